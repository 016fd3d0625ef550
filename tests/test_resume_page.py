"""The commands of `docs/resume.md`, run as the page has them, and what is left of a run under every strategy."""

import json
import re
from pathlib import Path

import pytest

from flowshard.config_file import dump_config
from tests import runs
from tests.conftest import REPOSITORY
from tests.launch import python, torchrun

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")


def _commands() -> list[str]:
    """The lines that start or continue a run, with the shell's words."""
    text = (REPOSITORY / "docs" / "resume.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if "flowshard train" in line and "..." not in line]


def _run(command: str, folder: Path, **more: str) -> str:
    words = command.replace("CONFIG", "job.yaml").split()
    start = {"flowshard": ["-m", "flowshard"], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[words[0]]
    done = python([*start, *words[1:]], folder=folder, more=more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_page(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """A run begun and continued by one command, and one that changes its layout on the way, end as those never stopped."""
    whole = runs.config(tiny, clips, tmp_path / "whole", "train.steps=6")
    runs.run(whole)
    own = runs.config(tiny, clips, tmp_path / "own", "train.steps=6")
    (tmp_path / "job.yaml").write_text(dump_config(own, {}), encoding="utf-8")
    again, first, second = _commands()
    assert "resumed" not in _run(again, tmp_path)
    assert "all 6 steps are done" in _run(again, tmp_path)
    expected = [line["loss"] for line in runs.metrics(whole)]  # made with another number of threads
    assert [line["loss"] for line in runs.metrics(own)] == pytest.approx(expected, rel=1e-6)
    _run(first, tmp_path)
    saved = sorted(path.name for path in (tmp_path / "runs" / "a" / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000004"]
    assert re.search(r"resumed .*step-00000004 after step 4", _run(second, tmp_path))
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_final_weights_are_there_once_under_every_strategy(tiny: Path, clips: Path, tmp_path: Path) -> None:
    expected = {0: [10], 3: [3, 6, 9, 10], 5: [5, 10], 10: [10], 100: [10]}
    configs = {
        (strategy, every): runs.config(
            tiny,
            clips,
            tmp_path / f"{strategy}-{every}",
            f"layout.strategy={strategy}",
            "train.steps=10",
            "train.global_batch=2",
            f"save.every={every}",
            "save.keep=9",
            "save.resumable=false",
        )
        for strategy in STRATEGIES
        for every in expected
    }
    job = []
    for config in configs.values():
        file = Path(config.output).with_suffix(".job.yaml")
        file.write_text(dump_config(config, {}), encoding="utf-8")
        job.append({"config": str(file), "stop_after": None})
    (tmp_path / "jobs.json").write_text(json.dumps(job), encoding="utf-8")
    done = torchrun(2, ["tests.workers.runs", str(tmp_path / "jobs.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    reference = runs.weights(
        runs.run(runs.config(tiny, clips, tmp_path / "single", "train.steps=10", "train.global_batch=2"))
    )
    for (strategy, every), config in configs.items():
        saved = sorted(Path(config.output, "checkpoints").iterdir())
        assert [path.name for path in saved] == [f"step-{step:08d}" for step in expected[every]], (strategy, every)
        files = list(saved[-1].rglob("*.safetensors"))
        assert [file.name for file in files] == ["lora.safetensors"]
        assert runs.distance(runs.weights(saved[-1]), reference) < 1e-5, (strategy, every)
