"""Saves checkpoints in a child that is killed at random moments, many times over; all that is complete has to load.

    python -m tests.workers.saver FOLDER TIMES

Prints how many checkpoints there were to load.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from flowshard.parallel.layout import generation_layout
from flowshard.parallel.processes import Processes
from flowshard.train.checkpoint import MASTERS, OPTIMIZER, complete_checkpoints
from flowshard.train.state import RunFolder
from flowshard.weights.files import read_headers


def save_forever(folder: Path, first: int) -> None:
    processes = Processes(generation_layout(1, 1, {}), "cpu", timeout_minutes=1)
    run = RunFolder(folder)

    def write(partial: Path | None) -> Exception | None:
        assert partial is not None
        for kind in (MASTERS, OPTIMIZER):
            (partial / kind).mkdir()
            save_file({"a": torch.full((100_000,), float(step))}, partial / kind / "00001.safetensors")
        return None

    step = first
    while True:
        run.save_checkpoint(step, write, state={}, resumable=True, keep=3, processes=processes)
        step += 1


def main(folder: Path, times: int) -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    loaded, first = 0, 1
    for _ in range(times):
        child = os.fork()
        if child == 0:
            save_forever(folder, first)
        time.sleep(draw.uniform(0.01, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        complete = list(complete_checkpoints(folder))
        # What has its final name is complete: no other is ever there.
        assert complete == RunFolder(folder).checkpoints()[::-1]
        for checkpoint in complete:
            assert set(read_headers(checkpoint / MASTERS)) == {"a"}
            loaded += 1
        first = int(complete[0].name.removeprefix("step-")) + 1 if complete else first
    sys.stdout.write(f"{loaded}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
