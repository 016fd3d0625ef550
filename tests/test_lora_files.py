"""LoRA files in the field's formats: read, written, trained on from, fused and merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file

from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.families import get_family
from flowshard.parity.command import parity
from flowshard.train.inputs import check_inputs
from flowshard.weights.files import read_headers
from flowshard.weights.lora import base_name
from flowshard.weights.lora_files import adapted_layers, load_factors, read_lora
from tests import runs
from tests.test_layouts_agree import options

RANK = 2
NAMES = get_family("wan").names
LAYERS = {  # diffusers' name: the publisher's, inputs, outputs
    "blocks.0.attn1.to_q": ("blocks.0.self_attn.q", 192, 192),
    "blocks.1.attn2.to_out.0": ("blocks.1.cross_attn.o", 192, 192),
    "blocks.2.ffn.net.0.proj": ("blocks.2.ffn.0", 192, 256),
    "blocks.2.ffn.net.2": ("blocks.2.ffn.2", 256, 192),
}


def _factors(scale: float = 1.0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        layer: (
            torch.randn(RANK, inputs, generator=generator),
            torch.randn(outputs, RANK, generator=generator) * scale,
        )
        for layer, (_, inputs, outputs) in LAYERS.items()
    }


def _write(file: Path, form: str, *, alpha: float | None = None) -> Path:
    """A file as other programs write it, key by key."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, (first, second) in _factors().items():
        original = LAYERS[layer][0]
        prefix, down, up = {
            "diffusers": (f"transformer.{layer}", "lora_A", "lora_B"),
            "original": (original, "lora_A.default", "lora_B.default"),
            "original, plain": (original, "lora_A", "lora_B"),
            "comfyui": (f"diffusion_model.{original}", "lora_A", "lora_B"),
            "comfyui, down and up": (f"diffusion_model.{original}", "lora_down", "lora_up"),
            "kohya": (f"lora_unet_{original.replace('.', '_')}", "lora_down", "lora_up"),
            "peft": (f"base_model.model.{layer}", "lora_A", "lora_B"),
        }[form]
        tensors[f"{prefix}.{down}.weight"], tensors[f"{prefix}.{up}.weight"] = first, second
        if alpha is not None:
            tensors[f"{prefix}.alpha"] = torch.tensor(alpha)
    save_file(tensors, file)
    return file


FORMS = ("diffusers", "original", "original, plain", "comfyui", "comfyui, down and up", "kohya", "peft")


@pytest.fixture(scope="module")
def shapes(tiny: Path) -> dict[str, tuple[int, ...]]:
    return adapted_layers((name, info.shape) for name, info in read_headers(tiny / "transformer").items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("alpha", [None, 1.0])
def test_every_format_is_read(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], form: str, alpha: float | None
) -> None:
    file = read_lora(_write(tmp_path / "lora.safetensors", form, alpha=alpha), shapes, NAMES, option="lora.preset")
    assert file.rank == RANK
    loaded = load_factors(file)
    assert list(loaded) == list(LAYERS), "in the order of the model"
    for layer, (first, second) in _factors().items():
        assert loaded[layer].first.equal(first)
        assert loaded[layer].second.equal(second)
        assert loaded[layer].scale == (1.0 if alpha is None else alpha / RANK)


def _export(source: Path, output: Path, form: str, *more: str) -> dict[str, torch.Tensor]:
    fixed = ["export", str(source), "--format", form, "--output", str(output), "--variant", "wan2.1-t2v-1.3b"]
    assert main([*fixed, *more]) == 0
    return load_file(output) if output.is_file() else {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trips_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    source = _write(tmp_path / "source.safetensors", "diffusers")
    save_file({key: value.to(dtype) for key, value in load_file(source).items()}, source)
    expected = load_file(source)
    original = _export(source, tmp_path / "original.safetensors", "original")
    assert "blocks.0.self_attn.q.lora_A.default.weight" in original
    assert "blocks.2.ffn.0.lora_B.default.weight" in original
    comfyui = _export(tmp_path / "original.safetensors", tmp_path / "comfyui.safetensors", "comfyui")
    assert "diffusion_model.blocks.1.cross_attn.o.lora_A.weight" in comfyui
    assert not any(key.endswith("alpha") for key in comfyui)
    back = _export(tmp_path / "comfyui.safetensors", tmp_path / "back.safetensors", "diffusers")
    assert back.keys() == expected.keys()
    assert all(value.dtype == dtype and value.equal(expected[key]) for key, value in back.items())


def test_alpha_is_stored_where_readers_know_it_and_folded_elsewhere(tmp_path: Path) -> None:
    source = _write(tmp_path / "source.safetensors", "comfyui", alpha=1.0)
    stored = _export(source, tmp_path / "stored.safetensors", "comfyui")
    assert stored["diffusion_model.blocks.0.self_attn.q.alpha"] == 1.0
    assert stored["diffusion_model.blocks.0.self_attn.q.lora_B.weight"].equal(_factors()["blocks.0.attn1.to_q"][1])
    for form, key in (
        ("diffusers", "transformer.blocks.0.attn1.to_q.lora_B.weight"),
        ("original", "blocks.0.self_attn.q.lora_B.default.weight"),
    ):
        folded = _export(source, tmp_path / f"{form}.safetensors", form)
        assert folded[key].equal(_factors()["blocks.0.attn1.to_q"][1] / RANK)
        assert not any(name.endswith("alpha") for name in folded)


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_diffusers_reads_what_is_written(tiny: Path, tmp_path: Path, form: str) -> None:
    """diffusers itself knows both formats for Wan, alpha included."""
    source = _write(tmp_path / "source.safetensors", "kohya", alpha=1.0)
    _export(source, tmp_path / "lora.safetensors", form, "--model", str(tiny))
    pipeline: Any = WanPipeline.from_pretrained(tiny)
    pipeline.load_lora_weights(str(tmp_path), weight_name="lora.safetensors")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    stock = WanTransformer3DModel.from_pretrained(tiny / "transformer").state_dict()
    for layer, (first, second) in _factors().items():
        change = pipeline.transformer.get_submodule(layer).weight - stock[f"{layer}.weight"]
        torch.testing.assert_close(change, second @ first / RANK, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["diffusers", "original", "comfyui"])
def test_merged_weights_equal_those_that_diffusers_fuses(tiny: Path, tmp_path: Path, form: str) -> None:
    source = _write(tmp_path / "source.safetensors", "diffusers")
    output = tmp_path / ("merged" if form == "diffusers" else "merged.safetensors")
    merged = _export(source, output, form, "--merge", "--model", str(tiny))
    pipeline: Any = WanPipeline.from_pretrained(tiny)
    pipeline.load_lora_weights(str(tmp_path), weight_name="source.safetensors")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    expected = pipeline.transformer.state_dict()
    if form == "diffusers":
        merged = WanTransformer3DModel.from_pretrained(output).state_dict()
    else:
        prefix = "model.diffusion_model." if form == "comfyui" else ""
        assert f"{prefix}blocks.0.self_attn.q.weight" in merged
        assert f"{prefix}head.modulation" in merged
        merged = convert_wan_transformer_to_diffusers(merged)
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-6)


def test_runs_are_exported(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """A LoRA with modules beside it, and whole weights; the run says which variant it is."""
    lora = runs.config(tiny, clips, tmp_path / "lora", "train.modules=[proj_out]", "train.steps=1")
    checkpoint = runs.run(lora)
    output = tmp_path / "lora.safetensors"
    assert main(["export", lora.output, "--format", "original", "--output", str(output)]) == 0
    trained = load_file(checkpoint / "lora.safetensors")
    exported = load_file(output)
    key = "transformer.blocks.1.attn1.to_out.0.lora_B.weight"
    assert exported["blocks.1.self_attn.o.lora_B.default.weight"].equal(trained[key])
    assert len(exported) == len(trained)
    assert sorted(load_file(tmp_path / "lora.modules.safetensors")) == ["head.head.bias", "head.head.weight"]
    full = runs.config(tiny, clips, tmp_path / "full", "train.method=full", "train.steps=1")
    whole = load_file(runs.run(full) / "transformer" / "diffusion_pytorch_model.safetensors")
    assert main(["export", full.output, "--format", "original", "--output", str(output)]) == 0
    back = convert_wan_transformer_to_diffusers(load_file(output))
    assert back.keys() == whole.keys()
    assert all(value.equal(whole[name]) for name, value in back.items())


@pytest.mark.parametrize("form", ["diffusers", "original", "comfyui"])
def test_training_goes_on_from_a_file(tiny: Path, clips: Path, tmp_path: Path, form: str) -> None:
    """With a learning rate of zero the saved LoRA is the file's, whatever alpha the run has."""
    file = _write(tmp_path / "from.safetensors", form, alpha=1.0 if form == "comfyui" else None)
    overrides = [f"lora.init_from={file}", f"lora.rank={RANK}", "lora.alpha=8", "train.learning_rate=0"]
    saved = load_file(runs.run(runs.config(tiny, clips, tmp_path / "run", *overrides)) / "lora.safetensors")
    assert len(saved) == 2 * len(LAYERS), "its layers, as lora.targets is null"
    scale = 1 / RANK if form == "comfyui" else 1.0
    for layer, (first, second) in _factors().items():
        assert saved[f"transformer.{layer}.lora_A.weight"].equal(first)
        torch.testing.assert_close(saved[f"transformer.{layer}.lora_B.weight"], second * scale, rtol=1e-6, atol=0)


def test_presets_are_fused_into_the_base(tiny: Path, clips: Path, tmp_path: Path) -> None:
    files = [_write(tmp_path / f"{form}.safetensors", form) for form in ("original", "comfyui")]
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", f"lora.preset={[str(file) for file in files]}"))
    filled = runs.fill_model(inputs)
    loaded = {base_name(name): value for name, value in filled.model.state_dict().items()}
    stock = WanTransformer3DModel.from_pretrained(tiny / "transformer").state_dict()
    for name, value in stock.items():
        found = loaded[name]
        change = _factors().get(name.removesuffix(".weight"))
        expected = value if change is None else value + 2 * change[1] @ change[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert sorted(set(filled.report.fused)) == sorted(f"{layer}.weight" for layer in LAYERS)


@pytest.mark.slow
def test_every_layout_starts_from_files_alike(tiny: Path, tmp_path: Path) -> None:
    start = _write(tmp_path / "start.safetensors", "original")
    preset = _write(tmp_path / "preset.safetensors", "comfyui", alpha=0.1)
    overrides = [f"lora.init_from={start}", f"lora.preset=[{preset}]", f"lora.rank={RANK}"]
    parity(options(tiny, ["single", "zero2:2", "zero3:2", "fsdp2:2", "sp:2"], *overrides))


def _change(file: Path, change: Any) -> Path:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


KEY = "transformer.blocks.0.attn1.to_q.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        (lambda t: t.update({"blocks.0.diff_b": torch.zeros(1)}), [], "'blocks.0.diff_b' is no tensor of a LoRA"),
        (lambda t: t.pop(KEY.format("A")), [], "the layer blocks.0.attn1.to_q has only one of its two factors"),
        (
            lambda t: t.update({"blocks.9.attn1.to_q.lora_A.weight": torch.zeros(2, 2)}),
            [],
            "there is no layer 'blocks.9",
        ),
        (
            lambda t: t.update({KEY.format("A"): torch.zeros(2, 5)}),
            [],
            r"shape \(2, 5\) and \(192, 2\) do not fit blocks.0",
        ),
        (lambda _: None, ["lora.rank=4"], "lora.rank: 4, but .* has rank 2; set lora.rank=2"),
        (lambda _: None, ["lora.targets=[q]"], "lora.targets: leaves out blocks.1.attn2.to_out.0"),
        (lambda _: None, ["train.method=full"], "lora.init_from has no effect with train.method=full"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tiny: Path, clips: Path, tmp_path: Path, change: Any, overrides: list[str], message: str
) -> None:
    file = _change(_write(tmp_path / "lora.safetensors", "diffusers"), change)
    with pytest.raises(UserError, match=message):
        fixed = [f"lora.init_from={file}", f"lora.rank={RANK}"]
        check_inputs(runs.config(tiny, clips, tmp_path / "run", *fixed, *overrides))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "original", "--output", "{tmp}/out.txt"], "--output: give a .safetensors file"),
        (
            ["--format", "original", "--output", "{tmp}/no/out.safetensors"],
            "--output: the folder {tmp}/no does not exist",
        ),
        (["--format", "original", "--output", "{tmp}/out.safetensors", "--merge"], "--merge: give the base model with"),
        (
            ["--format", "diffusers", "--output", "{tmp}/out.safetensors", "--merge", "--model", "{tiny}"],
            "--output: whole weights in diffusers' layout are a folder",
        ),
        (["--format", "original", "--output", "{tmp}/out.safetensors", "--variant", "wan"], "unknown variant 'wan'"),
    ],
)
def test_mistakes_of_export_are_named(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    source = _write(tmp_path / "lora.safetensors", "diffusers")
    given = [one.format(tmp=tmp_path, tiny=tiny) for one in arguments]
    if "--variant" not in given and "--model" not in given:
        given += ["--variant", "wan2.1-t2v-1.3b"]
    assert main(["export", str(source), *given]) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


def test_names_are_those_of_the_publisher(tiny: Path) -> None:
    """Every tensor of the model, against diffusers' own converter."""
    ours = list(read_headers(tiny / "transformer"))
    theirs = {NAMES.to_original(name): name for name in ours}
    assert None not in theirs
    assert len(theirs) == len(ours)
    back = convert_wan_transformer_to_diffusers({name: name for name in theirs})
    assert {original: name for name, original in back.items()} == theirs
    assert all(NAMES.from_original(str(original)) == name for original, name in theirs.items())
