"""Which tensors a diffusers model wants in float32 and how that is kept under autocast.

diffusers names those modules in the private class attribute `_keep_in_fp32_modules`; this is the only place that reads
it, and `tests/test_precision.py` fails when it changes.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def float32_modules(model: torch.nn.Module | type[torch.nn.Module]) -> tuple[str, ...]:
    """Name parts of the modules and parameters that the model keeps in float32."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())


def keeps_float32(name: str, modules: tuple[str, ...]) -> bool:
    """Whether the parameter `name` is one of them: diffusers compares whole components of the dotted name."""
    return any(module in name.split(".") for module in modules)


def compute_in_float32(model: torch.nn.Module) -> None:
    """Run the float32 modules that hold layers outside autocast, which would cast their matrix products.

    Norms and bare parameters need no care: the models compute with them in float32 themselves.
    """
    modules = float32_modules(model)
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if leaf in modules and not keeps_float32(parent, modules) and any(module.children()):
            module.forward = _without_autocast(module.forward)


def _without_autocast(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        with torch.autocast(tensor.device.type, enabled=False):
            return forward(*args, **kwargs)

    return run
