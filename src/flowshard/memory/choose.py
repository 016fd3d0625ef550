"""Which block keeps what: the fastest mix of activation policies that fits. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowshard.config import ActivationPolicy


@dataclass(frozen=True)
class Cost:
    """Of one block under one policy."""

    seconds: float
    """Its forward and backward pass, with what is computed again."""
    kept: int
    """Bytes that its forward pass leaves for the backward pass, at least 0; the output counts, the input does not."""
    peak: int
    """The most bytes that are alive in its passes, above those before its forward pass."""


Costs = Mapping[ActivationPolicy, Cost]
"""Of one block, by policy."""
_POINTS = 2048
"""Mixes of the rest of a model that are looked at further."""
_Point = tuple[int, int, Any]
"""Bytes and nanoseconds of some last blocks of a model, and their policies as (policy, those after it)."""


def most_alive(blocks: Sequence[Costs], policies: Sequence[ActivationPolicy], *, tail: int) -> int:
    """The most bytes that are alive at one time, above those before the first block.

    When a block runs backward, what the blocks before it keep is alive, and what those after it kept is gone.

    Args:
        blocks: in the order of execution.
        policies: as many.
        tail: the most bytes that what follows the last block needs, above those after it.
    """
    need = tail
    for costs, policy in zip(reversed(blocks), reversed(policies), strict=True):
        need = _need(costs[policy], need)
    return need


def least_alive(blocks: Sequence[Costs], *, tail: int) -> list[ActivationPolicy]:
    """The policies with the least memory; see `most_alive`."""
    need, policies = tail, []
    for costs in reversed(blocks):
        best = min(costs, key=lambda policy: (_need(costs[policy], need), costs[policy].seconds))
        need = _need(costs[best], need)
        policies.append(best)
    return policies[::-1]


def fastest_fitting(blocks: Sequence[Costs], room: int, *, tail: int) -> list[ActivationPolicy] | None:
    """The policies with the least time for which `most_alive` is at most `room`; None if there are none.

    From the last block to the first, the mixes are kept that no other one beats in both bytes and time, as an earlier
    block adds to all of them alike. Where they become too many, some that differ little in bytes are left out; never is
    the result slower than one policy for all blocks that fits.

    Args:
        blocks: in the order of execution.
        room: bytes.
        tail: see `most_alive`.
    """
    front: list[_Point] = [(tail, 0, None)] if tail <= room else []
    for costs in reversed(blocks):
        points = [
            (_need(cost, need), time + _nanoseconds(cost), (policy, rest))
            for need, time, rest in front
            for policy, cost in costs.items()
        ]
        front = _unbeaten(points, room)
    choices = [_policies(front[-1])] if front else []
    for policy in dict.fromkeys(policy for costs in blocks for policy in costs):
        if all(policy in costs for costs in blocks):
            uniform = [policy] * len(blocks)
            if most_alive(blocks, uniform, tail=tail) <= room:
                choices.append(uniform)
    return min(choices, key=lambda policies: total_nanoseconds(blocks, policies), default=None)


def total_nanoseconds(blocks: Sequence[Costs], policies: Sequence[ActivationPolicy]) -> int:
    """Time of all blocks. Whole numbers, so that equal mixes are equal in any order."""
    return sum(_nanoseconds(costs[policy]) for costs, policy in zip(blocks, policies, strict=True))


def _need(cost: Cost, after: int) -> int:
    return max(cost.peak, cost.kept + after)


def _nanoseconds(cost: Cost) -> int:
    return round(1e9 * cost.seconds)


def _unbeaten(points: list[_Point], room: int) -> list[_Point]:
    """Those that fit and that no other point beats, by rising bytes and falling time."""
    kept: list[_Point] = []
    for point in sorted(points, key=lambda one: one[:2]):
        if point[0] > room:
            break
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    if len(kept) > _POINTS:
        # Of those with about as many bytes, the fastest; and the one with the fewest bytes of all.
        cells = {point[0] * _POINTS // (room + 1): point for point in kept}
        kept = kept[:1] + [point for point in cells.values() if point is not kept[0]]
    return kept


def _policies(point: _Point) -> list[ActivationPolicy]:
    policies: list[ActivationPolicy] = []
    rest = point[2]
    while rest is not None:
        policy, rest = rest
        policies.append(policy)
    return policies
