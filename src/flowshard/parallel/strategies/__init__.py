"""Who holds parameters, gradients and optimizer state: one file a strategy, all behind `Strategy`."""

import torch

from flowshard.config import Config
from flowshard.parallel.deepspeed_config import deepspeed_config
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies.base import GroupSettings, OptimizerFactory, Strategy
from flowshard.parallel.strategies.scaling import LossScale
from flowshard.parallel.strategies.single import Single

__all__ = ["GroupSettings", "LossScale", "OptimizerFactory", "Single", "Strategy", "make_strategy"]


def make_strategy(config: Config, processes: Processes) -> Strategy:
    """The strategy of the layout. Engines are imported only where they are used.

    Raises:
        UserError: the config of an engine contradicts the run.
    """
    layout, device, clip_norm = processes.layout, processes.device, config.train.clip_norm
    loss_scale = LossScale(dynamic=config.model.dtype == "float16")
    if layout.strategy == "single":
        host_parameters = config.memory.parameters == "host"
        return Single(device, clip_norm=clip_norm, loss_scale=loss_scale, host_parameters=host_parameters)
    if layout.strategy == "ddp":
        from flowshard.parallel.strategies.ddp import DataParallel

        return DataParallel(device, clip_norm=clip_norm, loss_scale=loss_scale)
    if layout.strategy == "fsdp2":
        from flowshard.parallel.strategies.fsdp2 import FullyShardedDataParallel2

        return FullyShardedDataParallel2(
            device,
            clip_norm=clip_norm,
            loss_scale=loss_scale,
            world=layout.world,
            shard=layout.shard,
            offload=config.layout.offload_parameters,
            gather_dtype=torch.bfloat16 if config.layout.gather_dtype == "bfloat16" else None,
        )
    from flowshard.parallel.strategies.deepspeed import DeepSpeed

    return DeepSpeed(device, clip_norm=clip_norm, loss_scale=loss_scale, config=deepspeed_config(config, layout))
