"""Parameters, gradients and optimizer state divided block by block (torch's `fully_shard`)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowshard.parallel.strategies.plain import PlainStrategy
from flowshard.parallel.strategies.scaling import LossScale


class FullyShardedDataParallel2(PlainStrategy):
    """FSDP2, with HSDP (copies of a divided model) where fewer than all processes divide it."""

    _foreach = True  # torch does by itself for plain tensors only

    def __init__(
        self,
        device: torch.device,
        *,
        clip_norm: float | None,
        loss_scale: LossScale,
        world: int,
        shard: int,
        offload: bool,
        gather_dtype: torch.dtype | None,
    ) -> None:
        """Make the mesh.

        Args:
            device: of this process.
            clip_norm: largest gradient norm, or None.
            loss_scale: of the run.
            world: processes.
            shard: of them, how many divide one copy of the model.
            offload: keep parameters, gradients and optimizer state in host memory between their uses.
            gather_dtype: in which the blocks' parameters are sent; None for their own.
        """
        super().__init__(device, clip_norm=clip_norm, loss_scale=loss_scale)
        if shard == world:
            self._mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        else:
            self._mesh = init_device_mesh(device.type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))
        self._offload = offload
        self._gather_dtype = gather_dtype

    def shard(self, model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
        pinned = self.device.type != "cpu"
        policy = CPUOffloadPolicy(pin_memory=pinned) if self._offload else OffloadPolicy()
        # Gradients are reduced in float32 always. What is outside of the blocks is little, and models keep it precise.
        blocks = MixedPrecisionPolicy(
            param_dtype=self._gather_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for unit in units:
            fully_shard(unit, mesh=self._mesh, offload_policy=policy, mp_policy=blocks)
        fully_shard(model, mesh=self._mesh, offload_policy=policy)

    def place(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return super().place(parameter, value)
        # Every process cuts its own part out of the full value: nothing is sent.
        part = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        # A part may be a view of the full value, or of the file; it must not keep that alive.
        place = torch.device("cpu") if self._offload else self.device
        local = part.to_local().to(place, parameter.dtype, copy=True, memory_format=torch.contiguous_format)
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        model: Any = self.model
        assert isinstance(model, FSDPModule)  # noqa: S101
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def _release(self) -> None:
        model: Any = self._unwrapped
        model.reshard()  # the outermost parameters, which the engine keeps for a backward pass

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        local: Any = tensor.to(self.device) if self._offload else tensor
        full: torch.Tensor = local.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full
