"""From `zero3:2,activations=offload` to a run. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowshard.config import Config, LayoutConfig, MemoryConfig, Section, TrainConfig
from flowshard.config_file import load_config
from flowshard.errors import UserError
from flowshard.train.inputs import check_inputs

_SECTIONS: dict[str, type[Section]] = {"layout": LayoutConfig, "memory": MemoryConfig, "train": TrainConfig}


@dataclass(frozen=True)
class Case:
    """One layout to run."""

    label: str
    """As the user wrote it."""
    processes: int
    overrides: tuple[str, ...]


def parse_case(label: str) -> Case:
    """Read `STRATEGY[:PROCESSES][,key=value...]`, keys being those of `layout`, `memory` and `train`.

    `sp:N` is short for `ddp:N,sequence=N`.

    Raises:
        UserError: it is not of that form.
    """
    head, *settings = _split(label)
    strategy, colon, count = head.partition(":")
    if colon and (not count.isdecimal() or int(count) < 1):
        raise UserError(f"--layout {label}: {count!r} is not a number of processes; write for example zero3:2")
    processes = int(count) if colon else 1
    overrides = []
    if strategy == "sp":
        strategy, overrides = "ddp", [f"layout.sequence={processes}"]
    overrides.insert(0, f"layout.strategy={strategy}")
    for setting in settings:
        key, equals, value = setting.partition("=")
        section = next((name for name, model in _SECTIONS.items() if key in model.model_fields), None)
        if not equals or section is None:
            raise UserError(
                f"--layout {label}: {setting!r} is not key=value with a key of layout, memory or train, for example "
                "activations=offload or micro_batch=2"
            )
        overrides.append(f"{section}.{key}={value}")
    return Case(label, processes, tuple(overrides))


def _split(label: str) -> list[str]:
    """Split at the commas that stand outside of braces and brackets."""
    parts, depth = [""], 0
    for character in label:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def case_config(case: Case, config_file: str, overrides: Sequence[str], folder: Path) -> Config:
    """The case's config, checked as `train` would check it.

    Args:
        case: the layout.
        config_file: of the run.
        overrides: of all cases.
        folder: for what the cases write; encoded samples are shared by them.

    Raises:
        UserError: the config or the layout is wrong.
    """
    output = folder / "runs" / "".join(c if c.isalnum() else "-" for c in case.label)
    own = [f"output={output}", "save.every=0", "validation.every=0", "log.flops=false", "log.trackers=[]"]
    plain = load_config(config_file, [*overrides, *own, *case.overrides])
    if plain.data.cache == "auto":
        own.append(f"data.cache={folder / 'cache'}")
    config = load_config(config_file, [*overrides, *own, *case.overrides])
    check_inputs(config, {"WORLD_SIZE": str(case.processes)})
    return config
