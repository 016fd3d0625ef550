"""Trackers get the numbers of the files, on the main process, and are closed however the run ends."""

import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowshard.config import Config
from flowshard.errors import RunError, UserError
from flowshard.parallel.processes import Processes
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer
from flowshard.train.trackers import start_trackers
from tests import runs

Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


class _Recorder:
    """Notes calls of its methods."""

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*values: Any, **options: Any) -> "_Recorder":
            self._calls.append((f"{self._name}.{method}", values, options))
            return self

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the three packages, which are replaced, are asked to do."""
    noted: Calls = []
    for name in ("tensorboard", "wandb", "swanlab", "torch.utils.tensorboard"):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        recorder = _Recorder(noted, name.rpartition(".")[2])
        for function in ("init", "log", "finish", "SummaryWriter"):
            setattr(module, function, getattr(recorder, function))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("WANDB_PROJECT", "rabbits")
    return noted


def _config(tiny: Path, clips: Path, output: Path, *overrides: str) -> Config:
    names = "log.trackers=[tensorboard, wandb, swanlab]"
    held_out = ["validation.fraction=0.4", "validation.every=2"]
    return runs.config(tiny, clips, output, names, "train.steps=2", "train.global_batch=1", *held_out, *overrides)


def _logged(calls: Calls, method: str) -> list[tuple[int, dict[str, float]]]:
    return [(options["step"], values[0]) for name, values, options in calls if name == method]


def test_they_get_what_the_files_get(tiny: Path, clips: Path, tmp_path: Path, calls: Calls) -> None:
    config = _config(tiny, clips, tmp_path / "run", "log.project=mine")
    runs.run(config)
    lines = runs.metrics(config)
    held_out = [json.loads(line) for line in Path(config.output, "validation.jsonl").read_text().splitlines()]
    for method in ("wandb.log", "swanlab.log"):
        logged = _logged(calls, method)
        assert [step for step, _ in logged] == [0, 1, 2, 2]
        numbers = [logged[1][1], logged[2][1]]
        assert [one["train/loss"] for one in numbers] == [line["loss"] for line in lines]
        assert "train/step" not in numbers[0]
        assert [logged[0][1]["validation/loss"], logged[3][1]["validation/loss"]] == [one["loss"] for one in held_out]
        by_sigma = {key: value for key, value in numbers[0].items() if key.startswith("train/loss_by_sigma/")}
        place = next(place for place, value in enumerate(lines[0]["loss_by_sigma"]) if value is not None)
        assert by_sigma == {f"train/loss_by_sigma/{place}": lines[0]["loss_by_sigma"][place]}
    scalars = [(*values, options["global_step"]) for name, values, options in calls if name == "tensorboard.add_scalar"]
    assert [one for one in scalars if one[0] == "train/loss"] == [
        ("train/loss", line["loss"], line["step"]) for line in lines
    ]
    starts = {name: options for name, _, options in calls if name in ("wandb.init", "swanlab.init")}
    assert starts["wandb.init"]["project"] == "rabbits"  # the environment comes first
    assert starts["swanlab.init"]["project"] == "mine"
    assert starts["wandb.init"]["name"] == starts["swanlab.init"]["experiment_name"] == "run"
    assert starts["wandb.init"]["config"]["train"]["steps"] == 2
    assert (
        "tensorboard.SummaryWriter",
        (),
        {"log_dir": str(tmp_path / "run/tensorboard"), "purge_step": 1, "flush_secs": 10},
    ) in calls
    assert calls[-3:] == [
        ("tensorboard.close", (), {}),
        ("wandb.finish", (), {"exit_code": 0}),
        ("swanlab.finish", (), {}),
    ]


class _Failing(Observer):
    """A fault in the first step."""

    def backward_done(self, step: int, strategy: object) -> None:
        raise RunError("a fault")


def test_they_are_closed_when_the_run_fails(tiny: Path, clips: Path, tmp_path: Path, calls: Calls) -> None:
    inputs = check_inputs(_config(tiny, clips, tmp_path / "run"))
    with pytest.raises(RunError, match="a fault"):
        train(inputs, Processes(inputs.layout, "cpu", timeout_minutes=1), _Failing())
    assert calls[-2:] == [("wandb.finish", (), {"exit_code": 1}), ("swanlab.finish", (), {})]


def test_one_that_cannot_start_is_named_and_the_others_are_closed(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise ValueError("No API key\nconfigured")

    monkeypatch.setattr(sys.modules["swanlab"], "init", fail)
    message = "log.trackers: swanlab cannot start: No API key configured; log in, set SWANLAB_MODE=offline, or leave it"
    with pytest.raises(UserError, match=message):
        start_trackers(["wandb", "swanlab"], tmp_path, {}, project="mine", begin=0)
    assert calls[-1] == ("wandb.finish", (), {"exit_code": 1})


def test_a_run_without_trackers_imports_none(tmp_path: Path, calls: Calls) -> None:
    trackers = start_trackers([], tmp_path, {}, project="mine", begin=0)
    trackers.log({"train/loss": 1.0}, 1)
    trackers.close(failed=False)
    assert calls == []


def test_a_missing_package_is_named_with_its_command(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else found(name, *more)
    )
    with pytest.raises(UserError, match=r"log\.trackers: wandb is not installed; install it with `pip install wandb`"):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", "log.trackers=[wandb]"))
    with pytest.raises(UserError, match=r"log\.trackers"):
        runs.config(tiny, clips, tmp_path / "run", "log.trackers=[mlflow]")
