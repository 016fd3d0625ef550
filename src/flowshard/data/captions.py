"""Which caption a sample is trained with: a draw of (seed, step, position in the global batch). Needs no torch."""

from flowshard.data.metadata import Row
from flowshard.seeds import uniform

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
    if uniform(seed, "caption dropout", step, position) < dropout:
        return EMPTY
    return row.prompts[int(uniform(seed, "caption", step, position) * len(row.prompts))]


def captions_of(row: Row, *, dropout: float) -> list[str]:
    """All captions that a row can be trained with."""
    return list(dict.fromkeys([*row.prompts, *([EMPTY] if dropout > 0 else [])]))
