"""Kernels for Ascend NPUs, from torch_npu (https://gitee.com/ascend/op-plugin, docs/context). They are named here only.

Every one of them is optional: where the installed release lacks it, torch's own operators do the work, as in `attention`,
or the caller has another way and asks `kernel` first. Numbers are those of torch up to rounding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ATTENTION, ATTENTION_BACKWARD = "npu_fusion_attention", "npu_fusion_attention_grad"
RMS_NORM, ROTARY = "npu_rms_norm", "npu_rotary_mul"
_STATISTICS = 8
"""The attention kernel holds maximum and sum of a row that many times."""
_ROTARY_ROWS = 1000
"""The rotary kernel takes fewer heads than this, those of all samples together."""


def kernel(name: str) -> Any:
    """A function of torch_npu; None if it is not there."""
    try:
        import torch_npu
    except ImportError:
        return None
    return getattr(torch_npu, name, None)


def has_attention() -> bool:
    """Whether attention can be done in parts, forward and backward, by the kernel."""
    return kernel(ATTENTION) is not None and kernel(ATTENTION_BACKWARD) is not None


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of whole sequences, in autocast's type if it is on, else in the type of the values.

    Args:
        query: (batch, tokens, heads, size).
        key: (batch, keys, heads, size).
        value: like `key`.
        mask: bool of shape (batch, keys), True for keys that count, of which every sample has some; or None.
    """
    import torch

    from flowshard.device import compute_dtype

    dtype = compute_dtype(value)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    fused = kernel(ATTENTION)
    if fused is not None:
        hidden = None if mask is None else _for_all_queries(~mask[:, None, None], query.shape[1])
        output: torch.Tensor = fused(
            query, key, value, query.shape[2], "BSND", atten_mask=hidden, scale=_scale(query), keep_prob=1.0
        )[0]
        return output
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask = None if mask is None else mask[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp; see `parallel.kernels.attention_forward`."""
    import torch

    hidden, empty = _hidden(bias, query)
    query, key, value = (_tokens_first(tensor) for tensor in (query, key, value))
    output, largest, total, *_ = kernel(ATTENTION)(
        query, key, value, query.shape[2], "BSND", atten_mask=hidden, scale=_scale(query), keep_prob=1.0
    )
    lse = largest[..., 0] + total[..., 0].log()
    if empty is not None:
        lse = torch.where(empty[..., 0], torch.finfo(lse.dtype).min / 2, lse)
    return output.transpose(1, 2), lse


def attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value; see `parallel.kernels.attention_backward`."""
    import torch

    hidden, empty = _hidden(bias, query)
    # The kernel makes the weights as exp(score - maximum) / sum, which for these two is exp(score - log-sum-exp).
    largest = lse[..., None].expand(*lse.shape, _STATISTICS).contiguous()
    query, key, value, gradient, output = (_tokens_first(one) for one in (query, key, value, gradient, output))
    gradients = kernel(ATTENTION_BACKWARD)(
        query,
        key,
        value,
        gradient,
        query.shape[2],
        "BSND",
        atten_mask=hidden,
        softmax_max=largest,
        softmax_sum=torch.ones_like(largest),
        attention_in=output,
        scale_value=_scale(query),
        keep_prob=1.0,
    )
    dq, dk, dv = (part.transpose(1, 2) for part in gradients[:3])
    if empty is not None:
        dq, dk, dv = (torch.where(empty, torch.zeros_like(part), part) for part in (dq, dk, dv))
    return dq, dk, dv


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring channels, in float32.

    Args:
        states: (batch, tokens, heads, size).
        cos: every value twice, of shape (1 or batch, tokens, 1, size).
        sin: like `cos`.
    """
    import torch

    fused = kernel(ROTARY)
    wide, cos, sin = states.float(), cos.float(), sin.float()
    if cos.shape[0] == 1 and wide.shape[0] * wide.shape[2] < _ROTARY_ROWS:
        whole: torch.Tensor = fused(wide, cos, sin, rotary_mode="interleave")
        return whole.type_as(states)
    # It takes one table for all samples.
    tables = zip(cos.expand(len(wide), -1, -1, -1), sin.expand(len(wide), -1, -1, -1), strict=True)
    parts = [
        fused(sample[None], own_cos[None], own_sin[None], rotary_mode="interleave")
        for sample, (own_cos, own_sin) in zip(wide, tables, strict=True)
    ]
    return torch.cat(parts).type_as(states)


def fuse_norms(model: torch.nn.Module) -> None:
    """Let the RMS norms of a model be done by the kernel, if it is there."""
    from diffusers.models.normalization import RMSNorm
    from torch import nn

    if kernel(RMS_NORM) is None:
        return
    norms: list[Any] = [one for one in model.modules() if isinstance(one, (nn.RMSNorm, RMSNorm))]
    for norm in norms:
        weight, bias = norm.weight, getattr(norm, "bias", None)
        if weight is not None and weight.ndim == 1 and bias is None:
            norm.forward = _Norm(norm, as_weight=isinstance(norm, RMSNorm))


def is_stock(attention: Any) -> bool:
    """Whether an attention module works as diffusers made it, and no extension has given it a processor of its own."""
    return type(getattr(attention, "processor", None)).__module__.startswith("diffusers.")


class _Norm:
    """The forward pass of an RMS norm."""

    def __init__(self, module: Any, *, as_weight: bool) -> None:
        """Of a module.

        Args:
            module: has `weight`, which engines may exchange, and `eps`.
            as_weight: whether the states take the weight's type if that is a short one, as in diffusers' class.
        """
        self._module = module
        self._as_weight = as_weight

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; computed in the wider of both types, which the result has, as torch does it."""
        import torch

        weight = self._module.weight
        if self._as_weight and weight.dtype in (torch.float16, torch.bfloat16):
            states = states.to(weight.dtype)
        dtype = torch.promote_types(states.dtype, weight.dtype)
        epsilon = torch.finfo(dtype).eps if self._module.eps is None else self._module.eps
        output: torch.Tensor = kernel(RMS_NORM)(states.to(dtype), weight.to(dtype), epsilon=epsilon)[0]
        return output


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """From (batch, heads, tokens, size), which in a ring is a view of what this returns."""
    return tensor.transpose(1, 2).contiguous()


def _scale(query: torch.Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])


def _hidden(bias: torch.Tensor | None, query: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What the kernel is not to see, and which samples have no key at all, (batch, 1, 1, 1).

    What the kernel does with rows that see nothing is not relied on: such samples see everything, and their results are
    replaced.
    """
    if bias is None:
        return None, None
    hidden = bias < 0
    empty = hidden.all(dim=3, keepdim=True)
    return _for_all_queries(hidden & ~empty, query.shape[2]), empty


def _for_all_queries(hidden: torch.Tensor, queries: int) -> torch.Tensor:
    """(batch, 1, 1, keys) as the kernel wants it, with as many rows as there are queries."""
    return hidden.expand(-1, 1, queries, -1).contiguous()
