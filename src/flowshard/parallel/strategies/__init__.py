"""Who holds parameters, gradients and optimizer state: one file a strategy, all behind `Strategy`."""

from flowshard.parallel.strategies.base import Strategy
from flowshard.parallel.strategies.single import Single

__all__ = ["Single", "Strategy"]
