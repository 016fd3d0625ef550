"""Every process holds the whole model; gradients are averaged (torch's DistributedDataParallel)."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from flowshard.parallel.strategies.plain import PlainStrategy


class DataParallel(PlainStrategy):
    """DistributedDataParallel that reduces once an update."""

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        self._wrapper = DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            broadcast_buffers=False,
            init_sync=False,  # files and seeds give every process the same weights
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # text projections of a last joint block, absent conditions
        )
        return self._wrapper

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._wrapper.no_sync()
