"""A whole command line, launcher included, as a script, its options, and what the launcher would set. Needs no torch."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowshard.compat.options import SCRIPTS, Script
from flowshard.compat.wan_t2v_options import EARLIER
from flowshard.errors import UserError

_KNOWN: tuple[Script, ...] = (*SCRIPTS.values(), EARLIER)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PROCESSES = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node", "-n")
_MACHINES = ("--nnodes", "--num_machines", "--num-machines")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_VALUELESS = {
    "--multi_gpu",
    "--multi-gpu",
    "--use_deepspeed",
    "--use-deepspeed",
    "--use_fsdp",
    "--use-fsdp",
    "--cpu",
    "--standalone",
    "--same_network",
    "--quiet",
    "-q",
    "--debug",
    "--no_python",
    "--use_mps_device",
    "--tpu",
}
"""Options of launchers without a value."""
_ENGINE_OPTIONS = {
    "--zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "--deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "--offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "--offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "--gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "--gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "--mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "--fsdp_version": "FSDP_VERSION",
    "--fsdp_offload_params": "FSDP_OFFLOAD_PARAMS",
    "--fsdp_activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
}
"""Options of `accelerate launch` to what it sets for the processes; keys of its config file have the same names."""


@dataclass
class Command:
    """A command line that starts one of the scripts."""

    script: Script
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """What the launcher sets for the processes, `WORLD_SIZE` among it."""
    assumed: str | None = None
    """Why the number of processes is a guess, if it is one."""


def read_command(words: Sequence[str]) -> Command:
    """Take a command line apart.

    Args:
        words: as a shell gives them: assignments, launcher, script and options.

    Raises:
        UserError: it starts none of the scripts.
    """
    places = [place for place, word in enumerate(words) if word.endswith(".py")]
    script = None
    for place in places:
        script = next((one for one in _KNOWN if _is_path_of(words[place], one.path)), None)
        if script is not None:
            break
    if script is None:
        known = ", ".join(one.path for one in _KNOWN)
        raise UserError(f"COMMAND LINE: starts none of the scripts that are known here: {known}")
    before, after = list(words[:place]), list(words[place + 1 :])
    assigned: dict[str, str] = {}
    while before and (found := _ASSIGNMENT.fullmatch(before[0])):
        assigned[found[1]] = found[2]
        before.pop(0)
    return _launched(Command(script, after), before, assigned)


def _is_path_of(word: str, path: str) -> bool:
    return Path(word).as_posix().endswith(path)


def _launched(command: Command, launcher: list[str], assigned: Mapping[str, str]) -> Command:
    """Fill in what the launcher sets."""
    if "accelerate" in (Path(word).name for word in launcher):
        options = _options(launcher[launcher.index("launch") + 1 :] if "launch" in launcher else [])
        settings = _accelerate_config(options.get("--config_file"))
        command.environment = _accelerate_environment(settings, options)
        count = _first(options, _PROCESSES) or settings.get("num_processes")
        machines = 1
    elif any(Path(word).name == "torchrun" or word.endswith("distributed.run") for word in launcher):
        options = _options(launcher)
        count, machines = _first(options, _PROCESSES) or "1", int(_first(options, _MACHINES) or 1)
    else:
        count, machines = os.environ.get("WORLD_SIZE", "1"), 1
        if command.script is EARLIER and "WORLD_SIZE" not in os.environ:  # which starts processes itself
            count = _first(_options(command.arguments), ("--processes",))
    if count is None:
        devices = next((assigned[name] for name in _DEVICES if assigned.get(name)), None)
        if devices is None:
            command.assumed = "the command line does not say how many processes it starts, so one is taken"
        count = 1 if devices is None else len(devices.split(","))
    if not str(count).isdecimal() or int(count) < 1:
        raise UserError(f"COMMAND LINE: {count!r} is not a number of processes; give it as a number")
    command.environment["WORLD_SIZE"] = str(int(count) * machines)
    return command


def _options(words: Sequence[str]) -> dict[str, str]:
    """The options of a launcher, which all have one value but for some."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("-"):
            continue
        if not equals:
            value = "true" if name in _VALUELESS or not rest or rest[0].startswith("--") else rest.pop(0)
        found[name] = value
    return found


def _first(options: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((options[name] for name in names if name in options), None)


def _accelerate_config(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--config_file: {file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"--config_file: {file} is no config of accelerate")
    return settings


def _accelerate_environment(settings: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, str]:
    """What `accelerate launch` sets for the processes, as far as it concerns a run."""
    kind = str(settings.get("distributed_type", "NO")).upper()
    engines = {
        "ACCELERATE_USE_DEEPSPEED": kind == "DEEPSPEED" or "--use_deepspeed" in options,
        "ACCELERATE_USE_FSDP": kind == "FSDP" or "--use_fsdp" in options,
    }
    environment = {name: "true" for name, used in engines.items() if used}
    keys = {**settings, **(settings.get("deepspeed_config") or {}), **(settings.get("fsdp_config") or {})}
    for option, name in _ENGINE_OPTIONS.items():
        value = options.get(option, keys.get(option.removeprefix("--")))
        if value is not None:
            environment[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return environment
