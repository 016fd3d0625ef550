"""The bytes of the tensors that are alive at each moment of a computation."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flowshard.memory.storages import storage_id


class LiveBytes(TorchDispatchMode):
    """While active, counts what operators allocate until it is freed, on fake tensors too.

    What an operator needs for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are alive."""
        self.highest = 0
        """The most since it was last set."""
        self.outside = 0
        """Bytes that are alive in other memory."""
        self._known: dict[int, tuple[weakref.ref[Any], list[int]]] = {}
        self._outside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.add(value)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory, if it is not yet counted."""
        key = storage_id(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        # What is counted inside and outside of this memory.
        counted = [0, storage.nbytes()] if self._outside else [storage.nbytes(), 0]

        def freed(_: Any) -> None:
            del self._known[key]
            self.now -= counted[0]
            self.outside -= counted[1]

        self._known[key] = weakref.ref(storage, freed), counted
        self.now += counted[0]
        self.outside += counted[1]
        self.highest = max(self.highest, self.now)

    def leave_out(self, tensor: torch.Tensor) -> int:
        """Count a tensor's memory no longer, or not at all; the bytes that it has."""
        self.add(tensor)
        _, counted = self._known[storage_id(tensor)]
        self.now -= counted[0]
        counted[0] = 0
        return tensor.untyped_storage().nbytes()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is allocated meanwhile lies in other memory."""
        self._outside = True
        try:
            yield
        finally:
            self._outside = False
