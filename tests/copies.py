"""A stand-in for the stream beside the computation, which does nothing until it is waited for."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from flowshard.device import CopyStream


class _Copy:
    """A copy that was started. Does not keep its tensors, as a device does not."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._tensors = [
            (weakref.ref(one.untyped_storage()), one.dtype, one.storage_offset(), one.shape, one.stride())
            for one in (target, source)
        ]
        target.fill_(float("nan"))

    def run(self) -> None:
        target, source = (self._tensor(*one) for one in self._tensors)
        target.copy_(source)

    @staticmethod
    def _tensor(storage: Any, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> torch.Tensor:
        assert storage() is not None, "memory was let go of before its copy was waited for"
        with torch.no_grad():
            return torch.empty(0, dtype=dtype).set_(storage(), offset, shape, stride)


class DeferredCopies(CopyStream):
    """Makes copies in their order, at the last moment at which they have to be there."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.started = 0
        self.done = 0
        self.most = 0
        """Copies that were under way at one time."""
        self._copies: list[_Copy] = []

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
        made = [_Copy(target, source) for target, source in pairs]
        self._copies += made
        self.started += len(made)
        self.most = max(self.most, len(self._copies))
        return self.started

    def wait(self, copied: int) -> None:
        while self.done < copied:
            self._copies.pop(0).run()
            self.done += 1


class HastyCopies(DeferredCopies):
    """Nobody waits."""

    def wait(self, copied: int) -> None:
        del copied
