"""What one micro-batch keeps alive at each moment of its forward and backward pass, block by block.

It is measured on fake tensors, which compute nothing, with few blocks of each kind. Blocks of a kind that lie between
others are alike, so the rest of a model follows by repeating one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from flowshard.config import ActivationPolicy
from flowshard.memory.exchange import Exchange
from flowshard.memory.fakes import Forward, Tensors, fake_call, forgetting
from flowshard.memory.flops import CPU
from flowshard.memory.live import LiveBytes

MEASURED = 3
"""Blocks of each kind that have to be measured: a first, a last, and one between them."""


@dataclass(frozen=True)
class Segment:
    """A part of a pass: a block and what follows it up to the next one.

    Its bytes are those of neither parameters nor gradients of parameters, where nothing else is said.
    """

    block: int | None
    """Place in the order of execution; None for what comes before the first block, in either pass."""
    backward: bool
    change: int
    """Bytes at the end above those at the beginning."""
    peak: int
    """The most bytes inside above those at the beginning."""
    gradients: int = 0
    """Bytes of the gradients of parameters that it makes."""
    joint_peak: int = 0
    """As `peak`, with those of these gradients that have been made by then."""
    flops: int = 0
    """Floating-point operations of matrix products and attention, those of recomputation included."""
    exchanges: tuple[Exchange, ...] = ()
    """Of sequence parallelism."""


@dataclass(frozen=True)
class Timeline:
    """A micro-batch from its beginning to its end."""

    inputs: int
    """Bytes that are there before."""
    segments: tuple[Segment, ...]
    """In the order of execution: those of the forward pass, then those of the backward pass."""
    offloaded: int = 0
    """Bytes in host memory at the end of the forward pass."""
    passing: tuple[int, ...] = ()
    """Of each block that was measured, the bytes that its forward pass allocates and the end of the whole forward pass
    frees, such as weights that autocast has converted."""

    @property
    def flops(self) -> int:
        """Floating-point operations of both passes."""
        return sum(segment.flops for segment in self.segments)

    def sent(self, *, ulysses: int, ring: int) -> int:
        """Bytes that sequence parallelism of these degrees sends in both passes."""
        return sum(one.sent(ulysses, ring) for segment in self.segments for one in segment.exchanges)

    @property
    def kept(self) -> int:
        """Bytes that the forward pass leaves for the backward pass."""
        return self.inputs + sum(segment.change for segment in self.segments if not segment.backward)

    def walk(self) -> Iterator[tuple[Segment, int]]:
        """Each segment with the bytes that are alive when it begins."""
        live = self.inputs
        for segment in self.segments:
            yield segment, live
            live += segment.change


def measure_timeline(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    forward: Forward,
    inputs: Tensors,
    live: LiveBytes,
    *,
    remembering: Sequence[str] = (),
) -> Timeline:
    """Measure a model as it is: with its activation policies, and its tokens divided if they are.

    Args:
        model: on the meta device, with the types that its parameters will have.
        blocks: in the order of execution.
        forward: maps model and inputs to the loss on the CPU.
        inputs: of one micro-batch.
        live: what counts.
        remembering: see `forgetting`.
    """
    recorder = _Recorder(live)

    def both(model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        # The backward pass too has to find the fake parameters in the model, as blocks run again in it.
        loss = forward(model, tensors)
        recorder.begin_backward()
        loss.backward()
        return loss.detach()

    with forgetting(model, remembering):
        mode, call, fakes = fake_call(model, both, inputs, CPU)
        for tensor in fakes.values():
            live.leave_out(tensor)
        hooks = recorder.watch(blocks, [tensor for tensor in fakes.values() if tensor.requires_grad])
        with mode, live:
            call()
            recorder.cut(None, backward=True)
        for hook in hooks:
            hook.remove()
    held = sum(tensor.untyped_storage().nbytes() for tensor in inputs.values())
    end = len(blocks) - 1, False
    passing = tuple(live.freed[(index, False), end] for index in range(len(blocks)))
    return Timeline(held, tuple(recorder.segments), recorder.offloaded, passing)


class _Recorder:
    """Cuts a computation into segments."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self.segments: list[Segment] = []
        self.offloaded = 0
        """Bytes in other memory at the end of the forward pass."""
        self._block: int | None = None
        self._backward = False
        self._begin()

    def watch(self, blocks: Sequence[torch.nn.Module], trained: Sequence[torch.Tensor]) -> list[Any]:
        """Cut where blocks begin; returns what has to be removed afterwards."""
        hooks: list[Any] = []
        for index, block in enumerate(blocks):
            hooks.append(block.register_forward_pre_hook(lambda *_, index=index: self._enter(index)))
            hooks.append(block.register_forward_hook(lambda *call, index=index: self._leave(index, call[-1])))
        hooks += [tensor.register_post_accumulate_grad_hook(self._gradient) for tensor in trained]
        return hooks

    def _enter(self, index: int) -> None:
        if not self._backward:  # else it runs again
            self.cut(index, backward=False)

    def _leave(self, index: int, output: Any) -> None:
        if self._backward:
            return
        tensors = (value for value in tree_iter(output) if isinstance(value, torch.Tensor))
        tensor = next((value for value in tensors if value.requires_grad), None)
        if tensor is not None:
            # Its gradient is ready when all that comes after the block is done.
            tensor.register_hook(lambda _: self.cut(index, backward=True))

    def _gradient(self, parameter: torch.Tensor) -> None:
        """A gradient is complete: from here on it is counted by itself."""
        assert parameter.grad is not None  # noqa: S101
        self._note()
        self._gradients += self._live.leave_out(parameter.grad)
        self._live.highest = self._live.now

    def begin_backward(self) -> None:
        """The forward pass is done."""
        self.offloaded = self._live.outside
        self.cut(None, backward=True)

    def _begin(self) -> None:
        live = self._live
        self._start = self._peak = self._joint = live.highest = live.now
        self._gradients = live.flops = 0
        live.exchanges.clear()

    def _note(self) -> None:
        self._peak = max(self._peak, self._live.highest)
        self._joint = max(self._joint, self._live.highest + self._gradients)

    def cut(self, block: int | None, *, backward: bool) -> None:
        """A segment ends here, and the next begins."""
        self._note()
        start = self._start
        self.segments.append(
            Segment(
                self._block,
                self._backward,
                change=self._live.now - start,
                peak=self._peak - start,
                gradients=self._gradients,
                joint_peak=self._joint - start,
                flops=self._live.flops,
                exchanges=tuple(self._live.exchanges),
            )
        )
        self._block, self._backward = block, backward
        self._live.place = block, backward
        self._begin()


def between(one: Timeline, other: Timeline, share: float) -> Timeline:
    """The timeline at `share` of the way from one to another of the same model; what grows with the tokens of a process
    lies on a line, and the most bytes, as the largest of several lines, not above it."""

    def line(first: float, second: float) -> int:
        return round(first + share * (second - first))

    segments = tuple(
        replace(
            a,
            change=line(a.change, b.change),
            peak=line(a.peak, b.peak),
            joint_peak=line(a.joint_peak, b.joint_peak),
            flops=line(a.flops, b.flops),
        )
        for a, b in zip(one.segments, other.segments, strict=True)
    )
    passing = tuple(line(a, b) for a, b in zip(one.passing, other.passing, strict=True))
    return Timeline(line(one.inputs, other.inputs), segments, line(one.offloaded, other.offloaded), passing)


def whole_timeline(
    measured: Mapping[ActivationPolicy, Timeline],
    kinds: Sequence[tuple[int, int]],
    policies: Sequence[ActivationPolicy],
) -> Timeline:
    """The timeline of a model whose blocks have these policies.

    Args:
        measured: of a model with few blocks of each kind, all of one policy.
        kinds: for each kind of block, how many were measured and how many there are.
        policies: of each block that there is, in the order of execution.
    """
    copies = list(_copies(kinds))
    found = {
        policy: {(segment.block, segment.backward): segment for segment in timeline.segments}
        for policy, timeline in measured.items()
    }
    first = measured[policies[0]]
    segments: list[Segment] = []
    more = 0  # that the end of the forward pass frees
    for backward in (False, True):
        outside = found[policies[0]].get((None, backward))
        segments += [] if outside is None else [outside]
        order = list(enumerate(copies))
        for block, copy in reversed(order) if backward else order:
            segment = found[policies[block]].get((copy.place, backward))
            if segment is None:
                continue
            change = segment.change
            if copy.extra is not None:
                passing = measured[policies[block]].passing[copy.extra]
                more += 0 if backward else passing
                if backward:  # what the forward pass of a block among many leaves, its backward pass frees
                    change = passing - found[policies[block]][copy.place, False].change
            segments.append(replace(segment, block=block, change=change))
        if not backward:
            segments[-1] = replace(segments[-1], change=segments[-1].change - more)
    count = sum(number for number, _ in kinds)
    offloaded = sum(measured[policy].offloaded / count for policy in policies)
    return Timeline(first.inputs, tuple(segments), round(offloaded))


@dataclass(frozen=True)
class _Copy:
    """What stands for a block of the whole model."""

    place: int
    """The measured block that is like it."""
    extra: int | None = None
    """If there are more of its kind than were measured and it is one of these, the first of the kind."""


def _copies(kinds: Sequence[tuple[int, int]]) -> Iterator[_Copy]:
    start = 0
    for measured, whole in kinds:
        for index in range(whole):
            if index < min(MEASURED - 1, measured - 1) or whole == measured:
                yield _Copy(start + index)
            elif index == whole - 1:
                yield _Copy(start + measured - 1)
            else:
                yield _Copy(start + min(1, measured - 1), extra=start)
        start += measured
