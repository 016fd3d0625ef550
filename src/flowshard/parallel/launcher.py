"""What `accelerate launch` was configured for, read from the environment that it sets. Needs no torch.

accelerate itself is not used: on the CPU it turns FSDP2 and ZeRO into plain data parallelism without a word.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flowshard.config import Config
from flowshard.errors import UserError

_DEEPSPEED, _FSDP = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"
_TRUE = ("1", "true", "yes")
_HOST = ("cpu", "nvme")


@dataclass(frozen=True)
class _Wish:
    """Something about memory that a launcher's config can ask for and that the run's config has to ask for as well."""

    engine: str
    """Variable that says that the engine is in use."""
    variable: str
    values: tuple[str, ...]
    """Values of `variable` that ask for it."""
    key: str
    """In the launcher's config."""
    fix: str
    """In ours."""
    granted: Callable[[Config], bool]
    strategy: str | None = None
    """The only one with which it means something, if there is one: the engine ignores it with others."""


_WISHES = (
    _Wish(
        _DEEPSPEED,
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        _HOST,
        "offload_optimizer_device",
        "layout.offload_optimizer=true",
        lambda config: config.layout.offload_optimizer,
    ),
    _Wish(
        _DEEPSPEED,
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        _HOST,
        "offload_param_device",
        "layout.offload_parameters=true",
        lambda config: config.layout.offload_parameters,
        strategy="zero3",
    ),
    _Wish(
        _FSDP,
        "FSDP_OFFLOAD_PARAMS",
        _TRUE,
        "fsdp_offload_params",
        "layout.offload_parameters=true",
        lambda config: config.layout.offload_parameters,
    ),
    _Wish(
        _FSDP,
        "FSDP_ACTIVATION_CHECKPOINTING",
        _TRUE,
        "fsdp_activation_checkpointing",
        "memory.activations=recompute",
        lambda config: config.memory.activations != "keep",
    ),
)


def launcher_strategy(environment: Mapping[str, str]) -> str | None:
    """The strategy; None for plain data parallel or torchrun.

    Raises:
        UserError: FSDP 1, or a DeepSpeed file that cannot be read.
    """
    if _on(environment, _DEEPSPEED):
        file = launcher_deepspeed_file(environment)
        if file is not None:
            from flowshard.parallel.deepspeed_config import read_deepspeed_file

            stage = read_deepspeed_file(file).get("zero_optimization", {}).get("stage", 0)
        else:
            stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        return {"0": "ddp"}.get(str(stage), f"zero{stage}")
    if _on(environment, _FSDP):
        version = environment.get("FSDP_VERSION", "1")
        if version != "2":
            raise UserError(f"fsdp_version: the launcher's config asks for FSDP {version}; set fsdp_version: 2")
        return "fsdp2"
    return None


def launcher_deepspeed_file(environment: Mapping[str, str]) -> str | None:
    """The DeepSpeed JSON that the launcher's config names."""
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return None if file.lower() in ("none", "") or not _on(environment, _DEEPSPEED) else file


def check_launcher(config: Config, environment: Mapping[str, str], *, accumulation: int, data_parallel: int) -> None:
    """Refuse a launcher's config that says something else than the run's.

    Raises:
        UserError: about precision, accumulation, clipping or memory; the message names both options.
    """
    precision = {"bf16": "bfloat16", "fp16": "float16"}.get(environment.get("ACCELERATE_MIXED_PRECISION", "no"))
    if precision not in (None, config.model.dtype):
        raise UserError(
            f"model.dtype: the config says {config.model.dtype!r}, the launcher's mixed_precision {precision!r}; change "
            "one of them"
        )
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", "auto", str(accumulation)):
        raise UserError(
            f"gradient_accumulation_steps: the launcher's config says {steps}, but train.global_batch "
            f"{config.train.global_batch} / (train.micro_batch {config.train.micro_batch} * {data_parallel}) gives "
            f"{accumulation}; remove it from the launcher's config"
        )
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "none")
    if clipping not in ("none", "auto") and float(clipping) != (config.train.clip_norm or 0.0):
        raise UserError(
            f"gradient_clipping: the launcher's config says {clipping}, train.clip_norm is {config.train.clip_norm}; "
            "change one of them"
        )
    for wish in _WISHES:
        asked = _on(environment, wish.engine) and environment.get(wish.variable, "none").lower() in wish.values
        if asked and wish.strategy in (None, launcher_strategy(environment)) and not wish.granted(config):
            raise UserError(
                f"{wish.key}: the launcher's config asks for it and the run's does not; set {wish.fix}, or remove it"
            )


def _on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in _TRUE
