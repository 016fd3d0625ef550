"""Several runs in one launch, some of them stopped by a signal to one process.

    torchrun --nproc-per-node N -m tests.workers.runs JOB.json

A job is `[{"config": FILE, "stop_after": STEP or null}]`.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed

from flowshard.config_file import load_config
from flowshard.libraries import quiet_libraries
from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.strategies import Strategy
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer

dist: Any = torch.distributed


@dataclass
class Stopper(Observer):
    """Sends SIGTERM to the last process alone, which then has to tell the others."""

    after: int | None
    last: bool

    def step_done(self, step: int, loss: float, gradient_norm: float, strategy: Strategy) -> None:
        if self.last and step + 1 == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def _collectives() -> int:
    """Of the group of all processes so far."""
    group: Any = dist.group.WORLD
    number: int = group._get_sequence_number_for_group()
    return number


def main(file: Path) -> None:
    jobs = json.loads(file.read_text(encoding="utf-8"))

    def work(processes: Processes) -> None:
        for job in jobs:
            one = check_inputs(load_config(job["config"]))  # now, as it may go on from an earlier one
            layout, before = one.layout, _collectives()
            train(one, processes.with_layout(layout), Stopper(job["stop_after"], layout.rank == layout.world - 1))

            counts: list[int] = [0] * layout.world
            dist.all_gather_object(counts, _collectives() - before)
            assert len(set(counts)) == 1, counts
            processes.say(f"{counts[0]} collectives on every process")

    run_together(check_inputs(load_config(jobs[0]["config"])).layout, work, device_name="cpu")


if __name__ == "__main__":
    quiet_libraries()
    main(Path(sys.argv[1]))
