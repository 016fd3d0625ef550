"""Going on from a checkpoint: as if nothing had happened, under any layout, and refused where it would be another run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowshard.cli import main
from flowshard.config import Config
from flowshard.config_file import dump_config
from flowshard.errors import UserError
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import Strategy
from flowshard.train.checkpoint import complete_checkpoints
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer
from flowshard.train.stop import seconds
from tests import runs
from tests.launch import environment, local_agent, torchrun

METHODS = {
    "lora": ["train.modules=[proj_out]", "lora.rank=4", "lora.alpha=3"],
    "full": ["train.method=full", "train.learning_rate=1e-5"],
}
ANY = ["ddp", "zero2", "zero3", "fsdp2", "zero1"]
Make = Callable[..., Config]


@pytest.fixture
def make(tiny: Path, clips: Path, tmp_path: Path) -> Make:
    """A config of six steps with a schedule; the first argument names its output."""

    def config(name: str, *overrides: str) -> Config:
        fixed = ["train.steps=6", "train.schedule=cosine", "save.keep=9"]
        return runs.config(tiny, clips, tmp_path / name, *fixed, *overrides)

    return config


def _checkpoint(config: Config, step: int) -> Path:
    return Path(config.output, "checkpoints", f"step-{step:08d}")


def _losses(config: Config) -> list[float]:
    return [line["loss"] for line in runs.metrics(config)]


def _files(checkpoint: Path) -> dict[str, bytes]:
    """Of everything that holds tensors."""
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*.safetensors")}


@pytest.mark.parametrize("method", METHODS)
def test_three_and_three_steps_are_bitwise_six(make: Make, method: str) -> None:
    own = [*METHODS[method], "train.ema=0.75"]
    whole = make("whole", *own, "save.every=3")
    runs.run(whole)
    parts = make("parts", *own, "save.every=2")
    runs.run(parts)
    # Lines of updates after the checkpoint are written anew, and an earlier run's folder stays where it is.
    for later in _checkpoint(parts, 4), _checkpoint(parts, 6):
        shutil.rmtree(later)
    again = runs.run(make("parts", *own, "save.every=3", "resume=auto"))
    assert _losses(parts) == _losses(whole)
    assert [line["step"] for line in runs.metrics(parts)] == [1, 2, 3, 4, 5, 6]
    assert _files(again) == _files(_checkpoint(whole, 6))
    assert not Path(parts.output, "previous").exists()


@pytest.mark.parametrize("method", [pytest.param("lora"), pytest.param("full", marks=pytest.mark.slow)])
def test_any_layout_goes_on_from_any(make: Make, tmp_path: Path, method: str) -> None:
    """From one process to each strategy on two, from each of these to the next, and back to one process."""
    own = [*METHODS[method], "save.every=1", "train.ema=0.75"]
    whole = make("whole", *own)
    expected = runs.training_state(runs.run(whole))
    configs = {}
    for place, strategy in enumerate(ANY):
        first = [f"layout.strategy={strategy}", f"resume={_checkpoint(whole, 3)}"]
        configs[strategy] = make(strategy, *own, *first, f"train.micro_batch={1 + place % 2}")
    for strategy, following in zip(ANY, [*ANY[1:], ANY[0]], strict=True):
        then = [f"layout.strategy={following}", f"resume={_checkpoint(configs[strategy], 4)}"]
        configs[f"{strategy}-{following}"] = make(f"{strategy}-{following}", *own, *then)
    share = ["layout.strategy=fsdp2", "layout.sequence=2", f"resume={_checkpoint(configs['zero3'], 4)}"]
    configs["shared"] = make("shared", *own, *share)
    jobs = []
    for name, config in configs.items():
        (tmp_path / f"{name}.job.yaml").write_text(dump_config(config, {}))
        jobs.append({"config": str(tmp_path / f"{name}.job.yaml"), "stop_after": None})
    # A checkpoint that a job of this launch makes is not there yet when the configs above are made.
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(2, ["tests.workers.runs", str(tmp_path / "jobs.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    configs["single"] = make("back", *own, f"resume={_checkpoint(configs['zero3'], 5)}")
    runs.run(configs["single"])
    for name, config in configs.items():
        found = runs.training_state(_checkpoint(config, 6))
        assert runs.distance(found, expected) < 1e-5, name
        kept = _losses(config)
        assert kept == pytest.approx(_losses(whole)[-len(kept) :], rel=1e-6), name


@pytest.mark.slow
def test_four_processes_that_share_samples_go_on_from_one(make: Make, tmp_path: Path) -> None:
    own = METHODS["lora"]
    whole = make("whole", *own, "save.every=3")
    expected = runs.training_state(runs.run(whole))
    config = make("four", *own, "layout.strategy=zero3", "layout.sequence=2", f"resume={_checkpoint(whole, 3)}")
    (tmp_path / "four.job.yaml").write_text(dump_config(config, {}))
    done = torchrun(4, ["flowshard", "train", str(tmp_path / "four.job.yaml")])
    assert done.returncode == 0, done.stderr[-3000:]
    assert runs.distance(runs.training_state(_checkpoint(config, 6)), expected) < 1e-5


def test_weights_alone_begin_a_new_run(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    first = make("first", *METHODS["lora"])
    runs.run(first)
    spec = f"resume=weights:{first.output}"
    second = make("second", *METHODS["lora"], spec, "seed=3", "train.learning_rate=0", "train.steps=2")
    last = runs.run(second)
    assert [line["step"] for line in runs.metrics(second)] == [1, 2]
    assert runs.distance(runs.weights(last), runs.weights(_checkpoint(first, 6))) < 1e-7
    assert "resumed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=1", "seed was 0 and is 1"),
        ("data.height=48", "data.height was 32 and is 48"),
        ("train.global_batch=2", "train.global_batch was 4 and is 2"),
        ("objective.shift=2", "objective was {.* and is {"),
        ("lora.rank=8", "lora.rank was 4 and is 8"),
        ("train.optimizer=torch.optim.SGD", "train.optimizer was 'adamw' and is 'torch.optim.SGD'"),
        ("lora.targets=[to_q]", "trained other tensors: it has besides blocks.0.attn1.to_k"),
    ],
)
def test_another_run_is_refused(make: Make, override: str, message: str) -> None:
    runs.run(make("run", *METHODS["lora"], "train.steps=1"))
    with pytest.raises(UserError, match=message):
        runs.run(make("run", *METHODS["lora"], "resume=auto", override))


def test_other_rows_are_refused_and_what_may_change_is_said(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make("run", *METHODS["lora"], "train.steps=1")
    runs.run(config)
    data = tmp_path / "data"
    shutil.copytree(Path(str(config.data.metadata)).parent, data)
    lines = (data / "metadata.csv").read_text().splitlines(keepends=True)
    (data / "metadata.csv").write_text("".join([lines[0], lines[2], lines[1], *lines[3:]]))
    with pytest.raises(UserError, match="has other rows than when"):
        runs.run(make("run", *METHODS["lora"], "resume=auto", f"data.metadata={data / 'metadata.csv'}"))
    runs.run(make("run", *METHODS["lora"], "resume=auto", "train.learning_rate=1e-3", "train.steps=2"))
    said = capsys.readouterr().out
    assert "resume: changed since step 1: train.steps 1 -> 2, train.learning_rate 0.0001 -> 0.001" in said


def test_damaged_checkpoints_are_passed_over_or_refused(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("run", *METHODS["lora"], "train.steps=3", "save.every=1")
    runs.run(config)
    masters = next((_checkpoint(config, 3) / "masters").iterdir())
    masters.write_bytes(masters.read_bytes()[:-1])
    (_checkpoint(config, 2) / "manifest.json").unlink()
    assert list(complete_checkpoints(Path(config.output))) == [_checkpoint(config, 1)]
    for step, message in ((3, "is missing or cut off; give an earlier"), (2, "has no manifest.json")):
        with pytest.raises(UserError, match=message):
            check_inputs(make("run", *METHODS["lora"], f"resume={_checkpoint(config, step)}"))
    with pytest.raises(UserError, match=r"is neither a checkpoint with a state.json nor a run"):
        check_inputs(make("run", *METHODS["lora"], "resume=nowhere"))
    losses = [line["loss"] for line in runs.metrics(config)]
    runs.run(make("run", *METHODS["lora"], "train.steps=3", "save.every=1", "resume=auto"))
    assert "held checkpoints of later steps, which are now in" in capsys.readouterr().out
    assert list(complete_checkpoints(Path(config.output))) == [_checkpoint(config, step) for step in (3, 2, 1)]
    assert [path.name for path in sorted(Path(config.output, "previous", "1", "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000003",
    ]
    assert [line["loss"] for line in runs.metrics(config)] == losses
    content = bytearray((_checkpoint(config, 1) / "state.json").read_bytes())
    content[-3] ^= 1
    (_checkpoint(config, 1) / "state.json").write_bytes(content)
    with pytest.raises(UserError, match="is not what was saved"):
        check_inputs(make("run", *METHODS["lora"], f"resume={_checkpoint(config, 1)}"))


def test_auto_begins_where_there_is_nothing_and_ends_where_all_is_done(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make("run", "train.steps=2", "resume=auto")
    runs.run(config)
    before = _files(_checkpoint(config, 2))
    runs.run(config)
    assert "all 2 steps are done" in capsys.readouterr().out
    assert _files(_checkpoint(config, 2)) == before
    assert len(runs.metrics(config)) == 2


def test_checkpoints_that_are_not_to_be_resumed_hold_the_weights_only(make: Make) -> None:
    config = make("run", "train.steps=1", "save.resumable=false")
    assert {path.name for path in runs.run(config).iterdir()} == {"lora.safetensors", "state.json"}


@dataclass
class _Toucher(Observer):
    """Puts a file named stop into the run's folder after an update."""

    file: Path

    def step_done(self, step: int, loss: float, gradient_norm: float, strategy: Strategy) -> None:
        if step == 1:
            self.file.touch()


def test_a_file_named_stop_saves_and_stops(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = make("run")
    inputs = check_inputs(config)
    toucher = _Toucher(Path(config.output, "stop"))
    last = train(inputs, Processes(inputs.layout, "cpu", timeout_minutes=1), toucher)
    assert last == _checkpoint(config, 3)
    assert "stopped by a file named stop after step 3 of 6" in capsys.readouterr().out
    assert runs.run(make("run", "resume=auto")) == _checkpoint(config, 6)
    assert not toucher.file.exists()


def test_a_limit_of_time_saves_and_stops(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert [seconds(text) for text in ("2h50m", "90m", "45s", "1h1s")] == [10200, 5400, 45, 3601]
    assert runs.run(make("run", "save.before=0s")).name == "step-00000001"
    assert "stopped by save.before=0s after step 1 of 6" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"save.before: '2 hours' is no duration such as 2h50m"):
        make("run", "save.before=2 hours")


def test_a_checkpoint_is_complete_or_not_there_however_saving_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.workers.saver", str(tmp_path / "run"), "50"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 50


@pytest.mark.slow
def test_a_killed_worker_restarts_the_group_which_goes_on(make: Make, tmp_path: Path) -> None:
    """As torchrun --max-restarts does it; the weights are those of an undisturbed run."""
    own = [*METHODS["lora"], "train.steps=40", "save.every=1", "save.keep=2", "layout.strategy=zero2"]
    config = make("run", *own, "resume=auto")
    (tmp_path / "job.yaml").write_text(dump_config(config, {}))
    agent = [*local_agent(2), "--max-restarts=1", "-m", "flowshard", "train", str(tmp_path / "job.yaml")]
    log = (tmp_path / "log").open("w")
    started = subprocess.Popen([sys.executable, "-m", *agent], env=environment(), stdout=log, stderr=log)
    try:
        metrics, end = Path(config.output, "metrics.jsonl"), time.monotonic() + 120
        while time.monotonic() < end and not (metrics.is_file() and metrics.read_text().count("\n") >= 3):
            time.sleep(0.05)
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert started.wait(timeout=240) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        started.kill()
    assert re.search(r"resumed .*step-\d+ after step \d+", (tmp_path / "log").read_text())
    plain = make("plain", *own)
    (tmp_path / "plain.yaml.job").write_text(dump_config(plain, {}))
    assert torchrun(2, ["flowshard", "train", str(tmp_path / "plain.yaml.job")]).returncode == 0
    expected = runs.training_state(_checkpoint(plain, 40))
    assert runs.distance(runs.training_state(_checkpoint(config, 40)), expected) < 1e-6
    assert _losses(config) == pytest.approx(_losses(plain), rel=1e-6)


def test_the_command_says_what_it_goes_on_from(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: Any = make("run", "train.steps=1")
    runs.run(config)
    (tmp_path / "job.yaml").write_text(dump_config(make("run", "train.steps=2"), {}))
    assert main(["train", str(tmp_path / "job.yaml"), "resume=auto"]) == 0
    assert f"resumed {_checkpoint(config, 1)} after step 1" in capsys.readouterr().out
