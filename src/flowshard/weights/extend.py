"""Modules that a user's function adds to the model, replaces or removes before its weights load (`model.extend`)."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flowshard.errors import UserError
from flowshard.seeds import isolated_rng
from flowshard.weights.files import check_spec

AS_BUILT, RESET = "as the function left it", "reset_parameters"
"""How a new tensor got its value."""


@dataclass
class Extension:
    """What a function did to a model."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of every parameter and buffer of the new modules by its name in the model: its initial value on the CPU."""
    how: dict[str, str] = field(default_factory=dict)
    """Where each of these values comes from."""
    declared: set[str] = field(default_factory=set)
    """Names that keep this value even if the files have one of the same name."""
    removed: set[str] = field(default_factory=set)
    """Parameters and buffers of the stock model that are gone."""


def find_function(spec: str, *, option: str) -> Callable[[torch.nn.Module], Any]:
    """The function that `spec` names.

    Raises:
        UserError: naming `option`: there is no such file, module or function, or importing it failed.
    """
    place, name = check_spec(spec, option=option)
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise UserError(f"{option}: {place} cannot be imported: {_cause(error, place)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{option}: {place} has no function {name!r}")
    found: Callable[[torch.nn.Module], Any] = function
    return found


def _import_file(file: Path) -> ModuleType:
    name = f"flowshard_extension_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # noqa: S101
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up there
    spec.loader.exec_module(module)
    return module


def _cause(error: Exception, place: str) -> str:
    """What went wrong, and at which line of the user's own file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(place)]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def extend_model(model: torch.nn.Module, spec: str, *, seed: int, option: str = "model.extend") -> Extension:
    """Let a function change a model that is on the meta device.

    The function may build modules as it likes, on the CPU with values (which stay: a projection that it set to zero is
    exactly zero) or on the meta device, where `reset_parameters` gives the values. It may return the names of modules,
    parameters or buffers that shall not be loaded though the files have them. All random draws come from the seed.

    Args:
        model: is changed; afterwards all its parameters are on the meta device again.
        spec: `FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`.
        seed: of the run.
        option: names the option in messages.

    Raises:
        UserError: the function fails, names something that is not there, or leaves a tensor without a value.
    """
    function = find_function(spec, option=option)
    stock = dict(model.named_modules())
    known = {id(module): {*module._parameters, *module._buffers} for module in stock.values()}
    names = set(model.state_dict(keep_vars=True))
    with isolated_rng(seed, "extend"):
        try:
            returned = function(model)
        except Exception as error:
            raise UserError(f"{option}: {spec} failed: {_cause(error, spec.rpartition(':')[0])}") from error
    extension = Extension(removed=names - set(model.state_dict(keep_vars=True)))
    extension.declared = _declared(model, returned, spec, option)
    for prefix, module in model.named_modules():
        owned = {**module._parameters, **module._buffers}
        full = {leaf: f"{prefix}.{leaf}" if prefix else leaf for leaf in owned}
        fresh = [
            leaf
            for leaf, tensor in owned.items()
            if tensor is not None
            and leaf not in module._non_persistent_buffers_set
            and (leaf not in known.get(id(module), ()) or full[leaf] in extension.declared)
        ]
        how = AS_BUILT
        if any(owned[leaf].is_meta for leaf in fresh):
            _reset(module, fresh, prefix, seed, option, spec)
            how = RESET
        for leaf in fresh:
            tensor = getattr(module, leaf)
            extension.values[full[leaf]] = tensor.detach().cpu()
            extension.how[full[leaf]] = how
            empty = torch.empty_like(tensor, device="meta")
            if leaf in module._parameters:
                setattr(module, leaf, torch.nn.Parameter(empty, requires_grad=tensor.requires_grad))
            else:
                setattr(module, leaf, empty)
    return extension


def _declared(model: torch.nn.Module, returned: Any, spec: str, option: str) -> set[str]:
    if returned is None:
        return set()
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise UserError(f"{option}: {spec} returned {returned!r}; return a list of names, or nothing")
    names = list(model.state_dict(keep_vars=True))
    declared: set[str] = set()
    for one in returned:
        found = [name for name in names if name == one or name.startswith(f"{one}.")]
        if not found:
            raise UserError(f"{option}: {spec} returned {one!r}, but the model has no module or parameter of that name")
        declared.update(found)
    return declared


def _reset(module: Any, fresh: list[str], prefix: str, seed: int, option: str, spec: str) -> None:
    """Values for a module that was built on the meta device, from its own initialiser."""
    if not hasattr(module, "reset_parameters"):
        missing = ", ".join(f"{prefix}.{leaf}".lstrip(".") for leaf in fresh if getattr(module, leaf).is_meta)
        raise UserError(
            f"{option}: {spec} left {missing} on the meta device without a value, and {type(module).__name__} has no "
            "reset_parameters; build it on the CPU"
        )
    module.to_empty(device="cpu", recurse=False)
    with isolated_rng(seed, "extend", prefix):
        module.reset_parameters()
