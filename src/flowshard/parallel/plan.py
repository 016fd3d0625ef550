"""Applies a family's plan of sequence parallelism to its stock model, through hooks and attention processors."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowshard import npu
from flowshard.device import compute_dtype
from flowshard.families.base import Family
from flowshard.families.sequence import SequencePlan, Tokens
from flowshard.parallel.operators import gather_tokens, sequence_attention
from flowshard.parallel.sequence import GroupShape


def part_sizes(length: int, degree: int) -> list[int]:
    """Tokens of each of `degree` processes: they differ by one at most, the first ones have more."""
    each, more = divmod(length, degree)
    return [each + (rank < more) for rank in range(degree)]


class GroupTokens:
    """The tokens of the streams of a model over a group; see `families.sequence.Tokens`.

    How long a stream is, is noted where it is split and stays noted, as blocks may run again in the backward pass.
    """

    def __init__(self, group: GroupShape) -> None:
        self._group = group
        self._lengths: dict[str, int] = {}

    def sizes(self, stream: str) -> list[int]:
        """Tokens of each process; see `part_sizes`."""
        return part_sizes(self._lengths[stream], self._group.degree)

    def split(self, whole: torch.Tensor, dim: int, *, stream: str) -> torch.Tensor:
        """This process's part. A copy, which does not keep the whole alive."""
        self._lengths[stream] = whole.shape[dim]
        sizes, rank = self.sizes(stream), self._group.rank
        return whole.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)

    def gather(self, part: torch.Tensor, dim: int, *, stream: str, summed: bool = False) -> torch.Tensor:
        """The whole stream."""
        return gather_tokens(part, dim=dim, group=self._group.name, sizes=self.sizes(stream), summed=summed)

    def length(self, stream: str) -> int:
        """Tokens of a whole stream."""
        return self._lengths[stream]

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        streams: tuple[str, ...],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over all processes, in autocast's type if it is on, else in the type of the values."""
        dtype = compute_dtype(value)
        sizes = [sum(parts) for parts in zip(*(self.sizes(stream) for stream in streams), strict=True)]
        if mask is not None:
            mask = self._in_order_of_processes(mask, streams)
        return sequence_attention(
            query.to(dtype), key.to(dtype), value.to(dtype), mask=mask, group=self._group.name, sizes=sizes
        )

    def _in_order_of_processes(self, mask: torch.Tensor, streams: tuple[str, ...]) -> torch.Tensor:
        whole = mask.split([self._lengths[stream] for stream in streams], dim=1)
        parts = [
            stream_mask.split(self.sizes(stream), dim=1) for stream, stream_mask in zip(streams, whole, strict=True)
        ]
        return torch.cat([part for process in zip(*parts, strict=True) for part in process], dim=1)


class WholeTokens:
    """The tokens of the streams of a model that are all on this process; see `families.sequence.Tokens`."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def split(self, whole: torch.Tensor, dim: int, *, stream: str) -> torch.Tensor:
        """All of them."""
        self._lengths[stream] = whole.shape[dim]
        return whole

    def gather(self, part: torch.Tensor, dim: int, *, stream: str, summed: bool = False) -> torch.Tensor:
        """The stream as it is."""
        del dim, stream, summed
        return part

    def length(self, stream: str) -> int:
        """Tokens of a stream."""
        return self._lengths[stream]

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        streams: tuple[str, ...],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention by the NPU's kernel, else by torch."""
        del streams
        return npu.attention(query, key, value, mask)


def apply_plans(model: torch.nn.Module, family: Family, group: GroupShape | None, device: torch.device) -> None:
    """Change a model for the device and for the processes that it will run on.

    Args:
        model: the diffusers model; its parameters may be on the meta device.
        family: of the model.
        group: that shares the tokens of a sample, if there is one.
        device: of this process.
    """
    if device.type == "npu":
        npu.fuse_norms(model)
        family.prepare_for_npu(model, device)
    if group is not None:
        apply_sequence_plan(model, family.sequence_plan, group)
    elif device.type == "npu":
        tokens = WholeTokens()
        plan = family.sequence_plan(model, tokens)
        stock = {name: one for name, one in plan.processors.items() if npu.is_stock(model.get_submodule(name))}
        install_plan(model, dataclasses.replace(plan, processors=stock), tokens)


def apply_sequence_plan(model: Any, make_plan: Callable[[Any, GroupTokens], SequencePlan], group: GroupShape) -> None:
    """Divide the tokens of a model over a group.

    Args:
        model: the diffusers model; its parameters may be on the meta device.
        make_plan: the family's `sequence_plan`.
        group: that shares the tokens.
    """
    tokens = GroupTokens(group)
    install_plan(model, make_plan(model, tokens), tokens)


def install_plan(model: torch.nn.Module, plan: SequencePlan, tokens: Tokens) -> None:
    """Put hooks and processors of a plan in place."""
    for name, arguments in plan.inputs.items():
        module = model.get_submodule(name)
        module.register_forward_pre_hook(_splitter(module, arguments, tokens), with_kwargs=True)
    for name, replace in plan.outputs.items():
        model.get_submodule(name).register_forward_hook(lambda _, __, output, replace=replace: replace(output))
    for name, processor in plan.processors.items():
        attention: Any = model.get_submodule(name)
        attention.set_processor(processor)


def _splitter(module: torch.nn.Module, arguments: Mapping[str, tuple[str, int]], tokens: Tokens) -> Any:
    """A hook that divides arguments of a module, however they are passed."""
    order = list(inspect.signature(module.forward).parameters)

    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        for name, (stream, dim) in arguments.items():
            given[name] = tokens.split(given[name], dim, stream=stream)
        return tuple(given[name] for name in order[: len(args)]), {name: given[name] for name in kwargs}

    return hook
