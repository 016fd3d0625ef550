"""Rotary position embedding (https://arxiv.org/abs/2104.09864) as the models apply it: neighbouring channels are a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    even, odd = states[..., 0::2], states[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 0::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(states)


def rotate_complex(states: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, tokens, heads, size) by complex tables of shape (tokens, size / 2) or (batch, tokens, size / 2)."""
    import torch

    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * tables.unsqueeze(-2)).flatten(-2).type_as(states)
