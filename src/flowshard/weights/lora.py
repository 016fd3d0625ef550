"""Low-rank adapters through peft: injection, initialisation and the names of their tensors."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from flowshard.seeds import isolated_rng
from flowshard.weights.lora_files import Factors

ADAPTER = "default"
"""Name of the one adapter that is trained."""


def is_lora(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def is_lora_b(name: str) -> bool:
    """Whether a parameter is the second factor of an adapter, which starts at zero."""
    return ".lora_B." in name


def base_name(name: str) -> str:
    """The name that a frozen parameter has without adapters: peft nests it in `base_layer`."""
    return name.replace(".base_layer.", ".")


def inject(model: torch.nn.Module, *, targets: Sequence[str], rank: int, alpha: float) -> None:
    """Add adapters on the meta device to the modules named in full in `targets`; everything else is frozen."""
    config = PeftLoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(name))


def initial_values(model: torch.nn.Module, *, kind: str, seed: int) -> dict[str, Callable[[], torch.Tensor]]:
    """For every adapter parameter by its name, what makes its full float32 value on the CPU.

    A as peft does it for that kind (`lora.init`), B with zeros, so that training starts at the base. Each layer draws from
    a seed of its own name, so the values depend neither on the other targets nor on the layout.
    """
    values: dict[str, Callable[[], torch.Tensor]] = {}
    for name, layer in _layers(model):
        a, b = layer.lora_A[ADAPTER].weight.shape, layer.lora_B[ADAPTER].weight.shape
        values[f"{name}.lora_A.{ADAPTER}.weight"] = partial(_first, kind, a, seed, name)
        values[f"{name}.lora_B.{ADAPTER}.weight"] = partial(torch.zeros, b)
    return values


def values_from(factors: Mapping[str, Factors], *, scale: float) -> dict[str, Callable[[], torch.Tensor]]:
    """For the adapter parameters of these layers, what makes their value.

    Args:
        factors: of a LoRA file, by layer.
        scale: alpha / rank of the run. What the file's own scale differs from it goes into B.
    """
    values: dict[str, Callable[[], torch.Tensor]] = {}
    for name, one in factors.items():
        values[f"{name}.lora_A.{ADAPTER}.weight"] = one.first.float
        values[f"{name}.lora_B.{ADAPTER}.weight"] = partial(_scaled, one.second, one.scale / scale)
    return values


def _scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    return value.float() * factor


def _first(kind: str, shape: torch.Size, seed: int, name: str) -> torch.Tensor:
    """The first factor, (rank, inputs)."""
    with isolated_rng(seed, "lora", name):
        if kind == "gaussian":
            return torch.nn.init.normal_(torch.empty(shape), std=1 / shape[0])
        return torch.nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5))


def export_name(name: str) -> str:
    """The name of an adapter parameter in a file: without the adapter's own name."""
    return name.replace(f".{ADAPTER}.", ".")


def export_scales(model: torch.nn.Module) -> dict[str, float]:
    """What each B is multiplied by in a file, by parameter name: alpha / rank.

    With the scale in B, a reader that knows of no alpha, and takes it to be the rank, gets the trained result.
    """
    return {f"{name}.lora_B.{ADAPTER}.weight": layer.scaling[ADAPTER] for name, layer in _layers(model)}


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module
