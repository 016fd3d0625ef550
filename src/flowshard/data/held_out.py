"""Taking samples out of the training data. Needs no torch."""

import os
from dataclasses import replace
from pathlib import Path

from flowshard.data.metadata import Metadata
from flowshard.errors import UserError
from flowshard.seeds import derive_seed

_SEEDS = 2**63
"""As many as `derive_seed` may give."""


def hold_out(metadata: Metadata, fraction: float, *, seed: int, root: str | None) -> tuple[Metadata, Metadata]:
    """Divide rows into those for training and those held out.

    A hash of the seed and the name of the medium decides, so no row changes sides when others come or go, and all rows
    of one medium are on one side.

    Args:
        metadata: all rows.
        fraction: the share that is held out, on average.
        seed: of the run.
        root: the folder that names of media start from; that of the metadata if None.

    Raises:
        UserError: one side would be empty.
    """
    folder = os.path.abspath(metadata.path.parent if root is None else root)  # noqa: PTH100
    names = {row.number: Path(os.path.relpath(row.media, folder)).as_posix() for row in metadata.rows}
    chosen = {number: derive_seed(seed, "held-out rows", name) < fraction * _SEEDS for number, name in names.items()}
    sides = [tuple(row for row in metadata.rows if chosen[row.number] is side) for side in (False, True)]
    for rows, what, fix in zip(sides, ("all", "none"), ("lower", "raise"), strict=True):
        if not rows:
            raise UserError(
                f"validation.fraction: {fraction:g} holds out {what} of the {len(metadata.rows)} rows of {metadata.path}; "
                f"{fix} it, or name a file of its own with validation.metadata"
            )
    return replace(metadata, rows=sides[0]), replace(metadata, rows=sides[1])
