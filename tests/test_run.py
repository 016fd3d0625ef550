"""A whole run: what it prints, writes, keeps, and how it stops."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from flowshard.cli import main
from flowshard.config_file import dump_config, load_config
from flowshard.errors import UserError
from flowshard.train.inputs import check_inputs
from flowshard.train.metrics import StepMetrics
from flowshard.weights.files import sync
from tests import runs
from tests.conftest import REPOSITORY


@pytest.mark.parametrize(("method", "file"), [("lora", "lora.safetensors"), ("full", "transformer/config.json")])
def test_the_examples_train_from_the_command_line(tiny: Path, tmp_path: Path, method: str, file: str) -> None:
    output = tmp_path / "run"
    size = ["data.height=32", "data.width=32", "data.frames=5"]
    command = [sys.executable, "-m", "flowshard", "train", str(REPOSITORY / f"examples/wan_{method}.yaml")]
    options = [f"model.path={tiny}", f"output={output}", "train.steps=5", *size]
    done = subprocess.run([*command, *options], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing but errors goes to standard error without a terminal"
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert line.keys() == StepMetrics.__dataclass_fields__.keys()
        parts = sum(line[f"seconds_{part}"] for part in ("data", "forward", "backward", "optimizer"))
        assert line["seconds"] == pytest.approx(parts)
        assert line["samples_per_second"] == pytest.approx(4 / line["seconds"])
        assert line["tokens_per_second"] == pytest.approx(4 * 8 / line["seconds"])
        assert line["memory_peak_bytes"] > 2**20
    assert (output / "checkpoints/step-00000005" / file).is_file()
    for word in ("parameters", "trained", "tokens", "steps", "memory", "4 samples = 4 x 1"):
        assert word in done.stdout
    recorded = yaml.safe_load((output / "config.yaml").read_text())["record"]
    assert recorded["versions"]["torch"] == torch.__version__
    again = load_config(output / "config.yaml")
    assert again.train.method == method
    assert again.model.path == str(tiny)


@pytest.mark.parametrize(
    ("every", "keep", "left"), [(0, 3, [10]), (3, 9, [3, 6, 9, 10]), (5, 9, [5, 10]), (3, 2, [9, 10])]
)
def test_the_last_step_is_saved_once_and_old_checkpoints_go(
    tiny: Path, clips: Path, tmp_path: Path, every: int, keep: int, left: list[int]
) -> None:
    config = runs.config(
        tiny,
        clips,
        tmp_path / "run",
        "train.steps=10",
        "train.global_batch=1",
        f"save.every={every}",
        f"save.keep={keep}",
    )
    last = runs.run(config)
    assert sorted(path.name for path in last.parent.iterdir()) == [f"step-{step:08d}" for step in left]
    assert json.loads((last / "state.json").read_text())["step"] == 10


def test_steps_are_updates_and_epochs_cover_all_samples(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """2 epochs of 5 clips twice are 20 samples: 7 updates of 3, whatever the micro-batch."""
    for micro in (1, 3):
        options = (
            "train.steps=null",
            "train.epochs=2",
            "data.repeat=2",
            "train.global_batch=3",
            f"train.micro_batch={micro}",
        )
        config = runs.config(tiny, clips, tmp_path / f"micro{micro}", *options)
        assert runs.run(config).name == "step-00000007"
        assert len(runs.metrics(config)) == 7


def test_an_earlier_run_is_moved_and_its_cache_used_again(
    tiny: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", "data.cache=auto")
    first = runs.weights(runs.run(config))
    marks = {file: file.stat().st_mtime_ns for file in Path(config.output, "cache").rglob("*.safetensors")}
    capsys.readouterr()
    runs.run(config)
    out = capsys.readouterr().out
    assert "held an earlier run" in out
    assert "10 entries are there, 0 are encoded now" in out
    moved = Path(config.output, "previous", "1")
    assert runs.weights(moved / "checkpoints" / "step-00000003").keys() == first.keys()
    assert len((moved / "metrics.jsonl").read_text().splitlines()) == 3
    assert len(runs.metrics(config)) == 3
    assert len(marks) == 10
    assert {file: file.stat().st_mtime_ns for file in Path(config.output, "cache").rglob("*.safetensors")} == marks


def test_the_cache_follows_what_an_entry_depends_on(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """A changed clip, caption, size or encoder makes new entries; an unrelated option makes none."""
    data = Path(shutil.copytree(clips, tmp_path / "data"))
    model = Path(shutil.copytree(tiny, tmp_path / "model"))

    def entries(*options: str) -> tuple[int, int]:
        runs.run(runs.config(model, data, tmp_path / "run", "train.steps=1", *options))
        return tuple(len(list((tmp_path / "cache" / kind).iterdir())) for kind in ("media", "text"))  # type: ignore[return-value]

    assert entries() == (5, 5)
    assert entries("seed=4", "train.learning_rate=1", "data.repeat=3") == (5, 5)
    assert entries("data.frames=1") == (10, 5)
    shutil.copyfile(clips / "clip_0.mp4", data / "clip_4.mp4")  # now equal bytes under another name: no new entry
    assert entries() == (10, 5)
    text = (data / "metadata.csv").read_text()
    (data / "metadata.csv").write_text(text.replace("scratches its head", "sleeps"))
    assert entries() == (10, 6)
    weights = load_file(model / "vae" / "diffusion_pytorch_model.safetensors")
    weights["quant_conv.bias"] = weights["quant_conv.bias"] + 1
    save_file(weights, model / "vae" / "diffusion_pytorch_model.safetensors")
    assert entries() == (14, 6)


def test_pictures_and_clips_train_together(tiny: Path, clips: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(clips / "clip_0.mp4", data)
    Image.new("RGB", (50, 40), (200, 10, 10)).save(data / "red.png")
    (data / "metadata.jsonl").write_text(
        '{"video": "clip_0.mp4", "prompt": "a rabbit"}\n{"image": "red.png", "prompt": "red", "source": "drawn"}\n'
    )
    config = runs.config(
        tiny, data, tmp_path / "run", f"data.metadata={data / 'metadata.jsonl'}", "train.global_batch=2"
    )
    runs.run(config)
    for line in runs.metrics(config):  # 2 latent frames of the clip and 1 of the picture, 4 tokens each
        assert line["tokens_per_second"] * line["seconds"] == pytest.approx(12)


def test_unused_columns_are_named_once(
    tiny: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "more.csv"
    file.write_text("video,prompt,score\nclip_0.mp4,a,1\nclip_1.mp4,b,2\n")
    runs.run(runs.config(tiny, clips, tmp_path / "run", f"data.metadata={file}", f"data.root={clips}"))
    assert capsys.readouterr().out.count("unused columns: score") == 1


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_weights(
    tiny: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.config(tiny, clips, tmp_path / "warm", "train.steps=1")
    runs.run(config)
    entry = sorted((tmp_path / "cache" / "media").iterdir())[0]
    save_file({"latents": torch.full_like(load_file(entry)["latents"], float("inf"))}, entry)
    file = tmp_path / "bad.yaml"
    file.write_text((tmp_path / "warm" / "config.yaml").read_text())
    status = main(["train", str(file), f"output={tmp_path / 'bad'}", "train.steps=20", "train.global_batch=1"])
    message = capsys.readouterr().err
    assert status == 1
    assert message.startswith("flowshard: error: step ")
    assert "row " in message
    lines = (tmp_path / "bad" / "metrics.jsonl").read_text().splitlines()
    checkpoints = list((tmp_path / "bad" / "checkpoints").glob("step-*")) if lines else []
    assert [path.name for path in checkpoints] == ([f"step-{len(lines):08d}"] if lines else [])
    for path in checkpoints:
        assert all(torch.isfinite(tensor).all() for tensor in runs.weights(path).values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_saves_and_exits_cleanly(tiny: Path, clips: Path, tmp_path: Path, number: signal.Signals) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", "train.steps=100000", "data.cache=auto")
    file = tmp_path / "run.yaml"
    command = [sys.executable, "-m", "flowshard", "train", str(file)]
    options = [
        f"model.path={tiny}",
        f"data.metadata={clips / 'metadata.csv'}",
        f"output={config.output}",
        "train.steps=100000",
    ]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"stopped by {number.name}" in out
    done = len(runs.metrics(config))
    assert (Path(config.output) / "checkpoints" / f"step-{done:08d}" / "lora.safetensors").is_file()


def test_a_failing_disk_leaves_the_earlier_checkpoint_and_no_rest(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", "train.steps=4", "save.every=2")

    def full_disk(path: Path) -> None:
        if "step-00000004" in str(path):
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr("flowshard.train.state.sync", full_disk)
    (tmp_path / "run.yaml").write_text(dump_config(config, {}))
    assert main(["train", str(tmp_path / "run.yaml")]) == 1
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert "step-00000002" in message
    left = [path.name for path in (Path(config.output) / "checkpoints").iterdir()]
    assert left == ["step-00000002"]


@pytest.mark.parametrize("length", ["train.steps=3", "train.epochs=2"])
def test_a_warm_up_longer_than_the_run_is_refused(tiny: Path, clips: Path, tmp_path: Path, length: str) -> None:
    """2 epochs of 5 clips in batches of 4 are 3 steps."""
    options = ("train.steps=null", length, "train.warmup_steps=4")
    with pytest.raises(UserError, match=r"train\.warmup_steps: 4 exceeds the 3 steps of the run"):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", *options))


def test_files_have_the_permissions_of_new_files(tiny: Path, clips: Path, tmp_path: Path) -> None:
    checkpoint = runs.run(runs.config(tiny, clips, tmp_path / "run"))
    plain = tmp_path / "plain"
    plain.touch()
    written = [
        *(file for file in checkpoint.rglob("*") if file.is_file()),
        *(tmp_path / "cache").rglob("*.safetensors"),
        *tiny.rglob("*.safetensors"),
    ]
    assert {file.stat().st_mode for file in written} == {plain.stat().st_mode}


def test_a_start_that_fails_leaves_the_earlier_run_in_place(tiny: Path, clips: Path, tmp_path: Path) -> None:
    config = runs.config(tiny, clips, tmp_path / "run")
    checkpoint = runs.run(config)
    with pytest.raises(UserError, match=r"clip_0.mp4\): has 33 frames"):
        runs.run(runs.config(tiny, clips, tmp_path / "run", "data.frames=81"))
    assert checkpoint.is_dir()
    assert len(runs.metrics(config)) == 3
    assert not Path(config.output, "previous").exists()
