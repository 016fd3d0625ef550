"""A row of the metadata as the frames and pictures that a model gets. Needs no torch."""

from collections.abc import Sequence

import numpy as np

from flowshard.config import DataConfig
from flowshard.data.clips import Cut
from flowshard.data.media import WHOLE, read_frames, read_inputs
from flowshard.data.metadata import Row
from flowshard.data.sizes import row_size
from flowshard.families.base import Family
from flowshard.families.variant import Inputs
from flowshard.seeds import uniform


def cut_of(row: Row, data: DataConfig, family: Family, *, seed: int) -> Cut:
    """Which frames of the row's clip are taken."""
    if row.is_picture:
        return WHOLE
    return Cut(
        fps=None if row.pictures else data.fps,
        sampling=data.sampling,
        short=data.short,
        stride=family.frame_stride,
        start=row.start,
        end=row.end,
        draw=uniform(seed, "clip", row.media.name, str(row.start), str(row.end)),
    )


def decode(row: Row, data: DataConfig, family: Family, *, seed: int) -> np.ndarray:
    """The frames of the row's medium: uint8 RGB of shape (frames, height, width, 3).

    Raises:
        UserError: it cannot be decoded or is too short; the message names file and row.
    """
    height, width = row_size(row, data, family)
    return read_frames(
        row.pictures or row.media,
        height=height,
        width=width,
        frames=data.frames,
        where=row.describe(),
        cut=cut_of(row, data, family, seed=seed),
    )


def decode_inputs(
    row: Row, data: DataConfig, family: Family, columns: Sequence[str], frames: np.ndarray | None, *, seed: int
) -> Inputs:
    """What the model gets besides the prompt; see `families.base.Inputs`.

    Args:
        row: of the metadata.
        data: of the config.
        family: of the model.
        columns: which of its inputs.
        frames: the sample's own, if they stand in for pictures that no file is given for.
        seed: of the run.

    Raises:
        UserError: a file cannot be decoded; the message names file and row.
    """
    height, width = row_size(row, data, family)
    return read_inputs(
        [one for one in family.inputs if one.column in columns],
        row.inputs,
        own=frames,
        height=height,
        width=width,
        frames=data.frames,
        where=row.describe(),
        cut=cut_of(row, data, family, seed=seed),
    )
