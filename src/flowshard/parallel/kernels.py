"""Attention on one device with the log-sum-exp that joins parts, forward and backward.

All tensors are (batch, heads, tokens, head size); the log-sum-exp is float32 of shape (batch, heads, query tokens). The
backward pass takes output and log-sum-exp of the *whole* attention and returns a part's share of the gradients, which
is what a ring of devices needs (https://arxiv.org/abs/2310.01889).

The operators of torch that do this have private names. They are used here only; `tests/test_sequence.py` fails when
their arguments change.
"""

import math
from typing import Any

import torch

from flowshard import npu

Tensor = torch.Tensor
_aten: Any = torch.ops.aten
_QUERY_BLOCK = 1024
"""Queries that the fallback works on at once, so that it never holds all products of queries and keys."""
_LSE_MULTIPLE = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this."""
_BIAS_MULTIPLE = 8
"""It also wants the rows of a bias to start at multiples of 16 bytes."""


def key_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores so that keys are left out.

    Args:
        mask: bool of shape (batch, keys), True for keys that count.
        dtype: of the queries.

    Returns:
        (batch, 1, 1, keys). Finite, so that a part all of whose keys are left out has a defined result, whose weight in
        the whole is zero.
    """
    keys = mask.shape[1]
    padded = -(-keys // _BIAS_MULTIPLE) * _BIAS_MULTIPLE
    bias = torch.zeros(mask.shape[0], padded, dtype=dtype, device=mask.device)
    bias[:, :keys].masked_fill_(~mask, torch.finfo(dtype).min / 2)
    return bias[:, None, None, :keys]


def attention_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; `bias` from `key_bias`."""
    kernel = _kernel(query, bias)
    if kernel == "cpu":
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias)
        return output, lse
    if kernel == "flash":
        output, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value)
        return output, lse
    if kernel == "efficient":
        output, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _expanded(bias, query, key), True
        )
        return output, lse[..., : query.shape[2]]
    if kernel == "npu":
        return npu.attention_forward(query, key, value, bias)
    return _plain_forward(query, key, value, bias)


def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    Args:
        gradient: of the whole attention's output.
        query: the queries.
        key: the keys of this part.
        value: the values of this part.
        output: of the whole attention.
        lse: of the whole attention.
        bias: of this part's keys.
    """
    kernel = _kernel(query, bias)
    if kernel == "npu":
        return npu.attention_backward(gradient, query, key, value, output, lse, bias)
    if kernel == "cpu":
        result = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, lse, 0.0, False, attn_mask=bias
        )
    elif kernel == "flash":
        random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # dropout's state, which is off
        result = _aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            key,
            value,
            output,
            lse,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            False,
            random,
            random,
        )
    elif kernel == "efficient":
        random = torch.zeros((), dtype=torch.int64, device="cpu")
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _LSE_MULTIPLE), value=math.inf)
        expanded = _expanded(bias, query, key)
        result = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, expanded, output, padded, random, random, 0.0, [True, True, True, False]
        )[:3]
    else:
        result = _plain_backward(gradient, query, key, value, output, lse, bias)
    return result[0], result[1], result[2]


def _kernel(query: Tensor, bias: Tensor | None) -> str:
    kind = query.device.type
    if kind == "cpu":
        return "cpu"
    if kind == "cuda":
        flash = bias is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[3] <= 256
        return "flash" if flash else "efficient"
    return "npu" if kind == "npu" and npu.has_attention() else "plain"


def _expanded(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:3], key.shape[2])


def _scores(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    scores = query.float() @ key.float().transpose(2, 3) / math.sqrt(query.shape[3])
    return scores if bias is None else scores + bias.float()


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """For devices without a kernel that returns the log-sum-exp."""
    outputs, sums = [], []
    for block in query.split(_QUERY_BLOCK, dim=2):
        scores = _scores(block, key, bias)
        lse = scores.logsumexp(dim=3)
        outputs.append(((scores - lse[..., None]).exp() @ value.float()).to(query.dtype))
        sums.append(lse)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _plain_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    queries = []
    keys = torch.zeros_like(key, dtype=torch.float32)
    values = torch.zeros_like(value, dtype=torch.float32)
    scale = 1.0 / math.sqrt(query.shape[3])
    parts = (tensor.split(_QUERY_BLOCK, dim=2) for tensor in (gradient, query, output, lse))
    for grad, block, out, sums in zip(*parts, strict=True):
        weights = (_scores(block, key, bias) - sums[..., None]).exp()
        grad = grad.float()
        values += weights.transpose(2, 3) @ grad
        delta = (grad * out.float()).sum(dim=3, keepdim=True)
        scores = weights * (grad @ value.float().transpose(2, 3) - delta) * scale
        queries.append(scores @ key.float())
        keys += scores.transpose(2, 3) @ block.float()
    return torch.cat(queries, dim=2).to(query.dtype), keys.to(key.dtype), values.to(value.dtype)
