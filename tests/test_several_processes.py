"""What only shows with several processes: engines' state, stops and saves, lost peers, several machines."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flowshard.config import Config
from flowshard.config_file import dump_config
from flowshard.device import check_dtype
from flowshard.errors import UserError
from tests import runs
from tests.launch import environment, free_port, local_agent, start, torchrun
from tests.workers.strategies import CASES, CHECKS

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")


def _config_file(config: Config) -> str:
    file = Path(config.output).with_suffix(".yaml")
    file.write_text(dump_config(config, {}), encoding="utf-8")
    return str(file)


def _job(folder: Path, configs: dict[str, Config], stop_after: dict[str, int] | None = None) -> str:
    job = [
        {"config": _config_file(config), "stop_after": (stop_after or {}).get(name)} for name, config in configs.items()
    ]
    file = folder / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    return str(file)


def test_every_strategy_equals_plain_torch_on_three_processes(tmp_path: Path) -> None:
    """Norm, clipped update, optimizer state by name and from anywhere, and the loss scale of float16."""
    done = torchrun(3, ["tests.workers.strategies", str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.partition(":")[0] in CASES]
    assert lines == [f"{case}: {check}" for case in CASES for check in CHECKS]


def test_float16_is_refused_on_the_cpu() -> None:
    with pytest.raises(UserError, match="'float16' is not trained on the CPU; use bfloat16 or float32"):
        check_dtype(torch.device("cpu"), "float16")
    check_dtype(torch.device("cpu"), "bfloat16")


@pytest.fixture
def seven(tmp_path: Path, clips: Path) -> Path:
    """Seven samples, which neither two processes nor a global batch of six divide."""
    folder = tmp_path / "seven"
    folder.mkdir()
    rows = [f"{number % 5},clip {number}" for number in range(7)]
    text = "video,prompt\n" + "".join(f"clip_{row[0]}.mp4{row[1:]}\n" for row in rows)
    (folder / "metadata.csv").write_text(text)
    for clip in clips.glob("*.mp4"):
        (folder / clip.name).symlink_to(clip)
    return folder


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_stopped_run_has_saved_the_same_files_under_every_strategy(
    tiny: Path, seven: Path, tmp_path: Path, method: str
) -> None:
    """Saved in the middle, and at a signal that one process got; accumulation 3 on seven samples.

    Every process must have taken part in the same number of collectives.
    """
    fixed = ["train.global_batch=6", "train.steps=9", "save.every=2", "save.keep=9", f"train.method={method}"]
    fixed += ["train.modules=[proj_out]"] if method == "lora" else ["train.learning_rate=1e-5"]
    single = runs.config(tiny, seven, tmp_path / "single", *fixed, "train.steps=4")
    runs.run(single)
    configs = {
        name: runs.config(tiny, seven, tmp_path / name, *fixed, f"layout.strategy={name}") for name in STRATEGIES
    }
    job = _job(tmp_path, configs, dict.fromkeys(configs, 3))
    done = torchrun(2, ["tests.workers.runs", job])
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"[1-9]\d* collectives on every process", done.stdout)) == len(configs)
    assert done.stdout.count("stopped by another process after step 4 of 9") == len(configs)
    expected = {path.name: runs.weights(path) for path in Path(single.output, "checkpoints").iterdir()}
    assert sorted(expected) == ["step-00000002", "step-00000004"]
    for name, config in configs.items():
        saved = {path.name: runs.weights(path) for path in Path(config.output, "checkpoints").iterdir()}
        assert saved.keys() == expected.keys(), name
        for step, tensors in expected.items():
            assert {key: t.shape for key, t in saved[step].items()} == {key: t.shape for key, t in tensors.items()}
            assert runs.distance(saved[step], tensors) < 1e-5, (name, step)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_end_with_a_message_when_a_process_is_killed(
    tiny: Path, clips: Path, tmp_path: Path, lost: int
) -> None:
    """Two processes without an agent that would end them, as on two machines."""
    config = runs.config(tiny, clips, tmp_path / "run", "train.steps=100000", "layout.strategy=zero3")
    file, port = _config_file(config), str(free_port())
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    started = [
        start(["flowshard", "train", file], log, **shared, RANK=str(rank), MASTER_PORT=port)
        for rank, log in enumerate(logs)
    ]
    try:
        metrics = Path(config.output, "metrics.jsonl")
        while not (metrics.exists() and metrics.read_text().count("\n") > 1):
            assert all(process.poll() is None for process in started), [log.read_text()[-2000:] for log in logs]
            time.sleep(0.2)
        started[lost].send_signal(signal.SIGKILL)
        assert started[1 - lost].wait(timeout=120) == 1
    finally:
        for process in started:
            process.kill()
    message = logs[1 - lost].read_text()
    assert f"flowshard: error: rank {1 - lost}: the contact to another process was lost" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(("world", "status"), [("1", -signal.SIGABRT), ("2", 1)])
def test_a_failed_process_of_several_does_not_wait_for_the_interpreter(world: str, status: int) -> None:
    """While the interpreter shuts down, threads of a broken group may abort the process; here something always does."""
    code = "import atexit, os; from flowshard.cli import end_process; atexit.register(os.abort); end_process(1)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(WORLD_SIZE=world), check=False)
    assert done.returncode == status


@pytest.mark.slow
def test_two_machines_of_two_processes_equal_one_of_four(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Two agents of torchrun on the loopback device; zero3 and fsdp2 in one launch each."""
    losses = {}
    for machines in (1, 2):
        folder = tmp_path / str(machines)
        configs = {
            name: runs.config(tiny, clips, folder / name, f"layout.strategy={name}", f"data.cache={tmp_path / 'cache'}")
            for name in ("zero3", "fsdp2")
        }
        job = _job(folder, configs)
        if machines == 1:
            agents = [local_agent(4)]
        else:
            place = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
            agents = [
                ["torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", *place]
                for node in range(2)
            ]
        logs = [folder / f"agent-{number}.log" for number in range(len(agents))]
        started = [
            start([*agent, "-m", "tests.workers.runs", job], log) for agent, log in zip(agents, logs, strict=True)
        ]
        try:
            for process, log in zip(started, logs, strict=True):
                assert process.wait(timeout=300) == 0, log.read_text()[-3000:]
        except subprocess.TimeoutExpired:
            pytest.fail("\n".join(log.read_text()[-3000:] for log in logs))
        finally:
            for process in started:
                process.kill()
        losses[machines] = [[line["loss"] for line in runs.metrics(config)] for config in configs.values()]
    assert losses[2] == losses[1]
    assert losses[1][0] == pytest.approx(losses[1][1], rel=1e-6)
