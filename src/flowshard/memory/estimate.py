"""Memory of a run, worked out before its first step without computing anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowshard.config import ActivationPolicy
from flowshard.memory.activations import is_attention
from flowshard.memory.fakes import Forward, Tensors, fake_call, forgetting
from flowshard.memory.storages import storage_id
from flowshard.parallel.layout import Layout
from flowshard.parallel.strategies.base import OptimizerFactory


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

    def divided(self, layout: Layout) -> "MemoryEstimate":
        """What one process holds of it under a layout; what is gathered for a moment is left out."""
        parts = layout.shard
        return MemoryEstimate(
            parameters=self.parameters // (parts if layout.strategy in ("zero3", "fsdp2") else 1),
            gradients=self.gradients // (1 if layout.strategy == "zero1" else parts),
            optimizer=self.optimizer // parts,
            activations=self.activations,
        )


def estimate_memory(
    model: torch.nn.Module,
    forward: Forward,
    inputs: Tensors,
    make_optimizer: OptimizerFactory,
    policies: Sequence[ActivationPolicy],
    device: torch.device,
    *,
    remembering: Sequence[str] = (),
) -> MemoryEstimate:
    """Estimate parameters, gradients, optimizer state and the activations of one micro-batch.

    Args:
        model: on the meta device, with the types that its parameters will have.
        forward: maps model and inputs to the loss.
        inputs: of one micro-batch.
        make_optimizer: makes the run's optimizer from parameter groups.
        policies: what each block keeps.
        device: where it will run.
        remembering: see `forgetting`.
    """
    tensors = [*model.parameters(), *model.buffers()]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    with forgetting(model, remembering):
        selective = policies.count("selective") / len(policies)
        activations = _activation_bytes(model, forward, inputs, selective, device)
    return MemoryEstimate(
        parameters=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        gradients=4 * trained,
        optimizer=round(_optimizer_bytes_per_element(make_optimizer) * trained),
        activations=activations,
    )


def _optimizer_bytes_per_element(make_optimizer: OptimizerFactory) -> float:
    """State that the optimizer keeps for an element, found by one update of a small float32 matrix."""
    sample = torch.nn.Parameter(torch.zeros(64, 64))
    sample.grad = torch.zeros_like(sample)
    optimizer = make_optimizer([{"params": [sample], "lr": 0.0, "weight_decay": 0.0}])
    optimizer.step()
    state = [value for value in optimizer.state[sample].values() if isinstance(value, torch.Tensor) and value.ndim]
    return sum(value.numel() * value.element_size() for value in state) / sample.numel()


def _activation_bytes(
    model: torch.nn.Module, forward: Forward, inputs: Tensors, selective: float, device: torch.device
) -> int:
    """Bytes that a forward pass keeps for the backward pass, found on fake tensors: nothing is computed.

    Counted are the distinct storages that autograd saves, weights left out, and of the attention outputs the share
    `selective`, as those are kept outside of autograd.
    """
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no storage is mistaken for an earlier one
    weights: set[int] = set()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if storage_id(tensor) not in weights and tensor.device.type == device.type:
            alive.append(tensor)
            sizes[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    mode, call, fakes = fake_call(model, forward, inputs, device)
    weights.update(storage_id(tensor) for tensor in fakes.values())
    attention = _AttentionBytes()
    with mode, attention, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = call()
    del loss
    return sum(sizes.values()) + round(selective * attention.total)


class _AttentionBytes(TorchDispatchMode):
    """Adds up what the attention operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_attention(func):
            outputs = result if isinstance(result, tuple) else (result,)
            self.total += sum(value.nbytes for value in outputs if isinstance(value, torch.Tensor))
        return result
