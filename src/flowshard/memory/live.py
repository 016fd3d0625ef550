"""The bytes of the tensors that are alive at each moment of a computation, and what it computes and sends."""

import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flowshard.memory.exchange import Exchange, exchange_of
from flowshard.memory.flops import flops_of
from flowshard.memory.storages import storage_id
from flowshard.weights.frozen import workspace_of


class LiveBytes(TorchDispatchMode):
    """While active, counts what operators allocate until it is freed, on fake tensors too.

    What an operator needs for itself while it runs is not seen, but for those of sequence parallelism and of weights in
    fewer bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are alive."""
        self.highest = 0
        """The most since it was last set."""
        self.outside = 0
        """Bytes that are alive in other memory."""
        self.place: Hashable = None
        """Where the computation is, for `freed`."""
        self.freed: Counter[tuple[Hashable, Hashable]] = Counter()
        """Bytes by the place in which they were allocated and that in which they were freed."""
        self.flops = 0
        """Floating-point operations of matrix products and attention."""
        self.exchanges: list[Exchange] = []
        """Of sequence parallelism."""
        self._known: dict[int, tuple[weakref.ref[Any], list[int]]] = {}
        self._outside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += flops_of(func, args, kwargs, result)
        found = exchange_of(func, args)
        if found is not None:
            exchange, workspace = found
            self.exchanges.append(exchange)
            self.highest = max(self.highest, self.now + workspace)
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.add(value)
        self.highest = max(self.highest, self.now + workspace_of(func, args))
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory, if it is not yet counted."""
        key = storage_id(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        # What is counted inside and outside of this memory.
        counted = [0, storage.nbytes()] if self._outside else [storage.nbytes(), 0]

        born = self.place

        def freed(_: Any) -> None:
            del self._known[key]
            self.now -= counted[0]
            self.outside -= counted[1]
            self.freed[born, self.place] += counted[0]

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
