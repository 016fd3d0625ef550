"""One run, any layout, one loss curve: several processes against one, through `flowshard parity`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowshard.config_file import dump_config
from flowshard.data.order import Order
from flowshard.errors import RunError
from flowshard.parity.command import ParityOptions, parity
from tests import runs
from tests.conftest import REPOSITORY
from tests.launch import python

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")
POLICIES = ("keep", "recompute", "selective", "offload")
SMALL = ["data.height=32", "data.width=32", "data.frames=5", "model.dtype=float32"]


def options(tiny: Path, layouts: list[str], *overrides: str, **changes: object) -> ParityOptions:
    fields = {
        "config": str(REPOSITORY / "examples/wan_lora.yaml"),
        "overrides": [
            f"model.path={tiny}",
            f"data.metadata={REPOSITORY / 'examples/data/bunny/metadata.csv'}",
            *SMALL,
            *overrides,
        ],
        "layouts": layouts,
        "steps": 3,
        "tolerance": None,
        "json": None,
        "layers": None,
        "fault": None,
    }
    return ParityOptions(**{**fields, **changes})  # type: ignore[arg-type]


def _grid(file: Path, *, both: bool, half: int | None = None) -> list[str]:
    """All strategies with all policies; accumulation 1 and 2 in turn, or both for each; or every second pair.

    Every parameter of the tiny model is below the size from which ZeRO-3 divides one by default, so here it divides all.
    """
    file.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    cases = []
    for i, strategy in enumerate(STRATEGIES):
        for j, policy in enumerate(POLICIES):
            if half is not None and (i + j) % 2 != half:
                continue
            for micro in (1, 2) if both else ((i + j // 2) % 2 + 1,):
                cases.append(f"{strategy}:2,activations={policy},micro_batch={micro}")
                if strategy == "zero3":
                    cases[-1] += f",deepspeed={file}"
    return cases


METHODS = {
    "lora": ("lora.targets=[q]", "lora.rank=8"),
    "full": ("train.method=full", "lora.targets=null", "train.learning_rate=1e-5"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_strategy_and_policy_equals_one_process(
    tiny: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """LoRA with every second pair of strategy and policy, full training with the others."""
    extra = ["zero1:2,activations=offload", "zero3:2,activations=offload", "single,activations=selective,micro_batch=2"]
    extra += ["zero3:2,activations=auto", "sp:2,activations=auto"]  # measured before anything is divided, and together
    half = list(METHODS).index(method)
    layouts = ["single", *_grid(tmp_path / "ds.json", both=False, half=half), *extra]
    parity(options(tiny, layouts, *METHODS[method], "data.caption_dropout=0.3"))
    assert "all layouts agree" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_strategy_policy_and_accumulation_equals_one_process(tiny: Path, tmp_path: Path, method: str) -> None:
    default = [f"zero3:2,activations={policy}" for policy in POLICIES]
    parity(options(tiny, ["single", *_grid(tmp_path / "ds.json", both=True), *default], *METHODS[method]))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_four_processes_offload_and_hsdp_equal_one_process(tiny: Path, method: str) -> None:
    layouts = ["single", "ddp:4", "zero2:4", "zero3:4,activations=offload", "fsdp2:4", "fsdp2:4,shard=2"]
    offload = ["zero2:2,offload_optimizer=true", "zero3:2,offload_parameters=true", "fsdp2:2,offload_parameters=true"]
    parity(options(tiny, [*layouts, *offload], *METHODS[method]))


@pytest.mark.slow
def test_sending_parameters_in_bfloat16_keeps_the_loss(tiny: Path) -> None:
    layouts = ["single", "fsdp2:2", "fsdp2:2,gather_dtype=bfloat16,activations=recompute"]
    parity(options(tiny, layouts, *METHODS["full"], "model.dtype=bfloat16", steps=5))


@pytest.mark.slow
def test_zero3_follows_zero2_in_bfloat16_over_twenty_steps(tiny: Path) -> None:
    layouts = ["zero2:2", "zero3:2,activations=offload"]
    parity(options(tiny, layouts, "model.dtype=bfloat16", steps=20, tolerance=1e-3))


@pytest.mark.slow
def test_captions_sources_and_skipped_rows_are_those_of_one_process(tiny: Path, clips: Path, tmp_path: Path) -> None:
    names = ["clip_0.mp4", "broken.mp4", "clip_1.mp4"]
    for name in names:
        file = clips / name
        (tmp_path / name).write_bytes(file.read_bytes() if file.is_file() else b"no clip")
    rows = [{"video": name, "prompt": [f"{name} {n}" for n in range(3)]} for name in names]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    sources = f"[{{metadata: {tmp_path}/rows.json, weight: 1}}, {{metadata: {clips}/metadata.csv, weight: 2}}]"
    own = ["data.metadata=null", f"data.sources={sources}", "data.on_error=skip", "data.caption_dropout=0.3"]
    layouts = ["single", "ddp:2", "sp:2", "ddp:2,micro_batch=2"]
    parity(options(tiny, layouts, *own, "data.sampling=random", layers=1))


@pytest.mark.slow
def test_a_disturbed_noise_is_found_and_named_first(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "parity.json"
    with pytest.raises(RunError, match="the layouts differ; first: ddp:2: noise at step 1, position 2"):
        parity(options(tiny, ["single", "ddp:2"], fault="noise@1", json=file, layers=1, steps=1))
    rows = json.loads(file.read_text())["layouts"]["ddp:2"]
    assert {row["quantity"]: row["excessive"] for row in rows}["samples"] is False
    assert {row["quantity"]: row["excessive"] for row in rows}["loss"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "flowshard", "train"],
        ["accelerate.commands.launch", "--config_file", "configs/accelerate/zero3.yaml", "-m", "flowshard", "train"],
    ],
)
def test_both_launchers_train_and_save_what_one_process_saves(
    tiny: Path, clips: Path, tmp_path: Path, launch: list[str]
) -> None:
    single = runs.config(tiny, clips, tmp_path / "single", "train.modules=[proj_out]")
    expected = runs.weights(runs.run(single))
    output = tmp_path / "divided"
    options = [f"output={output}", "memory.activations=offload", "save.every=2"]
    if launch[0] == "torch.distributed.run":
        options.append("layout.strategy=zero3")
    done = python(["-m", *launch, str(Path(single.output, "config.yaml")), *options], timeout=None)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "layout      zero3, 2 processes" in done.stdout
    checkpoints = sorted((output / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000002", "step-00000003"]
    assert runs.distance(runs.weights(checkpoints[-1]), expected) < 1e-5
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in runs.metrics(single)], rel=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_only_one_process_reads_ends_all_with_its_message(
    tiny: Path, clips: Path, tmp_path: Path, rank: int
) -> None:
    """Seven samples on two processes, accumulation 3, encoded at every step; the clip of one's last place is broken."""
    broken = Order(0, [range(7)], global_batch=6).batch(0)[3 * rank + 2]
    data = tmp_path / "data"
    data.mkdir()
    rows = ["video,prompt"]
    for number in range(7):
        name = f"{number}.mp4"
        if number == broken:
            (data / name).write_bytes(b"not a clip")
        else:
            (data / name).symlink_to(clips / f"clip_{number % 5}.mp4")
        rows.append(f"{name},clip {number}")
    (data / "metadata.csv").write_text("\n".join(rows))
    config = runs.config(tiny, data, tmp_path / "run", "data.cache=off", "train.global_batch=6", "train.steps=9")
    (tmp_path / "run.yaml").write_text(dump_config(config, {}))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "-m", "flowshard", "train", str(tmp_path / "run.yaml"), "layout.strategy=zero2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode != 0
    assert f"row {broken + 1} (" in done.stderr
    assert "cannot be decoded" in done.stderr
