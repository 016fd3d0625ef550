"""The folder `samples` of a run: where each sample is, and all of them as one picture. Needs no torch."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from flowshard.data.media import stills
from flowshard.weights.files import atomic_file

GRID = "grid.png"
_FOLDER = re.compile(r"step-(\d+)")
_FILE = re.compile(r"(\d+)\.(?:png|mp4)")
_CELL, _GAP, _LABEL, _HEAD = 256, 8, 200, 28
"""Pixels of the grid: longer side of a sample, space between two, width of a prompt, height of the step numbers."""
_COLUMNS = 16
_STRIPS, _FRAMES, _FRAME = 4, 3, 160
"""Up to so many columns a clip is shown by so many frames, whose longer side has so many pixels."""
_LINES = 6
"""Of a prompt."""
_FONT = 16


def sample_folder(folder: Path, step: int) -> Path:
    """Where the samples of a step are."""
    return folder / f"step-{step:08d}"


def find_samples(folder: Path) -> dict[int, dict[int, Path]]:
    """Step to index of the prompt to picture or clip, in order."""
    found: dict[int, dict[int, Path]] = {}
    for entry in sorted(folder.glob("step-*")):
        step = _FOLDER.fullmatch(entry.name)
        if step is None or not entry.is_dir():
            continue
        named = ((_FILE.fullmatch(file.name), file) for file in sorted(entry.iterdir()))
        files = {int(name[1]): file for name, file in named if name}
        if files:
            found[int(step[1])] = files
    return found


def drop_samples_after(folder: Path, step: int) -> None:
    """Remove the samples of later steps, and the grid that shows them."""
    later = [one for one in find_samples(folder) if one > step]
    for one in later:
        shutil.rmtree(sample_folder(folder, one))
    if later:
        (folder / GRID).unlink(missing_ok=True)


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def write_grid(folder: Path, prompts: Sequence[str]) -> None:
    """All samples as one picture: a row for each prompt, a column for each step.

    Clips are shown by their first, middle and last frame; where there are many columns, by that in the middle.

    Args:
        folder: `samples`, with at least one sample.
        prompts: the texts of the rows.
    """
    samples = find_samples(folder)
    steps = spread(sorted(samples), _COLUMNS)
    cells = {}
    for step in steps:
        for index, file in samples[step].items():
            cells[step, index] = _cell(file, _FRAMES if len(steps) <= _STRIPS else 1)
    width, height = (max(getattr(cell, side) for cell in cells.values()) for side in ("width", "height"))
    font = ImageFont.load_default(_FONT)
    labels = ["\n".join(_wrapped(prompt)) for prompt in prompts]
    least = max(
        (ImageDraw.Draw(Image.new("RGB", (1, 1))).textbbox((0, 0), text, font)[3] for text in labels), default=0
    )
    row, column = max(height, round(least)) + _GAP, max(width, 96) + _GAP
    grid = Image.new("RGB", (_LABEL + column * len(steps), _HEAD + row * len(prompts)), "white")
    draw = ImageDraw.Draw(grid)
    for place, step in enumerate(steps):
        left = _LABEL + column * place
        draw.text((left, 4), f"step {step}", "black", font)
        for index in range(len(prompts)):
            if (step, index) in cells:
                grid.paste(cells[step, index], (left, _HEAD + row * index))
    for index, text in enumerate(labels):
        draw.text((_GAP, _HEAD + row * index), text, "black", font)
    with atomic_file(folder / GRID) as temporary:
        grid.save(temporary, format="PNG")


def _cell(file: Path, frames: int) -> Image.Image:
    pictures = stills(file, frames)
    side = _CELL if len(pictures) == 1 else _FRAME
    pictures = [ImageOps.contain(picture, (side, side)) for picture in pictures]
    width, height = pictures[0].size
    cell = Image.new("RGB", (width * len(pictures), height))
    for place, picture in enumerate(pictures):
        cell.paste(picture, (width * place, 0))
    return cell


def _wrapped(prompt: str) -> list[str]:
    lines = textwrap.wrap(prompt, _LABEL // 9) or [""]
    return lines if len(lines) <= _LINES else [*lines[: _LINES - 1], f"{lines[_LINES - 1][: _LABEL // 9 - 3]}..."]
