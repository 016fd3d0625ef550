"""What the training loop asks of a strategy. The loop does not know which one runs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from flowshard.parallel.strategies.scaling import LossScale
from flowshard.weights.load import Whole

ParameterGroups = list[dict[str, object]]
Tensors = dict[str, torch.Tensor]
OptimizerFactory = Callable[[ParameterGroups], torch.optim.Optimizer]


@dataclass(frozen=True)
class GroupSettings:
    """Learning rate and weight decay of one trained parameter."""

    learning_rate: float
    weight_decay: float


class Strategy(ABC):
    """Owns the model and the optimizer of a run.

    A run calls, in this order: `shard` once on the meta model, `place` for every tensor and `settle` for every unit as the
    weights come in, `start` once, perhaps `restore_optimizer_state`, and then for every step forward and `backward`
    within `micro_batch`, and `step`. What is collective has to be called by every process.
    """

    model: torch.nn.Module
    """What the forward pass goes through, from `start` on."""
    _unwrapped: torch.nn.Module
    """The same as it was built, from `start` on."""

    def __init__(self, device: torch.device, *, clip_norm: float | None, loss_scale: LossScale) -> None:
        """Prepare.

        Args:
            device: of this process.
            clip_norm: largest gradient norm, or None.
            loss_scale: multiplies the loss in `backward` and is taken out again before the norm is computed.
        """
        self.device = device
        self.clip_norm = clip_norm
        self.loss_scale = loss_scale

    def shard(self, model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:  # noqa: B027
        """Prepare the meta model for being divided.

        Args:
            model: with adapters, all parameters on the meta device in their final types.
            units: the parts that are gathered as a whole, in the order of execution.
        """

    def place(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The part of a full value that this process holds of a meta parameter or buffer: on the device, in its type.

        Args:
            parameter: on the meta device.
            value: whole, on the CPU, in the type that the file has; often a view of the mapped file.
        """
        return Whole(self.device).place(parameter, value)

    def settle(self, unit: torch.nn.Module) -> None:  # noqa: B027
        """All parameters of a unit have their values."""

    @abstractmethod
    def start(self, model: torch.nn.Module, settings: Mapping[str, GroupSettings], optimizer: OptimizerFactory) -> None:
        """Make engine and optimizer.

        Args:
            model: with its weights in place.
            settings: of every trained parameter by its name in `model`.
            optimizer: makes it from parameter groups.
        """

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of forward and backward pass of one micro-batch.

        Args:
            last: whether it is the last of the update; where the engine allows, gradients are only reduced then.
        """
        del last
        return nullcontext()

    @contextmanager
    def evaluation(self) -> Iterator[torch.nn.Module]:
        """The model without a wrapper, in evaluation mode, for forward passes that no backward pass follows.

        Collective: every process has to make as many of them. What the engine has gathered is let go of afterwards.
        """
        self._unwrapped.eval()
        try:
            yield self._unwrapped
        finally:
            self._unwrapped.train()
        self._release()

    def _release(self) -> None:  # noqa: B027
        """Divide again what a forward pass alone leaves gathered."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of one micro-batch.

        Args:
            loss: its share of the process's loss: the mean over the micro-batch divided by the number of micro-batches.
        """

    @abstractmethod
    def step(self, factor: float, limit: float = math.inf) -> float:
        """Clip and update, with every group's learning rate scaled by `factor`; gradients are zero afterwards.

        Args:
            factor: the schedule's value for this step.
            limit: largest norm with which the update is made; minus infinity makes none in any case.

        Returns:
            The 2-norm of the gradient of the global batch over all trained parameters, before clipping. If it is not
            finite or above `limit`, nothing was updated.
        """

    @abstractmethod
    def parameters(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Full values by name, one at a time. Collective: every process must take all of them."""

    @abstractmethod
    def trained_names(self) -> list[str]:
        """Names of the trained parameters in the unwrapped model, in its order."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full gradients of the global batch by name, between the last `backward` and `step`. Collective."""

    @property
    @abstractmethod
    def has_optimizer_state(self) -> bool:
        """Whether an update has been made, or its state restored."""

    @abstractmethod
    def optimizer_tensors(self, names: Sequence[str], key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """One of the tensors that the optimizer keeps of parameters, by name, whole, one at a time. Collective.

        Args:
            names: of trained parameters.
            key: torch's, such as `exp_avg`.
        """

    @abstractmethod
    def optimizer_state(self) -> Iterator[tuple[str, Tensors]]:
        """What the optimizer keeps of each trained parameter, whole, under torch's keys (`exp_avg`, `step`, ...).

        One parameter at a time, in the order of `trained_names`; nothing before the first update. Collective: every
        process must take all of them.
        """

    @abstractmethod
    def restore_optimizer_state(self, read: Callable[[str], Tensors], warm_up: Callable[[], torch.Tensor]) -> None:
        """Give a fresh optimizer the state that some strategy's `optimizer_state` returned.

        Args:
            read: the state of a parameter by its name, whole, on the CPU; asked for one parameter at a time.
            warm_up: runs some forward pass of `model` and returns its loss. For engines that make their state in a
                first update, which is then made with a gradient of zero and a learning rate of zero.
        """

    @abstractmethod
    def without_gradient(self) -> list[str]:
        """Trained parameters that the last update got no gradient for; they counted as having a zero gradient."""


def grouped(
    model: torch.nn.Module, settings: Mapping[str, GroupSettings]
) -> tuple[dict[str, torch.nn.Parameter], ParameterGroups]:
    """The trained parameters by name, and in groups of equal learning rate and decay, in the order of the model."""
    named = {name: parameter for name, parameter in model.named_parameters() if name in settings}
    groups: dict[GroupSettings, list[torch.nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault(settings[name], []).append(parameter)
    return named, [
        {"params": members, "lr": setting.learning_rate, "weight_decay": setting.weight_decay}
        for setting, members in groups.items()
    ]


class LearningRates:
    """Scales the learning rates that an optimizer was made with."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def scale(self, factor: float) -> None:
        """Set every group's rate to its peak times `factor`."""
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
