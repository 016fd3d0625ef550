"""Distributed attention and the gathering of tokens as operators of torch, each with its backward pass.

As operators they are units to activation policies, to memory estimates (which run them without computing) and to
`torch.compile`. A group is given by its name.
"""

from typing import Any

import torch
from torch.library import custom_op, register_autograd

from flowshard.parallel.sequence import find_group, find_shape, ring_backward, ring_forward

Tensor = torch.Tensor
ATTENTION = "flowshard::sequence_attention"

_SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor? mask, str group, SymInt[] sizes)"


@custom_op(ATTENTION, mutates_args=(), schema=f"{_SCHEMA} -> (Tensor, Tensor, Tensor, Tensor)")
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, group: str, sizes: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output for own tokens; and for the backward pass what was exchanged, its output, and the log-sum-exp."""
    members = find_group(group)
    if members.ulysses == 1:
        output, lse = ring_forward(members, torch.stack([query, key, value]), mask, sizes)
        return output, query.new_empty(0), query.new_empty(0), lse
    counts = members.column(sizes, members.ring_rank)
    exchanged = members.to_heads([query, key, value], counts)
    output, lse = ring_forward(members, exchanged, mask, sizes)
    return members.to_tokens([output], counts)[0], exchanged, output, lse


@_attention.register_fake
def _attention_shapes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, group: str, sizes: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    members = find_shape(group)
    batch, own, heads, size = query.shape
    tokens, share = sum(members.column(sizes, members.ring_rank)), heads // members.ulysses
    lse = query.new_empty(batch, share, tokens, dtype=torch.float32)
    if members.ulysses == 1:
        return torch.empty_like(query), query.new_empty(0), query.new_empty(0), lse
    exchanged = query.new_empty(3, batch, tokens, share, size)
    return query.new_empty(batch, own, heads, size), exchanged, query.new_empty(batch, tokens, share, size), lse


@custom_op(
    f"{ATTENTION}_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor qkv, Tensor output, Tensor lse, Tensor? mask, str group, SymInt[] sizes) -> Tensor",
)
def _attention_backward(
    gradient: Tensor, qkv: Tensor, output: Tensor, lse: Tensor, mask: Tensor | None, group: str, sizes: list[int]
) -> Tensor:
    """The gradients of own query, key and value, stacked."""
    members = find_group(group)
    if members.ulysses == 1:
        return torch.stack(ring_backward(members, gradient, qkv, output, lse, mask, sizes))
    counts = members.column(sizes, members.ring_rank)
    exchanged = members.to_heads([gradient], counts)[0]
    return members.to_tokens(ring_backward(members, exchanged, qkv, output, lse, mask, sizes), counts)


@_attention_backward.register_fake
def _backward_shapes(
    gradient: Tensor, qkv: Tensor, output: Tensor, lse: Tensor, mask: Tensor | None, group: str, sizes: list[int]
) -> Tensor:
    return gradient.new_empty(3, *gradient.shape)


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, mask, group, sizes = inputs
    result, exchanged, whole, lse = output
    ctx.group, ctx.sizes = group, list(sizes)
    ctx.set_materialize_grads(False)
    if find_shape(group).ulysses == 1:
        ctx.save_for_backward(query, key, value, result, lse, mask)
    else:
        ctx.save_for_backward(exchanged, whole, lse, mask)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 6
    *qkv, output, lse, mask = ctx.saved_tensors
    stacked = torch.stack(qkv) if len(qkv) == 3 else qkv[0]
    dq, dk, dv = _attention_backward(gradient.contiguous(), stacked, output, lse, mask, ctx.group, ctx.sizes)
    return dq, dk, dv, None, None, None


register_autograd(ATTENTION, _backward, setup_context=_keep_for_backward)


@custom_op(
    "flowshard::gather_tokens",
    mutates_args=(),
    schema="(Tensor part, str group, SymInt[] sizes, bool summed) -> Tensor",
)
def _gather(part: Tensor, group: str, sizes: list[int], summed: bool) -> Tensor:
    return find_group(group).gather(part.contiguous(), sizes)


@_gather.register_fake
def _gather_shapes(part: Tensor, group: str, sizes: list[int], summed: bool) -> Tensor:
    return part.new_empty(sum(sizes), *part.shape[1:])


@custom_op("flowshard::sum_tokens", mutates_args=(), schema="(Tensor whole, str group, SymInt[] sizes) -> Tensor")
def _sum(whole: Tensor, group: str, sizes: list[int]) -> Tensor:
    """Own part of the sum over the processes."""
    return find_group(group).reduce_scatter(whole.contiguous(), sizes)


@_sum.register_fake
def _sum_shapes(whole: Tensor, group: str, sizes: list[int]) -> Tensor:
    return whole.new_empty(sizes[find_shape(group).rank], *whole.shape[1:])


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Own part of the gradient, once.

    At the end of the model every process computes the whole loss from the gathered tokens, so each already holds the
    whole gradient: nothing is summed. Where processes go on with parts of the work (`summed`), each holds a part of a
    sum. In both cases the gradients of parameters are parts of a sum, whose factor is in the training loop.
    """
    if ctx.summed:
        return _sum(gradient, ctx.group, ctx.sizes), None, None, None
    start = sum(ctx.sizes[: ctx.rank])
    return gradient.narrow(0, start, ctx.sizes[ctx.rank]).contiguous(), None, None, None


def _gather_context(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    _, ctx.group, sizes, ctx.summed = inputs
    ctx.sizes, ctx.rank = list(sizes), find_shape(ctx.group).rank


register_autograd("flowshard::gather_tokens", _gather_backward, setup_context=_gather_context)


def sequence_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, group: str, sizes: list[int]
) -> Tensor:
    """Attention over the tokens of a group.

    Args:
        query: of own tokens, (batch, tokens, heads, size); all three of one type.
        key: like `query`.
        value: like `query`.
        mask: of all keys in the order of the processes, (batch, sum of sizes), True for those that count; or None.
        group: name of the group.
        sizes: tokens of each process.

    Returns:
        Shaped like `query`.
    """
    if query.shape[1] != sizes[find_shape(group).rank]:
        raise RuntimeError(f"{query.shape[1]} tokens where the plan has {sizes[find_shape(group).rank]}; sizes {sizes}")
    output: Tensor = _attention(query, key, value, mask, group, sizes)[0]
    return output


def gather_tokens(part: Tensor, *, dim: int, group: str, sizes: list[int], summed: bool = False) -> Tensor:
    """The parts of all processes of a group, joined along `dim`.

    Args:
        part: of this process.
        dim: of the tokens.
        group: name of the group.
        sizes: tokens of each process.
        summed: whether the processes' gradients of the result are parts of a sum, which the backward pass then makes;
            else all have the whole gradient, and it sends nothing.
    """
    whole: Tensor = _gather(part.transpose(0, dim), group, sizes, summed)
    return whole.transpose(0, dim)
