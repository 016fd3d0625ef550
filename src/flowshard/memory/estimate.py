"""Memory of a run, worked out before its first step without computing anything."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flowshard.parallel.strategies.base import OptimizerFactory

Tensors = dict[str, torch.Tensor]
Forward = Callable[[torch.nn.Module, Tensors], torch.Tensor]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum, which is near the peak, as gradients are complete when the activations are gone but not before."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def estimate_memory(
    model: torch.nn.Module,
    forward: Forward,
    inputs: Tensors,
    make_optimizer: OptimizerFactory,
) -> MemoryEstimate:
    """Estimate parameters, gradients, optimizer state and the activations of one micro-batch.

    Args:
        model: with its weights in their types.
        forward: maps model and inputs to the loss.
        inputs: of one micro-batch.
        make_optimizer: makes the run's optimizer from parameter groups.
    """
    tensors = [*model.parameters(), *model.buffers()]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return MemoryEstimate(
        parameters=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        gradients=4 * trained,
        optimizer=round(_optimizer_bytes_per_element(make_optimizer) * trained),
        activations=_activation_bytes(model, forward, inputs),
    )


def _optimizer_bytes_per_element(make_optimizer: OptimizerFactory) -> float:
    """State that the optimizer keeps for an element, found by one update of a small float32 matrix."""
    sample = torch.nn.Parameter(torch.zeros(64, 64))
    sample.grad = torch.zeros_like(sample)
    optimizer = make_optimizer([{"params": [sample], "lr": 0.0, "weight_decay": 0.0}])
    optimizer.step()
    state = [value for value in optimizer.state[sample].values() if isinstance(value, torch.Tensor) and value.ndim]
    return sum(value.numel() * value.element_size() for value in state) / sample.numel()


def _activation_bytes(model: torch.nn.Module, forward: Forward, inputs: Tensors) -> int:
    """Bytes of the distinct storages, weights left out, that autograd saves in a forward pass on fake tensors."""
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no address is used twice
    weights: set[int] = set()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            alive.append(tensor)
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    mode = FakeTensorMode()
    named = [*model.named_parameters(), *model.named_buffers()]
    fakes: Tensors = {f"model.{name}": mode.from_tensor(tensor) for name, tensor in named}
    weights.update(tensor.untyped_storage()._cdata for tensor in fakes.values())
    fake_inputs = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
    with mode, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = torch.func.functional_call(_Call(model, forward), fakes, (fake_inputs,))
    del loss
    return sum(sizes.values())


class _Call(torch.nn.Module):
    """`forward(model, inputs)` as a module, which is what `functional_call` puts other parameters into."""

    def __init__(self, model: torch.nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, inputs: Tensors) -> torch.Tensor:
        return self._forward(self.model, inputs)
