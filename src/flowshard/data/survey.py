"""Decodes every medium as training would, in parallel, and notes what it found. Needs no torch."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from flowshard.config import DataConfig
from flowshard.data.clips import clip_facts
from flowshard.data.media import picture_size
from flowshard.data.metadata import Row
from flowshard.data.problems import DataError
from flowshard.data.samples import decode, decode_inputs
from flowshard.errors import UserError
from flowshard.families.base import Family

Progress = Callable[[Iterable["Surveyed"], int], Iterable["Surveyed"]]
"""Shows how far the work is, of so many."""


@dataclass(frozen=True)
class Surveyed:
    """What a row's medium is, and what the model sees of it."""

    row: Row
    error: DataError | None = None
    """Why training would fail with it."""
    digest: str = ""
    """Hash of the files of the medium."""
    size: tuple[int, int] = (0, 0)
    """Width and height before the cut, upright."""
    frames: int = 0
    """Of the medium."""
    fps: float | None = None
    """Of a clip."""
    used: int = 0
    """Frames that the model sees."""
    previews: tuple[Image.Image, ...] = ()
    """The first, the middle and the last of these frames."""


def survey(
    rows: Sequence[Row],
    data: DataConfig,
    family: Family,
    *,
    seed: int,
    workers: int,
    previews: int,
    progress: Progress,
) -> list[Surveyed]:
    """Look at the media of all rows.

    Args:
        rows: whose files exist.
        data: of the config.
        family: of the model.
        seed: of the run.
        workers: threads; decoders and resampling run beside one another.
        previews: of so many rows, the first ones, pictures are kept.
        progress: shows how far the work is.

    Returns:
        One entry a row, in their order. Rows with the same media are decoded once.
    """
    alike: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        key = (row.files, row.start, row.end, tuple(row.inputs))
        alike.setdefault(key, []).append(number)

    def look(numbers: Sequence[int]) -> Surveyed:
        return _look(rows[numbers[0]], data, family, seed=seed, keep=numbers[0] < previews)

    found: dict[int, Surveyed] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="survey") as threads:
        results = progress(threads.map(look, alike.values()), len(alike))
        for numbers, result in zip(alike.values(), results, strict=True):
            for number in numbers:
                found[number] = _for_row(result, rows[number])
    return [found[number] for number in range(len(rows))]


def _for_row(result: Surveyed, row: Row) -> Surveyed:
    """What was found for another row with the same media."""
    if result.error is None:
        return replace(result, row=row)
    message = str(result.error).replace(result.row.describe(), row.describe())
    error = DataError(result.error.kind, message, source=row.source, row=row.number)
    return replace(result, row=row, error=error)


def _look(row: Row, data: DataConfig, family: Family, *, seed: int, keep: bool) -> Surveyed:
    try:
        frames = decode(row, data, family, seed=seed)
        columns = [one.column for one in family.inputs]
        inputs = decode_inputs(row, data, family, columns, frames, seed=seed)
        for one in family.inputs:
            if one.kind == "images":
                for picture in inputs.get(one.column, ()):
                    family.input_shape(picture.size)
        found = _facts(row)
    except UserError as error:
        kind = error.kind if isinstance(error, DataError) else "input"
        message = str(error) if str(error).startswith(row.describe()) else f"{row.describe()}: {error}"
        return Surveyed(row, error=DataError(kind, message, source=row.source, row=row.number))
    return replace(found, digest=_digest(row.medium), used=len(frames), previews=_previews(frames) if keep else ())


def _facts(row: Row) -> Surveyed:
    """Size, frames and rate of the medium."""
    if row.is_picture or row.pictures:
        return Surveyed(row, size=picture_size(row.medium[0], where=row.describe()), frames=len(row.medium))
    try:
        facts = clip_facts(row.media)
    except Exception as error:  # readers raise almost anything
        reason = " ".join(str(error).split())
        raise DataError("not decodable", f"{row.describe()}: cannot be read to its end ({reason})") from None
    return Surveyed(row, size=(facts.width, facts.height), frames=facts.frames, fps=facts.fps)


def _previews(frames: np.ndarray) -> tuple[Image.Image, ...]:
    places = dict.fromkeys((0, (len(frames) - 1) // 2, len(frames) - 1))
    return tuple(Image.fromarray(frames[place]) for place in places)


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                digest.update(block)
    return digest.hexdigest()
