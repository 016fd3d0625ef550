"""`flowshard export`: what a run trained, in the names and files that other programs read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError
from flowshard.families import Family, find_variant
from flowshard.weights.files import (
    LORA_FILE,
    MODULES_FILE,
    TRANSFORMER_FOLDER,
    TensorInfo,
    atomic_file,
    find_trained,
    read_header,
    read_headers,
    read_json,
)
from flowshard.weights.lora_files import (
    Factors,
    Format,
    LoraFile,
    adapted_layers,
    load_factors,
    lora_tensors,
    read_lora,
)
from flowshard.weights.source import ModelSource, find_any_source

if TYPE_CHECKING:
    import torch

_CONFIG, _WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
_WHOLE_PREFIX = {"original": "", "comfyui": "model.diffusion_model."}
"""What precedes the publisher's names of a whole model's tensors."""


@dataclass(frozen=True)
class ExportOptions:
    """The options of `flowshard export`."""

    source: Path
    format: Format
    output: Path
    merge: bool
    model: str | None
    variant: str | None


@dataclass(frozen=True)
class Whole:
    """All weights of a transformer."""

    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class CheckedExport:
    """Options together with what they lead to."""

    options: ExportOptions
    family: Family
    lora: LoraFile | None
    modules: Path | None
    """What was trained in full beside the LoRA."""
    whole: Whole | None
    """Whole weights: the trained ones, or the base that is merged into."""


def check_export(options: ExportOptions) -> CheckedExport:
    """Find mistakes before torch is imported.

    Raises:
        UserError: naming option, file or key, and the fix.
    """
    found = find_trained(options.source, LORA_FILE, f"{TRANSFORMER_FOLDER}/{_CONFIG}", option="SOURCE")
    family, base = _family(options, found)
    if not options.output.absolute().parent.is_dir():
        raise UserError(f"--output: the folder {options.output.absolute().parent} does not exist")
    if found.name == _CONFIG:
        if options.merge:
            raise UserError(f"--merge: {found.parent} holds whole weights, there is nothing to merge")
        _check_output(options, whole=True)
        whole = Whole(read_headers(found.parent), read_json(found))
        return CheckedExport(options, family, None, None, whole)
    if options.merge and base is None:
        raise UserError("--merge: give the base model with --model")
    _check_output(options, whole=options.merge)
    layers = None if base is None else adapted_layers((name, info.shape) for name, info in base.tensors.items())
    modules = found.with_name(MODULES_FILE)
    return CheckedExport(
        options,
        family,
        read_lora(found, layers, family.names, option="SOURCE"),
        modules if modules.is_file() else None,
        None if base is None or not options.merge else Whole(base.tensors, base.config),
    )


def _check_output(options: ExportOptions, *, whole: bool) -> None:
    folder = whole and options.format == "diffusers"
    if folder and options.output.suffix == ".safetensors":
        raise UserError(f"--output: whole weights in diffusers' layout are a folder, not {options.output.name}")
    if not folder and options.output.suffix != ".safetensors":
        raise UserError(f"--output: give a .safetensors file, not {options.output}")


def _family(options: ExportOptions, found: Path) -> tuple[Family, ModelSource | None]:
    """The family, and the base model if it is known."""
    if options.model is not None:
        variant, expert = _model_of_run(found)
        family, _, source = find_any_source(
            options.model, options.variant or variant, option="--model", expert=expert, encoders=False
        )
        return family, source
    variant = options.variant or _model_of_run(found)[0]
    if variant is None:
        raise UserError(f"--variant: {found} belongs to no run here; say what it was trained on, or give --model")
    return find_variant(variant, option="--variant")[0], None


def _model_of_run(found: Path) -> tuple[str | None, str | None]:
    """Variant and expert that the run of a file trained, if it is in a run's folder."""
    import yaml

    for folder in found.absolute().parents:
        file = folder / "config.yaml"
        if file.is_file():
            settings = yaml.safe_load(file.read_text(encoding="utf-8"))
            return str(settings["model"]["variant"]), settings["model"].get("expert")
    return None, None


def export(checked: CheckedExport) -> list[Path]:
    """Write the files; which ones."""
    from safetensors.torch import load_file, save_file

    options, family = checked.options, checked.family
    if checked.whole is not None:
        return [_export_whole(checked, checked.whole)]
    assert checked.lora is not None  # noqa: S101
    tensors = lora_tensors(load_factors(checked.lora), family.names, options.format)
    written = [options.output]
    with atomic_file(options.output) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    if checked.modules is not None:
        beside = options.output.with_name(f"{options.output.stem}.{MODULES_FILE}")
        renamed = _renamed(load_file(checked.modules), options, family)
        with atomic_file(beside) as temporary:
            save_file(renamed, temporary, metadata={"format": "pt"})
        written.append(beside)
    return written


def _export_whole(checked: CheckedExport, source: Whole) -> Path:
    from safetensors.torch import save_file

    options, family = checked.options, checked.family
    factors = {} if checked.lora is None else load_factors(checked.lora)
    tensors = _renamed(dict(_merged(source.tensors, factors, checked.modules)), options, family)
    output = options.output
    if options.format == "diffusers":
        output.mkdir(exist_ok=True)
        (output / _CONFIG).write_text(json.dumps(dict(source.config), indent=2), encoding="utf-8")
        output = output / _WEIGHTS
    with atomic_file(output) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    return options.output


def _merged(
    tensors: Mapping[str, TensorInfo], factors: dict[str, Factors], modules: Path | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole weights, with a LoRA added and what was trained in full in its place. What does not change is mapped."""
    from safetensors import safe_open

    own = {} if modules is None else read_header(modules)
    headers = {**tensors, **own}
    for file in dict.fromkeys(info.file for info in headers.values()):
        with safe_open(file, framework="pt") as reader:
            for name, info in headers.items():
                if info.file != file:
                    continue
                value = info.read(reader, name)
                one = factors.get(name.removesuffix(".weight"))
                yield name, value if one is None else one.added_to(value)


def _renamed(tensors: dict[str, torch.Tensor], options: ExportOptions, family: Family) -> dict[str, torch.Tensor]:
    """Tensors in the names of the format; what was added to the model has no other.

    Raises:
        UserError: they are only some of those that the publisher has as one.
    """
    from flowshard.weights.fused import original_tensors

    if options.format == "diffusers":
        return tensors
    names = family.comfyui_names if options.format == "comfyui" and family.comfyui_names else family.names
    renamed = original_tensors(tensors, names, option=f"--format {options.format}")
    return {_WHOLE_PREFIX[options.format] + name: value for name, value in renamed.items()}
