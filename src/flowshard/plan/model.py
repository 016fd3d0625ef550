"""A run's model, measured on fake tensors under any layout: nothing is computed, nothing of its size is allocated."""

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from flowshard.config import ActivationPolicy, Config
from flowshard.device import CopyStream
from flowshard.memory.activations import apply_activation_policies, block_policies
from flowshard.memory.estimate import Engine, MemoryEstimate, Optimizer, estimate_memory, optimizer_memory
from flowshard.memory.fakes import Tensors
from flowshard.memory.flops import CPU
from flowshard.memory.live import LiveBytes
from flowshard.memory.sizes import ModelSize, model_size
from flowshard.memory.timeline import MEASURED, Timeline, between, measure_timeline, whole_timeline
from flowshard.parallel.deepspeed_config import deepspeed_config
from flowshard.parallel.layout import Layout
from flowshard.parallel.plan import apply_sequence_plan
from flowshard.parallel.sequence import GroupShape
from flowshard.train.build import ModelInputs, loss_function, typed_model
from flowshard.train.optimizer import optimizer_factory


def engine_of(config: Config, layout: Layout) -> Engine:
    """What memory depends on of a layout's strategy."""
    zero = deepspeed_config(config, layout)["zero_optimization"] if layout.strategy.startswith("zero") else {}
    return Engine(
        strategy=layout.strategy,
        shard=layout.shard,
        accumulation=layout.accumulation,
        offload_optimizer=config.layout.offload_optimizer,
        offload_parameters=config.layout.offload_parameters,
        host_parameters=config.memory.parameters == "host",
        gather_bytes=2 if config.layout.gather_dtype == "bfloat16" else None,
        zero=zero,
    )


class PlannedModel:
    """Measures a model once for each degree of sequence parallelism and activation policy."""

    def __init__(self, inputs: ModelInputs, whole: torch.nn.Module, tensors: Tensors, *, accelerator: bool) -> None:
        """Prepare.

        Args:
            inputs: checked.
            whole: the whole model on the meta device in its final types.
            tensors: of one micro-batch, `MicroBatch.tensors`.
            accelerator: whether it will run on one, and not on the CPU.
        """
        self._inputs, self._tensors, self._accelerator = inputs, tensors, accelerator
        family = inputs.family
        self.size: ModelSize = model_size(whole, family.blocks(whole))
        self.optimizer: Optimizer = optimizer_memory(optimizer_factory(inputs.config), accelerator=accelerator)
        self._lengths = [len(getattr(whole, name)) for name in family.block_lists]
        self._few = MEASURED if inputs.config.model.extend is None and self._alike(whole) else max(self._lengths)
        self._models: dict[tuple[int, int], Any] = {}
        self._timelines: dict[tuple[tuple[int, int], ActivationPolicy], Timeline] = {}
        self._ends: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]] = {}
        """Degrees to those between which they lie."""

    def policies(self) -> list[ActivationPolicy]:
        """Those of the config, for each block."""
        return block_policies(self._inputs.config.memory, sum(self._lengths))

    def expect(self, degrees: Iterable[tuple[int, int]]) -> None:
        """Say which degrees, of ulysses and ring, there will be: those between others are not measured by themselves."""
        kinds: dict[bool, set[tuple[int, int]]] = {}
        for ulysses, ring in degrees:
            if ulysses * ring > 1:
                kinds.setdefault(ring > 1, set()).add((ulysses, ring))
        for found in kinds.values():
            first, *middle, last = sorted(found, key=math.prod) if len(found) > 1 else (*found, *found)
            self._ends.update(dict.fromkeys(middle, (first, last)))

    def timeline(self, *, ulysses: int, ring: int, policies: Sequence[ActivationPolicy]) -> Timeline:
        """That of the first process of a group, which has the most tokens.

        Args:
            ulysses: see `Layout`.
            ring: see `Layout`.
            policies: of each block, in the order of execution.
        """
        measured = {policy: self._few_blocks((ulysses, ring), policy) for policy in dict.fromkeys(policies)}
        kinds = [(min(self._few, length), length) for length in self._lengths]
        return whole_timeline(measured, kinds, policies)

    def _few_blocks(self, degrees: tuple[int, int], policy: ActivationPolicy) -> Timeline:
        known = self._timelines.get((degrees, policy))
        if known is None:
            if degrees in self._ends:
                ends = self._ends[degrees]
                tokens = [1 / math.prod(one) for one in (*ends, degrees)]
                share = (tokens[2] - tokens[0]) / (tokens[1] - tokens[0])
                first, last = (self._few_blocks(end, policy) for end in ends)
                known = between(first, last, share)
            else:
                known = self._measure(degrees, policy)
            self._timelines[degrees, policy] = known
        return known

    def estimate(
        self, layout: Layout, *, config: Config | None = None, policies: Sequence[ActivationPolicy] | None = None
    ) -> MemoryEstimate:
        """The memory of a process under a layout.

        Args:
            layout: how the run is spread.
            config: that it is of; the run's if None.
            policies: of each block; the run's if None.
        """
        timeline = self.timeline(ulysses=layout.ulysses, ring=layout.ring, policies=policies or self.policies())
        engine = engine_of(config or self._inputs.config, layout)
        return estimate_memory(timeline, self.size, engine, self.optimizer)

    def _measure(self, degrees: tuple[int, int], policy: ActivationPolicy) -> Timeline:
        family = self._inputs.family
        if degrees not in self._models:
            model, _ = typed_model(self._inputs, self._few)
            ulysses, ring = degrees
            if ulysses * ring > 1:
                apply_sequence_plan(model, family.sequence_plan, GroupShape(ulysses=ulysses, ring=ring, rank=0))
            self._models[degrees] = model.train()
        model = self._models[degrees]
        blocks = family.blocks(model)
        live = LiveBytes()
        model.disable_gradient_checkpointing()
        apply_activation_policies(
            model,
            blocks,
            [policy] * len(blocks),
            partitioned=False,
            host_memory=live.elsewhere if self._accelerator else nullcontext,
            overlap=CopyStream(CPU) if self._inputs.config.memory.offload_overlap else None,
        )
        loss = loss_function(family, dtype=getattr(torch, self._inputs.config.model.dtype), device=CPU)
        return measure_timeline(model, blocks, loss, self._tensors, live, remembering=family.remembering)

    def _alike(self, whole: torch.nn.Module) -> bool:
        """Whether the same is trained in all blocks of each kind."""
        kinds: dict[tuple[str, str], set[str]] = {}
        lists = "|".join(map(re.escape, self._inputs.family.block_lists))
        block = re.compile(rf"({lists})\.(\d+)\.(.*)")
        for name, parameter in whole.named_parameters():
            found = block.fullmatch(name)
            if found is not None and parameter.requires_grad:
                kinds.setdefault((found[1], found[2]), set()).add(found[3])
        by_list: dict[str, list[set[str]]] = {}
        for (of_list, _), names in kinds.items():
            by_list.setdefault(of_list, []).append(names)
        lengths = dict(zip(self._inputs.family.block_lists, self._lengths, strict=True))
        return all(len(found) == lengths[of_list] and _few_kinds(found) for of_list, found in by_list.items())


def _few_kinds(blocks: Sequence[set[str]]) -> bool:
    """Whether all blocks between the first and the last are alike."""
    return all(names == blocks[1] for names in blocks[1:-1])
