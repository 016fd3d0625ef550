"""Reads a run's folder: config, metrics, held-out losses, samples, checkpoints. Needs no torch."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowshard.config_file import RECORD_KEY
from flowshard.errors import UserError
from flowshard.train.sample_files import find_samples

QUARTILES = 4
"""Parts of the range of sigma for which losses are given, from low noise to high."""
NUMBERS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "samples_per_second",
    "tokens_per_second",
    "mfu",
    "seconds",
    "seconds_data",
    "seconds_forward",
    "seconds_backward",
    "seconds_optimizer",
    "seconds_communication",
    "memory_peak_bytes",
    "memory_peak_rank",
    "skipped_updates",
)
"""Fields of a line of metrics that are one number."""


@dataclass
class Table:
    """Numbers by step; a number that a line lacks, or null, is NaN."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def has(self, name: str) -> bool:
        """Whether some line has the number."""
        return any(not math.isnan(value) for value in self.columns[name])

    def last(self, name: str) -> float:
        """The number in the last line that has it, else NaN."""
        return next((value for value in reversed(self.columns[name]) if not math.isnan(value)), math.nan)


def quartile(index: int) -> str:
    """The column of the losses in one part of the range of sigma."""
    return f"loss_by_sigma.{index}"


@dataclass(frozen=True)
class Run:
    """What is on the disk of a run."""

    path: Path
    config: Mapping[str, Any]
    """Resolved, without the record."""
    record: Mapping[str, Any]
    """Versions, layout, machine, git state."""
    metrics: Table
    validation: Table
    """Held-out losses; empty if there are none."""
    samples: Mapping[int, Mapping[int, Path]]
    """Step to index of the prompt to picture or clip."""
    checkpoints: Mapping[int, int]
    """Step to bytes of all files."""

    @property
    def planned(self) -> int | None:
        """Steps of the whole run, as far as the files say."""
        steps = self.record.get("steps") or _mapping(self.config.get("train")).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def done(self) -> int:
        """Steps that were made."""
        return int(self.metrics.steps[-1]) if len(self.metrics) else 0

    def prompt(self, index: int) -> str:
        """The prompt of a sample, as far as the config says."""
        prompts = _mapping(self.config.get("validation")).get("prompts")
        if not isinstance(prompts, list) or index >= len(prompts):
            return f"prompt {index}"
        one = prompts[index]
        return str(one.get("prompt", "")) if isinstance(one, Mapping) else str(one)


def read_run(path: Path) -> Run:
    """Read the folder of a run, also of one that is still going on.

    Raises:
        UserError: it is none, or a file in it is damaged; the message names it.
    """
    if not (path / "config.yaml").is_file():
        what = "does not exist" if not path.exists() else "is no run: it has no config.yaml"
        raise UserError(f"RUN: {path} {what}; give the folder that `flowshard train` wrote, `output` of its config")
    try:
        tree = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"RUN: {path / 'config.yaml'} cannot be read: {' '.join(str(error).split())}; restore the file"
        ) from None
    if not isinstance(tree, dict):
        raise UserError(f"RUN: {path / 'config.yaml'} holds no options; give the folder that `flowshard train` wrote")
    record = _mapping(tree.pop(RECORD_KEY, None))
    return Run(
        path,
        tree,
        record,
        _read_table(path / "metrics.jsonl", NUMBERS),
        _read_table(path / "validation.jsonl", ("loss",)),
        find_samples(path / "samples"),
        _checkpoints(path / "checkpoints"),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read_table(file: Path, names: tuple[str, ...]) -> Table:
    table = Table(columns={name: array("d") for name in (*names, *map(quartile, range(QUARTILES)))})
    for line in _lines(file):
        table.steps.append(line["step"])
        for name in names:
            table.columns[name].append(_number(line.get(name)))
        parts = line.get("loss_by_sigma")
        if not isinstance(parts, list) or len(parts) != QUARTILES:
            parts = [None] * QUARTILES
        for index, part in enumerate(parts):
            table.columns[quartile(index)].append(_number(part))
    return table


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; the last one may still be being written."""
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as stream:
        for number, text in enumerate(stream, start=1):
            if not text.endswith("\n"):
                return
            try:
                line = json.loads(text)
                if isinstance(line["step"], bool) or not isinstance(line["step"], int):
                    raise TypeError
            except (ValueError, TypeError, KeyError):
                raise UserError(f"RUN: {file}: line {number} is no JSON object with a step; remove the line") from None
            yield line


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _checkpoints(folder: Path) -> dict[int, int]:
    return {
        int(entry.name.removeprefix("step-")): sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
        for entry in sorted(folder.glob("step-*[0-9]"))
    }
