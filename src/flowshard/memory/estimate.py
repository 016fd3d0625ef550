"""What one process holds at most in a step under a layout: its timeline and what its strategy adds. See `docs/plan.md`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flowshard.memory.live import LiveBytes
from flowshard.memory.sizes import MASTER, ModelSize
from flowshard.memory.timeline import Segment, Timeline
from flowshard.parallel.strategies.base import OptimizerFactory


@dataclass(frozen=True)
class Engine:
    """A strategy as far as memory depends on it."""

    strategy: str
    shard: int = 1
    """Processes that divide one copy of the model."""
    accumulation: int = 1
    """Micro-batches of one process in one update."""
    offload_optimizer: bool = False
    offload_parameters: bool = False
    host_parameters: bool = False
    """Whether frozen parameters of blocks are in host memory, but for two blocks."""
    gather_bytes: int | None = None
    """Bytes of an element of a block's parameter where it is gathered; None for those of its own type."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """`zero_optimization` of DeepSpeed's config."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as far as memory depends on it."""

    state: float
    """Bytes that it keeps for an element."""
    working: float
    """Bytes that it allocates for an element while it updates a parameter; none if it is fused."""
    foreach: bool
    """Whether it updates all parameters at once, as torch's do on accelerators if they are not fused."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process on its device."""

    parameters: int
    gradients: int
    optimizer: int
    """With the copies of trained parameters that some engines make."""
    activations: int
    """What the forward pass leaves for the backward pass."""
    buffers: int
    """Of the engine: gathered parameters, gradients on their way. The most of them at one time."""
    peak: int
    """The most at one time. Not the sum of the others, whose largest values do not coincide."""
    moment: str
    """When that is."""
    host: int = 0
    """Bytes in host memory."""


def optimizer_memory(make: OptimizerFactory, *, accelerator: bool) -> Optimizer:
    """What an optimizer needs, found by two updates of a small float32 matrix.

    Args:
        make: makes it from parameter groups.
        accelerator: whether it will run on one.
    """
    sample = torch.nn.Parameter(torch.zeros(64, 64))
    sample.grad = torch.zeros_like(sample)
    optimizer = make([{"params": [sample], "lr": 0.0, "weight_decay": 0.0}])
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    working = live.highest / sample.numel() if live.highest >= sample.nbytes else 0.0  # else it is a scalar or two
    state = [value for value in optimizer.state[sample].values() if isinstance(value, torch.Tensor) and value.ndim]
    asked = optimizer.defaults.get("foreach")
    fused = bool(optimizer.defaults.get("fused"))
    foreach = "foreach" in optimizer.defaults and not fused and (accelerator if asked is None else bool(asked))
    return Optimizer(sum(value.nbytes for value in state) / sample.numel(), working, foreach and working > 0)


def estimate_memory(timeline: Timeline, size: ModelSize, engine: Engine, optimizer: Optimizer) -> MemoryEstimate:
    """The most that a process holds in a step after the first, which makes the optimizer's state.

    Args:
        timeline: of one micro-batch on the process.
        size: of the whole model.
        engine: the strategy.
        optimizer: of the run.
    """
    return _ENGINES[engine.strategy](timeline, size, engine, optimizer).estimate()


class _Engine:
    """`single`, and what the others share."""

    def __init__(self, timeline: Timeline, size: ModelSize, engine: Engine, optimizer: Optimizer) -> None:
        self.timeline, self.size, self.engine, self.optimizer = timeline, size, engine, optimizer
        self.whole = size.whole
        self.trained = MASTER * self.whole.trained
        """Bytes of trained parameters, and of their gradients."""
        self.part = -(-self.whole.trained // engine.shard)
        """Elements that this process updates."""

    @property
    def parameters(self) -> int:
        """Bytes that are always there."""
        streamed = self.size.hosted - self.size.two_blocks if self.engine.host_parameters else 0
        return self.whole.bytes - streamed

    @property
    def gradients(self) -> int:
        """Bytes of complete gradients."""
        return self.trained

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state, and copies of what it updates."""
        return round(self.optimizer.state * self.part)

    @property
    def always(self) -> int:
        """Bytes of buffers that are always there."""
        return 0

    def update(self) -> int:
        """Bytes that an update needs for itself."""
        return self._working(self.part, min(self.whole.largest, self.part))

    def _working(self, all_elements: int, largest: int) -> int:
        """Bytes of what an optimizer computes on its way; torch's make one tensor of all, or some for each parameter."""
        return MASTER * all_elements if self.optimizer.foreach else round(self.optimizer.working * largest)

    def passes(self) -> Iterator[tuple[str, int, int]]:
        """For each moment of the passes: its name, bytes of gradients and buffers, and of those the buffers'."""
        again = self.engine.accumulation > 1
        made = self.trained if again else 0
        for segment, live in self.timeline.walk():
            more = segment.peak if again else segment.joint_peak
            yield _name(segment), live + more + made, 0
            made += 0 if again else segment.gradients

    def estimate(self) -> MemoryEstimate:
        """The sum at each moment, and the most of it."""
        base = self.parameters + self.state + self.always
        moments = [(base + more, name) for name, more, _ in self.passes()]
        moments.append((base + self.gradients + self.update(), "update"))
        peak, moment = max(moments, key=lambda one: one[0])
        return MemoryEstimate(
            parameters=self.parameters,
            gradients=self.gradients,
            optimizer=self.state,
            activations=self.timeline.kept,
            buffers=self.always + max(buffers for *_, buffers in self.passes()),
            peak=peak,
            moment=moment,
            host=self.timeline.offloaded + self.host,
        )

    @property
    def host(self) -> int:
        """Bytes of what the strategy keeps in host memory."""
        return self.size.hosted if self.engine.host_parameters else 0


def _name(segment: Segment) -> str:
    direction = "backward" if segment.backward else "forward"
    return f"{direction} pass" if segment.block is None else f"{direction} pass of block {segment.block}"


class _DataParallel(_Engine):
    """Gradients lie in buckets that are always there; those of several micro-batches are added up outside of them."""

    def passes(self) -> Iterator[tuple[str, int, int]]:
        outside = self.trained if self.engine.accumulation > 1 else 0
        for segment, live in self.timeline.walk():
            yield _name(segment), live + segment.peak + self.trained + outside, outside


class _Zero(_Engine):
    """ZeRO-1: the optimizer's state is divided, with a copy of what it updates. Gradients go through a bucket."""

    @property
    def _divided(self) -> int:
        return round((self.optimizer.state + MASTER) * self.part)

    @property
    def state(self) -> int:
        return 0 if self.engine.offload_optimizer else self._divided

    @property
    def host(self) -> int:
        # The state, the gradient that it is updated with, and a copy of the parameters on their way back.
        return self._divided + 2 * MASTER * self.part if self.engine.offload_optimizer else 0

    @property
    def bucket(self) -> int:
        """Bytes of the buckets in which gradients are joined; they are as large for few gradients."""
        elements = int(self.engine.zero.get("reduce_bucket_size", _REDUCE_BUCKET))
        return MASTER * elements * (2 if self.engine.zero.get("overlap_comm") else 1)

    @property
    def divided_gradients(self) -> int:
        """Bytes of the gradients that this process updates with."""
        return 0 if self.engine.offload_optimizer else MASTER * self.part

    def update(self) -> int:
        """The gradients once more as one tensor, and what the optimizer computes."""
        if self.engine.offload_optimizer:
            return 0
        return MASTER * self.part + self._working(self.part, self.part) - self.gradients + self.divided_gradients

    def passes(self) -> Iterator[tuple[str, int, int]]:
        for name, more, _ in super().passes():
            bucket = self.bucket if name.startswith("backward") else 0
            yield name, more + bucket, bucket


class _Zero2(_Zero):
    """Gradients are divided as well."""

    @property
    def gradients(self) -> int:
        return self.divided_gradients

    def passes(self) -> Iterator[tuple[str, int, int]]:
        for segment, live in self.timeline.walk():
            bucket = self.bucket if segment.backward else 0
            yield _name(segment), live + segment.peak + self.gradients + bucket, bucket


class _Zero3(_Zero2):
    """Parameters are divided as well, and gathered some time before they are used."""

    @property
    def parameters(self) -> int:
        return 0 if self.engine.offload_parameters else self.divided_parameters

    @property
    def divided_parameters(self) -> int:
        """Bytes of this process's part."""
        return -(-self.whole.bytes // self.engine.shard)

    @property
    def host(self) -> int:
        return super().host + (self.divided_parameters if self.engine.offload_parameters else 0)

    @property
    def bucket(self) -> int:
        return MASTER * int(self.engine.zero.get("reduce_bucket_size", _REDUCE_BUCKET))

    @property
    def always(self) -> int:
        return self.bucket

    def passes(self) -> Iterator[tuple[str, int, int]]:
        zero, whole = self.engine.zero, self.whole
        ahead = float(zero.get("stage3_prefetch_bucket_size", _PREFETCH))
        element = whole.bytes / whole.elements
        held = min(whole.elements, zero3_kept(zero))
        for segment, live in self.timeline.walk():
            # A copy of what comes next, in one buffer; if everything stays, nothing comes next in the backward pass.
            all_here = segment.backward and held == whole.elements
            coming = 0.0 if all_here else min(whole.bytes - whole.small, element * ahead)
            gathered = round(element * held + coming)
            yield _name(segment), live + segment.peak + self.gradients + gathered, gathered


class _FullySharded(_Engine):
    """FSDP2: everything is divided. A block is gathered while it runs, in the backward pass also the one before it."""

    @property
    def _kept(self) -> bool:
        return not self.engine.offload_parameters

    @property
    def parameters(self) -> int:
        return self._part_bytes if self._kept else 0

    @property
    def _part_bytes(self) -> int:
        return -(-self.whole.bytes // self.engine.shard)

    @property
    def state(self) -> int:
        return super().state if self._kept else 0

    @property
    def gradients(self) -> int:
        return MASTER * self.part if self._kept else 0

    @property
    def host(self) -> int:
        return 0 if self._kept else self._part_bytes + super().state + MASTER * self.part

    def update(self) -> int:
        return self._working(self.part, -(-self.whole.largest // self.engine.shard)) if self._kept else 0

    def _gathered(self, block: int | None) -> int:
        if block is None:
            return 0
        size, element = self.size.blocks[block], self.engine.gather_bytes
        return size.bytes if element is None else min(size.bytes, element * size.elements)

    def passes(self) -> Iterator[tuple[str, int, int]]:
        root = self.size.rest.bytes  # gathered from the beginning of the forward pass to the end of the backward pass
        several = self.engine.accumulation > 1
        # Gradients of several micro-batches are added up undivided, and divided at the last.
        made = self.trained if several else 0
        sending = 0  # the gradients of the block that ran before, until those of the next are sent
        for segment, live in self.timeline.walk():
            own = self._gathered(segment.block)
            if not segment.backward:
                # Where a block is gathered, it is there twice: in the buffer that was received, and in its parameters.
                buffers = root + own
                most = max(segment.peak, own)
            else:
                buffers = root + own + sending + (self._gathered(segment.block - 1) if segment.block else 0)
                inside = segment.peak if several else segment.joint_peak
                # At its end its gradients are copied into what is sent, and it is not gathered any more.
                most = max(inside, segment.change + 2 * segment.gradients - own)
            yield _name(segment), live + most + made + buffers, buffers + max(0, made - self.gradients)
            sending = segment.gradients if segment.backward else 0
            if segment.backward and self._kept:
                made += segment.gradients // self.engine.shard - (segment.gradients if several else 0)


def zero3_kept(zero: Mapping[str, Any]) -> float:
    """Elements that ZeRO-3 holds where the passes meet: those that are used again after so many others, in the backward
    pass, but no more than may be live."""
    reuse = float(zero.get("stage3_max_reuse_distance", _REUSE))
    return min(float(zero.get("stage3_max_live_parameters", _LIVE)), reuse / 2)


_REDUCE_BUCKET, _PREFETCH, _LIVE, _REUSE = 5e8, 5e7, 1e9, 1e9
"""Elements: DeepSpeed's defaults of the settings of these names."""
_ENGINES: Mapping[str, type[_Engine]] = {
    "single": _Engine,
    "ddp": _DataParallel,
    "zero1": _Zero,
    "zero2": _Zero2,
    "zero3": _Zero3,
    "fsdp2": _FullySharded,
}
