"""Added, replaced and removed modules, and loading outside of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

import flowshard
from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.parity.command import parity
from flowshard.train.inputs import check_inputs
from flowshard.weights.report import LoadReport
from tests import runs
from tests.conftest import REPOSITORY
from tests.test_layouts_agree import options

ADAPTERS = f"{REPOSITORY / 'examples/added_modules/adapters.py'}:add_adapters"
VARIANT = "wan2.1-t2v-1.3b"


def _write(folder: Path, body: str) -> str:
    """An extension with that body; its specification."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (folder / "own.py").write_text(f"import torch\nfrom torch import nn\n\n\ndef change(model):\n{lines}\n")
    return f"{folder / 'own.py'}:change"


def _load(tiny: Path, spec: str, seed: int = 0) -> tuple[Any, LoadReport]:
    return flowshard.load(VARIANT, tiny, extend=spec, dtype=torch.float32, seed=seed)


def test_without_an_extension_it_is_what_from_pretrained_gives(tiny: Path) -> None:
    model, report = flowshard.load(VARIANT, tiny, dtype=torch.float32)
    stock = WanTransformer3DModel.from_pretrained(tiny / "transformer").state_dict()
    assert dict.fromkeys(stock, True) == {name: value.equal(stock[name]) for name, value in model.state_dict().items()}
    assert sorted(report.loaded) == sorted(stock)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert report.to_json()["missing"] == []
    assert report.table() == f"loaded  {len(stock):>5}"


def test_new_modules_keep_what_the_function_gave_them(tiny: Path, tmp_path: Path) -> None:
    spec = _write(
        tmp_path,
        """
branch = nn.Linear(8, 4)
nn.init.zeros_(branch.bias)
model.branch = branch
with torch.device("meta"):
    model.late = nn.Linear(8, 4)
model.blocks[0].gate = nn.Parameter(torch.full((3,), 0.25))
model.register_buffer("table", torch.arange(5.0))
""",
    )
    model, report = _load(tiny, spec)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert report.new == {
        "branch.weight": "as the function left it",
        "branch.bias": "as the function left it",
        "late.weight": "reset_parameters",
        "late.bias": "reset_parameters",
        "blocks.0.gate": "as the function left it",
        "table": "as the function left it",
    }
    assert not model.branch.bias.any(), "exactly zero"
    assert model.blocks[0].gate.tolist() == [0.25] * 3
    assert model.table.tolist() == [0, 1, 2, 3, 4]
    assert 0.1 < float(model.late.weight.detach().abs().max()) <= 8**-0.5, "uniform, as a linear layer starts"
    again, _ = _load(tiny, spec)
    other, _ = _load(tiny, spec, seed=1)
    for name in ("branch.weight", "late.weight"):
        assert again.state_dict()[name].equal(model.state_dict()[name])
        assert not other.state_dict()[name].equal(model.state_dict()[name])


def test_removed_and_declared_modules_are_listed_as_dropped(tiny: Path, tmp_path: Path) -> None:
    spec = _write(
        tmp_path,
        """
model.blocks[2] = nn.Identity()
model.proj_out = nn.Linear(192, 64)
nn.init.ones_(model.proj_out.weight)
return ["proj_out.weight"]
""",
    )
    model, report = _load(tiny, spec)
    assert all(name.startswith("blocks.2.") or name == "proj_out.weight" for name in report.dropped)
    assert len(report.dropped) == 27 + 1
    assert model.proj_out.weight.unique().tolist() == [1.0]
    stock = WanTransformer3DModel.from_pretrained(tiny / "transformer")
    assert model.proj_out.bias.equal(stock.proj_out.bias), "not declared, so from the file"


def test_tied_weights_stay_tied(tiny: Path, tmp_path: Path) -> None:
    spec = _write(tmp_path, "model.blocks[1].attn1.to_q.weight = model.blocks[0].attn1.to_q.weight")
    model, _ = _load(tiny, spec)
    assert model.blocks[1].attn1.to_q.weight is model.blocks[0].attn1.to_q.weight


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no camera')", r"failed: ValueError: no camera \(line 6\)"),
        ("model.nothing.here", r"failed: AttributeError: .*nothing.* \(line 6\)"),
        ("return ['camera']", "returned 'camera', but the model has no module or parameter of that name"),
        ("return 'proj_out'", "returned 'proj_out'; return a list of names"),
        ("model.gate = nn.Parameter(torch.empty(3, device='meta'))", "left gate on the meta device without a value"),
        (
            "model.proj_out = nn.Linear(192, 32)",
            r"shapes differ for proj_out.bias \(file \(64,\), model \(32,\)\).* let its function return their names",
        ),
    ],
)
def test_mistakes_of_the_function_are_named(tiny: Path, tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _load(tiny, _write(tmp_path, body))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("adapters.py", "model.extend: 'adapters.py' is not FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"),
        ("nowhere.py:add", "model.extend: the file nowhere.py does not exist"),
        ("{file}:subtract", "has no function 'subtract'"),
        ("no_such_package.module:add", "model.extend: no_such_package.module cannot be imported: ModuleNotFoundError"),
        ("{broken}:add", r"broken.py cannot be imported: SyntaxError"),
    ],
)
def test_an_extension_that_cannot_be_had_is_refused(
    tiny: Path, clips: Path, tmp_path: Path, spec: str, message: str
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def add(:\n")
    spec = spec.format(file=ADAPTERS.rpartition(":")[0], broken=broken)
    with pytest.raises(UserError, match=message):
        runs.fill_model(check_inputs(runs.config(tiny, clips, tmp_path / "run", f"model.extend={spec}")))


def _broken(tiny: Path, folder: Path, change: Any) -> Path:
    """A pipeline whose transformer's weights went through `change`."""
    for item in tiny.iterdir():
        if item.name != "transformer":
            (folder / item.name).symlink_to(item)
    (folder / "transformer").mkdir()
    for item in (tiny / "transformer").iterdir():
        if item.suffix == ".safetensors":
            save_file(change(load_file(item)), folder / "transformer" / item.name)
        else:
            (folder / "transformer" / item.name).write_bytes(item.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {f"module.{name}": value for name, value in w.items()},
            "All names start with 'module.', which a wrapper left",
        ),
        (
            lambda w: {f"pipe.dit.{name}": value for name, value in w.items()},
            "All names start with 'pipe.dit.', which a wrapper left",
        ),
        (
            lambda _: {"transformer.blocks.0.attn1.to_q.lora_A.weight": torch.zeros(2, 2)},
            "This is a LoRA, not weights: give the base model, and the LoRA as lora.init_from",
        ),
        (
            lambda w: {name: torch.zeros(3) for name in w},
            "the weights of another size of the model: check model.variant",
        ),
        (lambda w: {**w, "extra.weight": torch.zeros(1)}, "If they are of no use, set model.unexpected=ignore"),
    ],
)
def test_known_mistakes_come_with_the_fix(tiny: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        flowshard.load(VARIANT, _broken(tiny, tmp_path, change))


def test_unexpected_weights_can_be_ignored(tiny: Path, clips: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    _broken(tiny, model, lambda w: {**w, "extra.weight": torch.zeros(1)})
    filled = runs.fill_model(check_inputs(runs.config(model, clips, tmp_path / "run", "model.unexpected=ignore")))
    assert filled.report.dropped == ["extra.weight"]


def test_added_modules_are_trained_beside_the_lora_saved_and_used(tiny: Path, clips: Path, tmp_path: Path) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", f"model.extend={ADAPTERS}", "train.learning_rate=0.1")
    checkpoint = runs.run(config)
    saved = load_file(checkpoint / "modules.safetensors")
    assert sorted(saved) == sorted(
        f"blocks.{n}.adapter.{part}.{leaf}" for n in range(3) for part in ("down", "up") for leaf in ("weight", "bias")
    )
    assert all(float(saved[f"blocks.{n}.adapter.up.weight"].abs().max()) > 0 for n in range(3)), "no longer zero"
    pictures = []
    fixed = ["--model", str(tiny), "--prompt", "a rabbit", "--dtype", "float32", "--frames", "1", "--steps", "2"]
    fixed += ["--height", "32", "--width", "32", "--device", "cpu"]
    for name, more in (("base", []), ("trained", ["--lora", str(checkpoint), "--extend", ADAPTERS])):
        file = tmp_path / f"{name}.png"
        assert main(["generate", *fixed, *more, "--output", str(file)]) == 0
        pictures.append(file.read_bytes())
    assert pictures[0] != pictures[1]


def test_full_training_of_an_extended_model_is_read_back(tiny: Path, clips: Path, tmp_path: Path) -> None:
    overrides = [f"model.extend={ADAPTERS}", "train.method=full", "train.learning_rate=0.01"]
    checkpoint = runs.run(runs.config(tiny, clips, tmp_path / "run", *overrides))
    model = tmp_path / "model"
    model.mkdir()
    for item in tiny.iterdir():
        (model / item.name).symlink_to(checkpoint / "transformer" if item.name == "transformer" else item)
    found, report = flowshard.load(VARIANT, model, extend=ADAPTERS, dtype=torch.float32)
    assert report.new == {}
    saved = load_file(checkpoint / "transformer" / "diffusion_pytorch_model.safetensors")
    assert found.state_dict().keys() == saved.keys()
    assert all(value.equal(saved[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "trained"),
    [
        (["train.modules=[proj_out]"], {"adapter", "proj_out", "lora"}),
        (["train.method=full", "train.modules=[adapter]"], {"adapter"}),
    ],
)
def test_patterns_reach_into_added_modules(
    tiny: Path, clips: Path, tmp_path: Path, overrides: list[str], trained: set[str]
) -> None:
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", f"model.extend={ADAPTERS}", *overrides))
    model = runs.fill_model(inputs).model
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    kinds = {word for word in ("adapter", "proj_out", "lora") for name in names if word in name}
    assert kinds == trained
    assert all(any(kind in name for kind in trained) for name in names)


def test_a_pattern_for_nothing_is_refused_in_an_extended_model(tiny: Path, clips: Path, tmp_path: Path) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", f"model.extend={ADAPTERS}", "train.modules=[camera]")
    with pytest.raises(UserError, match=r"train.modules: the pattern 'camera' matches nothing in the model"):
        runs.fill_model(check_inputs(config))


def test_the_pipeline_works(tiny: Path) -> None:
    pipeline, _ = flowshard.load_pipeline(VARIANT, tiny, dtype=torch.float32)
    arguments = {"prompt": "a rabbit", "height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 2}
    stock = WanPipeline.from_pretrained(tiny)
    found, expected = (
        one(**arguments, generator=torch.Generator().manual_seed(0), output_type="np").frames
        for one in (pipeline, stock)
    )
    # Not bitwise: the weights of one are mapped from the file and those of the other copied, and where a matrix lies in
    # memory decides on some processors how its product is summed.
    assert abs(found - expected).max() < 1e-5


@pytest.mark.slow
def test_the_example_trains_under_every_layout(tiny: Path) -> None:
    layouts = ["single", "zero3:2", "fsdp2:2,activations=recompute", "sp:2", "zero2:2,micro_batch=2"]
    parity(options(tiny, layouts, config=str(REPOSITORY / "examples/added_modules/wan.yaml")))
