"""One process that holds everything: the reference that every other strategy has to agree with."""

from flowshard.parallel.strategies.plain import PlainStrategy


class Single(PlainStrategy):
    """Plain torch."""
