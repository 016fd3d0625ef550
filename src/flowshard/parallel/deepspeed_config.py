"""The DeepSpeed config of a run: ours, with what a user's own JSON file adds. Needs no torch."""

import json
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flowshard.config import Config
from flowshard.errors import UserError
from flowshard.parallel.layout import Layout

_ENGINES_OWN = ("bf16", "fp16", "amp", "torch_autocast", "data_types")
"""Switches of precision. Ours is one rule for all strategies (`docs/layouts.md`), so these stay off."""
_SUPPORTED, _OLDEST = (0, 19, 2), (0, 16, 9)
"""Releases from which all strategies work, and from which ZeRO-3 trains LoRA in float32."""
_OTHER_DIVISIONS = {
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}
"""Settings that change the numbers, or what each process holds of a parameter, with their values when they are off."""
_OTHERS_OWN = ("optimizer", "scheduler")


def check_deepspeed(config: Config, layout: Layout) -> None:
    """Refuse what the installed release of DeepSpeed cannot do.

    Raises:
        UserError: it is not installed, or too old for the run.
    """
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        raise UserError(
            f"layout.strategy: {layout.strategy} needs DeepSpeed, which is not installed; install flowshard[deepspeed] or "
            "use layout.strategy=fsdp2"
        ) from None
    if _numbers(installed) >= _SUPPORTED:
        return
    needed = ".".join(map(str, _SUPPORTED))
    if _numbers(installed) < _OLDEST:
        raise UserError(f"layout.strategy: deepspeed {installed} is too old; install deepspeed>={needed}")
    # Measured with 0.16.9 and 0.18.9 on torch 2.13: the first update of stages 1 and 2 fails ("Output 0 of Split is a
    # view"), and so do parameters of several types.
    if layout.strategy != "zero3":
        raise UserError(
            f"layout.strategy: {layout.strategy} does not work with deepspeed {installed}; install deepspeed>={needed} or "
            "use layout.strategy=zero3, fsdp2 or ddp"
        )
    if config.model.dtype != "float32" or config.train.method != "lora":
        raise UserError(
            f"layout.strategy: with deepspeed {installed}, zero3 trains LoRA with model.dtype=float32 alone; install "
            f"deepspeed>={needed} or use layout.strategy=fsdp2"
        )


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def read_deepspeed_file(path: str | Path) -> dict[str, Any]:
    """A user's DeepSpeed JSON.

    Raises:
        UserError: it cannot be read.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"layout.deepspeed: {path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"layout.deepspeed: {path} is not a JSON object")
    return value


def deepspeed_config(config: Config, layout: Layout) -> dict[str, Any]:
    """The config that `deepspeed.initialize` gets.

    Raises:
        UserError: the user's file contradicts the run; the message names the key, both values and the fix.
    """
    stage = int(layout.strategy.removeprefix("zero"))
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["memory_efficient_linear"] = False  # replaces torch's linear function for the whole process
    if config.layout.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.layout.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    fixed: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "train_batch_size": config.train.global_batch,
        "gradient_clipping": config.train.clip_norm or 0.0,  # the engine's default is 1.0, not off
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own Adam would be another optimizer than the other strategies'
        "steps_per_print": 2**31 - 1,
        "zero_optimization": zero,
    }
    # The engine knows of no processes that share a sample: to it, each has samples of its own.
    engines_own = {"train_batch_size": config.train.micro_batch * layout.accumulation * layout.world}
    file = layout.deepspeed_file
    if file is None:
        return {**fixed, **engines_own}
    users = read_deepspeed_file(file)
    asks_offload = users.get("activation_checkpointing", {}).get("cpu_checkpointing", False) is True
    if asks_offload and config.memory.activations != "offload":
        raise UserError(f"{file}: activation_checkpointing.cpu_checkpointing is on; set memory.activations=offload")
    merged = {**_merge(fixed, users, file), **engines_own}
    zero = merged["zero_optimization"]
    for key, default in _OTHER_DIVISIONS.items():
        if zero.get(key, default) != default:
            raise UserError(
                f"{file}: zero_optimization.{key} is {zero[key]!r}, which rounds parameters or divides them in a way that "
                "is not loaded here; remove it"
            )
    if zero.get("offload_param", {}).get("device") == "nvme":
        raise UserError(f"{file}: zero_optimization.offload_param.device is nvme, which cannot be loaded into; use cpu")
    return merged


def _merge(fixed: dict[str, Any], users: Mapping[str, Any], file: str, path: str = "") -> dict[str, Any]:
    merged = dict(fixed)
    for key, value in users.items():
        name = f"{path}{key}"
        if not path and key in _OTHERS_OWN:
            raise UserError(f"{file}: {name} has two owners; remove it and set train.optimizer or train.schedule")
        if not path and key in _ENGINES_OWN:
            if value is not False and not (isinstance(value, dict) and value.get("enabled", False) in (False, "auto")):
                raise UserError(
                    f"{file}: {name} casts other things than model.dtype does; remove it and set model.dtype"
                )
            continue
        ours = fixed.get(key)
        if isinstance(ours, dict) and isinstance(value, Mapping):
            merged[key] = _merge(ours, value, file, f"{name}.")
        elif value == "auto":
            continue
        elif ours is not None and ours != value:
            raise UserError(
                f"{file}: {name} is {value!r}, the run has {ours!r}; remove it there or change the run's option"
            )
        else:
            merged[key] = value
    return merged
