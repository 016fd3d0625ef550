"""`flowshard cache`, and training from what it wrote when the encoders are gone."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowshard.config import Config
from flowshard.config_file import dump_config
from flowshard.errors import UserError
from flowshard.train.encode import check_encoding, encode_samples
from tests import runs
from tests.conftest import REPOSITORY
from tests.launch import python

ENCODERS = ("text_encoder", "tokenizer", "vae")


def _entries(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {str(file.relative_to(folder)): load_file(file) for file in folder.rglob("*.safetensors")}


def _fill(config: Config) -> dict[str, dict[str, torch.Tensor]]:
    encode_samples(check_encoding(config))
    assert config.cache_folder is not None
    return _entries(config.cache_folder)


def _same(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        one[file].keys() == other[file].keys()
        and all(torch.equal(one[file][key], other[file][key]) for key in one[file])
        for file in one
    )


def test_transformer_and_encoders_are_needed_one_after_the_other(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Encoded without the transformer, trained without the encoders: to the bit what a run with both does."""
    whole = runs.config(tiny, clips, tmp_path / "whole")
    runs.run(whole)
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    (model / "transformer").rename(tmp_path / "transformer")
    config = runs.config(model, clips, tmp_path / "parts", f"data.cache={tmp_path / 'filled'}")
    assert len(_fill(config)) == 10
    (tmp_path / "transformer").rename(model / "transformer")
    for name in ENCODERS:
        shutil.rmtree(model / name)
    runs.run(config)
    assert [line["loss"] for line in runs.metrics(config)] == [line["loss"] for line in runs.metrics(whole)]


def test_publishers_files_without_encoders_train_from_the_cache(
    originals: Callable[[str], Path], clips: Path, tmp_path: Path
) -> None:
    folder = originals("wan2.1-t2v-1.3b")
    cache = f"data.cache={tmp_path / 'filled'}"
    _fill(runs.config(folder, clips, tmp_path / "whole", cache))
    whole = runs.config(folder, clips, tmp_path / "whole", cache)
    runs.run(whole)
    weights = tmp_path / "weights"
    weights.mkdir()
    for file in folder.glob("diffusion_pytorch_model*"):
        shutil.copy(file, weights)
    alone = runs.config(weights, clips, tmp_path / "alone", cache)
    runs.run(alone)
    assert [line["loss"] for line in runs.metrics(alone)] == [line["loss"] for line in runs.metrics(whole)]


def test_variants_of_a_kind_share_entries(originals: Callable[[str], Path], clips: Path, tmp_path: Path) -> None:
    """Text to video of 1.3B and 14B: another transformer, the same encoders. Image to video is another kind."""
    one, other = "wan2.1-t2v-1.3b", "wan2.1-i2v-14b-480p"
    filled = [
        _fill(runs.config(originals(model), clips, tmp_path / "run", f"model.variant={variant}")).keys()
        for model, variant in ((one, one), (one, "wan2.1-t2v-14b"), (other, other))
    ]
    assert filled[0] == filled[1]
    assert len(filled[2] - filled[0]) == 10


def test_what_is_missing_is_said_before_weights_load(tiny: Path, clips: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    shutil.rmtree(model / "vae")
    config = runs.config(model, clips, tmp_path / "run")
    with pytest.raises(UserError, match=r"model lacks vae; add what is missing"):
        check_encoding(config)
    with pytest.raises(UserError, match=r"lacks vae, and the cache .* has no entries of wan models; add the vae"):
        runs.run(config)
    _fill(runs.config(tiny, clips, tmp_path / "run"))
    with pytest.raises(UserError, match=r"model lacks vae, and 5 entries are not in .*cache yet"):
        runs.run(runs.config(model, clips, tmp_path / "run", "data.frames=1"))
    with pytest.raises(UserError, match=r"model.path: .*model lacks vae; add what is missing"):
        runs.run(runs.config(model, clips, tmp_path / "run", "data.cache=off"))
    shutil.copytree(tiny / "vae", model / "vae")
    settings = model / "vae" / "config.json"
    settings.write_text(settings.read_text() + "\n")
    _fill(runs.config(model, clips, tmp_path / "run"))
    shutil.rmtree(model / "vae")
    with pytest.raises(UserError, match=r"lacks vae, and the cache .* holds entries of 2 of them; add the vae"):
        runs.run(config)
    with pytest.raises(UserError, match=r"data.cache: 'off' keeps no encoded samples"):
        check_encoding(runs.config(tiny, clips, tmp_path / "run", "data.cache=off"))


def test_eight_processes_fill_one_cache_and_one_is_killed(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Each started on its own, as on eight machines. What the killed one had begun is made by the others."""
    expected = _fill(runs.config(tiny, clips, tmp_path / "alone", f"data.cache={tmp_path / 'alone-cache'}"))
    config = runs.config(tiny, clips, tmp_path / "together", f"data.cache={tmp_path / 'cache'}")
    file = tmp_path / "job.yaml"
    file.write_text(dump_config(config, {}), encoding="utf-8")
    done = python(["-m", "tests.workers.fillers", str(file), "8"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["killed", *["0"] * 7]
    assert _same(_entries(tmp_path / "cache"), expected)


def test_a_second_filling_encodes_nothing(
    tiny: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.config(tiny, clips, tmp_path / "run")
    left = tmp_path / "cache" / "media" / ".old.safetensors.1.partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"cut off")
    os.utime(left, (0, 0))
    _fill(config)
    assert not left.exists()
    assert "5 samples of 5 media and 5 prompts; 0 entries are there, 10 are encoded now" in capsys.readouterr().out
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.safetensors")}
    _fill(config)
    assert "10 entries are there, 0 are encoded now" in capsys.readouterr().out
    assert times == {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.safetensors")}


@pytest.mark.slow
def test_any_launcher_fills_the_same_cache(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Under a launcher that is configured for ZeRO-3, and a global batch that its processes do not divide."""
    expected = _fill(runs.config(tiny, clips, tmp_path / "alone", f"data.cache={tmp_path / 'alone-cache'}"))
    config = runs.config(tiny, clips, tmp_path / "run", f"data.cache={tmp_path / 'cache'}", "train.global_batch=3")
    file = tmp_path / "job.yaml"
    file.write_text(dump_config(config, {}), encoding="utf-8")
    launcher = REPOSITORY / "configs" / "accelerate" / "zero3.yaml"
    command = [
        "accelerate.commands.launch",
        "--config_file",
        str(launcher),
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    done = python(["-m", *command, "-m", "flowshard", "cache", str(file)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert _same(_entries(tmp_path / "cache"), expected)
