"""Low-rank adapters through peft: injection, initialisation and the names of their tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from flowshard.seeds import isolated_rng

ADAPTER = "default"
"""Name of the one adapter that is trained."""


def is_lora(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """The name that a frozen parameter has without adapters: peft nests it in `base_layer`."""
    return name.replace(".base_layer.", ".")


def inject(model: torch.nn.Module, *, targets: Sequence[str], rank: int, alpha: float) -> None:
    """Add adapters on the meta device to the modules named in full in `targets`; everything else is frozen."""
    config = PeftLoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(name))


def initialise(model: torch.nn.Module, *, seed: int, device: torch.device) -> dict[str, str]:
    """Fill the adapters in float32: A as peft does (Kaiming uniform), B with zeros, so that training starts at the base.

    Each layer draws from a seed of its own name, so the values depend neither on the other targets nor on the layout.

    Returns:
        The new tensors and how they were initialised.
    """
    new = {}
    for name, layer in _layers(model):
        for factor in (layer.lora_A, layer.lora_B):
            factor[ADAPTER].to_empty(device="cpu").float()
        with isolated_rng(seed, "lora", name):
            layer.reset_lora_parameters(ADAPTER, True)
        for kind, factor, how in (("A", layer.lora_A, "Kaiming uniform"), ("B", layer.lora_B, "zeros")):
            factor[ADAPTER].to(device)
            new[f"{name}.lora_{kind}.weight"] = how
    return new


def lora_state(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters as `{module}.lora_A.weight` and `{module}.lora_B.weight`, with alpha / rank folded into B.

    With the scale in B, a reader that knows of no alpha, and takes it to be the rank, gets the trained result.

    Args:
        model: the model with adapters.
        values: full values of the trained parameters by their name in the model.
    """
    state = {}
    for name, layer in _layers(model):
        state[f"{name}.lora_A.weight"] = values[f"{name}.lora_A.{ADAPTER}.weight"]
        state[f"{name}.lora_B.weight"] = values[f"{name}.lora_B.{ADAPTER}.weight"] * layer.scaling[ADAPTER]
    return state


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module
