"""Strategies whose optimizer works on parameters that autograd fills the gradients of: single, ddp and fsdp2."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from flowshard.parallel.strategies.base import GroupSettings, LearningRates, OptimizerFactory, Strategy, grouped


class PlainStrategy(Strategy):
    """What they share. A subclass says how gradients are reduced and how a full tensor is had from a local one."""

    def __init__(self, device: torch.device, *, clip_norm: float | None) -> None:
        super().__init__(device)
        self._clip_norm = clip_norm
        self._without_gradient: list[str] = []

    def start(self, model: torch.nn.Module, settings: Mapping[str, GroupSettings], optimizer: OptimizerFactory) -> None:
        self._unwrapped = model
        self._trained, groups = grouped(model, settings)
        self._optimizer = optimizer(groups)
        self._rates = LearningRates(self._optimizer)
        self.model = self._wrap(model)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor of which this process may hold a part. Collective."""
        return tensor

    def step(self, factor: float) -> float:
        self._fill_gradients()
        gradients = [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        value = float(self._full(norm))
        if math.isfinite(value):
            if self._clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._trained.values(), self._clip_norm, norm)
            self._rates.scale(factor)
            self._optimizer.step()
        self._optimizer.zero_grad()
        return value

    def _fill_gradients(self) -> None:
        """A missing gradient is zero: engines differ in what it would mean for weight decay and moments."""
        self._without_gradient = [name for name, parameter in self._trained.items() if parameter.grad is None]
        for name in self._without_gradient:
            self._trained[name].grad = torch.zeros_like(self._trained[name])

    def parameters(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._unwrapped.state_dict()
        for name in names:
            yield name, self._full(tensors[name])

    def trained_names(self) -> list[str]:
        return list(self._trained)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._trained.items():
            gradient = parameter.grad
            yield name, torch.zeros(parameter.shape) if gradient is None else self._full(gradient)

    def without_gradient(self) -> list[str]:
        return self._without_gradient
