"""Runs cases in this process and writes down what each draws and computes. Started by `parity.launch`.

    python -m flowshard.parity.trace JOB.json

A job is `{"cases": [{"config": FILE, "trace": FOLDER}], "fault": "noise@RANK" or null}`.
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowshard.cli import exit_status
from flowshard.config_file import load_config
from flowshard.libraries import quiet_libraries
from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.strategies import Strategy
from flowshard.train.batches import MicroBatch
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer

GRADIENT_STEPS = (0, 1)
"""Steps whose gradients are written. The second as well, as the first factor of a LoRA has none before."""
_FAULT = 1e-3
"""What a deliberate fault adds to one process's noise."""


@dataclass
class Tracer(Observer):
    """Writes `rank-R.json`, and on the main process `gradients-S.safetensors` and `weights.safetensors`."""

    folder: Path
    rank: int
    fault_rank: int | None
    _steps: list[dict[str, Any]] = field(default_factory=list)

    def batch(self, step: int, batch: MicroBatch) -> MicroBatch:
        if self.rank == self.fault_rank:
            batch = replace(batch, noise=batch.noise + _FAULT)
        while len(self._steps) <= step:
            self._steps.append({"samples": {}})
        for place, position in enumerate(batch.positions):
            self._steps[step]["samples"][position] = {
                "row": batch.rows[place].number,
                "latents": _digest(batch.latents[place]),
                "noise": _digest(batch.noise[place]),
                "sigma": float(batch.sigma[place]),
            }
        return batch

    def backward_done(self, step: int, strategy: Strategy) -> None:
        if step in GRADIENT_STEPS:
            self._write(f"gradients-{step}", dict(strategy.gradients()))

    def step_done(self, step: int, loss: float, gradient_norm: float) -> None:
        self._steps[step].update(loss=loss, grad_norm=gradient_norm)

    def run_done(self, strategy: Strategy) -> None:
        self._write("weights", dict(strategy.parameters(strategy.trained_names())))
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(self._steps), encoding="utf-8")

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if self.rank == 0:
            copies = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}
            save_file(copies, self.folder / f"{name}.safetensors")


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def run_job(file: Path) -> None:
    """Run the cases of a job one after another in one group of processes."""
    job = json.loads(file.read_text(encoding="utf-8"))
    fault = job["fault"]
    fault_rank = int(fault.removeprefix("noise@")) if fault else None
    inputs = [check_inputs(load_config(case["config"])) for case in job["cases"]]
    # A group is only made for a strategy that needs one.
    leader = next((one for one in inputs if one.layout.strategy != "single"), inputs[0])

    def work(processes: Processes) -> None:
        for one, case in zip(inputs, job["cases"], strict=True):
            tracer = Tracer(Path(case["trace"]), one.layout.rank, fault_rank if one.layout.world > 1 else None)
            train(one, processes.with_layout(one.layout), tracer)

    run_together(leader.layout, leader.config, work)


if __name__ == "__main__":
    quiet_libraries()
    os.environ.setdefault("LOCAL_RANK", "0")
    sys.exit(exit_status(lambda: run_job(Path(sys.argv[1]))))
