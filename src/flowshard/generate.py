"""Pictures and clips through the stock diffusers pipeline, with a LoRA or trained weights in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from flowshard.data.given import check_files
from flowshard.data.media import read_inputs, write_video
from flowshard.errors import UserError
from flowshard.families import Family
from flowshard.families.variant import Sampling, Variant
from flowshard.parallel.layout import Layout, generation_layout
from flowshard.weights.files import (
    LORA_FILE,
    LOW_EXPERT_FOLDER,
    MODULES_FILE,
    TRANSFORMER_FOLDER,
    atomic_file,
    check_spec,
    find_trained,
    read_header,
    read_headers,
    read_json,
)
from flowshard.weights.source import ModelSource, find_any_source, find_source

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
    guidance_low: float | None
    fps: int
    seed: int
    device: str
    dtype: str
    sequence: int
    variant: str | None
    extend: str | None
    inputs: list[str]
    lora_high: Path | None
    lora_low: Path | None


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
    inputs: Mapping[str, tuple[Path, ...]]
    """Files of what the model gets besides the prompt, by column."""
    low: Expert | None
    """The transformer for low noise, of a model with two."""


@dataclass(frozen=True)
class Expert:
    """One transformer of a model with two."""

    source: ModelSource
    lora: Path | None


def check_generation(options: GenerateOptions) -> CheckedGeneration:
    """Find mistakes before torch is imported.

    Raises:
        UserError: naming option, value and fix.
    """
    family, variant, source = find_any_source(options.model, options.variant, option="--model")
    if variant.experts is None and options.guidance_low is not None:
        raise UserError(f"--guidance-low: {variant.name} has one transformer; give --guidance")
    asked = {one.name: getattr(options, one.name) for one in fields(Sampling)}
    if variant.experts is not None and options.guidance_low is None:
        asked["guidance_low"] = options.guidance  # given for one, it is for both
    sampling = replace(variant.sampling, **{name: value for name, value in asked.items() if value is not None})
    family.check_size(sampling.height, sampling.width, sampling.frames, where="--")
    if options.negative_prompt and not family.takes_negative_prompt:
        raise UserError(f"--negative-prompt: {variant.name} takes none")
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
    if variant.experts is not None and (options.lora is not None or options.weights is not None):
        raise UserError(
            f"--lora, --weights: {variant.name} has two transformers; give --lora-high and --lora-low, and trained weights "
            f"as {TRANSFORMER_FOLDER}/ or {LOW_EXPERT_FOLDER}/ of the folder of --model"
        )
    if variant.experts is None and (options.lora_high is not None or options.lora_low is not None):
        raise UserError(f"--lora-high, --lora-low: {variant.name} has one transformer; give --lora")
    weights = low = None
    lora = _find_lora(options.lora, source, "--lora") or _find_lora(options.lora_high, source, "--lora-high")
    if variant.experts is not None:
        second = find_source(options.model, family, variant, option="--model", expert="low")
        if second.tensors == source.tensors:
            raise UserError(
                f"--model: {variant.name} has two transformers, which single files do not tell apart; give a folder that "
                f"has both, for example {variant.hub_id}"
            )
        low = Expert(second, _find_lora(options.lora_low, second, "--lora-low"))
    if options.weights is not None:
        weights = find_trained(
            options.weights, "config.json", f"{TRANSFORMER_FOLDER}/config.json", option="--weights"
        ).parent
        read_headers(weights)
    inputs = _input_files(options.inputs, family, variant)
    return CheckedGeneration(options, source, family, lora, weights, layout, sampling, inputs, low)


def _input_files(given: Sequence[str], family: Family, variant: Variant) -> dict[str, tuple[Path, ...]]:
    """The files of `--input COLUMN=FILE`."""
    known = {one.column for one in family.inputs}
    files: dict[str, tuple[Path, ...]] = {}
    for text in given:
        column, equals, name = text.partition("=")
        if not equals or column not in known:
            takes = f"it takes {', '.join(one.column for one in family.inputs)}" if known else "it takes none"
            raise UserError(f"--input {text}: write COLUMN=FILE with an input of {variant.name}; {takes}")
        files[column] = (*files.get(column, ()), Path(name))
    check_files(files, family, variant, place=lambda column: f"--input {column}=FILE", where="--input: ")
    return files


def _find_lora(path: Path | None, source: ModelSource, option: str) -> Path | None:
    """The LoRA file; refused if it has adapters for layers that the model lacks, which the pipeline would only skip."""
    if path is None:
        return None
    lora = find_trained(path, LORA_FILE, option=option)
    prefix = f"{TRANSFORMER_FOLDER}."
    for name, info in read_header(lora).items():
        layer, found, _ = name.removeprefix(prefix).partition(".lora_A.")
        if not (name.startswith(prefix) and found):
            continue
        weight = source.tensors.get(f"{layer}.weight")
        if weight is None or weight.shape[1] != info.shape[1]:
            problem = "has no layer" if weight is None else "has another width at"
            raise UserError(f"{option}: {lora} was trained on another model: {source.label} {problem} {layer}")
    return lora


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
    from flowshard.parallel.plan import apply_plans
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
    transformers: list[tuple[Any, Path | None, dict[str, bool]]] = [(transformer.eval(), checked.lora, {})]
    parts = {}
    if checked.low is not None:
        second, _ = load_transformer(
            family, checked.low.source, extend=options.extend, dtype=dtype, device=device, option="--extend"
        )
        parts[LOW_EXPERT_FOLDER] = second.eval()
        transformers.append((second, checked.low.lora, {f"load_into_{LOW_EXPERT_FOLDER}": True}))
    pipeline = family.make_pipeline(checked.source, transformer, dtype=dtype, **parts)
    for model, lora, where in transformers:
        if lora is not None:
            modules = lora.with_name(MODULES_FILE)
            if modules.is_file():
                load_modules(model, modules)
            pipeline.load_lora_weights(str(lora.parent), weight_name=lora.name, **where)
    pipeline.to(device)
    group = SequenceGroup(checked.layout, device) if checked.layout.sequence > 1 else None
    for model, *_ in transformers:
        apply_plans(model, family, group, device)
    sampling = checked.sampling
    inputs = read_inputs(
        family.inputs,
        checked.inputs,
        own=None,
        height=sampling.height,
        width=sampling.width,
        frames=sampling.frames,
        where="--input",
    )
    texts = {"prompt": options.prompt}
    if family.takes_negative_prompt:
        texts["negative_prompt"] = options.negative_prompt
    # None without a terminal.
    pipeline.set_progress_bar_config(disable=None if processes.is_main else True)
    frames = family.generate(
        pipeline,
        texts=texts,
        **asdict(sampling),
        inputs=inputs,
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
