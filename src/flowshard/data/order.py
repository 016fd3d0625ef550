"""Which samples step t sees: a function of (seed, step) alone, whatever the layout.

Epoch e goes through a permutation of its own of all samples. Step t takes positions [t * G, (t + 1) * G) of the endless
concatenation of the epochs, where G is the global batch. Nothing is dropped and nothing padded; ranks and micro-batches
take slices of the global batch.
"""

from functools import lru_cache

import numpy as np

from flowshard.seeds import derive_seed


def global_batch(seed: int, step: int, *, size: int, global_batch: int) -> list[int]:
    """The samples of one optimizer update.

    Args:
        seed: the run's seed.
        step: the update, from 0.
        size: samples of an epoch.
        global_batch: samples of an update, over all ranks and micro-batches.

    Returns:
        `global_batch` indices into an epoch, each in [0, size).
    """
    positions = range(step * global_batch, (step + 1) * global_batch)
    return [int(permutation(seed, position // size, size)[position % size]) for position in positions]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of one epoch: indices 0 to size - 1 sorted by a keyed 64-bit hash.

    Written out rather than taken from a library's shuffle, whose result may change from one release or machine to the
    next, as resumed runs depend on it.
    """
    keys = np.arange(size, dtype=np.uint64) + np.uint64(derive_seed(seed, "order", epoch))
    return np.argsort(_splitmix64(keys), kind="stable")


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (https://doi.org/10.1145/2660193.2660195), element by element, modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
