"""What the operators of sequence parallelism send, and what they need while they run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowshard.parallel.sequence import find_shape


@dataclass(frozen=True)
class Exchange:
    """Of one operator of sequence parallelism."""

    sent: int
    """Bytes to other processes."""
    workspace: int
    """Bytes that it allocates while it runs, besides its result."""


def _attention(query: torch.Tensor, *rest: Any) -> Exchange:
    """Own queries, keys and values for all of some heads, round the ring, and the output back."""
    unit, own, tokens, ulysses, ring = _degrees(query, *rest[-2:])
    sent = 3 * own * (ulysses - 1) + (tokens - own) + 2 * (ring - 1) * tokens
    # What is sent and what is received, while the tensor that is made of it is there; then keys and values on their way.
    workspace = max(6 * tokens if ulysses > 1 else 0, 4 * tokens * (ring > 1))
    return Exchange(unit * sent, unit * workspace)


def _attention_backward(gradient: torch.Tensor, *rest: Any) -> Exchange:
    """The gradient of the output, keys and values round the ring and their gradients after them, and all three back."""
    unit, own, tokens, ulysses, ring = _degrees(gradient, *rest[-2:])
    sent = own * (ulysses - 1) + 3 * (tokens - own) + 4 * (ring - 1) * tokens
    # The exchanged gradient, those of the three, what is sent and received; or float32 sums and what goes round.
    workspace = max((1 + 3 + 6) * tokens if ulysses > 1 else 3 * tokens, 16 * tokens * (ring > 1))
    return Exchange(unit * sent, unit * workspace)


def _degrees(tensor: torch.Tensor, group: str, sizes: list[int]) -> tuple[int, int, int, int, int]:
    """Bytes of a token's share of heads, own tokens, those of a place in the ring, and the degrees."""
    batch, own, heads, size = tensor.shape
    shape = find_shape(group)
    unit = batch * (heads // shape.ulysses) * size * tensor.element_size()
    return unit, own, sum(shape.column(sizes, shape.ring_rank)), shape.ulysses, shape.ring


def _gather(part: torch.Tensor, group: str, sizes: list[int], summed: bool) -> Exchange:
    del group, summed
    others = len(sizes) - 1
    return Exchange(part.nbytes * others, part.nbytes * (others + 2))


def _sum(whole: torch.Tensor, group: str, sizes: list[int]) -> Exchange:
    own = whole.nbytes * sizes[find_shape(group).rank] // sum(sizes)
    return Exchange(whole.nbytes - own, whole.nbytes)


_OPERATORS: Mapping[str, Callable[..., Exchange]] = {
    "flowshard::sequence_attention": _attention,
    "flowshard::sequence_attention_backward": _attention_backward,
    "flowshard::gather_tokens": _gather,
    "flowshard::sum_tokens": _sum,
}


def exchange_of(operator: Any, args: tuple[Any, ...]) -> Exchange | None:
    """What an operator exchanges between the processes that share a sample; None for others."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    find = _OPERATORS.get(operator.name().split(".")[0])
    return None if find is None else find(*args)
