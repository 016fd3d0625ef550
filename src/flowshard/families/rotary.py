"""Rotary position embedding (https://arxiv.org/abs/2104.09864) as the models apply it: neighbouring channels are a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, tokens, heads, size) in float32 by tables that hold every value twice.

    Args:
        states: queries or keys.
        cos: of shape (tokens, 1, size), or one that broadcasts likewise.
        sin: like `cos`.
    """
    import torch

    from flowshard import npu

    if states.device.type == "npu" and npu.kernel(npu.ROTARY) is not None:
        cos, sin = (table if table.ndim == 4 else table[None] for table in (cos, sin))
        return npu.rotate(states, cos, sin)
    even, odd = states[..., 0::2], states[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 0::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(states)


def rotate_complex(states: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, tokens, heads, size) by complex tables, or by what `real_tables` made of them.

    Args:
        states: queries or keys.
        tables: complex of shape (tokens, size / 2) or (batch, tokens, size / 2), or real with the two last dimensions
            (2, size) instead.
    """
    import torch

    if not tables.is_complex():
        cos, sin = tables.unsqueeze(-3).unbind(-2)
        return rotate(states, cos, sin)
    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * tables.unsqueeze(-2)).flatten(-2).type_as(states)


def real_tables(tables: torch.Tensor) -> torch.Tensor:
    """Complex tables for devices without complex numbers: (..., size / 2) to float32 of shape (..., 2, size).

    Cosine and sine, each with every value twice.
    """
    import torch

    return torch.view_as_real(tables).transpose(-1, -2).repeat_interleave(2, dim=-1).float()


def make_on_cpu(module: torch.nn.Module, device: torch.device) -> None:
    """Let a module make its tables on the CPU, where there are float64 and complex numbers, and real ones reach a device.

    Args:
        module: takes positions, or is told by the argument `device` where to compute, and returns tables.
        device: where the model is.
    """
    import torch

    def before(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if "device" in named:
            named = {**named, "device": torch.device("cpu")}
        return tuple(one.cpu() if isinstance(one, torch.Tensor) else one for one in positional), named

    def after(_: Any, __: Any, tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        real = (real_tables(table) if table.is_complex() else table for table in tables)
        return tuple(table.to(device) for table in real)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
