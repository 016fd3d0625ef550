"""Seeds from names: the root of stateless randomness. Needs no torch."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager


def derive_seed(seed: int, purpose: str, *keys: int | str) -> int:
    """A 63-bit seed that depends on nothing but its arguments.

    Args:
        seed: the run's seed.
        purpose: what is drawn, for example `noise`; two purposes never share a stream.
        keys: what tells one draw from another within the purpose, for example step and position in the global batch.
    """
    text = "\x1f".join(["flowshard", str(seed), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def uniform(seed: int, purpose: str, *keys: int | str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments; they are those of `derive_seed`."""
    return (derive_seed(seed, purpose, *keys) >> 10) / 2**53  # the upper 53 bits, all of which a float holds


@contextmanager
def isolated_rng(seed: int, purpose: str, *keys: int | str) -> Iterator[None]:
    """Run code of other libraries that draws from torch's global CPU generator, without reading or advancing it."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, purpose, *keys))
        yield
