"""`memory.activations: auto`: what each block keeps, found before the first step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from flowshard.config import ActivationPolicy, parse_budget
from flowshard.device import free_memory_bytes, memory_total_bytes, sum_dtype
from flowshard.errors import UserError
from flowshard.memory.blocks import POLICIES, Calls, costs_of, find_calls, kinds, measure_block
from flowshard.memory.choose import (
    Cost,
    fastest_fitting,
    least_alive,
    most_alive,
    total_nanoseconds,
)
from flowshard.memory.compiled import CompileChoice
from flowshard.memory.estimate import MemoryEstimate
from flowshard.parallel.processes import Processes
from flowshard.plan.model import PlannedModel
from flowshard.train.batches import MicroBatch
from flowshard.train.build import LossFunction
from flowshard.train.checkpoint import Checkpoint
from flowshard.train.inputs import RunInputs
from flowshard.units import amount

_SHARE_OF_FREE = 0.9
"""For what is not seen here: what kernels need for themselves, and memory that torch cannot use because of gaps."""
_OF_A_PROCESS = ("rank", "local_rank", "reason", "deepspeed_file")
"""What of a layout says nothing of memory."""


@dataclass(frozen=True)
class Measured:
    """What a choice is made from."""

    costs: list[dict[ActivationPolicy, Cost]]
    """Of every block, in the order of execution."""
    order: list[int]
    """Which of the model's blocks each of them is."""
    kinds: list[list[int]]
    """Places, in the order of execution, of the blocks that are alike."""
    names: list[str]
    """Class of the blocks of each kind."""
    fixed: int
    """Bytes that a process needs besides: parameters, gradients, optimizer, buffers of the strategy, and activations before
    the first block."""
    tail: int
    """See `most_alive`."""


class ActivationPlanner:
    """Chooses policies and says why."""

    def __init__(
        self,
        inputs: RunInputs,
        largest: MicroBatch,
        loss: LossFunction,
        processes: Processes,
        compiling: CompileChoice,
    ) -> None:
        """Prepare.

        Args:
            inputs: of the run.
            largest: the micro-batch that is planned for.
            loss: maps model and tensors of a micro-batch to the loss.
            processes: of which the main one decides.
            compiling: whether the run's blocks will be compiled.
        """
        self._inputs, self._largest, self._loss = inputs, largest, loss
        self._processes, self._compiling = processes, compiling
        self._planned_for: dict[str, Any] = {}
        self._policies: list[ActivationPolicy] = []
        self._planned: PlannedModel | None = None

    def planned(self, model: torch.nn.Module) -> PlannedModel:
        """The run's whole model on the meta device, measured on fake tensors: what is measured once is known from then on."""
        if self._planned is None:
            on_accelerator = self._processes.device.type != "cpu"
            self._planned = PlannedModel(self._inputs, model, self._largest.tensors(), accelerator=on_accelerator)
        return self._planned

    @property
    def state(self) -> dict[str, Any] | None:
        """For checkpoints: the choice, and what it was made for; None if nothing was chosen."""
        return {"for": self._planned_for, "policies": self._policies} if self._policies else None

    @property
    def record(self) -> dict[str, Any]:
        """For `config.yaml`."""
        return {"activations": describe_order(self._policies)} if self._policies else {}

    def choose(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> list[ActivationPolicy]:
        """The policy of each block. Collective.

        Args:
            model: on the meta device, in its final types, its tokens divided if they are; without activation policies.
            blocks: in the order of execution.

        Raises:
            UserError: nothing fits in `memory.budget`.
        """
        self._planned_for = self._situation(len(blocks))
        earlier = _earlier(self._inputs.checkpoint)
        again = earlier["policies"] if earlier is not None and earlier["for"] == self._planned_for else []
        reused: list[ActivationPolicy] = self._processes.share(again)  # others may run on another kind of device
        if reused:
            self._policies = reused
            self._processes.say(f"{'activations':<11} as planned before: {describe_order(reused)}")
            return reused
        try:
            measured = self.measure(model, blocks)
        except torch.OutOfMemoryError:
            raise UserError(
                "memory.activations: one block alone does not fit on the device with a micro-batch of the largest samples; "
                "lower train.micro_batch or the size of the samples, or raise layout.sequence"
            ) from None
        budget = self._budget()
        choice = self._processes.on_main(lambda: decide(measured, budget, self._processes.say))
        self._policies = [policy for _, policy in sorted(zip(measured.order, choice, strict=True))]
        return self._policies

    def _situation(self, blocks: int) -> dict[str, Any]:
        """What a choice is made for, as JSON gives it back."""
        config, device = self._inputs.config, self._processes.device
        layout = {key: value for key, value in asdict(self._inputs.layout).items() if key not in _OF_A_PROCESS}
        name = "cpu" if device.type == "cpu" else str(getattr(torch, device.type).get_device_name(device))
        return {
            "layout": layout,
            "engine": config.layout.model_dump(mode="json", include={"offload_optimizer", "offload_parameters"}),
            "memory": config.memory.model_dump(mode="json"),
            "micro_batch": config.train.micro_batch,
            "shapes": {key: list(tensor.shape) for key, tensor in sorted(self._largest.tensors().items())},
            "blocks": blocks,
            "device": name,
        }

    def measure(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> Measured:
        """On all processes, as those that share a sample need each other."""
        inputs, device = self._inputs, self._processes.device
        tensors, remembering = self._largest.tensors(), inputs.family.remembering
        calls = find_calls(model, blocks, self._loss, tensors, device, remembering=remembering)
        partitioned = inputs.layout.strategy == "zero3"
        found = kinds(calls.blocks)
        measured: dict[int, Mapping[ActivationPolicy, Cost]] = {}
        for places in found:
            # One between others, as the first may get what needs no gradient yet.
            call = calls.blocks[places[len(places) // 2]]
            costs = measure_block(
                call,
                device,
                autocast=calls.autocast,
                partitioned=partitioned,
                compiling=self._compiling,
                agree=self._processes.share,
            )
            measured.update(dict.fromkeys(places, costs))
        keep: list[ActivationPolicy] = ["keep"] * len(blocks)  # any policy: what counts here is the same with all
        memory = self._processes.on_main(lambda: self.planned(model).estimate(inputs.layout, policies=keep))
        places_of = {id(block): place for place, block in enumerate(blocks)}
        return Measured(
            costs=costs_of(calls, measured),
            order=[places_of[id(call.block)] for call in calls.blocks],
            kinds=found,
            names=[type(calls.blocks[places[0]].block).__name__ for places in found],
            fixed=fixed_bytes(memory, calls),
            tail=calls.tail,
        )

    def _budget(self) -> int:
        """Bytes that every process may use: the least of any of them. Collective."""
        asked, device, layout = self._inputs.config.memory.budget, self._processes.device, self._inputs.layout
        sharing = layout.local_world if device.type == "cpu" else 1
        if asked is None:
            own = _SHARE_OF_FREE * free_memory_bytes(device) / sharing
        else:
            most = parse_budget(asked)
            own = most if isinstance(most, int) else most * memory_total_bytes(device) / sharing
        budgets = torch.zeros(layout.world, dtype=sum_dtype(device), device=device)
        budgets[layout.rank] = own
        return int(self._processes.sum(budgets).min())


def _earlier(checkpoint: Checkpoint | None) -> Mapping[str, Any] | None:
    """The choice of the run that goes on."""
    if checkpoint is None or checkpoint.weights_only:
        return None
    choice: Mapping[str, Any] | None = checkpoint.state.get("activations")
    return choice


def fixed_bytes(memory: MemoryEstimate, calls: Calls) -> int:
    """What a process needs whatever its blocks keep.

    Args:
        memory: of the process.
        calls: of the blocks.
    """
    return memory.parameters + memory.gradients + memory.optimizer + memory.buffers + calls.begin


def decide(measured: Measured, budget: int, say: Callable[[str], None]) -> list[ActivationPolicy]:
    """Choose, and say what was chosen and why.

    Args:
        measured: of the run.
        budget: bytes of a process.
        say: prints a line.

    Raises:
        UserError: nothing fits.
    """
    costs, tail = measured.costs, measured.tail
    for places, name in zip(measured.kinds, measured.names, strict=True):
        one = ", ".join(
            f"{policy} {1000 * cost.seconds:.3g} ms {amount(cost.kept)}"
            for policy, cost in costs[places[len(places) // 2]].items()
        )
        say(f"{'measured':<11} {len(places)} x {name}: {one}")
    choice = fastest_fitting(costs, budget - measured.fixed, tail=tail)
    if choice is None:
        least = least_alive(costs, tail=tail)
        needs = measured.fixed + most_alive(costs, least, tail=tail)
        raise UserError(
            f"memory.budget: {amount(budget)} a process is too little; the least that this layout needs is "
            f"{amount(needs)}, with {describe_order(least)} ({amount(measured.fixed)} of it for what "
            "activation policies do not change). Raise the budget, lower train.micro_batch or the size of the samples, or "
            "divide more by layout.strategy or layout.sequence"
        )
    uniform = []
    for policy in POLICIES:
        everywhere: list[ActivationPolicy] = [policy] * len(costs)
        needs = measured.fixed + most_alive(costs, everywhere, tail=tail)
        fits = "" if needs <= budget else ", does not fit"
        uniform.append(f"{policy} {total_nanoseconds(costs, everywhere) / 1e9:.3g} s {amount(needs)}{fits}")
    say(f"{'all blocks':<11} {'; '.join(uniform)}")
    needs = measured.fixed + most_alive(costs, choice, tail=tail)
    say(
        f"{'chosen':<11} {describe_order(choice)}: {total_nanoseconds(costs, choice) / 1e9:.3g} s of each micro-batch, "
        f"{amount(needs)} of {amount(budget)}"
    )
    return choice


def describe_order(policies: Sequence[ActivationPolicy]) -> str:
    """Policies in the order of the blocks, as in `12 x recompute, 18 x keep`."""
    return ", ".join(f"{len(list(run))} x {policy}" for policy, run in groupby(policies))
