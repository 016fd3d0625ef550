"""Adds to every block of a Wan transformer a small residual branch that starts at zero.

    flowshard train examples/added_modules/wan.yaml

`model.extend: adapters.py:add_adapters` calls the function with the transformer before any weight is loaded. What it
builds keeps the values that it gives here; weights of the published model are loaded around it.
"""

from typing import Any

import torch

WIDTH = 32


class Adapter(torch.nn.Module):
    """Two layers around a nonlinearity, of which the second starts at zero, so that training starts at the base."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = torch.nn.Linear(channels, WIDTH)
        self.up = torch.nn.Linear(WIDTH, channels)
        torch.nn.init.zeros_(self.up.weight)
        torch.nn.init.zeros_(self.up.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.up(torch.nn.functional.silu(self.down(states)))
        return result


def _add(block: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = output + block.adapter(output).type_as(output)
    return result


def add_adapters(transformer: Any) -> None:
    """Give every block an `adapter`, applied to the block's output."""
    channels = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    for block in transformer.blocks:
        block.adapter = Adapter(channels)
        block.register_forward_hook(_add)
