"""The plan that is printed before the first step."""

import torch

from flowshard.memory.estimate import MemoryEstimate
from flowshard.train.inputs import RunInputs
from flowshard.weights.load import LoadReport


def describe_plan(
    inputs: RunInputs,
    model: torch.nn.Module,
    report: LoadReport,
    memory: MemoryEstimate,
    *,
    latents: torch.Size,
    device: torch.device,
) -> str:
    """What the run is going to do and need, as lines of text.

    Args:
        inputs: the checked input.
        model: the transformer with its weights.
        report: how they were loaded.
        memory: the estimate.
        latents: shape of the largest sample's latents without batch.
        device: where it runs.
    """
    config, train = inputs.config, inputs.config.train
    everything = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    tokens = inputs.family.tokens(latents)
    accumulation = train.global_batch // train.micro_batch
    method = f"LoRA of rank {config.lora.rank} on {len(inputs.adapted)} layers" if inputs.adapted else "full training"
    if inputs.adapted and inputs.trained:
        method += f", {len(inputs.trained)} tensors in full"
    passes = inputs.steps * train.global_batch / inputs.samples
    rows = [
        ("model", f"{inputs.variant.name} from {inputs.folder}, {config.model.dtype} on {device}"),
        ("method", method),
        ("parameters", f"{_count(everything)}, trained {_count(trained)} ({100 * trained / everything:.2f} %)"),
        ("weights", f"{len(report.loaded)} tensors loaded, {len(report.new)} new"),
        ("data", f"{len(inputs.metadata.rows)} rows, {inputs.samples} samples an epoch"),
        ("sample", f"latents {tuple(latents)}, {tokens:,} tokens"),
        (
            "step",
            f"{train.global_batch} samples = {accumulation} x {train.micro_batch}, {train.global_batch * tokens:,} tokens",
        ),
        ("steps", f"{inputs.steps} ({passes:.2f} epochs)"),
        ("sigma", f"{config.objective.sampling}, shift {inputs.shift:g}, weighting {config.objective.weighting}"),
        (
            "memory",
            f"{_bytes(memory.total)} = parameters {_bytes(memory.parameters)} + gradients {_bytes(memory.gradients)} + "
            f"optimizer {_bytes(memory.optimizer)} + activations {_bytes(memory.activations)}",
        ),
    ]
    return "\n".join(f"{name:<11} {text}" for name, text in rows)


def _count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number} B"
