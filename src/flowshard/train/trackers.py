"""Experiment trackers, imported only where they are asked for."""

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowshard.errors import UserError

FOLDERS = ("tensorboard", "wandb", "swanlog")
"""What they write into a run's folder."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not there.

    Raises:
        UserError: naming the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"log.trackers: {name} is not installed; install it with `pip install {name}`, or leave it out"
            )


class Tracker(ABC):
    """One tracker of a run, on the main process."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers by name after so many updates."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Send or write what is left; `failed` says how the run ended."""


class Trackers(Tracker):
    """All trackers of a run, or none."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(values, step)

    def close(self, *, failed: bool) -> None:
        for tracker in self._trackers:
            tracker.close(failed=failed)


def start_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any], *, begin: int) -> Trackers:
    """Start trackers.

    Args:
        names: `log.trackers`.
        folder: of the run; its name is the name of what is tracked.
        config: of the run.
        begin: updates done before.

    Raises:
        UserError: a tracker cannot start, for example because nobody is logged in.
    """
    kinds: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]]
    kinds = {"tensorboard": _TensorBoard, "wandb": _Wandb, "swanlab": _SwanLab}
    started: list[Tracker] = []
    for name in names:
        try:
            started.append(kinds[name](folder, config, begin))
        except Exception as error:  # of types that each tracker has of its own
            Trackers(started).close(failed=True)
            raise UserError(
                f"log.trackers: {name} cannot start: {' '.join(str(error).split())}; log in, set "
                f"{name.upper()}_MODE=offline, or leave it out"
            ) from error
    return Trackers(started)


def flat(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers of a line of `metrics.jsonl` or `validation.jsonl`, those of lists by their place; what is null is left out."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        items = (
            {f"{name}/{place}": one for place, one in enumerate(value)} if isinstance(value, list) else {name: value}
        )
        numbers.update({f"{prefix}/{key}": float(one) for key, one in items.items() if one is not None})
    return numbers


class _TensorBoard(Tracker):
    """https://pytorch.org/docs/stable/tensorboard.html"""

    def __init__(self, folder: Path, config: Mapping[str, Any], begin: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        del config
        # What an earlier part of the run wrote of later steps is not shown.
        self._writer: Any = SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=begin + 1, flush_secs=10)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self, *, failed: bool) -> None:
        del failed
        self._writer.close()


class _Wandb(Tracker):
    """https://docs.wandb.ai/ref/python/init/; `WANDB_MODE=offline` writes files only."""

    def __init__(self, folder: Path, config: Mapping[str, Any], begin: int) -> None:
        import wandb

        del begin
        project = os.environ.get("WANDB_PROJECT", config["log"]["project"])
        self._run: Any = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _SwanLab(Tracker):
    """https://docs.swanlab.cn/en/api/py-init.html; `SWANLAB_MODE=offline` writes files only."""

    def __init__(self, folder: Path, config: Mapping[str, Any], begin: int) -> None:
        import swanlab

        del begin
        self._swanlab: Any = swanlab
        project = os.environ.get("SWANLAB_PROJECT", config["log"]["project"])
        swanlab.init(project=project, experiment_name=folder.name, logdir=str(folder / "swanlog"), config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        del failed
        self._swanlab.finish()
