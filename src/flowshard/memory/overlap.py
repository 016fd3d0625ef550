"""Inputs of blocks in host memory, copied there and back beside the computation (`memory.offload_overlap`).

Two sets of inputs are on the device beside what the blocks need: in the forward pass those that are being copied out, in
the backward pass the one that is in use and the one that comes next.
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from flowshard.device import CopyStream, host_tensor

_LEAVING = 2
"""Blocks whose inputs are on their way to host memory at one time; the next one waits until the first of them is there."""


class BlockInputs:
    """What one block got from the block before it."""

    def __init__(self, before: "weakref.ref[BlockInputs] | None") -> None:
        self.before = before
        """Of the block that ran before, which the backward pass needs next; it lives as long as its part of the graph."""
        self.host: list[torch.Tensor] = []
        self.here: list[torch.Tensor | None] = []
        """The same on the device, as long as a copy needs it there or until autograd has it."""
        self.copied: Any = None
        """The last copy."""


class OverlappingOffload:
    """Keeps the order of copies and computation."""

    def __init__(self, copies: CopyStream, host_memory: Callable[[], AbstractContextManager[Any]]) -> None:
        """Prepare.

        Args:
            copies: of the device.
            host_memory: is entered while host memory is allocated.
        """
        self._copies, self._host_memory = copies, host_memory
        self._leaving: deque[BlockInputs] = deque()
        self._coming: BlockInputs | None = None
        self._last: weakref.ref[BlockInputs] | None = None

    def block(self) -> BlockInputs:
        """The inputs of the block that runs next in the forward pass."""
        while len(self._leaving) >= _LEAVING:
            self._let_go(self._leaving.popleft())
        inputs = BlockInputs(self._last)
        self._leaving.append(inputs)
        self._last = weakref.ref(inputs)
        return inputs

    def save(self, inputs: BlockInputs, tensor: torch.Tensor) -> int:
        """Start to copy a tensor to host memory; its place among the block's inputs."""
        with self._host_memory():
            host = host_tensor(tensor.shape, tensor.dtype, tensor.device)
        inputs.copied = self._copies.copy([(host, tensor)])
        inputs.host.append(host)
        inputs.here.append(tensor)
        return len(inputs.host) - 1

    def load(self, inputs: BlockInputs, place: int, device: torch.device) -> torch.Tensor:
        """The tensor on the device again; those of the block before are on their way from now on."""
        if inputs in self._leaving:  # the last blocks of the forward pass
            self._leaving.remove(inputs)
        if inputs.here[place] is None:
            self._fetch(inputs, device)
        self._copies.wait(inputs.copied)
        tensor, inputs.here[place] = inputs.here[place], None
        assert tensor is not None  # noqa: S101 - fetched above
        if self._coming is inputs:
            self._coming = None
        before = None if inputs.before is None else inputs.before()
        if before is not None and before is not self._coming and before not in self._leaving:
            if self._coming is not None:  # which autograd has not asked for
                self._let_go(self._coming)
            self._fetch(before, device)
            self._coming = before
        return tensor

    def _fetch(self, inputs: BlockInputs, device: torch.device) -> None:
        """Start to copy what is not on the device."""
        missing = [place for place, tensor in enumerate(inputs.here) if tensor is None]
        made = [torch.empty_like(inputs.host[place], device=device) for place in missing]
        inputs.copied = self._copies.copy(zip(made, (inputs.host[place] for place in missing), strict=True))
        for place, tensor in zip(missing, made, strict=True):
            inputs.here[place] = tensor

    def _let_go(self, inputs: BlockInputs) -> None:
        """Of the tensors on the device, when no copy needs them any more."""
        if inputs.host:
            self._copies.wait(inputs.copied)
        inputs.here = [None] * len(inputs.here)
