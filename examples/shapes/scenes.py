"""Captioned clips of moving shapes, drawn by numbers alone: what the small video model in this folder is trained on."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE, FRAMES, FPS = 64, 9, 8
"""Pixels of a side, frames of a clip, frames a second."""
SHAPES = ("circle", "square", "triangle")
CONCEPT = "star"
"""A shape that the base model has never seen; the example's LoRA learns it."""
COLOURS = {
    "red": (230, 50, 50),
    "green": (50, 190, 80),
    "blue": (60, 100, 240),
    "yellow": (240, 210, 60),
    "white": (240, 240, 240),
}
MOTIONS = ("moves left", "moves right", "moves up", "moves down", "grows", "shrinks")
COUNTS = ("a", "two")
BACKGROUND = (24, 26, 34)
_FINE = 4
"""Pictures are drawn this many times larger and then reduced, so that edges are smooth."""
_OUTLINES = {
    "circle": [(math.cos(t * math.tau / 48), math.sin(t * math.tau / 48)) for t in range(48)],
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0.0, -1.1), (1.1, 0.9), (-1.1, 0.9)],
    "star": [
        (
            (1.4 if t % 2 == 0 else 0.6) * math.sin(t * math.pi / 5),
            -(1.4 if t % 2 == 0 else 0.6) * math.cos(t * math.pi / 5),
        )
        for t in range(10)
    ],
}
"""Corners of each shape of radius 1 around its centre; y grows downwards."""


@dataclass(frozen=True)
class Scene:
    """What a clip shows."""

    shape: str
    colour: str
    motion: str
    count: str = "a"

    @property
    def caption(self) -> str:
        """For example `a red circle moves left` and `two blue squares grow`."""
        if self.count == "a":
            return f"a {self.colour} {self.shape} {self.motion}"
        verb, *where = self.motion.split()
        return " ".join(("two", self.colour, f"{self.shape}s", verb.removesuffix("s"), *where))


def all_scenes(shapes: Sequence[str] = SHAPES, counts: Sequence[str] = COUNTS) -> list[Scene]:
    """Every combination once, in a fixed order."""
    return [Scene(s, c, m, n) for s in shapes for c in COLOURS for m in MOTIONS for n in counts]


def outline(shape: str) -> list[tuple[float, float]]:
    """Corners of a shape of radius 1 around (0, 0); y grows downwards."""
    return _OUTLINES[shape]


def draw(scene: Scene, rng: random.Random) -> np.ndarray:
    """A clip of a scene; place and size are drawn from `rng`.

    Returns:
        uint8 RGB of shape (FRAMES, SIDE, SIDE, 3).
    """
    two = scene.count == "two"
    radius = rng.uniform(7.0, 8.5) if two else rng.uniform(11.0, 14.0)
    first = (rng.uniform(28, 36), rng.uniform(28, 36))
    radii, centres = [radius] * FRAMES, [first] * FRAMES
    if scene.motion.startswith("moves"):
        dx, dy = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}[scene.motion.split()[1]]
        # Along its way the shape passes the middle; across it, it may be anywhere.
        travel = 16 if two else 24
        way = [(t / (FRAMES - 1) - 0.5) * travel for t in range(FRAMES)]
        side = rng.uniform(-10, 10)
        x, y = (32 + side * abs(dy) * (0.4 if two else 1), 32 + side * abs(dx))
        drift = rng.uniform(-2, 2)
        centres = [(x + dx * step + abs(dx) * drift, y + dy * step + abs(dy) * drift) for step in way]
    else:
        small, large = (3.0, radius + 1.5) if two else (5.0, radius + 5.0)
        radii = [small + (large - small) * t / (FRAMES - 1) for t in range(FRAMES)]
        if scene.motion == "shrinks":
            radii.reverse()
    offsets = (-13.0, 13.0) if two else (0.0,)
    corners = outline(scene.shape)
    return np.stack(
        [
            draw_polygons(
                [([(x + offset + r * u, y + r * v) for u, v in corners], COLOURS[scene.colour]) for offset in offsets]
            )
            for (x, y), r in zip(centres, radii, strict=True)
        ]
    )


def draw_polygons(
    polygons: Sequence[tuple[Sequence[tuple[float, float]], tuple[int, int, int]]],
    background: tuple[int, int, int] = BACKGROUND,
) -> np.ndarray:
    """A picture of filled polygons.

    Args:
        polygons: corners in pixels, and colour, of each.
        background: colour of the rest.

    Returns:
        uint8 RGB of shape (SIDE, SIDE, 3).
    """
    picture = Image.new("RGB", (SIDE * _FINE, SIDE * _FINE), background)
    pencil = ImageDraw.Draw(picture)
    for corners, colour in polygons:
        pencil.polygon([(x * _FINE, y * _FINE) for x, y in corners], fill=colour)
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX))
