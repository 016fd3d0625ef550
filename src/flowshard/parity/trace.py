"""Runs cases in this process and writes down what each draws and computes. Started by `parity.launch`.

    python -m flowshard.parity.trace JOB.json

A job is `{"cases": [{"config": FILE, "trace": FOLDER, "fault": FAULT or null}], "probe": BOOL}`; see `faults.py`.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowshard.cli import end_process, exit_status
from flowshard.config_file import load_config
from flowshard.libraries import quiet_libraries
from flowshard.objective.randomness import generator
from flowshard.parallel.layout import Layout
from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.strategies import Strategy
from flowshard.parity.faults import Fault, parse_fault
from flowshard.parity.padding import fill_padding
from flowshard.parity.walk import ModuleProbe
from flowshard.train.batches import MicroBatch
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import NewWeights, Observer
from flowshard.weights.lora import is_lora_b

GRADIENTS, WEIGHTS = "gradients.safetensors", "weights.safetensors"
"""Gradients of the first step, and weights after the last."""
_SPREAD = 0.01
"""Standard deviation that the second factors of adapters start with. With zeros, as in a run, the first factors would
have no gradient in the first step, and in the second AdamW has already turned rounding into whole steps."""


@dataclass
class Tracer(Observer):
    """Writes `rank-R.json`, and on the main process `gradients.safetensors` and `weights.safetensors`."""

    folder: Path
    layout: Layout
    global_batch: int
    fault: Fault | None
    probing: bool
    _probe: ModuleProbe | None = None
    _steps: list[dict[str, Any]] = field(default_factory=list)

    def started(self, model: torch.nn.Module) -> None:
        if self.fault is not None:
            self.fault.install(model)
        if self.probing:
            self._probe = ModuleProbe(model)

    def new_weights(self, values: NewWeights) -> NewWeights:
        return {
            name: replace(one, make=partial(spread, name, one.make)) if is_lora_b(name) else one
            for name, one in values.items()
        }

    def batch(self, step: int, batch: MicroBatch) -> MicroBatch:
        batch = fill_padding(batch, step)
        if self.fault is not None:
            batch = self.fault.disturb(batch)
        while len(self._steps) <= step:
            self._steps.append({"samples": {}})
        for place, position in enumerate(batch.positions):
            self._steps[step]["samples"][position] = {
                "row": batch.rows[place].number,
                "latents": _digest(batch.latents[place]),
                "noise": _digest(batch.noise[place]),
                "sigma": float(batch.sigma[place]),
            }
        if self._probe is not None and step == 0 and 0 in batch.positions:
            self._probe.record(batch.positions.index(0), len(batch.positions))
        return batch

    def backward_done(self, step: int, strategy: Strategy) -> None:
        if step == 0:
            self._write(GRADIENTS, dict(strategy.gradients()))
            if self._probe is not None and 0 in self._steps[0]["samples"]:
                # The loss of a process is the mean over its samples, times the degree of sequence parallelism.
                own = self.global_batch / self.layout.data_parallel
                self._probe.write(self.folder, self.layout.rank, own / self.layout.sequence / strategy.loss_scale.value)

    def step_done(self, step: int, loss: float, gradient_norm: float, strategy: Strategy) -> None:
        self._steps[step].update(loss=loss, grad_norm=gradient_norm, missing=strategy.without_gradient())

    def run_done(self, strategy: Strategy) -> None:
        self._write(WEIGHTS, dict(strategy.parameters(strategy.trained_names())))
        (self.folder / f"rank-{self.layout.rank}.json").write_text(json.dumps(self._steps), encoding="utf-8")

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if self.layout.rank == 0:
            copies = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}
            save_file(copies, self.folder / name)


def spread(name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the second factor of an adapter starts with here: what a run makes, but for zeros."""
    value = make()
    if value.any():  # a LoRA that was trained before
        return value
    return torch.randn(value.shape, generator=generator(0, "parity", name)) * _SPREAD


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def run_job(file: Path) -> None:
    """Run the cases of a job one after another in one group of processes."""
    job = json.loads(file.read_text(encoding="utf-8"))
    inputs = [check_inputs(load_config(case["config"])) for case in job["cases"]]
    # A group is only made for a strategy that needs one.
    leader = next((one for one in inputs if one.layout.strategy != "single"), inputs[0])

    def work(processes: Processes) -> None:
        for one, case in zip(inputs, job["cases"], strict=True):
            layout = one.layout
            fault = parse_fault(case["fault"]) if case["fault"] else None
            tracer = Tracer(
                folder=Path(case["trace"]),
                layout=layout,
                global_batch=one.config.train.global_batch,
                fault=fault if fault is not None and fault.rank == layout.rank else None,
                probing=job["probe"],
            )
            train(one, processes.with_layout(layout), tracer)

    run_together(
        leader.layout,
        work,
        device_name=leader.config.device,
        timeout_minutes=leader.config.layout.timeout_minutes,
    )


if __name__ == "__main__":
    quiet_libraries()
    os.environ.setdefault("LOCAL_RANK", "0")
    end_process(exit_status(lambda: run_job(Path(sys.argv[1]))))
