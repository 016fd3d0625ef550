"""Short training runs for tests: configs at the smallest sizes, runs in this process, and what they left behind."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flowshard.config import Config
from flowshard.config_file import load_config
from flowshard.data.dataset import Encoder, open_datasets
from flowshard.memory.compiled import CompileChoice
from flowshard.objective.sigmas import NoiseLevels
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import LossScale, Single, Strategy
from flowshard.train.batches import StepBatches
from flowshard.train.build import Build, build_on_meta, fill
from flowshard.train.checkpoint import MASTERS, OPTIMIZER
from flowshard.train.inputs import RunInputs, check_inputs
from flowshard.train.loop import run_training
from flowshard.train.optimizer import optimizer_factory
from flowshard.weights.export import WeightsWriter
from flowshard.weights.report import LoadReport

SIZE, FRAMES = 32, 5
"""Pixels a side and frames of a clip: 8 tokens."""

_BASE = f"""
model: {{variant: wan2.1-t2v-1.3b, dtype: float32}}
data: {{height: {SIZE}, width: {SIZE}, frames: {FRAMES}}}
train: {{steps: 3, global_batch: 4}}
lora: {{rank: 4, alpha: 4}}
"""


def config(tiny: Path, clips: Path, output: Path, *overrides: str) -> Config:
    """A small float32 LoRA run on the clips, with overrides."""
    file = output.parent / f"{output.name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_BASE, encoding="utf-8")
    fixed = [f"model.path={tiny}", f"data.metadata={clips / 'metadata.csv'}", f"output={output}"]
    if not any(override.startswith("data.cache=") for override in overrides):
        fixed.append(f"data.cache={output.parent / 'cache'}")  # shared by the runs of a test
    return load_config(file, [*fixed, *overrides])


@dataclass
class Filled:
    """A transformer with its weights, as a run has it before its first step."""

    build: Build
    report: LoadReport
    strategy: Strategy
    writer: WeightsWriter

    @property
    def model(self) -> torch.nn.Module:
        return self.build.model


def fill_model(inputs: RunInputs, compiling: CompileChoice | None = None) -> Filled:
    """What `train` does up to the first step, on one process."""
    build = build_on_meta(inputs, compiling=compiling)
    writer = WeightsWriter(build.model, inputs.config)
    strategy = Single(
        torch.device("cpu"),
        clip_norm=inputs.config.train.clip_norm,
        loss_scale=LossScale(dynamic=False),
        host_parameters=inputs.config.memory.parameters == "host",
    )
    report = fill(build, inputs, strategy)
    strategy.start(build.model, build.settings, optimizer_factory(inputs.config))
    return Filled(build, report, strategy, writer)


def batches(inputs: RunInputs) -> StepBatches:
    """The batches of a run on one process, encoded now."""
    config = inputs.config
    processes = Processes(inputs.layout, "cpu", timeout_minutes=1)
    dtype = getattr(torch, config.model.dtype)
    encoder = Encoder(config, inputs.family, inputs.source, inputs.data.training, dtype, processes.device)
    dataset, _ = open_datasets(encoder, inputs.data, config.cache_folder, processes=processes)
    levels = NoiseLevels(config.objective, inputs.shift)
    return StepBatches(dataset, inputs.family, config, inputs.layout, levels, guidance=inputs.guidance)


def run(config: Config) -> Path:
    """Train in this process; the folder of the last checkpoint."""
    inputs = check_inputs(config)
    checkpoint = run_training(inputs)
    assert checkpoint is not None
    return checkpoint


def metrics(config: Config) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    text = Path(config.output, "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that are for use, by file and name."""
    return {
        f"{file.relative_to(checkpoint)}:{name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        if file.parent.name not in (MASTERS, OPTIMIZER)
        for name, tensor in load_file(file).items()
    }


def training_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Masters and optimizer state of a checkpoint, by name."""
    files = [file for kind in (MASTERS, OPTIMIZER) for file in sorted((checkpoint / kind).iterdir())]
    return {name: tensor.double() for file in files for name, tensor in load_file(file).items()}


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference over the norm, over all tensors together."""
    assert found.keys() == expected.keys()
    square = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    norm = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return float((square / norm) ** 0.5)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm."""
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())
