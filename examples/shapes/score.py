"""Read from the pixels of a clip what it shows, and how well clips fit their captions.

`python examples/shapes/score.py CLIP.mp4 ...` prints what each shows. There is no network in it: colour is the nearest one,
number and motion come from the places of what is not background, the shape is the outline that covers it best.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image
from scenes import BACKGROUND, COLOURS, CONCEPT, FRAMES, SHAPES, SIDE, Scene, draw_polygons, outline

from flowshard.data.media import read_frames

_FAR = 60.0
"""Distance in RGB from the background from which on a pixel belongs to a shape."""
_LEAST = 12
"""Pixels of the smallest shape that is read; less is no shape."""
_TEMPLATE = 32


@dataclass(frozen=True)
class Seen:
    """What a clip shows; attributes are None where nothing is there."""

    shape: str | None
    colour: str | None
    motion: str | None
    count: str | None
    overlap: dict[str, float]
    """For each outline, the share of it and of the shape in the picture that they have in common, 1 for an equal one; on average
    over the frames in which the shape is large."""


def read(clip: np.ndarray) -> Seen:
    """What a clip shows.

    Args:
        clip: uint8 RGB of shape (frames, height, width, 3).
    """
    masks = np.linalg.norm(clip.astype(np.float32) - BACKGROUND, axis=-1) > _FAR
    areas = masks.sum(axis=(1, 2))
    if areas.max() < _LEAST:
        return Seen(None, None, None, None, dict.fromkeys((*SHAPES, CONCEPT), 0.0))
    largest = int(areas.argmax())
    pieces = {frame: _pieces(masks[frame]) for frame in np.flatnonzero(areas >= 0.6 * areas[largest]).tolist()}
    overlaps = {
        shape: float(np.mean([max(_overlap(piece, shape) for piece in found) for found in pieces.values()]))
        for shape in (*SHAPES, CONCEPT)
    }
    # Edges are mixed with the background, so the colour is that of the pixels farthest from it.
    pixels = clip[largest][masks[largest]].astype(np.float32)
    distance = np.linalg.norm(pixels - BACKGROUND, axis=-1)
    colour = pixels[distance >= np.quantile(distance, 0.5)].mean(axis=0)
    return Seen(
        shape=max(overlaps, key=lambda shape: overlaps[shape]),
        colour=min(COLOURS, key=lambda name: float(np.linalg.norm(colour - COLOURS[name]))),
        motion=_motion(masks, areas),
        count="a" if len(pieces[largest]) == 1 else "two",
        overlap=overlaps,
    )


def fitting(clips: Sequence[np.ndarray], scenes: Sequence[Scene]) -> dict[str, float]:
    """For each of shape, colour, motion and count: the share of clips that show what their caption says."""
    seen = [asdict(read(clip)) for clip in clips]
    return {
        name: sum(one[name] == asdict(scene)[name] for one, scene in zip(seen, scenes, strict=True)) / len(scenes)
        for name in ("shape", "colour", "motion", "count")
    }


def _motion(masks: np.ndarray, areas: np.ndarray) -> str | None:
    if min(areas[0], areas[-1]) < 1:
        return "grows" if areas[-1] > areas[0] else "shrinks"
    ratio = areas[-1] / areas[0]
    if not 0.5 < ratio < 2:
        return "grows" if ratio > 1 else "shrinks"
    (y0, x0), (y1, x1) = (np.argwhere(masks[frame]).mean(axis=0) for frame in (0, -1))
    dx, dy = x1 - x0, y1 - y0
    if max(abs(dx), abs(dy)) < 4:
        return None
    if abs(dx) > abs(dy):
        return "moves right" if dx > 0 else "moves left"
    return "moves down" if dy > 0 else "moves up"


def _pieces(mask: np.ndarray) -> list[np.ndarray]:
    """The mask cut where columns without a shape separate two parts, each cropped to its content."""
    columns = mask.sum(axis=0) > 1
    edges = np.flatnonzero(np.diff(np.r_[False, columns, False].astype(int)))
    parts = [mask[:, left:right] for left, right in edges.reshape(-1, 2)]
    parts = [part for part in parts if part.sum() >= _LEAST] or [mask]
    return [_cropped(part) for part in parts]


def _cropped(mask: np.ndarray) -> np.ndarray:
    return mask[np.ix_(mask.any(axis=1), mask.any(axis=0))]


def _overlap(piece: np.ndarray, shape: str) -> float:
    scaled = _scaled(piece)
    template = _template(shape)
    return float((scaled & template).sum() / (scaled | template).sum())


@cache
def _template(shape: str) -> np.ndarray:
    corners = [(32 + 24 * x, 32 + 24 * y) for x, y in outline(shape)]
    mask = draw_polygons([(corners, (255, 255, 255))], (0, 0, 0))[..., 0] > 127
    return _scaled(_cropped(mask))


def _scaled(mask: np.ndarray) -> np.ndarray:
    """In the middle of a square, and that in a fixed size, so that proportions are kept."""
    side = max(mask.shape)
    square = np.zeros((side, side), np.uint8)
    top, left = ((side - size) // 2 for size in mask.shape)
    square[top : top + mask.shape[0], left : left + mask.shape[1]] = mask * np.uint8(255)
    return np.asarray(Image.fromarray(square).resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BILINEAR)) > 127


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path, nargs="+")
    for path in parser.parse_args().clips:
        seen = read(read_frames(path, height=SIDE, width=SIDE, frames=FRAMES, where=str(path)))
        print(f"{path}: {seen.count} {seen.colour} {seen.shape}, {seen.motion}; overlap " + str(seen.overlap))


if __name__ == "__main__":
    main()
