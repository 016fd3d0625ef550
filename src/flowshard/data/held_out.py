"""Taking samples out of the training data. Needs no torch."""

from dataclasses import replace

from flowshard.data.metadata import Metadata, without
from flowshard.errors import UserError
from flowshard.seeds import uniform


def hold_out(metadata: Metadata, fraction: float, *, seed: int) -> tuple[Metadata, Metadata]:
    """Divide rows into those for training and those held out.

    A hash of the seed and the name of the medium decides, so no row changes sides when others come or go, and all rows
    of one medium are on one side.

    Args:
        metadata: all rows.
        fraction: the share that is held out, on average.
        seed: of the run.

    Raises:
        UserError: one side would be empty.
    """
    chosen = [uniform(seed, "held-out rows", row.name) < fraction for row in metadata.rows]
    for side, what, fix in ((False, "all", "lower"), (True, "none", "raise")):
        if side not in chosen:
            raise UserError(
                f"validation.fraction: {fraction:g} holds out {what} of the {len(metadata.rows)} rows of {metadata.label}; "
                f"{fix} it, or name a file of its own with validation.metadata"
            )
    training, held_out = (
        without(metadata, {place for place, its in enumerate(chosen) if its is not side}) for side in (False, True)
    )
    return training, replace(held_out, epoch=range(len(held_out.rows)), left_out=())
