"""Weights in torch's own file format, of which only tensors are read."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

from flowshard.errors import UserError
from flowshard.seeds import isolated_rng
from flowshard.weights.precision import float32_modules, keeps_float32
from flowshard.weights.report import LoadReport


def read_pth(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped. Nothing in it is executed.

    Raises:
        UserError: it is broken, or holds something else than tensors.
    """
    try:
        value = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{file}: holds more than tensors, which is not executed here ({reason}); get the file from its publisher"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file}: cannot be read ({reason}); copy or download it again") from None
    if not isinstance(value, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        raise UserError(f"{file}: is not a mapping of names to tensors")
    return value


def fill(
    model_class: Any, config: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, file: Path
) -> torch.nn.Module:
    """A frozen model of transformers or diffusers with these tensors as its weights.

    Args:
        model_class: whose constructor takes a config object, or the settings of one.
        config: the object, or a mapping.
        tensors: in the names of the class.
        dtype: of the weights; in float16 some stay float32, as transformers keeps them.
        file: where they come from, for messages.

    Raises:
        UserError: they do not fill the model.
    """
    with init_empty_weights(include_buffers=False), isolated_rng(0, "constructor"):
        model: torch.nn.Module = model_class(**config) if isinstance(config, dict) else model_class(config)
    places = model.state_dict()
    report = LoadReport(
        missing=[name for name in places if name not in tensors],
        unexpected=[name for name in tensors if name not in places],
        shape_mismatch={
            name: (tuple(value.shape), tuple(places[name].shape))
            for name, value in tensors.items()
            if name in places and value.shape != places[name].shape
        },
    )
    report.raise_for_problems(file)
    keep = float32_modules(model) if dtype == torch.float16 else ()
    cast: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for name, value in tensors.items():
        if id(value) not in cast:
            wanted = torch.float32 if keeps_float32(name, keep) else dtype
            cast[id(value)] = value.to(wanted) if value.is_floating_point() else value
    model.load_state_dict({name: cast[id(value)] for name, value in tensors.items()}, assign=True)
    return model.eval().requires_grad_(False)
