"""Floating-point operations of a step, counted before its first one without computing anything."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from flowshard.memory.fakes import fake_call, forgetting

CPU = torch.device("cpu")


def count_flops(
    model: torch.nn.Module,
    forward: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    inputs: dict[str, torch.Tensor],
    *,
    remembering: Sequence[str] = (),
) -> int:
    """Operations of one forward and backward pass: two for each multiplication of a matrix product, a convolution or attention.

    Nothing that is computed a second time counts: neither activations nor the products of queries and keys, which kernels
    of attention repeat in their backward pass.

    Args:
        model: on the meta device, whole, without activation policies.
        forward: maps model and inputs to the loss on the CPU.
        inputs: of one micro-batch.
        remembering: see `forgetting`.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    with forgetting(model, remembering):
        mode, call, _ = fake_call(model, forward, inputs, CPU)
        with mode, counter:
            call().backward()
    return int(counter.get_total_flops())


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Queries times keys, and weights times values; shapes are (batch, heads, tokens, head size)."""
    batch, heads, tokens, size = query
    return 2 * batch * heads * tokens * key[2] * (size + value[3])


def _attention_backward(
    _: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int], *__: Any, **___: Any
) -> int:
    """Two products for each of the forward pass."""
    return 2 * _attention(query, key, value)


_aten: Any = torch.ops.aten
# torch has no formulas for the operators of the CPU, on which all is counted.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
