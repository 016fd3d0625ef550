"""Groups of samples whose tensors have the same shapes, so that micro-batches can be made of them. Needs no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each tensor of a sample's medium and inputs, by name."""


@dataclass(frozen=True)
class Bucket:
    """Samples of one shape."""

    shapes: Shapes
    samples: list[int]
    """Their indices in an epoch, ascending."""

    @property
    def latents(self) -> tuple[int, ...]:
        """The shape of the latents, without batch."""
        return dict(self.shapes)["latents"]


def elements(shapes: Shapes) -> int:
    """Of all tensors together."""
    return sum(math.prod(shape) for _, shape in shapes)


def group(samples: Iterable[Shapes]) -> list[Bucket]:
    """The samples of an epoch, in their order, by shape; the bucket of the largest ones first."""
    found: dict[Shapes, list[int]] = {}
    for index, shapes in enumerate(samples):
        found.setdefault(shapes, []).append(index)
    buckets = [Bucket(shapes, indices) for shapes, indices in found.items()]
    return sorted(buckets, key=lambda bucket: (-elements(bucket.shapes), bucket.shapes))
