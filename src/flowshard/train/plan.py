"""The plan that is printed before the first step."""

import torch

from flowshard.memory.estimate import MemoryEstimate
from flowshard.train.build import Build
from flowshard.train.inputs import RunInputs


def describe_plan(
    inputs: RunInputs,
    build: Build,
    memory: MemoryEstimate,
    *,
    latents: torch.Size,
    device: torch.device,
) -> str:
    """What the run is going to do and need, as lines of text.

    Args:
        inputs: the checked input.
        build: the transformer.
        memory: the estimate.
        latents: shape of the largest sample's latents without batch.
        device: where it runs.
    """
    config, train = inputs.config, inputs.config.train
    everything = sum(parameter.numel() for parameter in build.model.parameters())
    trained = sum(parameter.numel() for parameter in build.model.parameters() if parameter.requires_grad)
    tokens = inputs.family.tokens(latents)
    layout = inputs.layout
    memory = memory.divided(layout)
    method = f"LoRA of rank {config.lora.rank} on {len(inputs.adapted)} layers" if inputs.adapted else "full training"
    if inputs.adapted and inputs.trained:
        method += f", {len(inputs.trained)} tensors in full"
    passes = inputs.steps * train.global_batch / inputs.samples
    rows = [
        (
            "model",
            f"{inputs.variant.name}{' (recognised)' if inputs.recognised else ''} from {inputs.source.label}, {config.model.dtype} on {device}",
        ),
        ("layout", f"{layout.text}: {layout.reason}"),
        ("method", method),
        ("parameters", f"{_count(everything)}, trained {_count(trained)} ({100 * trained / everything:.2f} %)"),
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
        ("sigma", f"{config.objective.sampling}, shift {inputs.shift:g}, weighting {config.objective.weighting}"),
        (
            "activations",
            ", ".join(f"{build.policies.count(policy)} x {policy}" for policy in dict.fromkeys(build.policies)),
        ),
        (
            "memory",
            f"{readable_bytes(memory.total)} = parameters {readable_bytes(memory.parameters)} + gradients {readable_bytes(memory.gradients)} + "
            f"optimizer {readable_bytes(memory.optimizer)} + activations {readable_bytes(memory.activations)}",
        ),
    ]
    if inputs.guidance is not None:
        rows.insert(-2, ("guidance", f"{inputs.guidance:g}"))
    return "\n".join(f"{name:<11} {text}" for name, text in rows)


def _count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return str(number)


def readable_bytes(number: int) -> str:
    """As in `1.50 GiB`."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number} B"
