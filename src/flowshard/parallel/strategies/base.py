"""What the training loop asks of a strategy. The loop does not know which one runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch

ParameterGroups = list[dict[str, object]]
OptimizerFactory = Callable[[ParameterGroups], torch.optim.Optimizer]


class Strategy(ABC):
    """Owns the model and the optimizer of a run."""

    model: torch.nn.Module
    """What the forward pass goes through."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of one micro-batch.

        Args:
            loss: its share of the loss: the mean over the micro-batch divided by the number of micro-batches.
        """

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the gradient of the global batch over all trained parameters, before clipping."""

    @abstractmethod
    def step(self, factor: float, norm: torch.Tensor) -> None:
        """Clip and update, with every group's learning rate scaled by `factor`; gradients are zero afterwards.

        Args:
            factor: the schedule's value for this step.
            norm: from `gradient_norm`.
        """

    @abstractmethod
    def trained_parameters(self) -> dict[str, torch.Tensor]:
        """Full values of the trained parameters by their name in the unwrapped model."""

    @abstractmethod
    def without_gradient(self) -> Iterable[str]:
        """Trained parameters that the last backward passes did not reach; they count as having a zero gradient."""
