"""Taking samples out of the training data. Needs no torch."""

from dataclasses import replace

from flowshard.data.metadata import Metadata
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
    kept = [place for place, side in enumerate(chosen) if not side]
    held_out = tuple(row for row, side in zip(metadata.rows, chosen, strict=True) if side)
    place_of = {place: number for number, place in enumerate(kept)}
    epoch = [place_of[place] for place in metadata.epoch if place in place_of]
    return (
        replace(metadata, rows=tuple(metadata.rows[place] for place in kept), epoch=epoch),
        replace(metadata, rows=held_out, epoch=range(len(held_out))),
    )
