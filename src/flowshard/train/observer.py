"""What a run shows to whoever watches it; `flowshard parity` does."""

from pathlib import Path

import torch

from flowshard.parallel.strategies import Strategy
from flowshard.train.batches import MicroBatch
from flowshard.weights.load import NewTensor

NewWeights = dict[str, NewTensor]


class Observer:
    """Sees nothing. A subclass overrides what it wants to see; its methods are called on every process."""

    def new_weights(self, values: NewWeights) -> NewWeights:
        """What makes the value of every tensor that the files may lack, by its name; what is returned is used."""
        return values

    def started(self, model: torch.nn.Module) -> None:
        """The model has its weights and its engine; no step has been made."""

    def batch(self, step: int, batch: MicroBatch) -> MicroBatch:
        """A micro-batch of this process before its forward pass; what is returned goes through the model."""
        del step
        return batch

    def backward_done(self, step: int, strategy: Strategy) -> None:
        """All gradients of a step are there and no update has been made."""

    def step_done(self, step: int, loss: float, gradient_norm: float, strategy: Strategy) -> None:
        """An update has been made."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """A checkpoint was written after so many updates. On the main process alone; the others wait, however long.

        Raises:
            RunError: something cannot be written; the run ends.
        """

    def run_done(self, strategy: Strategy) -> None:
        """The last update has been made and saved."""
