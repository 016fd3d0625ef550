"""The recipe scripts under DiffSynth-Studio's names, and what they start."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
RECIPES = sorted(file for file in EXAMPLES.glob("*/model_training/**/*.sh") if "npu_training" not in file.parts)
LAUNCHERS = sorted(
    file
    for pattern in ("full/accelerate_config*.yaml", "special/*/deepspeed*.yaml")
    for file in EXAMPLES.glob(f"*/model_training/{pattern}")
)

_RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORDED"], "a") as stream:
    noted = [os.environ[name] for name in {noted}]
    stream.write(json.dumps([os.path.basename(sys.argv[0]), *noted, *sys.argv[1:]]) + "\\n")
"""


@dataclass(frozen=True)
class Started:
    """A command that a recipe starts."""

    launcher: list[str]
    """Options of `accelerate launch`."""
    script: str
    arguments: list[str]

    def option(self, name: str) -> str | None:
        """The value of an option of the script; the last one counts."""
        values = [self.arguments[place + 1] for place, one in enumerate(self.arguments) if one == f"--{name}"]
        return values[-1] if values else None


def name_of(file: Path) -> str:
    """A file by its place in the repository."""
    return str(file.relative_to(EXAMPLES))


def calls_of(
    recipe: Path, folder: Path, *options: str, noted: Sequence[str] = (), **environment: str
) -> list[list[str]]:
    """Run a recipe with programs that only note how they are called in the place of `accelerate` and `modelscope`.

    Returns:
        Of each call the program, the values of the variables `noted`, and the arguments.
    """
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("accelerate", "modelscope"):
        (programs / name).write_text(_RECORDER.format(python=sys.executable, noted=list(noted)), encoding="utf-8")
        (programs / name).chmod(0o755)
    recorded = folder / f"{recipe.stem}.jsonl"
    recorded.unlink(missing_ok=True)
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "RECORDED": str(recorded), **environment}
    subprocess.run(["bash", str(recipe.relative_to(REPOSITORY)), *options], cwd=REPOSITORY, env=variables, check=True)
    return [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]


def dry_run(recipe: Path, folder: Path, *options: str, **environment: str) -> tuple[list[Started], list[list[str]]]:
    """Run a recipe as `calls_of` does.

    Returns:
        What it starts, and what it downloads.
    """
    calls = calls_of(recipe, folder, *options, **environment)
    started = []
    for program, *arguments in calls:
        if program == "accelerate":
            place = next(place for place, one in enumerate(arguments) if one.endswith(".py"))
            assert arguments[0] == "launch"
            started.append(Started(arguments[1:place], arguments[place], arguments[place + 1 :]))
    return started, [arguments for program, *arguments in calls if program == "modelscope"]


def launcher_environment(file: Path, monkeypatch: Any) -> dict[str, str]:
    """What `accelerate launch --config_file FILE` sets in its processes.

    `_validate_launch_command` is private; the tests that ask for this fail when it changes.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    monkeypatch.chdir(REPOSITORY)
    given = ["--config_file", str(file), "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    arguments.deepspeed_fields_from_accelerate_config = ""
    return {**prepare_deepspeed_cmd_env(arguments)[1], "WORLD_SIZE": str(arguments.num_processes)}
