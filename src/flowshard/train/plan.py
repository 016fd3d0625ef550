"""The plan that is printed before the first step, and the refusal of a run that cannot fit."""

import torch

from flowshard.device import memory_total_bytes
from flowshard.errors import UserError
from flowshard.memory.compiled import CompileChoice
from flowshard.memory.estimate import MemoryEstimate
from flowshard.plan.candidates import candidates
from flowshard.plan.hardware import USABLE
from flowshard.plan.model import PlannedModel
from flowshard.train.build import Build
from flowshard.train.inputs import RunInputs
from flowshard.units import amount, count
from flowshard.weights.frozen import frozen_elements, frozen_layers


def describe_plan(
    inputs: RunInputs,
    build: Build,
    memory: MemoryEstimate,
    compiling: CompileChoice,
    *,
    latents: torch.Size,
    device: torch.device,
) -> str:
    """What the run is going to do and need, as lines of text.

    Args:
        inputs: the checked input.
        build: the transformer.
        memory: the estimate.
        compiling: whether blocks are compiled.
        latents: shape of the largest sample's latents without batch.
        device: where it runs.
    """
    config, train = inputs.config, inputs.config.train
    everything = sum(parameter.numel() for parameter in build.model.parameters()) + frozen_elements(build.model)
    trained = sum(parameter.numel() for parameter in build.model.parameters() if parameter.requires_grad)
    tokens = inputs.family.tokens(latents)
    layout = inputs.layout
    method = f"LoRA of rank {config.lora.rank} on {len(inputs.adapted)} layers" if inputs.adapted else "full training"
    if inputs.adapted and inputs.trained:
        method += f", {len(inputs.trained)} tensors in full"
    held = frozen_layers(build.model)
    types = config.model.dtype + (f" with {len(held)} frozen layers in {config.model.frozen_dtype}" if held else "")
    passes = inputs.steps * train.global_batch / inputs.samples
    rows = [
        (
            "model",
            f"{inputs.variant.name}{' (recognised)' if inputs.recognised else ''} from {inputs.source.label}, {types} on {device}",
        ),
        ("layout", f"{layout.text}: {layout.reason}"),
        ("method", method),
        ("parameters", f"{count(everything)}, trained {count(trained)} ({100 * trained / everything:.2f} %)"),
        (
            "data",
            f"{len(inputs.data.training.rows)} rows, {inputs.samples} samples an epoch"
            + ("" if inputs.data.held_out is None else f"; {len(inputs.data.held_out.rows)} rows held out"),
        ),
        ("sample", f"latents {tuple(latents)}, {tokens:,} tokens"),
        (
            "step",
            f"{train.global_batch} samples = {layout.accumulation} x {train.micro_batch} x {layout.data_parallel} {'processes' if layout.sequence == 1 else 'groups'}, "
            f"{train.global_batch * tokens:,} tokens",
        ),
        ("steps", f"{inputs.steps} ({passes:.2f} epochs)"),
        ("sigma", _noise_levels(inputs)),
        (
            "activations",
            ", ".join(f"{build.policies.count(policy)} x {policy}" for policy in dict.fromkeys(build.policies)),
        ),
        ("compile", f"{'blocks' if compiling.enabled else 'nothing'}: {compiling.reason}"),
        (
            "memory",
            f"{amount(memory.peak)} at most, in the {memory.moment}: parameters {amount(memory.parameters)}, gradients "
            f"{amount(memory.gradients)}, optimizer {amount(memory.optimizer)}, activations {amount(memory.activations)}, "
            f"buffers {amount(memory.buffers)}" + (f"; {amount(memory.host)} in host memory" if memory.host else ""),
        ),
    ]
    if inputs.guidance is not None:
        rows.insert(-3, ("guidance", f"{inputs.guidance:g}"))
    return "\n".join(f"{name:<11} {text}" for name, text in rows)


def _noise_levels(inputs: RunInputs) -> str:
    objective = inputs.config.objective
    if objective.preset is None:
        return f"{objective.sampling}, shift {inputs.shift:g}, weighting {objective.weighting}"
    low, high = objective.index_range
    return f"preset {objective.preset}, shift {inputs.shift:g}, places {low:g} to {high:g} of the grid, weighting bell"


def check_memory(
    inputs: RunInputs, model: PlannedModel, memory: MemoryEstimate, *, latents: torch.Size, device: torch.device
) -> None:
    """Refuse a run that the memory of its device cannot hold.

    Args:
        inputs: checked.
        model: of the run.
        memory: what a process needs at most.
        latents: shape of the largest sample's latents without batch.
        device: of this process; those of the others are taken to be alike. Processes on a CPU share its memory.

    Raises:
        UserError: with layouts of as many processes that fit.
    """
    layout = inputs.layout
    total = memory_total_bytes(device)
    on_cpu = device.type == "cpu"
    if memory.peak <= (total // layout.local_world if on_cpu else total):
        return
    usable = total // layout.local_world if on_cpu else int(USABLE * total)
    nodes = max(1, layout.world // layout.local_world)
    tokens, blocks = inputs.family.tokens(latents), len(model.size.blocks)
    found = list(candidates(inputs.config, devices=layout.world, nodes=nodes, tokens=tokens, blocks=blocks))
    model.expect((one.layout.ulysses, one.layout.ring) for one in found)
    choices = []
    for one in sorted(found, key=lambda one: one.complexity):
        options = one.config.layout
        if on_cpu and (options.offload_optimizer or options.offload_parameters or one.host_parameters):
            continue  # to the same memory
        if model.estimate(one.layout, config=one.config, policies=one.policies).peak <= usable:
            choices.append(" ".join(one.options))
        if len(choices) == _CHOICES:
            break
    fix = f"use {'; or '.join(choices)}" if choices else "take more devices, fewer frames or pixels, or LoRA"
    raise UserError(
        f"memory: this run needs {amount(memory.peak)} in the {memory.moment} on each of its devices, which have "
        f"{amount(total // layout.local_world if on_cpu else total)}; {fix}. `flowshard plan` shows all layouts"
    )


_CHOICES = 3
"""Layouts that a message names."""
