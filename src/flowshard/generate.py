"""Pictures and clips through the stock diffusers pipeline, with a LoRA or trained weights in place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from flowshard.data.media import write_video
from flowshard.errors import UserError
from flowshard.families import Family
from flowshard.families.base import Sampling
from flowshard.parallel.layout import Layout, generation_layout
from flowshard.weights.files import (
    LORA_FILE,
    MODULES_FILE,
    TRANSFORMER_FOLDER,
    atomic_file,
    check_spec,
    find_trained,
    read_header,
    read_headers,
    read_json,
)
from flowshard.weights.source import ModelSource, find_any_source

if TYPE_CHECKING:
    from flowshard.parallel.processes import Processes


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `flowshard generate`."""

    model: str
    lora: Path | None
    weights: Path | None
    prompt: str
    negative_prompt: str
    output: Path
    frames: int | None
    height: int | None
    width: int | None
    steps: int | None
    guidance: float | None
    fps: int
    seed: int
    device: str
    dtype: str
    sequence: int
    variant: str | None
    extend: str | None


@dataclass(frozen=True)
class CheckedGeneration:
    """Options together with what they lead to on the disk."""

    options: GenerateOptions
    source: ModelSource
    family: Family
    lora: Path | None
    weights: Path | None
    layout: Layout
    sampling: Sampling
    """What was asked for, else the variant's own."""


def check_generation(options: GenerateOptions) -> CheckedGeneration:
    """Find mistakes before torch is imported.

    Raises:
        UserError: naming option, value and fix.
    """
    family, variant, source = find_any_source(options.model, options.variant, option="--model")
    asked = {one.name: getattr(options, one.name) for one in fields(Sampling)}
    sampling = replace(variant.sampling, **{name: value for name, value in asked.items() if value is not None})
    family.check_size(sampling.height, sampling.width, sampling.frames, where="--")
    if options.negative_prompt and not family.takes_negative_prompt:
        raise UserError(f"--negative-prompt: {variant.name} takes none, as it does no classifier-free guidance")
    wanted = ".png" if sampling.frames == 1 else ".mp4"
    if options.output.suffix.lower() != wanted:
        what = "one frame is" if sampling.frames == 1 else f"{sampling.frames} frames are"
        raise UserError(f"--output: {what} written as a {wanted} file, not {options.output}")
    if not options.output.absolute().parent.is_dir():
        raise UserError(f"--output: the folder {options.output.absolute().parent} does not exist")
    if min(sampling.steps, options.fps) < 1:
        raise UserError(f"--steps and --fps are at least 1, not {sampling.steps} and {options.fps}")
    if options.extend is not None:
        check_spec(options.extend, option="--extend")
    layout = generation_layout(options.sequence, source.config.get(family.heads_setting, variant.heads))
    tokens = family.token_count(sampling.height, sampling.width, sampling.frames)
    if tokens < options.sequence:
        raise UserError(f"--sequence: {options.sequence} processes cannot share {tokens} tokens; use at most {tokens}")
    if options.lora is not None and options.weights is not None:
        raise UserError("--lora and --weights exclude each other; give the one that was trained")
    lora = weights = None
    if options.lora is not None:
        lora = find_trained(options.lora, LORA_FILE, option="--lora")
        _check_lora(lora, source)
    if options.weights is not None:
        weights = find_trained(
            options.weights, "config.json", f"{TRANSFORMER_FOLDER}/config.json", option="--weights"
        ).parent
        read_headers(weights)
    return CheckedGeneration(options, source, family, lora, weights, layout, sampling)


def _check_lora(lora: Path, source: ModelSource) -> None:
    """Refuse adapters for layers that the model does not have, which the pipeline would skip with a warning at most."""
    prefix = f"{TRANSFORMER_FOLDER}."
    for name, info in read_header(lora).items():
        layer, found, _ = name.removeprefix(prefix).partition(".lora_A.")
        if not (name.startswith(prefix) and found):
            continue
        weight = source.tensors.get(f"{layer}.weight")
        if weight is None or weight.shape[1] != info.shape[1]:
            problem = "has no layer" if weight is None else "has another width at"
            raise UserError(f"--lora: {lora} was trained on another model: {source.label} {problem} {layer}")


def generate(checked: CheckedGeneration) -> bool:
    """Run the pipeline in all processes and write the output file in the main one.

    Returns:
        Whether this process wrote it.
    """
    from flowshard.device import resolve_device
    from flowshard.parallel.processes import run_together

    options = checked.options
    resolve_device(options.device, option="--device")
    return run_together(checked.layout, lambda processes: _generate(checked, processes), device_name=options.device)


def _generate(checked: CheckedGeneration, processes: Processes) -> bool:
    import torch

    from flowshard.api import load_transformer
    from flowshard.parallel.plan import apply_sequence_plan
    from flowshard.parallel.sequence import SequenceGroup
    from flowshard.weights.load import load_modules

    options, family, device = checked.options, checked.family, processes.device
    dtype = getattr(torch, options.dtype)
    source = checked.source
    if checked.weights is not None:
        config = read_json(checked.weights / "config.json")
        tensors = read_headers(checked.weights)
        source = replace(source, label=str(checked.weights), folder=None, tensors=tensors, config=config)
    transformer, _ = load_transformer(
        family, source, extend=options.extend, dtype=dtype, device=device, option="--extend"
    )
    pipeline = family.make_pipeline(checked.source, transformer.eval(), dtype=dtype)
    if checked.lora is not None:
        modules = checked.lora.with_name(MODULES_FILE)
        if modules.is_file():
            load_modules(pipeline.transformer, modules)
        pipeline.load_lora_weights(str(checked.lora.parent), weight_name=checked.lora.name)
    pipeline.to(device)
    if checked.layout.sequence > 1:
        apply_sequence_plan(pipeline.transformer, family.sequence_plan, SequenceGroup(checked.layout, device))
    # None without a terminal.
    pipeline.set_progress_bar_config(disable=None if processes.is_main else True)
    frames = family.generate(
        pipeline,
        prompt=options.prompt,
        negative_prompt=options.negative_prompt,
        **asdict(checked.sampling),
        generator=torch.Generator("cpu").manual_seed(options.seed),
    )
    if not processes.is_main:
        return False
    with atomic_file(options.output) as temporary:
        if len(frames) == 1:
            Image.fromarray(frames[0]).save(temporary, format="PNG")
        else:
            write_video(temporary, frames, fps=options.fps)
    return True
