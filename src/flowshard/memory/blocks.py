"""What a block costs under each activation policy, measured on the device before the model has weights.

The model is run once on fake tensors to see what its blocks get. Then one block of each kind runs with random weights, as
nothing else of the model exists yet.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from flowshard.config import ActivationPolicy
from flowshard.device import synchronize
from flowshard.memory.activations import PolicyCaller
from flowshard.memory.choose import Cost
from flowshard.memory.compiled import CompileChoice, compiled_alone
from flowshard.memory.fakes import Forward, Tensors, fake_call, forgetting
from flowshard.memory.live import LiveBytes
from flowshard.memory.storages import storage_id

POLICIES: tuple[ActivationPolicy, ...] = ("keep", "selective", "offload", "recompute")
_SECONDS, _LEAST, _MOST = 1.5, 3, 15
"""How long a kind of block is timed, and how often each policy at least and at most."""


@dataclass
class BlockCall:
    """How the model calls one of its blocks."""

    block: torch.nn.Module
    inputs: tuple[Any, ...]
    """Fake tensors, and what is no tensor."""
    before: int
    """Bytes that are allocated between the block before it and this one, and stay."""
    shared: frozenset[int] = frozenset()
    """Storages of the inputs that a block next to it gets as well."""


@dataclass
class Calls:
    """How the model calls its blocks."""

    blocks: list[BlockCall] = field(default_factory=list)
    """In the order of execution."""
    begin: int = 0
    """Bytes that are alive before the first block."""
    tail: int = 0
    """The most bytes that follow the last block and its loss, above those after it."""
    autocast: torch.dtype | None = None
    """The type to which the blocks compute."""


def find_calls(
    model: Any,
    blocks: Sequence[torch.nn.Module],
    forward: Forward,
    inputs: Tensors,
    device: torch.device,
    *,
    remembering: Sequence[str] = (),
) -> Calls:
    """See what blocks get, without computing anything.

    Args:
        model: on the meta device, in its final types; its tokens may be divided. It must not have activation policies.
        blocks: in the order of execution.
        forward: maps model and inputs to the loss on `device`.
        inputs: of one micro-batch.
        device: where it will run.
        remembering: see `forgetting`.
    """
    calls = Calls()
    live = _DeviceBytes(device)
    last = 0

    def note(block: torch.nn.Module, *args: Any) -> Any:
        nonlocal last
        if calls.blocks:
            before = live.now - last
        else:
            before, calls.begin = 0, live.now
            if torch.is_autocast_enabled(device.type):
                calls.autocast = torch.get_autocast_dtype(device.type)
        calls.blocks.append(BlockCall(block, args, before))
        # Cut off, so that nothing that the block keeps stays. A copy, as the model may change it in place.
        output = tree_map_only(torch.Tensor, lambda one: _cut(one).clone(), block(*args))
        live.highest = last = live.now
        return output

    def both(model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        loss = forward(model, tensors)
        loss.backward()
        return loss.detach()

    model.enable_gradient_checkpointing(note)
    model.train()
    try:
        with forgetting(model, remembering):
            mode, call, fakes = fake_call(model, both, inputs, device)
            for tensor in fakes.values():
                live.leave_out(tensor)
            with mode, live:
                call()
    finally:
        model.disable_gradient_checkpointing()
    calls.tail = live.highest - last
    if device.type == "cpu":
        calls.begin += sum(tensor.nbytes for tensor in inputs.values())
    _mark_shared(calls.blocks)
    assert len(calls.blocks) == len(blocks)  # noqa: S101
    return calls


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _mark_shared(calls: Sequence[BlockCall]) -> None:
    stored = [{storage_id(value) for value in _tensors(call.inputs)} for call in calls]
    for index, call in enumerate(calls):
        beside = [stored[other] for other in (index - 1, index + 1) if 0 <= other < len(calls)]
        call.shared = frozenset(stored[index].intersection(set().union(*beside)))


def kinds(calls: Sequence[BlockCall]) -> list[list[int]]:
    """Places of the blocks that are alike, by kind, in the order of execution."""
    found: dict[Any, list[int]] = {}
    for index, call in enumerate(calls):
        tensors = [*call.block.named_parameters(), *call.block.named_buffers()]
        own = tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
        given = tuple((value.shape, value.dtype) for value in _tensors(call.inputs))
        found.setdefault((type(call.block), own, given), []).append(index)
    return list(found.values())


def measure_block(
    call: BlockCall,
    device: torch.device,
    *,
    autocast: torch.dtype | None,
    partitioned: bool,
    compiling: CompileChoice,
    agree: Callable[[int], int],
) -> dict[ActivationPolicy, Cost]:
    """Run a block with random weights and inputs under each policy.

    If attention is divided among processes, all of them have to do so at the same time.

    Args:
        call: of the block, which stays as it is.
        device: where it will run.
        autocast: the type to which it computes, or None.
        partitioned: see `apply_activation_policies`.
        compiling: whether it is compiled code that is timed. Bytes are those of the block as it is, which are not less.
        agree: gives all processes the number of repetitions that the main one has found.
    """
    generator = torch.Generator(device)
    generator.manual_seed(0)
    tensors = {
        f"block.{name}": _random(tensor, device, generator, scale=0.02).requires_grad_(tensor.requires_grad)
        for name, tensor in [*call.block.named_parameters(), *call.block.named_buffers()]
    }
    for tensor in tensors.values():
        if tensor.requires_grad:
            tensor.grad = torch.zeros_like(tensor)
    given = [
        _random(value, value.device, generator, scale=1.0).requires_grad_(value.requires_grad)
        for value in _tensors(call.inputs)
    ]
    trial = _Trial(call, given, device, autocast=autocast, partitioned=partitioned)

    def run(policy: ActivationPolicy, live: LiveBytes | None = None) -> Cost:
        cost: Cost = torch.func.functional_call(_Inside(call.block), tensors, (trial, policy, live))
        for one in given:
            one.grad = None
        return cost

    first: dict[ActivationPolicy, Cost] = {}
    for policy in POLICIES:
        live = _DeviceBytes(device)
        for one in [*tensors.values(), *(tensor.grad for tensor in tensors.values()), *given]:
            if one is not None:
                live.leave_out(one)
        first[policy] = run(policy, live)
    with trial.compiled(compiling):
        if compiling.enabled:
            for policy in POLICIES:
                run(policy)  # compiles
        once = sum(run(policy).seconds for policy in POLICIES)
        repeats = agree(min(_MOST, max(_LEAST, int(_SECONDS / once))))
        # They take turns, so that a change of the machine's speed meets all; the least is what other work disturbs least.
        times = [{policy: run(policy).seconds for policy in POLICIES} for _ in range(repeats)]
    seconds = without_noise({policy: min(one[policy] for one in times) for policy in POLICIES})
    return {policy: Cost(seconds[policy], first[policy].kept, first[policy].peak) for policy in POLICIES}


def without_noise(seconds: Mapping[ActivationPolicy, float]) -> dict[ActivationPolicy, float]:
    """Times of a block, corrected where they contradict the work that was done.

    All policies do what `keep` does and something more, and `offload` does what `recompute` does and something more.
    """
    keep, again = min(seconds.values()), min(seconds["recompute"], seconds["offload"])
    more = 1e-9
    return {
        "keep": keep,
        "selective": max(seconds["selective"], keep + more),
        "offload": max(seconds["offload"], again + more, keep + 2 * more),
        "recompute": max(again, keep + more),
    }


class _Inside(torch.nn.Module):
    """Runs a trial while the block has other parameters, in the backward pass too."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, trial: "_Trial", policy: ActivationPolicy, live: LiveBytes | None) -> Cost:
        return trial.run(self.block, policy, live)


class _Trial:
    """Forward and backward pass of one block."""

    def __init__(
        self,
        call: BlockCall,
        given: Sequence[torch.Tensor],
        device: torch.device,
        *,
        autocast: torch.dtype | None,
        partitioned: bool,
    ) -> None:
        self._block, self._inputs, self._given, self._device = call.block, call.inputs, given, device
        self._own = [storage_id(value) not in call.shared for value in _tensors(call.inputs)]
        self._autocast, self._partitioned = autocast, partitioned
        self._use: Callable[[ActivationPolicy], None] | None = None

    @contextmanager
    def compiled(self, compiling: CompileChoice) -> Iterator[None]:
        """While active, compiled code runs, if it is to be."""
        if not compiling.enabled:
            yield
            return
        name = f"measured_{type(self._block).__name__}_{id(self)}"
        with compiled_alone(self._block, name, fall_back=compiling.fall_back) as use:
            self._use = use
            yield
        self._use = None

    def _arguments(self) -> tuple[Any, ...]:
        """As the block before it would give them: what it made is new, and belongs to nobody else."""
        values: Iterator[torch.Tensor] = iter(
            [one.clone() if own else one for one, own in zip(self._given, self._own, strict=True)]
        )
        arguments: tuple[Any, ...] = tree_map_only(torch.Tensor, lambda _: next(values), self._inputs)
        return arguments

    def run(self, block: torch.nn.Module, policy: ActivationPolicy, live: LiveBytes | None) -> Cost:
        """Once; `live` counts, which takes time."""
        caller = PolicyCaller(lambda _: policy, partitioned=self._partitioned, compiled=self._use is not None)
        if self._use is not None:
            self._use(policy)
        # Offloading leaves alone what an earlier block had as well.
        caller.offload.of([one for one, own in zip(self._given, self._own, strict=True) if not own])
        mixed = nullcontext() if self._autocast is None else torch.autocast(self._device.type, dtype=self._autocast)
        with live or nullcontext():
            arguments = self._arguments()
            before = 0
            if live is not None:
                before = live.highest = live.now
            synchronize(self._device)
            start = time.perf_counter()
            with mixed:
                outputs = caller(block, *arguments)
                del arguments
                # Copies of weights in the type of autocast stay until the forward pass of the whole model is done.
                kept = live.now - before if live is not None else 0
            ends = [value for value in _tensors(outputs) if value.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            synchronize(self._device)
            seconds = time.perf_counter() - start
        return Cost(seconds, max(kept, 0), live.highest - before if live is not None else 0)


class _DeviceBytes(LiveBytes):
    """Leaves out what is in the memory of another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == self._device.type:
            super().add(tensor)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in tree_iter(tree) if isinstance(value, torch.Tensor)]


def _random(like: torch.Tensor, device: torch.device, generator: torch.Generator, *, scale: float) -> torch.Tensor:
    """A tensor of that shape and type: small numbers, angles as complex numbers, or a mask of ones."""
    if device.type != generator.device.type:
        generator = torch.Generator(device).manual_seed(0)
    if like.is_complex():
        angles = torch.rand(like.shape, generator=generator, device=device, dtype=like.real.dtype)
        return torch.polar(torch.ones_like(angles), angles)
    if like.is_floating_point():
        return torch.randn(like.shape, generator=generator, device=device).mul_(scale).to(like.dtype)
    return torch.ones(like.shape, dtype=like.dtype, device=device)


def costs_of(
    calls: Calls, measured: Mapping[int, Mapping[ActivationPolicy, Cost]]
) -> list[dict[ActivationPolicy, Cost]]:
    """The costs of every block, in the order of execution, with what is allocated right before it.

    Args:
        calls: of all blocks.
        measured: costs by the place of each block.
    """
    return [
        {
            policy: Cost(cost.seconds, max(cost.kept + call.before, 0), max(cost.peak + call.before, 0))
            for policy, cost in measured[index].items()
        }
        for index, call in enumerate(calls.blocks)
    ]
