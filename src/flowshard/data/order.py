"""Which samples step t sees: a function of (seed, step) alone, whatever the layout.

Epoch e goes through a permutation of its own of all samples. Step t takes positions [t * G, (t + 1) * G) of the endless
concatenation of the epochs, where G is the global batch. Nothing is dropped and nothing padded; ranks and micro-batches
take slices of the global batch.

With buckets, each bucket goes through its own samples in this way, and each step belongs to one bucket. The k-th step of a
bucket with n of the N samples is due at time (k + 1/2) * N / n, and the steps are taken in the order in which they are due:
so in any stretch of a run all samples are used about equally often, whatever their bucket. The steps of the first bucket,
that of the largest samples, are due half an interval earlier, so step 0 is one of them.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from flowshard.seeds import derive_seed


class Order:
    """The endless order of the samples of a run."""

    def __init__(self, seed: int, buckets: Sequence[Sequence[int]], *, global_batch: int) -> None:
        """Lay out the order.

        Args:
            seed: the run's seed.
            buckets: the samples of an epoch, each in one bucket, by their indices; one bucket if all go together.
            global_batch: samples of an update, over all ranks and micro-batches.
        """
        self._buckets = [np.asarray(bucket, dtype=np.int64) for bucket in buckets]
        self._global_batch = global_batch
        self._permutation = lru_cache(maxsize=4 * len(buckets))(
            lambda bucket, epoch: permutation(seed, epoch, self._buckets[bucket])
        )
        sizes = [len(bucket) for bucket in buckets]
        due = [(np.arange(size) + (0.0 if number == 0 else 0.5)) / size for number, size in enumerate(sizes)]
        # Of steps that are due at the same time the first bucket's comes first.
        order = np.argsort(np.concatenate(due), kind="stable")
        self._bucket = np.repeat(np.arange(len(sizes)), sizes)[order]
        """The bucket of each of the first N steps, after which it begins again."""
        self._turn = np.concatenate([np.arange(size) for size in sizes])[order]
        """How many of these steps the bucket had before."""

    def bucket(self, step: int) -> int:
        """The bucket that a step takes its samples from."""
        return int(self._bucket[step % len(self._bucket)])

    def first_step(self, bucket: int) -> int:
        """The first step that takes its samples from a bucket."""
        return int(np.flatnonzero(self._bucket == bucket)[0])

    def batch(self, step: int) -> list[int]:
        """The samples of one update.

        Args:
            step: the update, from 0.

        Returns:
            `global_batch` indices into an epoch, of one bucket.
        """
        rounds, place = divmod(step, len(self._bucket))
        bucket = int(self._bucket[place])
        size = len(self._buckets[bucket])
        first = (rounds * size + int(self._turn[place])) * self._global_batch
        positions = range(first, first + self._global_batch)
        return [int(self._permutation(bucket, position // size)[position % size]) for position in positions]


def permutation(seed: int, epoch: int, members: np.ndarray) -> np.ndarray:
    """The order of one epoch: the members, in [0, 2^63), sorted by a keyed 64-bit hash.

    Written out rather than taken from a library's shuffle, whose result may change from one release or machine to the
    next, as resumed runs depend on it.
    """
    keys = members.astype(np.uint64) + np.uint64(derive_seed(seed, "order", epoch))
    return members[np.argsort(_splitmix64(keys), kind="stable")]


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (https://doi.org/10.1145/2660193.2660195), element by element, modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
