"""Building and filling the transformer."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from flowshard.errors import UserError
from flowshard.train.inputs import check_inputs
from flowshard.weights.files import read_headers, read_json
from flowshard.weights.load import Whole, build_model, declare_types, materialise
from tests import runs
from tests.conftest import REPOSITORY

CPU = torch.device("cpu")


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = build_model("WanTransformer3DModel", read_json(folder / "config.json"))
    model.requires_grad_(False)
    declare_types(model, dtype)
    materialise(model, read_headers(folder), source=folder, units=[], new={}, strategy=Whole(CPU))
    return model


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A private copy of the tiny transformer."""
    return Path(shutil.copytree(tiny / "transformer", tmp_path / "transformer"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_from_pretrained_in_values_types_and_buffers(tiny: Path, dtype: torch.dtype) -> None:
    model = _load(tiny / "transformer", dtype)
    stock = WanTransformer3DModel.from_pretrained(tiny / "transformer", dtype=dtype)
    for ours, theirs in (
        (model.named_parameters(), stock.named_parameters()),
        (model.named_buffers(), stock.named_buffers()),
    ):
        expected = dict(theirs)
        found = dict(ours)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name


def test_shards_load_like_one_file(tiny: Path, tmp_path: Path) -> None:
    stock = WanTransformer3DModel.from_pretrained(tiny / "transformer")
    stock.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found = _load(tmp_path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in stock.state_dict().items())


def test_frozen_weights_stay_a_view_of_the_file_and_trained_ones_do_not(
    tiny: Path, clips: Path, tmp_path: Path
) -> None:
    """Training in place must not write through the mapping, and frozen weights must not take memory twice."""
    file = tiny / "transformer" / "diffusion_pytorch_model.safetensors"
    before = file.read_bytes()
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "train.modules=[proj_out]"))
    filled = runs.fill_model(inputs)
    model, report = filled.model, filled.report
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert file.read_bytes() == before
    assert load_file(file)["proj_out.weight"].equal(
        WanTransformer3DModel.from_pretrained(tiny / "transformer").proj_out.weight
    )
    assert len(report.loaded) == len(read_headers(tiny / "transformer"))
    assert len(report.new) == 2 * 30
    assert not report.missing + report.unexpected


def test_trained_weights_are_float32_masters_and_frozen_ones_have_the_models_type(
    tiny: Path, clips: Path, tmp_path: Path
) -> None:
    options = ("model.dtype=bfloat16", "train.modules=[blocks.0.attn1.norm_q]")
    filled = runs.fill_model(check_inputs(runs.config(tiny, clips, tmp_path / "run", *options)))
    model, report = filled.model, filled.report
    for name, parameter in model.named_parameters():
        trained = "lora_" in name or name == "blocks.0.attn1.norm_q.weight"
        kept = "time_embedder" in name or "scale_shift_table" in name or ".norm2." in name
        assert parameter.requires_grad == trained, name
        assert parameter.dtype == (torch.float32 if trained or kept else torch.bfloat16), name
        assert not parameter.is_meta
    assert report.dtype_changed["proj_out.weight"] == ("torch.float32", "torch.bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("blocks.1.attn2.to_k.weight"), "the files lack blocks.1.attn2.to_k.weight"),
        (lambda w: w.update({"camera.weight": torch.zeros(2)}), "the model has no place for camera.weight"),
        (
            lambda w: w.update({"proj_out.bias": torch.zeros(3)}),
            r"shapes differ for proj_out.bias \(file \(3,\), model \(64,\)\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(copy: Path, change: object, message: str) -> None:
    file = copy / "diffusion_pytorch_model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    assert callable(change)
    change(weights)
    save_file(weights, file)
    with pytest.raises(UserError, match=message):
        _load(copy)


def test_a_config_that_disagrees_with_the_weights_is_refused(copy: Path) -> None:
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "num_layers": 2}))
    with pytest.raises(UserError, match=r"the model has no place for blocks\.2"):
        _load(copy)


@pytest.mark.slow
def test_processes_hold_little_more_than_their_share_while_loading() -> None:
    """The benchmark, with a looser bound: own memory at its peak, less a constant, over the share of the model."""
    done = subprocess.run(
        [sys.executable, "benchmarks/loading.py", "--layers", "8"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ratios = [float(line.split()[-1]) for line in done.stdout.splitlines()[1:]]
    assert len(ratios) == 4
    assert max(ratios) < 1.5, done.stdout
