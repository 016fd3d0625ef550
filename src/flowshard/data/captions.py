"""Which caption a sample is trained with: a draw of (seed, step, position in the global batch). Needs no torch."""

from flowshard.data.metadata import Row
from flowshard.seeds import derive_seed

EMPTY = ""
"""What a caption that is left out becomes; it has no prefix either."""


def caption_of(row: Row, *, seed: int, step: int, position: int, dropout: float) -> str:
    """The caption of one use of a row.

    Args:
        row: with one caption or several, which are equally likely.
        seed: the run's seed.
        step: the optimizer update, from 0.
        position: the sample's place in the global batch.
        dropout: how likely it is left out.
    """
    if _uniform(seed, "caption dropout", step, position) < dropout:
        return EMPTY
    return row.prompts[int(_uniform(seed, "caption", step, position) * len(row.prompts))]


def captions_of(row: Row, *, dropout: float) -> list[str]:
    """All captions that a row can be trained with."""
    return list(dict.fromkeys([*row.prompts, *([EMPTY] if dropout > 0 else [])]))


def _uniform(seed: int, purpose: str, step: int, position: int) -> float:
    """In [0, 1): the upper 53 bits of the seed, all of which a float holds."""
    return (derive_seed(seed, purpose, step, position) >> 10) / 2**53
