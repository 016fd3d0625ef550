"""The order of samples against a second implementation of SplitMix64 and against the rule written out."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from flowshard.data.order import Order, _splitmix64, permutation
from flowshard.seeds import derive_seed

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
BUCKETS = [[0, 3, 4], [1], [2, 5, 6, 7, 8, 9]]


def _reference_stream(state: int) -> Iterator[int]:
    """SplitMix64 in plain integers (https://prng.di.unimi.it/splitmix64.c): add the gamma, then mix the state."""
    while True:
        state = (state + GOLDEN_GAMMA) & MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        yield mixed ^ (mixed >> 31)


def _epochs(seed: int, count: int, size: int) -> list[int]:
    return [int(index) for epoch in range(count) for index in permutation(seed, epoch, np.arange(size))]


def test_splitmix64_gives_the_published_numbers() -> None:
    # The n-th output of the generator with seed 0 mixes n gammas; `_splitmix64` adds the last of them itself.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = np.array([n * GOLDEN_GAMMA & MASK for n in range(3)], dtype=np.uint64)
    assert _splitmix64(states).tolist() == published


def test_splitmix64_equals_plain_integers_over_the_whole_range() -> None:
    states = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, MASK - 1, MASK]
    expected = [next(_reference_stream(state)) for state in states]
    assert _splitmix64(np.array(states, dtype=np.uint64)).tolist() == expected


@pytest.mark.parametrize(("seed", "epoch", "size"), [(0, 0, 7), (0, 1, 7), (5, 3, 100)])
def test_an_epoch_is_sorted_by_the_hash_of_index_and_key(seed: int, epoch: int, size: int) -> None:
    key = derive_seed(seed, "order", epoch)
    hashes = [next(_reference_stream((key + index) & MASK)) for index in range(size)]
    assert permutation(seed, epoch, np.arange(size)).tolist() == sorted(range(size), key=hashes.__getitem__)


def test_order_never_changes_between_releases() -> None:
    # Resumed runs depend on these. They come from the rule above in plain integers with sha256, not from this code.
    assert derive_seed(0, "order", 0) == 1251443145688630567
    steps = [Order(0, [range(5)], global_batch=4).batch(step) for step in range(3)]
    assert steps == [[4, 1, 2, 0], [3, 2, 1, 3], [4, 0, 3, 0]]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1001])
def test_each_epoch_holds_every_sample_once(size: int) -> None:
    for epoch in range(3):
        assert sorted(permutation(3, epoch, np.arange(size)).tolist()) == list(range(size))


def test_epochs_differ_from_one_another() -> None:
    orders = {tuple(permutation(0, epoch, np.arange(20)).tolist()) for epoch in range(50)}
    assert len(orders) == 50


def test_another_seed_gives_another_order() -> None:
    orders = {tuple(Order(seed, [range(20)], global_batch=20).batch(0)) for seed in range(50)}
    assert len(orders) == 50


def test_every_place_of_an_epoch_gets_every_sample() -> None:
    # 4,000 epochs of 4: each sample 1,000 times at each place, with a standard deviation of 27.4.
    counts = np.zeros((4, 4), dtype=int)
    for epoch in range(4000):
        for place, index in enumerate(permutation(0, epoch, np.arange(4)).tolist()):
            counts[place, index] += 1
    assert np.abs(counts - 1000).max() < 5 * 27.4


@pytest.mark.parametrize(
    ("size", "batch"),
    [(7, 3), (6, 3), (3, 7), (1, 4), (5, 5), (4, 13)],
    ids=["batch-crosses-epochs", "divides", "batch-above-epoch", "one-sample", "whole-epoch", "several-epochs"],
)
def test_steps_follow_one_another_through_the_concatenated_epochs(size: int, batch: int) -> None:
    steps = 10
    epochs = -(-steps * batch // size)
    taken = [index for step in range(steps) for index in Order(11, [range(size)], global_batch=batch).batch(step)]
    assert taken == _epochs(11, epochs, size)[: steps * batch]


def test_nothing_is_dropped_or_padded_where_an_epoch_ends_within_a_batch() -> None:
    # 7 samples in batches of 3: after 7 steps, 3 whole epochs have passed, so each sample came 3 times.
    taken = [index for step in range(7) for index in Order(0, [range(7)], global_batch=3).batch(step)]
    assert sorted(taken) == sorted(list(range(7)) * 3)


def test_a_batch_above_the_epoch_spreads_samples_evenly() -> None:
    batch = Order(0, [range(3)], global_batch=7).batch(0)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]
    assert batch[6] in {0, 1, 2}


def test_a_step_does_not_depend_on_what_was_asked_before() -> None:
    forward, backward = (Order(2, BUCKETS, global_batch=3) for _ in range(2))
    expected = [forward.batch(step) for step in range(60)]
    assert [backward.batch(step) for step in reversed(range(60))][::-1] == expected


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    singles = [Order(2, [range(7)], global_batch=1).batch(step)[0] for step in range(30)]
    sixes = [index for step in range(5) for index in Order(2, [range(7)], global_batch=6).batch(step)]
    assert sixes == singles


def test_no_random_state_of_numpy_is_read_or_advanced() -> None:
    np.random.seed(0)
    undisturbed = np.random.random()
    np.random.seed(0)
    first = Order(0, [range(50)], global_batch=50).batch(0)
    assert np.random.random() == undisturbed
    np.random.seed(1)
    assert Order(0, [range(50)], global_batch=50).batch(0) == first


def test_indices_are_plain_integers() -> None:
    assert all(type(index) is int for index in Order(0, [range(3)], global_batch=5).batch(0))


def test_a_step_is_of_one_bucket_and_the_first_one_of_the_first() -> None:
    order = Order(5, BUCKETS, global_batch=4)
    for step in range(100):
        assert set(order.batch(step)) <= set(BUCKETS[order.bucket(step)]), step
    assert order.bucket(0) == 0
    assert [order.first_step(bucket) for bucket in range(3)] == [
        next(step for step in range(100) if order.bucket(step) == bucket) for bucket in range(3)
    ]


def test_steps_of_buckets_come_when_they_are_due() -> None:
    # By hand: times of 10 samples in units of N / n, k for the first bucket and k + 1/2 for the others.
    due = [(k * Fraction(10, 3), 0) for k in range(6)]
    due += [((k + Fraction(1, 2)) * 10, 1) for k in range(2)]
    due += [((k + Fraction(1, 2)) * Fraction(10, 6), 2) for k in range(12)]
    order = Order(0, BUCKETS, global_batch=1)
    assert [order.bucket(step) for step in range(20)] == [bucket for _, bucket in sorted(due)]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_samples_come_equally_often_whatever_their_bucket(batch: int) -> None:
    # Ten steps are one for each sample, so each sample is in as many of them as a batch holds.
    order = Order(1, BUCKETS, global_batch=batch)
    for rounds in range(4):
        taken = Counter(index for step in range(10 * rounds, 10 * rounds + 10) for index in order.batch(step))
        assert taken == dict.fromkeys(range(10), batch)


def test_a_bucket_goes_through_the_permutations_of_its_own_samples() -> None:
    order = Order(3, BUCKETS, global_batch=4)
    steps = [step for step in range(60) if order.bucket(step) == 2]
    taken = [index for step in steps for index in order.batch(step)]
    expected = [int(index) for epoch in range(len(taken)) for index in permutation(3, epoch, np.array(BUCKETS[2]))]
    assert taken == expected[: len(taken)]
    whole = permutation(3, 0, np.arange(10)).tolist()
    assert expected[:6] == [index for index in whole if index in BUCKETS[2]], "those of all samples, without the others"
