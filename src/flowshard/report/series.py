"""What is done to a column of numbers before it is drawn: smoothing, and thinning of long ones."""

import math
from collections.abc import Sequence

Points = tuple[list[float], list[float]]
"""Equally many x and y; a y that is NaN breaks the line."""
MOST_POINTS = 1000
"""Of a line."""
_OF_A_BUCKET = 3
"""Points that a bucket becomes at most: lowest, highest, and a break."""


def smooth(values: Sequence[float], span: float) -> list[float]:
    """Exponential mean over about `span` values, without the bias of its beginning; NaN is passed over and stays NaN."""
    keep = 1.0 - 1.0 / max(span, 1.0)
    total = weight = 0.0
    result = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + (1.0 - keep) * value, keep * weight + (1.0 - keep)
            result.append(total / weight)
        else:
            result.append(math.nan)
    return result


def present(xs: Sequence[float], ys: Sequence[float]) -> Points:
    """The points without those that have no value, so that the line goes on over them."""
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def thin(xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS) -> Points:
    """At most `most` points that look like all: of each bucket the lowest and the highest, in their order.

    A bucket with a value that is no finite number ends with a break.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    size = -(-len(xs) * _OF_A_BUCKET // most)
    kept_x: list[float] = []
    kept_y: list[float] = []
    for start in range(0, len(xs), size):
        places = range(start, min(start + size, len(xs)))
        finite = [place for place in places if math.isfinite(ys[place])]
        if finite:
            for place in sorted({min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)}):
                kept_x.append(xs[place])
                kept_y.append(ys[place])
        if len(finite) < len(places):
            kept_x.append(xs[places[-1]])
            kept_y.append(math.nan)
    return kept_x, kept_y


def means(
    xs: Sequence[float], columns: Sequence[Sequence[float]], most: int = MOST_POINTS
) -> tuple[list[float], list[list[float]]]:
    """Several columns at the same x as at most `most` points, each the mean of a bucket; rows with a NaN are left out."""
    rows = [row for row in zip(xs, *columns, strict=True) if all(map(math.isfinite, row))]
    size = max(-(-len(rows) // most), 1)
    buckets = [rows[start : start + size] for start in range(0, len(rows), size)]
    averaged = [[sum(values) / len(bucket) for values in zip(*bucket, strict=True)] for bucket in buckets]
    return [row[0] for row in averaged], [[row[1 + index] for row in averaged] for index in range(len(columns))]
