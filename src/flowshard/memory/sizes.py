"""How large the parameters of a model are, block by block."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowshard.weights.frozen import frozen_elements

MASTER = 4
"""Bytes of an element of a trained parameter, of its gradient and of each tensor that its optimizer keeps."""
SMALL = 100_000
"""Elements of parameters that ZeRO-3 gathers once and keeps: DeepSpeed's default of
`stage3_param_persistence_threshold`."""


@dataclass(frozen=True)
class Size:
    """Of some parameters and buffers."""

    bytes: int = 0
    elements: int = 0
    """Of parameters alone, with weights that are held in fewer bits."""
    trained: int = 0
    """Elements that are trained."""
    largest: int = 0
    """Elements of the largest trained parameter."""
    frozen: int = 0
    """Bytes of parameters that are not trained."""
    small: int = 0
    """Bytes of parameters of at most `SMALL` elements."""

    def __add__(self, other: "Size") -> "Size":
        return Size(
            self.bytes + other.bytes,
            self.elements + other.elements,
            self.trained + other.trained,
            max(self.largest, other.largest),
            self.frozen + other.frozen,
            self.small + other.small,
        )


@dataclass(frozen=True)
class ModelSize:
    """Of a model."""

    blocks: tuple[Size, ...]
    """Of each block, in the order of execution."""
    rest: Size
    """Of what is in no block."""

    @property
    def whole(self) -> Size:
        """Of all of it."""
        return sum(self.blocks, self.rest)

    @property
    def hosted(self) -> int:
        """Bytes of what `memory.parameters: host` keeps in host memory."""
        return sum(block.frozen for block in self.blocks)

    @property
    def two_blocks(self) -> int:
        """The most bytes of these that are on the device at one time: of two blocks next to one another."""
        frozen = [block.frozen for block in self.blocks]
        return max((sum(frozen[place : place + 2]) for place in range(len(frozen))), default=0)


def model_size(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> ModelSize:
    """The sizes of a model, which may be on the meta device.

    Args:
        model: with the types that its parameters will have.
        blocks: in the order of execution.
    """
    inside: set[int] = set()
    sizes = []
    for block in blocks:
        tensors = _tensors(block)
        inside.update(map(id, tensors))
        sizes.append(_size(tensors, frozen_elements(block)))
    return ModelSize(tuple(sizes), _size([tensor for tensor in _tensors(model) if id(tensor) not in inside]))


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _size(tensors: Sequence[torch.Tensor], more: int = 0) -> Size:
    parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    trained = [tensor.numel() for tensor in parameters if tensor.requires_grad]
    return Size(
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        elements=sum(tensor.numel() for tensor in parameters) + more,
        trained=sum(trained),
        largest=max(trained, default=0),
        frozen=sum(one.numel() * one.element_size() for one in parameters if not one.requires_grad),
        small=sum(one.numel() * one.element_size() for one in parameters if one.numel() <= SMALL),
    )
