"""Where a run came from: versions, machine and git state, for its `config.yaml`."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = (
    "flowshard",
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "deepspeed",
    "bitsandbytes",
)


def environment_record() -> dict[str, Any]:
    """Versions of the packages that decide the numbers, and the state of the git repository that we run in."""
    record: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine(), "versions": {}}
    for package in _PACKAGES:
        try:
            record["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _git("rev-parse", "HEAD")
    if commit is not None:
        record["git"] = {"commit": commit, "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    return record


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603, S607
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
