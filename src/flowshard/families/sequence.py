"""What a family says about sequence parallelism: where tokens are split and gathered, and which attention is distributed.

The family knows the model; how tokens travel is behind `Tokens`. Everything is applied to the stock model from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Tokens(Protocol):
    """The tokens of a sample over the processes of a group."""

    def split(self, whole: torch.Tensor, dim: int, *, stream: str) -> torch.Tensor:
        """This process's part of a stream of tokens, for example `image`, along `dim`."""

    def gather(self, part: torch.Tensor, dim: int, *, stream: str, summed: bool = False) -> torch.Tensor:
        """The whole stream from the parts of all processes.

        Args:
            part: of this process.
            dim: of the tokens.
            stream: that they belong to.
            summed: whether each process goes on with a part of the work, so that the gradients that they have of the
                whole are parts of a sum; else all do the same, and each has the whole gradient.
        """

    def length(self, stream: str) -> int:
        """Tokens of a whole stream."""

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        streams: tuple[str, ...],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of own tokens to those of all processes.

        Args:
            query: (batch, own tokens of `streams` one after another, heads, size).
            key: like `query`.
            value: like `query`.
            streams: that the tokens belong to, in this order.
            mask: of all tokens of the whole streams, (batch, tokens), True for keys that count.
        """


@dataclass(frozen=True)
class SequencePlan:
    """How one transformer's tokens are divided."""

    outputs: Mapping[str, Callable[[Any], Any]]
    """Name of a module to what replaces its output."""
    processors: Mapping[str, Any]
    """Name of an attention module to its processor, in the form that its `set_processor` takes."""
    inputs: Mapping[str, Mapping[str, tuple[str, int]]] = field(default_factory=dict)
    """Name of a module to those of its arguments that are divided before it runs: their stream and dimension."""
