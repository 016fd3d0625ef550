"""Building a transformer on the meta device and filling it from memory-mapped files, tensor by tensor."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import no_init_weights
from safetensors import safe_open
from safetensors.torch import load_file

from flowshard.errors import UserError
from flowshard.seeds import isolated_rng
from flowshard.weights.files import TensorInfo
from flowshard.weights.lora import base_name
from flowshard.weights.precision import float32_modules, keeps_float32

_SHOWN_NAMES = 8


@dataclass
class LoadReport:
    """What became of every tensor of the model and of the files. Names are those of the files."""

    loaded: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    """Tensors that no file has, by design: adapters."""
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


class Strategy(Protocol):
    """What loading needs of a strategy; see `parallel.strategies.Strategy`."""

    device: torch.device

    def place(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The part of a full value that this process holds."""

    def settle(self, unit: torch.nn.Module) -> None:
        """All parameters of a unit have their values."""


def _names(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def build_model(transformer_class: str, folder: Path, changes: Mapping[str, Any] | None = None) -> torch.nn.Module:
    """The model that `folder/config.json` describes, with parameters on the meta device and real buffers.

    Buffers that no file holds, such as rotary tables, are computed by the model's own constructor. `changes` replace
    entries of the config.
    """
    model_class = getattr(diffusers, transformer_class)
    # Constructors draw random weights; the seed is of no matter, as files or initialisers give every value.
    with init_empty_weights(include_buffers=False), no_init_weights(), isolated_rng(0, "constructor"):
        model: torch.nn.Module = model_class.from_config({**model_class.load_config(folder), **(changes or {})})
    return model


def declare_types(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters of a meta model their final types.

    What is trained becomes float32, the rest `dtype`, or float32 where the model asks for it.
    """
    keep = float32_modules(model)
    for name, parameter in list(model.named_parameters()):
        wanted = torch.float32 if parameter.requires_grad or keeps_float32(name, keep) else dtype
        _assign(model, name, torch.empty_like(parameter, dtype=wanted), requires_grad=parameter.requires_grad)


def materialise(
    model: torch.nn.Module,
    tensors: Mapping[str, TensorInfo],
    *,
    source: Path,
    units: Sequence[torch.nn.Module],
    new: Mapping[str, Callable[[], torch.Tensor]],
    strategy: Strategy,
) -> LoadReport:
    """Give every parameter and buffer of a meta model its value, unit by unit.

    A frozen parameter stays a view of the mapped file where type and device allow; nothing is read twice and no more
    than one unit is held as a whole by strategies that divide it.

    Args:
        model: from `build_model`, with adapters, types declared, and divided by the strategy.
        tensors: the files' tensors by name.
        source: the folder, for messages.
        units: parts of the model that are complete at once, in the order of execution; the rest of it comes last.
        new: for parameters that no file has, by their name in the model, what makes their value.
        strategy: says which part of a tensor this process holds.

    Raises:
        UserError: the files do not fill the model exactly.
    """
    report = LoadReport()
    expected = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in new}
    by_file_name = {base_name(name): tensor for name, tensor in expected.items()}
    report.missing = [name for name in by_file_name if name not in tensors]
    report.unexpected = [name for name in tensors if name not in by_file_name]
    for name, tensor in by_file_name.items():
        if name in tensors and tensors[name].shape != tuple(tensor.shape):
            report.shape_mismatch[name] = (tensors[name].shape, tuple(tensor.shape))
    report.raise_for_problems(source)

    names = {id(module): name for name, module in model.named_modules()}
    left = dict(model.state_dict(keep_vars=True))
    with ExitStack() as stack:
        readers: dict[Path, Any] = {}
        for unit in (*units, model):
            prefix = names[id(unit)]
            for name in [name for name in left if not prefix or name.startswith(f"{prefix}.")]:
                place = left.pop(name)
                if name in new:
                    value = new[name]()
                    report.new.append(name)
                else:
                    info = tensors[base_name(name)]
                    if info.file not in readers:
                        readers[info.file] = stack.enter_context(safe_open(info.file, framework="pt"))
                    stored = readers[info.file].get_tensor(base_name(name))
                    value = stored.to(place.dtype)
                    report.loaded.append(base_name(name))
                    if stored.dtype != place.dtype:
                        report.dtype_changed[base_name(name)] = (str(stored.dtype), str(place.dtype))
                _assign(model, name, strategy.place(place, value), requires_grad=place.requires_grad)
            strategy.settle(unit)
    for module in model.modules():  # buffers that no file holds, from the constructor
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = buffer.to(strategy.device)
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
