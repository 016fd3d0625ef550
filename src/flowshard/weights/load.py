"""Building a transformer on the meta device and filling it from memory-mapped files, tensor by tensor."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from flowshard.weights.frozen import frozen_layers
from flowshard.weights.lora import base_name
from flowshard.weights.lora_files import Factors
from flowshard.weights.precision import float32_modules, keeps_float32
from flowshard.weights.report import LoadReport, some


@dataclass(frozen=True)
class NewTensor:
    """A tensor that the files may lack."""

    make: Callable[[], torch.Tensor]
    """Its full value on the CPU."""
    how: str
    """Where the value comes from, for the report."""
    forced: bool = False
    """Whether it is new though the files have one of that name."""


class Strategy(Protocol):
    """What loading needs of a strategy; see `parallel.strategies.Strategy`."""

    device: torch.device

    def place(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The part of a full value that this process holds."""

    def settle(self, unit: torch.nn.Module) -> None:
        """All parameters of a unit have their values."""


class Whole:
    """Everything on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The value on the device; what is trained must not share memory with the mapping of a file."""
        return value.to(self.device, parameter.dtype, copy=parameter.requires_grad)

    def settle(self, unit: torch.nn.Module) -> None:
        """Nothing is divided."""


def build_model(transformer_class: str, config: Mapping[str, Any]) -> torch.nn.Module:
    """The diffusers model that a config describes, with parameters on the meta device and real buffers.

    Buffers that no file holds, such as rotary tables, are computed by the model's own constructor.
    """
    model_class = getattr(diffusers, transformer_class)
    # Constructors draw random weights; the seed is of no matter, as files or initialisers give every value.
    with init_empty_weights(include_buffers=False), no_init_weights(), isolated_rng(0, "constructor"):
        model: torch.nn.Module = model_class.from_config(dict(config))
    return model


def declare_types(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters of a meta model their final types.

    What is trained becomes float32, the rest `dtype`, or float32 where the model asks for it.
    """
    keep = float32_modules(model)
    tied: dict[int, torch.Tensor] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in tied:
            _assign(model, name, tied[id(parameter)], requires_grad=parameter.requires_grad)
            continue
        wanted = torch.float32 if parameter.requires_grad or keeps_float32(name, keep) else dtype
        empty = torch.empty_like(parameter, dtype=wanted)
        tied[id(parameter)] = _assign(model, name, empty, requires_grad=parameter.requires_grad)


def materialise(
    model: torch.nn.Module,
    tensors: Mapping[str, TensorInfo],
    *,
    source: Path,
    units: Sequence[torch.nn.Module],
    new: dict[str, NewTensor],
    strategy: Strategy,
    removed: Collection[str] = (),
    presets: Sequence[Mapping[str, Factors]] = (),
    ignore_unexpected: bool = False,
) -> LoadReport:
    """Give every parameter and buffer of a meta model its value, unit by unit.

    A frozen parameter stays a view of the mapped file where type and device allow; nothing is read twice and no more
    than one unit is held as a whole by strategies that divide it. Tied parameters stay tied. A weight that is to be held in
    fewer bits becomes so as it is read, from the values of the file.

    Args:
        model: from `build_model`, with adapters, types declared, and divided by the strategy.
        tensors: the files' tensors by name.
        source: the folder, for messages.
        units: parts of the model that are complete at once, in the order of execution; the rest of it comes last.
        new: for tensors that the files may lack, by their name in the model, what makes their value. They are taken out
            as they are used, so that no value stays in memory.
        strategy: says which part of a tensor this process holds.
        removed: names of the stock model whose modules are gone.
        presets: LoRAs by layer that are added to the weights.
        ignore_unexpected: whether other weights without a place are only reported.

    Raises:
        UserError: the files do not fill the model exactly.
    """
    places = model.state_dict(keep_vars=True)
    frozen = {f"{name}.weight": layer for name, layer in frozen_layers(model).items()}
    places.update({name: layer.place for name, layer in frozen.items()})
    made = {name: one.how for name, one in new.items() if one.forced or base_name(name) not in tensors}
    loaded = {base_name(name): tensor for name, tensor in places.items() if name not in made}
    report = LoadReport(new=made)
    report.missing = [name for name in loaded if name not in tensors]
    for name, info in tensors.items():
        if name not in loaded:
            gone = name in removed or name in made
            (report.dropped if gone or ignore_unexpected else report.unexpected).append(name)
        elif info.shape != tuple(loaded[name].shape):
            report.shape_mismatch[name] = (info.shape, tuple(loaded[name].shape))
    report.raise_for_problems(source)

    names = {id(module): name for name, module in model.named_modules()}
    left = dict(places)
    done: dict[int, Any] = {}  # what tied names share is placed once
    with ExitStack() as stack:
        readers: dict[Path, Any] = {}
        for unit in (*units, model):
            prefix = names[id(unit)]
            for name in [name for name in left if not prefix or name.startswith(f"{prefix}.")]:
                place = left.pop(name)
                if id(place) in done:
                    _assign(model, name, done[id(place)], requires_grad=place.requires_grad)
                    continue
                if name in made:
                    value = new.pop(name).make()
                else:
                    info = tensors[base_name(name)]
                    if info.file not in readers:
                        readers[info.file] = stack.enter_context(safe_open(info.file, framework="pt"))
                    stored = info.read(readers[info.file], base_name(name))
                    value = stored
                    for factors in presets:
                        one = factors.get(base_name(name).removesuffix(".weight"))
                        if one is not None:
                            value = one.added_to(value.float())
                            report.fused.append(base_name(name))
                    report.loaded.append(base_name(name))
                    if name not in frozen and stored.dtype != place.dtype:
                        report.dtype_changed[base_name(name)] = (str(stored.dtype), str(place.dtype))
                if name in frozen:
                    frozen[name].fill(value.to(strategy.device))
                    report.quantised[base_name(name)] = frozen[name].held_as
                    continue
                part = strategy.place(place, value)
                done[id(place)] = _assign(model, name, part, requires_grad=place.requires_grad)
            strategy.settle(unit)
    for module in model.modules():  # buffers that no file holds, from the constructor
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = buffer.to(strategy.device)
    return report


def _assign(model: torch.nn.Module, name: str, value: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Put a value in place, as a parameter if there was one; what is now there."""
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if leaf in parent._parameters and not isinstance(value, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=requires_grad)
    setattr(parent, leaf, value)
    return value


def load_modules(model: torch.nn.Module, file: Path) -> None:
    """Put the tensors of a `modules.safetensors` in place of the model's own, in the model's types.

    Raises:
        UserError: the model has no place for one of them.
    """
    outcome = model.load_state_dict(load_file(file), strict=False)
    if outcome.unexpected_keys:
        raise UserError(
            f"{file}: the model has no place for {some(outcome.unexpected_keys)}; it was trained on another"
        )
