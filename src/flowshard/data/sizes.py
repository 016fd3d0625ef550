"""The size at which each sample is encoded: that of the run, or its own under a budget of pixels. Needs no torch."""

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from flowshard.config import DataConfig
from flowshard.data.media import picture_size
from flowshard.data.metadata import Metadata, Row
from flowshard.data.problems import DataError
from flowshard.errors import UserError
from flowshard.families.base import Family


def run_size(data: DataConfig, family: Family) -> tuple[int, int]:
    """Height and width of the run; with `data.max_pixels` those of the largest square."""
    if data.max_pixels is None:
        assert data.height is not None and data.width is not None  # noqa: S101 - load_config has seen to it
        return data.height, data.width
    side = _floor(math.isqrt(data.max_pixels), _step(data, family))
    return side, side


def row_size(row: Row, data: DataConfig, family: Family) -> tuple[int, int]:
    """Height and width at which a sample is encoded.

    Raises:
        DataError: it has a size of its own, and that cannot be found or is too small; the message names file and row.
    """
    if row.size is not None:
        return row.size
    return run_size(data, family) if data.max_pixels is None else _own_size(row, data, family)


def with_sizes(metadata: Metadata, data: DataConfig, family: Family, *, keep_bad: bool) -> Metadata:
    """The rows with their sizes, if they have sizes of their own.

    Args:
        metadata: the rows.
        data: of the config.
        family: of the model.
        keep_bad: leave rows whose size cannot be found as they are; they fail when they are decoded.

    Raises:
        DataError: as `row_size`, if such rows are not kept.
    """
    if data.max_pixels is None:
        return metadata

    def sized(row: Row) -> Row:
        try:
            return replace(row, size=row_size(row, data, family))
        except DataError:
            if keep_bad:
                return row
            raise

    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="sizes") as threads:
        return replace(metadata, rows=tuple(threads.map(sized, metadata.rows)))


def check_budget(data: DataConfig, family: Family) -> None:
    """Refuse a budget of pixels that nothing fits in, and a step that the model cannot take.

    Raises:
        UserError: naming the option.
    """
    multiple, step = family.spatial_multiple, _step(data, family)
    if step % multiple:
        raise UserError(
            f"data.bucket_step: {step} is not a multiple of {multiple}, which {family.name} needs; use "
            f"{_floor(step, multiple) + multiple}"
        )
    if data.max_pixels is not None and data.max_pixels < step * step:
        raise UserError(f"data.max_pixels: {data.max_pixels} is less than {step}x{step}, the smallest size; raise it")


def fitted(width: int, height: int, *, max_pixels: int, step: int) -> tuple[int, int]:
    """Height and width of a medium under a budget: as large as it is or smaller, both multiples of `step`.

    Its aspect ratio is kept but for that; a side that is shorter than `step` becomes 0.
    """
    if width * height > max_pixels:
        width, height = math.isqrt(max_pixels * width // height), math.isqrt(max_pixels * height // width)
    return _floor(height, step), _floor(width, step)


def _own_size(row: Row, data: DataConfig, family: Family) -> tuple[int, int]:
    assert data.max_pixels is not None  # noqa: S101 - the callers have seen to it
    width, height = picture_size(row.medium[0], where=row.describe())
    step = _step(data, family)
    size = fitted(width, height, max_pixels=data.max_pixels, step=step)
    if not all(size):
        raise DataError(
            "too small",
            f"{row.describe()}: is {width}x{height}, and nothing is left of a side within {data.max_pixels} pixels in steps of "
            f"{step} (data.max_pixels, data.bucket_step); remove the row, or set data.height and data.width instead",
            source=row.source,
            row=row.number,
        )
    return size


def _step(data: DataConfig, family: Family) -> int:
    return data.bucket_step or family.spatial_multiple


def _floor(value: int, multiple: int) -> int:
    return value // multiple * multiple


def smallest(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The size of the fewest pixels."""
    return min(sizes, key=math.prod)
