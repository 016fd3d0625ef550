"""Building a transformer on the meta device and filling it from memory-mapped files, tensor by tensor."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import no_init_weights
from safetensors import safe_open
from safetensors.torch import load_file

from flowshard.errors import UserError
from flowshard.seeds import isolated_rng
from flowshard.weights.files import TensorInfo
from flowshard.weights.lora import base_name, is_lora
from flowshard.weights.precision import float32_modules, keeps_float32

_SHOWN_NAMES = 8


@dataclass
class LoadReport:
    """What became of every tensor of the model and of the files. Names are those of the files."""

    loaded: list[str] = field(default_factory=list)
    new: dict[str, str] = field(default_factory=dict)
    """Tensors that no file has, by design, and how they were initialised."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shape_mismatch: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Name to (shape in the file, shape in the model)."""
    dtype_changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name to (type in the file, type in the model)."""

    def raise_for_problems(self, source: Path) -> None:
        """Refuse a model that is not filled completely and exactly.

        Raises:
            UserError: tensors are missing, unexpected or of another shape; the message names them.
        """
        problems = []
        if self.missing:
            problems.append(f"the files lack {_names(self.missing)}")
        if self.unexpected:
            problems.append(f"the model has no place for {_names(self.unexpected)}")
        if self.shape_mismatch:
            shapes = [f"{name} (file {file}, model {model})" for name, (file, model) in self.shape_mismatch.items()]
            problems.append(f"shapes differ for {_names(shapes)}")
        if problems:
            raise UserError(f"{source}: the weights do not fit its config.json: {'; '.join(problems)}")


def _names(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def build_on_meta(transformer_class: str, folder: Path) -> torch.nn.Module:
    """The model that `folder/config.json` describes, with parameters on the meta device and real buffers.

    Buffers that no file holds, such as rotary tables, are computed by the model's own constructor.
    """
    model_class = getattr(diffusers, transformer_class)
    # Constructors draw random weights; the seed is of no matter, as files or initialisers give every value.
    with init_empty_weights(include_buffers=False), no_init_weights(), isolated_rng(0, "constructor"):
        model: torch.nn.Module = model_class.from_config(model_class.load_config(folder))
    return model


def materialise(
    model: torch.nn.Module,
    tensors: Mapping[str, TensorInfo],
    *,
    source: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadReport:
    """Give every base parameter and buffer of a meta model its value from the files.

    A parameter that needs a gradient becomes float32, whatever the file has, and is copied; a frozen one gets `dtype`,
    float32 where the model asks for it, and stays a view of the mapped file where type and device allow.

    Args:
        model: from `build_on_meta`, with adapters injected and `requires_grad` set.
        tensors: the files' tensors by name.
        source: the folder, for messages.
        dtype: type of frozen parameters.
        device: where the parameters go.

    Raises:
        UserError: the files do not fill the model exactly.
    """
    report = LoadReport()
    keep = float32_modules(model)
    expected: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_lora(name):
            expected[base_name(name)] = (name, tensor)
    report.missing = [name for name in expected if name not in tensors]
    report.unexpected = [name for name in tensors if name not in expected]
    for name, (_, tensor) in expected.items():
        if name in tensors and tensors[name].shape != tuple(tensor.shape):
            report.shape_mismatch[name] = (tensors[name].shape, tuple(tensor.shape))
    report.raise_for_problems(source)

    by_file: dict[Path, list[str]] = {}
    for name in expected:
        by_file.setdefault(tensors[name].file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as reader:
            for name in names:
                own_name, tensor = expected[name]
                stored = reader.get_tensor(name)
                trainable = tensor.requires_grad
                wanted = torch.float32 if trainable or keeps_float32(name, keep) else dtype
                # A trained tensor must not share memory with the mapping of the file.
                value = stored.to(device=device, dtype=wanted, copy=trainable)
                _assign(model, own_name, value, requires_grad=trainable)
                report.loaded.append(name)
                if stored.dtype != wanted:
                    report.dtype_changed[name] = (str(stored.dtype), str(wanted))
    for module in model.modules():  # buffers that no file holds, from the constructor
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return report


def _assign(model: torch.nn.Module, name: str, value: torch.Tensor, *, requires_grad: bool) -> None:
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if leaf in parent._parameters:
        setattr(parent, leaf, torch.nn.Parameter(value, requires_grad=requires_grad))
    else:
        setattr(parent, leaf, value)


def load_modules(model: torch.nn.Module, file: Path) -> None:
    """Put the tensors of a `modules.safetensors` in place of the model's own, in the model's types.

    Raises:
        UserError: the model has no place for one of them.
    """
    outcome = model.load_state_dict(load_file(file), strict=False)
    if outcome.unexpected_keys:
        raise UserError(
            f"{file}: the model has no place for {_names(outcome.unexpected_keys)}; it was trained on another"
        )
