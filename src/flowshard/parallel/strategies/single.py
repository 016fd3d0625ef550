"""One process that holds everything: the reference that every other strategy has to agree with."""

from collections.abc import Sequence

import torch

from flowshard.device import HostMemory
from flowshard.memory.streaming import hosted_parameters
from flowshard.parallel.strategies.plain import PlainStrategy
from flowshard.parallel.strategies.scaling import LossScale


class Single(PlainStrategy):
    """Plain torch."""

    def __init__(
        self, device: torch.device, *, clip_norm: float | None, loss_scale: LossScale, host_parameters: bool = False
    ) -> None:
        """Prepare.

        Args:
            device: of this process.
            clip_norm: largest gradient norm, or None.
            loss_scale: of the run.
            host_parameters: keep the frozen parameters of blocks in host memory; `stream_blocks` brings them to the device.
        """
        super().__init__(device, clip_norm=clip_norm, loss_scale=loss_scale)
        self._host = HostMemory(device) if host_parameters else None
        self._hosted: set[int] = set()

    def shard(self, model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
        if self._host is not None:
            found = hosted_parameters(model, units)
            self._hosted = {id(parameter) for parameters in found for parameter in parameters.values()}

    def place(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self._host is None or id(parameter) not in self._hosted:
            return super().place(parameter, value)
        return self._host.empty(parameter.shape, parameter.dtype).copy_(value)
