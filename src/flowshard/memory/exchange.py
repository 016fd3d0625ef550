"""What the operators of sequence parallelism send, and what they need while they run."""

from dataclasses import dataclass
from typing import Any

import torch

from flowshard.parallel.sequence import find_shape


@dataclass(frozen=True)
class Exchange:
    """One call of an operator, under any degrees of sequence parallelism."""

    operator: str
    width: int
    """Bytes of a token of one of the tensors that are exchanged, with all heads, over the batch."""
    tokens: int
    """Of all processes together."""

    def sent(self, ulysses: int, ring: int) -> int:
        """Bytes that the first process sends to others."""
        degree = ulysses * ring
        own, share = -(-self.tokens // degree), self.width // ulysses
        place = -(-self.tokens // ring)  # tokens of those that exchange heads
        if self.operator == _FORWARD:
            # Queries, keys and values for all of some heads; keys and values round the ring; the output back.
            return share * (3 * own * (ulysses - 1) + (place - own) + 2 * (ring - 1) * place)
        if self.operator == _BACKWARD:
            # The output's gradient; keys and values round the ring, and their gradients; the three gradients back.
            return share * (own * (ulysses - 1) + 3 * (place - own) + 4 * (ring - 1) * place)
        if self.operator == _GATHER:
            return self.width * own * (degree - 1)
        return self.width * (self.tokens - own)

    def workspace(self, ulysses: int, ring: int) -> int:
        """Bytes that the operator allocates while it runs, besides its result."""
        place, share = -(-self.tokens // ring), self.width // ulysses
        if self.operator == _FORWARD:
            # The three as they are sent and as they come; or keys and values that leave and arrive.
            return share * place * max(6 * (ulysses > 1), 4 * (ring > 1))
        if self.operator == _BACKWARD:
            # The exchanged gradient, the three that are made, sent and received; or float32 sums and what goes round.
            return share * place * max(10 if ulysses > 1 else 3, 16 * (ring > 1))
        return self.width * self.tokens


_FORWARD, _BACKWARD = "flowshard::sequence_attention", "flowshard::sequence_attention_backward"
_GATHER, _SUM = "flowshard::gather_tokens", "flowshard::sum_tokens"
_OPERATORS = (_FORWARD, _BACKWARD, _GATHER, _SUM)


def exchange_of(operator: Any, args: tuple[Any, ...]) -> tuple[Exchange, int] | None:
    """What a call of an operator exchanges between processes that share a sample, and its workspace; None for others."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    name = operator.name().split(".")[0]
    if name not in _OPERATORS:
        return None
    tensor: torch.Tensor = args[0]
    group, sizes = (args[1], args[2]) if name in (_GATHER, _SUM) else args[-2:]
    tokens_here = tensor.shape[0 if name in (_GATHER, _SUM) else 1]
    exchange = Exchange(name, tensor.numel() // tokens_here * tensor.element_size(), sum(sizes))
    shape = find_shape(group)
    return exchange, exchange.workspace(shape.ulysses, shape.ring)
