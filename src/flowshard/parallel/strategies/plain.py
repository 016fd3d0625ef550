"""Strategies whose optimizer works on parameters that autograd fills the gradients of: single, ddp and fsdp2."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from flowshard.parallel.strategies.base import (
    GroupSettings,
    LearningRates,
    OptimizerFactory,
    Strategy,
    Tensors,
    grouped,
)


class PlainStrategy(Strategy):
    """What they share. A subclass says how gradients are reduced and how a full tensor is had from a local one."""

    _without_gradient: list[str] = []
    _foreach: bool | None = None
    """Whether norm and clipping take all gradients at once; None where torch finds out by itself."""

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

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.loss_scale.value).backward()

    def step(self, factor: float, limit: float = math.inf) -> float:
        self._fill_gradients()
        gradients = [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]
        if self.loss_scale.value != 1.0:
            for gradient in gradients:
                gradient.div_(self.loss_scale.value)
        norm = torch.nn.utils.get_total_norm(gradients, foreach=self._foreach)
        value = float(self._full(norm))
        if math.isfinite(value) and value <= limit:
            if self.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(
                    self._trained.values(), self.clip_norm, norm, foreach=self._foreach
                )
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
            full = torch.zeros(parameter.shape) if gradient is None else self._full(gradient)
            yield name, full / self.loss_scale.value

    @property
    def has_optimizer_state(self) -> bool:
        return any(self._optimizer.state.values())

    def optimizer_tensors(self, names: Sequence[str], key: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self._full(self._optimizer.state[self._trained[name]][key])

    def optimizer_state(self) -> Iterator[tuple[str, Tensors]]:
        for name, parameter in self._trained.items():
            state = self._optimizer.state[parameter]
            yield name, {key: self._full(torch.as_tensor(value)) for key, value in state.items() if value is not None}

    def restore_optimizer_state(self, read: Callable[[str], Tensors], warm_up: Callable[[], torch.Tensor]) -> None:
        del warm_up
        places = {id(parameter): name for name, parameter in self._trained.items()}
        members = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        state = {}
        for index, parameter in enumerate(members):  # the order in which torch numbers them
            values = read(places[id(parameter)])
            state[index] = {
                key: self.place(parameter, value) if value.shape == parameter.shape and value.ndim else value.clone()
                for key, value in values.items()
            }
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})

    def without_gradient(self) -> list[str]:
        return self._without_gradient
