"""Frozen parameters that stay in host memory and are on the device while their block runs (`memory.parameters: host`).

Two blocks are on the device: the one that runs, and the one that runs next, which is being copied meanwhile. What autograd
would keep of a weight for the backward pass is a note of which weight it is.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowshard.config import ActivationPolicy
from flowshard.device import CopyStream
from flowshard.memory.storages import storage_id


def hosted_parameters(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> list[dict[str, torch.Tensor]]:
    """The parameters that stay in host memory, for each block, by name in the block.

    They are the frozen ones, other than those that are used outside of the blocks as well.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    others = (module for module in model.modules() if id(module) not in inside)
    outside = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    return [
        {
            name: parameter
            for name, parameter in block.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and id(parameter) not in outside
        }
        for block in blocks
    ]


def stream_blocks(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    policies: Sequence[ActivationPolicy],
    *,
    device: torch.device,
    copies: CopyStream,
) -> None:
    """Let every block run with copies of its frozen parameters on the device.

    Args:
        model: that the blocks belong to; it gets its weights later.
        blocks: all of them, in the order of execution.
        policies: as many, already applied.
        device: that the model is on.
        copies: to the device.
    """
    names = [list(parameters) for parameters in hosted_parameters(model, blocks)]
    stream = _Stream(blocks, names, device, copies)
    for place, (block, policy) in enumerate(zip(blocks, policies, strict=True)):
        # The other policies run the block again, and autograd keeps nothing of the first time.
        block.forward = _streamed(stream, place, block, block.forward, keeps=policy == "keep")


def _streamed(
    stream: "_Stream", place: int, block: torch.nn.Module, plain: Callable[..., Any], *, keeps: bool
) -> Callable[..., Any]:
    body = _Body(block, plain)

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {f"block.{name}": weight for name, weight in stream.use(place).weights.items()}
        notes: AbstractContextManager[Any] = nullcontext()
        if keeps and torch.is_grad_enabled():
            # Autograd has both functions for as long as what they return, so neither may hold the weights.
            notes = torch.autograd.graph.saved_tensors_hooks(partial(stream.note, place), stream.recall)
        with notes:
            return torch.func.functional_call(body, weights, args, kwargs, tie_weights=False)

    return forward


class _Body(torch.nn.Module):
    """Runs a block's own forward pass, so that the block can have other parameters meanwhile."""

    def __init__(self, block: torch.nn.Module, plain: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self._plain = plain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain(*args, **kwargs)


class _Here:
    """The parameters of a block on the device."""

    def __init__(self, place: int, weights: dict[str, torch.Tensor], copied: Any) -> None:
        self.place, self.weights, self.copied = place, weights, copied
        self.names = {storage_id(weight): name for name, weight in weights.items()}


@dataclass(frozen=True)
class _Note:
    """What is kept in place of a view of a weight."""

    place: int
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Stream:
    """Has the parameters of a block on the device when they are needed."""

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        names: Sequence[Sequence[str]],
        device: torch.device,
        copies: CopyStream,
    ) -> None:
        self._blocks, self._names, self._device, self._copies = blocks, names, device, copies
        self._here: _Here | None = None
        self._coming: _Here | None = None

    def use(self, place: int) -> _Here:
        """The parameters of the block at that place; those of the block that comes next are on their way from now on."""
        here, before = self._here, -1 if self._here is None else self._here.place
        if here is not None and before == place:
            return here
        coming, self._coming = self._coming, None
        if coming is not None and coming.place != place:  # another block came than was expected
            self._copies.wait(coming.copied)
            coming = None
        self._here = here = None  # before there is memory for the next, which may be the same
        here = self._here = coming or self._fetch(place)
        self._copies.wait(here.copied)
        following = self._following(before, place)
        if following is not None:
            self._coming = self._fetch(following)
        return here

    def note(self, place: int, tensor: torch.Tensor) -> "torch.Tensor | _Note":
        """What autograd keeps of a tensor of the block at that place, which runs."""
        here = self._here
        assert here is not None and here.place == place  # noqa: S101 - blocks do not run inside of one another
        name = here.names.get(storage_id(tensor))
        if name is None:
            return tensor
        return _Note(place, name, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def recall(self, kept: "torch.Tensor | _Note") -> torch.Tensor:
        """What autograd would have kept."""
        if isinstance(kept, torch.Tensor):
            return kept
        return self.use(kept.place).weights[kept.name].as_strided(kept.size, kept.stride, kept.offset)

    def _fetch(self, place: int) -> _Here:
        with torch.no_grad():
            host = {name: self._blocks[place].get_parameter(name) for name in self._names[place]}
            weights = {name: torch.empty(one.shape, dtype=one.dtype, device=self._device) for name, one in host.items()}
            copied = self._copies.copy((weights[name], one) for name, one in host.items())
        return _Here(place, weights, copied)

    def _following(self, before: int, place: int) -> int | None:
        """The block that is used after one; a guess, which costs a copy if it is wrong."""
        last = len(self._blocks) - 1
        if last == 0:
            return None
        if place == 0:
            return 1
        if place == last:  # the backward pass begins, or another forward pass
            return last - 1 if self._blocks[place].training else 0
        return place + 1 if before < place else place - 1
