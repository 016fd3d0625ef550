"""The most bytes of tensors that are alive in a process during training, as torch's own allocator counts them.

    torchrun --nproc-per-node N -m tests.workers.memory CONFIG.yaml ...

Prints a line of JSON for every config: the peak, of all processes, in the steps after the first.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flowshard.config_file import load_config
from flowshard.libraries import quiet_libraries
from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.strategies import Strategy
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer

_STEP = "flowshard test: a step is done"
dist: Any = torch.distributed


class Marker(Observer):
    """Marks the end of each step in the record of the profiler."""

    def step_done(self, step: int, loss: float, gradient_norm: float, strategy: Strategy) -> None:
        with record_function(_STEP):
            pass


def peaks(record: profile) -> list[int]:
    """The peak of each step, of all that was allocated since the record began."""
    assert record.profiler is not None and record.profiler.kineto_results is not None
    events: list[Any] = [
        event for event in record.profiler.kineto_results.events() if event.name() in ("[memory]", _STEP)
    ]
    live = peak = 0
    found = []
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == _STEP:
            found.append(peak)
            peak = live
        else:
            live += event.nbytes()
            peak = max(peak, live)
    return found


def main(files: list[str]) -> None:
    def work(processes: Processes) -> None:
        for file in files:
            inputs = check_inputs(load_config(file))
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
                train(inputs, processes.with_layout(inputs.layout), Marker())
            first, *later = peaks(record)
            assert first and later
            gathered: list[Any] = [None] * inputs.layout.world
            dist.all_gather_object(gathered, max(later))
            processes.say(json.dumps({"config": file, "peak": max(gathered)}))

    run_together(check_inputs(load_config(files[0])).layout, work, device_name="cpu")


if __name__ == "__main__":
    quiet_libraries()
    main(sys.argv[1:])
