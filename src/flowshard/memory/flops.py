"""Floating-point operations of a step, counted before its first one without computing anything."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

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


def flops_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Operations of one call of an operator, as `count_flops` counts them; 0 for those that it does not count."""
    packet = getattr(operator, "_overloadpacket", None)
    if packet in _ATTENTION:
        return _ATTENTION[packet](*_shapes(args), **kwargs)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    sequence: Callable[..., int] | None = _SEQUENCE.get(str(packet))
    return 0 if sequence is None else sequence(*args)


def _shapes(args: Sequence[Any]) -> list[Any]:
    return [arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args]


def _sequence(query: torch.Tensor, *rest: Any) -> int:
    """Own queries, (batch, tokens, heads, head size), to the keys of all processes; how many each has comes last."""
    batch, own, heads, size = query.shape
    return 4 * batch * heads * own * sum(rest[-1]) * size


def _sequence_backward(gradient: torch.Tensor, *rest: Any) -> int:
    return 2 * _sequence(gradient, *rest)


_SEQUENCE: dict[str, Callable[..., int]] = {
    "flowshard.sequence_attention": _sequence,
    "flowshard.sequence_attention_backward": _sequence_backward,
}
"""By name, as the operators need a group of processes."""


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
_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
