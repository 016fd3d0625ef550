"""The choice of activation policies against all mixes there are."""

import itertools
import random
from collections.abc import Sequence

import pytest

from flowshard.config import ActivationPolicy
from flowshard.memory.blocks import without_noise
from flowshard.memory.choose import (
    Cost,
    Costs,
    fastest_fitting,
    least_alive,
    most_alive,
    total_nanoseconds,
)

POLICIES: tuple[ActivationPolicy, ...] = ("keep", "selective", "offload", "recompute")


def _simulate(blocks: Sequence[Costs], policies: tuple[ActivationPolicy, ...], tail: int) -> tuple[int, float]:
    """Most bytes alive, and seconds, by going through both passes."""
    chosen = [costs[policy] for costs, policy in zip(blocks, policies, strict=True)]
    alive = highest = 0
    for cost in chosen:
        alive += cost.kept
        highest = max(highest, alive)
    highest = max(highest, alive + tail)
    for cost in reversed(chosen):
        alive -= cost.kept
        highest = max(highest, alive + cost.peak)
    return highest, sum(cost.seconds for cost in chosen)


def _kind(draw: random.Random) -> dict[ActivationPolicy, Cost]:
    """Costs like those of a block: who keeps less takes longer. Times are whole microseconds, which add up exactly."""
    keep = draw.randint(400, 900)
    kept = [draw.randint(300, 900), draw.randint(20, 200), draw.randint(0, 5), draw.randint(5, 30)]
    more = [0, draw.randint(10, 60), draw.randint(100, 300), draw.randint(50, 200)]
    return {
        policy: Cost((keep + extra) * 1e-6, size, size + draw.randint(0, 1000))
        for policy, size, extra in zip(POLICIES, kept, more, strict=True)
    }


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all_mixes(seed: int) -> None:
    draw = random.Random(seed)
    first, second = _kind(draw), _kind(draw)
    blocks = [first] * draw.randint(1, 3) + [second] * draw.randint(1, 3)
    tail = draw.randint(0, 300)
    mixes = {mix: _simulate(blocks, mix, tail) for mix in itertools.product(POLICIES, repeat=len(blocks))}
    least = min(need for need, _ in mixes.values())
    most = max(need for need, _ in mixes.values())
    assert _simulate(blocks, tuple(least_alive(blocks, tail=tail)), tail)[0] == least
    assert fastest_fitting(blocks, least - 1, tail=tail) is None
    for room in [least, *(draw.randint(least, most) for _ in range(6)), most]:
        choice = fastest_fitting(blocks, room, tail=tail)
        assert choice is not None
        need, seconds = mixes[tuple(choice)]
        assert need == most_alive(blocks, choice, tail=tail) <= room
        assert seconds == pytest.approx(min(time for other, time in mixes.values() if other <= room), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_a_model_of_many_blocks_is_never_slower_than_one_policy_for_all(seed: int) -> None:
    """57 blocks of two kinds with sizes and times of full precision, so that not all mixes can be looked at."""
    draw = random.Random(seed)
    kinds = [
        {p: Cost(c.seconds * draw.random(), c.kept * draw.randint(10**5, 10**6), 10**9) for p, c in _kind(draw).items()}
        for _ in range(2)
    ]
    blocks = [kinds[0]] * 19 + [kinds[1]] * 38
    for uniform in POLICIES:
        everywhere = [uniform] * len(blocks)
        room = most_alive(blocks, everywhere, tail=0)  # just enough for it
        choice = fastest_fitting(blocks, room, tail=0)
        assert choice is not None and most_alive(blocks, choice, tail=0) <= room
        assert total_nanoseconds(blocks, choice) <= total_nanoseconds(blocks, everywhere)


def test_times_that_contradict_the_work_are_corrected() -> None:
    found = without_noise({"keep": 1.2, "selective": 1.1, "offload": 1.3, "recompute": 1.4})
    assert found == pytest.approx({"keep": 1.1, "selective": 1.1, "offload": 1.3, "recompute": 1.3})
    assert found["keep"] < min(found["selective"], found["recompute"]) and found["recompute"] < found["offload"]
    right = {"keep": 1.0, "selective": 1.6, "offload": 1.5, "recompute": 1.4}  # selective may have a price of its own
    assert without_noise(right) == right  # type: ignore[arg-type]
