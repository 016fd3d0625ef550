"""Seeds from names: the root of stateless randomness. Needs no torch."""

import hashlib


def derive_seed(seed: int, purpose: str, *keys: int | str) -> int:
    """A 63-bit seed that depends on nothing but its arguments.

    Args:
        seed: the run's seed.
        purpose: what is drawn, for example `noise`; two purposes never share a stream.
        keys: what tells one draw from another within the purpose, for example step and position in the global batch.
    """
    text = "\x1f".join(["flowshard", str(seed), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
