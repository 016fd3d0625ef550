"""A contact sheet: what the model sees of each sample, with its caption below. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from flowshard.data.survey import Surveyed
from flowshard.errors import UserError

_WIDTH, _PREVIEW, _GAP = 1620, 256, 6
"""Pixels: of the sheet, of a preview's longer side, and between previews."""
_MARGIN = 18
_TEXT, _LINE, _LINES = 15, 20, 4
"""Pixels of a letter and of a line of text, and lines of a caption."""
_BACKGROUND, _INK, _FAINT = (250, 250, 250), (20, 20, 20), (110, 110, 110)


def write_sheet(path: Path, samples: Sequence[Surveyed]) -> None:
    """Write a PNG of the samples that have previews.

    Raises:
        UserError: the file cannot be written.
    """
    shown = [sample for sample in samples if sample.previews]
    cells = [_cell(sample) for sample in shown]
    width = max((cell.width for cell in cells), default=_PREVIEW)
    across = max((_WIDTH - _MARGIN) // (width + _MARGIN), 1)
    lines = [cells[start : start + across] for start in range(0, len(cells), across)]
    height = sum(max(cell.height for cell in line) + _MARGIN for line in lines) + _MARGIN
    sheet = Image.new("RGB", (across * (width + _MARGIN) + _MARGIN, height), _BACKGROUND)
    top = _MARGIN
    for line in lines:
        for place, cell in enumerate(line):
            sheet.paste(cell, (_MARGIN + place * (width + _MARGIN), top))
        top += max(cell.height for cell in line) + _MARGIN
    try:
        sheet.save(path, format="PNG")
    except OSError as error:
        raise UserError(f"--sheet: {path} cannot be written: {error.strerror or error}") from None


def _cell(sample: Surveyed) -> Image.Image:
    """Previews beside one another, and below them the place and the caption."""
    font = ImageFont.load_default(size=_TEXT)
    previews = [_scaled(picture) for picture in sample.previews]
    # Clips of one frame and of more are alike in width, so that captions are as well.
    width = 3 * previews[0].width + 2 * _GAP if sample.frames > 1 else max(previews[0].width, _PREVIEW)
    row = sample.row
    frames = f", {sample.used} frames" if sample.used > 1 else ""
    title = f"row {row.number}  {row.media.name}{frames}"
    captions = row.prompt if len(row.prompts) == 1 else f"{row.prompt} (and {len(row.prompts) - 1} more)"
    lines = [
        *[(line, _FAINT) for line in wrapped(title, font, width, 1)],
        *[(line, _INK) for line in wrapped(captions or "(empty caption)", font, width, _LINES)],
    ]
    top = max(picture.height for picture in previews) + _GAP
    cell = Image.new("RGB", (width, top + len(lines) * _LINE), _BACKGROUND)
    for number, picture in enumerate(previews):
        cell.paste(picture, (number * (picture.width + _GAP), 0))
    draw = ImageDraw.Draw(cell)
    for number, (line, colour) in enumerate(lines):
        draw.text((0, top + number * _LINE), line, fill=colour, font=font)
    return cell


def _scaled(picture: Image.Image) -> Image.Image:
    scale = min(_PREVIEW / max(picture.size), 4.0)
    return picture.resize(
        (max(round(picture.width * scale), 1), max(round(picture.height * scale), 1)), Image.Resampling.LANCZOS
    )


def wrapped(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int, most: int) -> list[str]:
    """Text in lines of at most so many pixels, cut off with an ellipsis after `most` lines."""
    lines = [""]
    for word in " ".join(text.split()).split(" "):
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = word
        while font.getlength(lines[-1]) > width:  # a word without end is broken where it has to be
            kept = next((end for end in range(len(lines[-1]), 1, -1) if font.getlength(lines[-1][:end]) <= width), 1)
            lines[-1:] = [lines[-1][:kept], lines[-1][kept:]]
            if len(lines) > most:
                break
        if len(lines) > most:
            break
    if len(lines) > most:
        last = lines[most - 1]
        while last and font.getlength(f"{last}...") > width:
            last = last[:-1]
        lines = [*lines[: most - 1], f"{last.rstrip()}..."]
    return lines
