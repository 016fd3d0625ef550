"""The moving average of the trained weights: its values, its files, and turning it on and off."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from flowshard.config import Config
from flowshard.config_file import dump_config
from flowshard.errors import UserError
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.launch import torchrun

DECAY = 0.75
EMA = f"train.ema={DECAY}"
Make = Callable[..., Config]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def make(tiny: Path, clips: Path, tmp_path: Path) -> Make:
    """A config whose checkpoints are all kept; the first argument names its output."""

    def config(name: str, *overrides: str) -> Config:
        fixed = ["train.global_batch=2", "train.learning_rate=1e-3", "save.every=1", "save.keep=9"]
        return runs.config(tiny, clips, tmp_path / name, *fixed, *overrides)

    return config


def _checkpoint(config: Config, step: int) -> Path:
    return Path(config.output, "checkpoints", f"step-{step:08d}")


def _state(checkpoint: Path) -> tuple[Tensors, Tensors]:
    """Masters, and their averages, by name."""
    state = runs.training_state(checkpoint)
    averages = {name.removesuffix("/ema"): value for name, value in state.items() if name.endswith("/ema")}
    return {name: value for name, value in state.items() if "/" not in name}, averages


def test_it_begins_with_the_first_weights_and_follows_every_update(make: Make) -> None:
    config = make("run", EMA, "train.modules=[proj_out]", "lora.rank=2", "lora.alpha=1")
    start = runs.fill_model(check_inputs(config)).strategy
    average = {name: value.double().clone() for name, value in start.parameters(start.trained_names())}
    runs.run(config)
    for step in (1, 2, 3):
        masters, found = _state(_checkpoint(config, step))
        average = {name: DECAY * value + (1 - DECAY) * masters[name] for name, value in average.items()}
        assert runs.distance(found, average) < 1e-6
        for file in ("lora.safetensors", "modules.safetensors"):
            plain = load_file(_checkpoint(config, step) / file)
            for_use = load_file(_checkpoint(config, step) / "ema" / file)
            assert {name: value.shape for name, value in for_use.items()} == {n: v.shape for n, v in plain.items()}
            for name, value in plain.items():  # the scale is folded into what is for use
                master = name.removeprefix("transformer.").replace(".lora_A.", ".lora_A.default.")
                master = master.replace(".lora_B.", ".lora_B.default.")
                factor = (value.double() * masters[master]).sum() / masters[master].square().sum()
                torch.testing.assert_close(for_use[name].double(), factor * average[master], rtol=1e-5, atol=1e-8)


def test_full_training_has_a_second_transformer_for_use(make: Make) -> None:
    config = make("run", EMA, "train.method=full", "train.steps=1", "save.dtype=float32")
    last = runs.run(config)
    _, averages = _state(last)
    model = WanTransformer3DModel.from_pretrained(last / "ema" / "transformer")
    found = {name: value.detach() for name, value in model.named_parameters() if name in averages}
    assert runs.distance(found, averages) < 1e-6
    assert runs.distance(averages, dict(_state(last)[0])) > 1e-6


@pytest.mark.parametrize(
    "strategies",
    [["single"], pytest.param(["zero1", "zero2", "zero3", "fsdp2"], marks=pytest.mark.slow)],
    ids=["single", "divided"],
)
def test_it_can_be_turned_on_and_off_between_the_parts_of_a_run(
    make: Make, tmp_path: Path, strategies: list[str]
) -> None:
    """Turned on, it begins with the weights that are there; turned off, nothing of it is left."""
    both = {"with": make("with", EMA, "train.steps=2"), "without": make("without", "train.steps=2")}
    for config in both.values():
        runs.run(config)
    configs, jobs = {}, []
    for strategy in strategies:
        for name, overrides in (("with", []), ("without", [EMA])):
            kind = f"{strategy}-{name}"
            resume = f"resume={_checkpoint(both[name], 2)}"
            configs[kind] = make(kind, "train.steps=3", resume, f"layout.strategy={strategy}", *overrides)
            if strategy == "single":
                runs.run(configs[kind])
                continue
            (tmp_path / f"{kind}.job.yaml").write_text(dump_config(configs[kind], {}))
            jobs.append({"config": str(tmp_path / f"{kind}.job.yaml"), "stop_after": None})
    if jobs:
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        done = torchrun(2, ["tests.workers.runs", str(tmp_path / "jobs.json")])
        assert done.returncode == 0, done.stderr[-3000:]
    before = _state(_checkpoint(both["without"], 2))[0]
    for kind, config in configs.items():
        masters, averages = _state(_checkpoint(config, 3))
        assert (_checkpoint(config, 3) / "ema").exists() == bool(averages) == kind.endswith("without"), kind
        if averages:
            expected = {name: DECAY * value + (1 - DECAY) * masters[name] for name, value in before.items()}
            assert runs.distance(averages, expected) < 1e-6, kind


def test_without_an_update_there_is_no_average_yet(make: Make, tmp_path: Path) -> None:
    """And going on from there is as going on from the start."""
    config = make("run", EMA, "train.steps=1", "train.on_nan=skip")
    runs.run(config)
    good = {file: file.read_bytes() for file in (tmp_path / "cache" / "media").iterdir()}
    for file in good:
        save_file({"latents": torch.full_like(load_file(file)["latents"], float("nan"))}, file)
    shutil.rmtree(config.output)
    assert not (runs.run(config) / "ema").exists()
    for file, content in good.items():
        file.write_bytes(content)
    last = runs.run(make("run", EMA, "train.steps=2", "train.on_nan=skip", "resume=auto"))
    masters, averages = _state(last)
    start = runs.fill_model(check_inputs(config)).strategy
    first = dict(start.parameters(start.trained_names()))
    expected = {name: DECAY * value.double() + (1 - DECAY) * masters[name] for name, value in first.items()}
    assert runs.distance(averages, expected) < 1e-6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.ema=1"], "train.ema: 1 is not less than 1"),
        (
            ["train.ema=0.9", "train.optimizer=torch.optim.Adagrad", "layout.strategy=zero2"],
            "train.ema: zero2 makes an",
        ),
    ],
)
def test_what_cannot_be_averaged_is_refused(make: Make, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_inputs(make("run", *overrides), {"WORLD_SIZE": "2"})
