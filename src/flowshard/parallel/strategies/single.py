"""One process that holds everything."""

import torch

from flowshard.parallel.strategies.base import OptimizerFactory, ParameterGroups, Strategy


class Single(Strategy):
    """The reference that every other strategy has to agree with."""

    def __init__(
        self, model: torch.nn.Module, groups: ParameterGroups, optimizer: OptimizerFactory, *, clip_norm: float | None
    ) -> None:
        self.model = model
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._optimizer = optimizer(groups)
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._clip_norm = clip_norm
        self._without_gradient: list[str] = []

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def gradient_norm(self) -> torch.Tensor:
        self._without_gradient = []
        for name, parameter in self._named.items():
            if parameter.grad is None:
                # Engines differ in what a missing gradient means for weight decay and moments; zero is our rule.
                parameter.grad = torch.zeros_like(parameter)
                self._without_gradient.append(name)
        return torch.nn.utils.get_total_norm([p.grad for p in self._named.values() if p.grad is not None])

    def step(self, factor: float, norm: torch.Tensor) -> None:
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._clip_norm, norm)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._optimizer.step()
        self._optimizer.zero_grad()

    def trained_parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def without_gradient(self) -> list[str]:
        return self._without_gradient
