"""Copies that are made at the last moment at which they have to be there, as a stand-in for a stream of a device."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from flowshard.device import CopyStream


class PendingCopy:
    """A copy that was started. Does not keep its tensors, as a device does not."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = _Place(target), _Place(source)
        if target.is_floating_point():
            target.fill_(float("nan"))

    def run(self) -> None:
        """Make it."""
        self._target.tensor().copy_(self._source.tensor())


class _Place:
    """Where a tensor is, as long as it is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage: Any = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._view = int(tensor.storage_offset()), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = self._storage()
        assert storage is not None, "memory was let go of before its copy was waited for"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class DeferredCopies(CopyStream):
    """Makes copies in their order, when they are waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.started = 0
        self.done = 0
        self.most = 0
        """Copies that were under way at one time."""
        self._copies: list[PendingCopy] = []

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
        made = [PendingCopy(target, source) for target, source in pairs]
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
