"""The run's folder: its record, its checkpoints, and what happens to an earlier run in the same place."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flowshard.errors import RunError
from flowshard.parallel.processes import Processes
from flowshard.train.checkpoint import STATE, write_manifest
from flowshard.train.sample_files import drop_samples_after
from flowshard.train.trackers import FOLDERS
from flowshard.weights.files import apply_umask, atomic_file, sync

_RUN_FILES = ("config.yaml", "metrics.jsonl", "validation.jsonl", "checkpoints", "samples", "report.html", *FOLDERS)
_PARTIAL = ".partial"
_STOP = "stop"
"""A file of this name in the run's folder asks the run to save and stop."""


class RunFolder:
    """`runs/NAME`. Nothing in it is ever overwritten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.validation = path / "validation.jsonl"
        self._checkpoints = path / "checkpoints"

    def prepare(self, config_text: str, *, resumed: Path | None, step: int) -> str | None:
        """Create the folder and write `config.yaml`; an earlier run moves to `previous/N`, unless it goes on.

        Args:
            config_text: of the run.
            resumed: checkpoint that the run goes on from, here or elsewhere.
            step: updates that were done by then; later lines of metrics and validation are dropped.

        Returns:
            A line for the user if an earlier run was moved.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / _STOP).unlink(missing_ok=True)
        goes_on = resumed is not None and resumed.absolute().parent == self._checkpoints.absolute()
        moved = None
        if goes_on and step:
            for file in (self.metrics, self.validation):
                _drop_lines_after(step, file)
            drop_samples_after(self.path / "samples", step)
            # Damaged ones, or those after one that was asked for: the run comes to these steps again.
            later = [one for one in self.checkpoints() if one.name > f"step-{step:08d}"]
            moved = self._set_aside(later, what="checkpoints of later steps")
        else:
            moved = self._set_aside(
                [self.path / name for name in _RUN_FILES if (self.path / name).exists()], what="an earlier run"
            )
        with atomic_file(self.path / "config.yaml") as temporary:
            temporary.write_text(config_text, encoding="utf-8")
        return moved

    @property
    def stop_requested(self) -> bool:
        """Whether the user has put a file `stop` there."""
        return (self.path / _STOP).exists()

    def is_validated(self, step: int) -> bool:
        """Whether the held-out loss after that many updates is there."""
        if not self.validation.is_file():
            return False
        lines = self.validation.read_text(encoding="utf-8").splitlines()
        return any(json.loads(line)["step"] == step for line in lines)

    def _set_aside(self, items: Sequence[Path], *, what: str) -> str | None:
        """Move files and folders of the run to the same place below `previous/N`; a line for the user if there are any."""
        if not items:
            return None
        previous = self.path / "previous"
        taken = [int(entry.name) for entry in previous.glob("*") if entry.name.isdecimal()]
        target = previous / str(max(taken, default=0) + 1)
        for item in items:
            place = target / item.relative_to(self.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            item.rename(place)
        return f"{self.path} held {what}, which {'are' if what.endswith('s') else 'is'} now in {target}"

    def save_checkpoint(
        self,
        step: int,
        write: Callable[[Path | None], Exception | None],
        *,
        state: dict[str, Any],
        resumable: bool,
        keep: int,
        processes: Processes,
    ) -> Path:
        """Write `checkpoints/step-N` as a whole or not at all, then delete the oldest beyond `keep`. Collective.

        Args:
            step: updates done.
            write: writes the weights into the folder that it is given; given None, it only takes part in gathering.
                Returns what the disk refused.
            state: noted in `state.json`.
            resumable: whether masters and optimizer state are among what is written.
            keep: complete checkpoints that remain.
            processes: of which the main one writes.

        Raises:
            RunError: on every process, if the disk refuses; earlier checkpoints are untouched.
        """
        final = self._checkpoints / f"step-{step:08d}"
        partial = self._checkpoints / f".{final.name}{_PARTIAL}"
        refused: Exception | None = None
        if processes.is_main:
            try:
                for left in self._checkpoints.glob(f".*{_PARTIAL}"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                partial.mkdir(parents=True)
            except OSError as error:
                refused = error
        written = write(partial if processes.is_main and refused is None else None)
        refused = refused or written
        problem = None
        if processes.is_main:
            try:
                if refused is not None:
                    raise refused
                (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=2), encoding="utf-8")
                if resumable:
                    write_manifest(partial)
                for item in [*partial.rglob("*"), partial]:
                    if item.is_file():
                        apply_umask(item)
                    sync(item)
                partial.rename(final)
                sync(self._checkpoints)
            except (OSError, ValueError, SafetensorError) as error:
                shutil.rmtree(partial, ignore_errors=True)
                last = self.newest_checkpoint()
                kept = f"the last complete checkpoint is {last}" if last else "there is no earlier checkpoint"
                problem = f"cannot save step {step} in {final}: {error}; {kept}; make room and start again"
        processes.wait_for_all("save")  # writing may take longer than a collective waits
        problem = processes.share(problem)
        if problem is not None:
            raise RunError(problem)
        if processes.is_main:
            for old in self.checkpoints()[:-keep]:
                gone = self._checkpoints / f".{old.name}{_PARTIAL}"
                old.rename(gone)  # at once, so that what has a checkpoint's name is always whole
                shutil.rmtree(gone)
        return final

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self._checkpoints.glob("step-*"))

    def newest_checkpoint(self) -> Path | None:
        """The last complete checkpoint, if there is one."""
        return next(reversed(self.checkpoints()), None)


def _drop_lines_after(step: int, file: Path) -> None:
    """Updates that were made after the checkpoint are made again."""
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    with atomic_file(file) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
