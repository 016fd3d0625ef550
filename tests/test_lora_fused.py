"""LoRA files of models whose publishers keep several of diffusers' layers as one: read, written, merged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from safetensors.torch import load_file, save_file

from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.families.tiny import write_tiny_pipeline
from flowshard.weights.files import read_headers
from flowshard.weights.lora_files import adapted_layers, load_factors, read_lora
from tests import runs

TinyModels = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]
WIDTH, RANK = 144, 2
DOUBLE, SINGLE = "transformer_blocks.0", "single_transformer_blocks.1"
FUSED = {  # the publisher's name: DiffSynth-Studio's, inputs, diffusers' layers with their outputs
    "double_blocks.0.img_attn.qkv": (
        "blocks.0.attn.a_to_qkv",
        WIDTH,
        {f"{DOUBLE}.attn.{name}": WIDTH for name in ("to_q", "to_k", "to_v")},
    ),
    "double_blocks.0.txt_attn.qkv": (
        "blocks.0.attn.b_to_qkv",
        WIDTH,
        {f"{DOUBLE}.attn.{name}": WIDTH for name in ("add_q_proj", "add_k_proj", "add_v_proj")},
    ),
    "single_blocks.1.linear1": (
        "single_blocks.1.to_qkv_mlp",
        WIDTH,
        {
            **{f"{SINGLE}.attn.{name}": WIDTH for name in ("to_q", "to_k", "to_v")},
            f"{SINGLE}.proj_mlp": 4 * WIDTH,
        },
    ),
    "single_blocks.1.linear2": ("single_blocks.1.proj_out", 5 * WIDTH, {f"{SINGLE}.proj_out": WIDTH}),
    "double_blocks.0.txt_mlp.2": ("blocks.0.ff_b.2", 4 * WIDTH, {f"{DOUBLE}.ff_context.net.2": WIDTH}),
    "double_blocks.0.img_mod.lin": ("blocks.0.norm1_a.linear", WIDTH, {f"{DOUBLE}.norm1.linear": 6 * WIDTH}),
}


def _factors(seed: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)


def _fused_file(file: Path, form: str, alpha: float | None) -> dict[str, torch.Tensor]:
    """A file in the publisher's layers; the change of the weight of each of diffusers'."""
    stored: Tensors = {}
    changes: Tensors = {}
    for seed, (original, (diffsynth, inputs, outputs)) in enumerate(FUSED.items()):
        first, second = _factors(seed, inputs, sum(outputs.values()))
        prefix, down, up = {
            "original": (original, "lora_A.default", "lora_B.default"),
            "comfyui": (f"diffusion_model.{original}", "lora_A", "lora_B"),
            "kohya": (f"lora_unet_{original.replace('.', '_')}", "lora_down", "lora_up"),
            "diffsynth": (diffsynth, "lora_A.default", "lora_B.default"),
        }[form]
        stored |= {f"{prefix}.{down}.weight": first, f"{prefix}.{up}.weight": second}
        if alpha is not None:
            stored[f"{prefix}.alpha"] = torch.tensor(alpha)
        scale = 1.0 if alpha is None else alpha / RANK
        changes |= dict(zip(outputs, (scale * second @ first).split(list(outputs.values())), strict=True))
    save_file(stored, file)
    return changes


def _changes(file: Path, layers: dict[str, tuple[int, ...]] | None) -> Tensors:
    """What a file adds to each weight, as it is read here."""
    names = find_variant("flux.1-dev", option="")[0].names
    factors = load_factors(read_lora(file, layers, names, option="lora.preset"))
    return {name: one.scale * one.second @ one.first for name, one in factors.items()}


def _export(source: Path, output: Path, form: str, variant: str = "flux.1-dev") -> Tensors:
    fixed = ["export", str(source), "--format", form, "--output", str(output), "--variant", variant]
    assert main(fixed) == 0
    return load_file(output)


def _close(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def layers(tiny_models: TinyModels) -> dict[str, tuple[int, ...]]:
    headers = read_headers(tiny_models("flux.1-dev") / "transformer")
    return adapted_layers((name, info.shape) for name, info in headers.items())


@pytest.mark.parametrize("alpha", [None, 1.0])
@pytest.mark.parametrize("form", ["original", "comfyui", "kohya", "diffsynth"])
def test_fused_layers_are_read(
    layers: dict[str, tuple[int, ...]], tmp_path: Path, form: str, alpha: float | None
) -> None:
    file = tmp_path / "lora.safetensors"
    expected = _fused_file(file, form, alpha)
    _close(_changes(file, layers), expected)
    if form != "kohya":  # whose names need the model's
        _close(_changes(file, None), expected)


@pytest.mark.parametrize("form", ["original", "comfyui"])
def test_fused_files_go_through_all_formats_without_a_changed_bit(tmp_path: Path, form: str) -> None:
    source = tmp_path / "source.safetensors"
    _fused_file(source, form, None)
    diffusers = _export(source, tmp_path / "diffusers.safetensors", "diffusers")
    assert f"transformer.{SINGLE}.proj_mlp.lora_B.weight" in diffusers
    back = _export(tmp_path / "diffusers.safetensors", tmp_path / "back.safetensors", form)
    expected = load_file(source)
    assert back.keys() == expected.keys()
    assert all(back[name].equal(value) for name, value in expected.items())


def _separate_file(file: Path, *, without: str = "-") -> Tensors:
    """A file as training writes it, with factors of its own for each layer; the change of each weight."""
    stored: Tensors = {}
    changes: Tensors = {}
    for _, inputs, outputs in FUSED.values():
        for name, rows in outputs.items():
            if without not in name:
                first, second = _factors(len(stored) + 100, inputs, rows)
                stored |= {f"transformer.{name}.lora_A.weight": first, f"transformer.{name}.lora_B.weight": second}
                changes[name] = second @ first
    save_file(stored, file)
    return changes


@pytest.mark.parametrize("without", ["-", "to_k", "proj_mlp"])
def test_separate_layers_are_written_as_one(layers: dict[str, tuple[int, ...]], tmp_path: Path, without: str) -> None:
    """Ranks add up; layers without an adapter do not change."""
    changes = _separate_file(tmp_path / "separate.safetensors", without=without)
    fused = _export(tmp_path / "separate.safetensors", tmp_path / "fused.safetensors", "comfyui")
    for original, (_, _, outputs) in FUSED.items():
        first, second = (fused[f"diffusion_model.{original}.lora_{factor}.weight"] for factor in "AB")
        present = [name for name in outputs if name in changes]
        assert len(first) == RANK * len(present)
        found = dict(zip(outputs, (second @ first).split(list(outputs.values())), strict=True))
        _close(found, {name: changes.get(name, torch.zeros_like(found[name])) for name in outputs})
    read = _changes(tmp_path / "fused.safetensors", layers)
    assert all(not read[name].any() for name in read.keys() - changes.keys())


def test_diffusers_reads_what_is_written_as_one(tmp_path: Path) -> None:
    """Its converter knows queries, keys and values of any width, and the rest of the real one only."""
    changes = _separate_file(tmp_path / "separate.safetensors")
    fused = _export(tmp_path / "separate.safetensors", tmp_path / "fused.safetensors", "comfyui")
    kohya = {
        f"lora_unet_{layer.replace('.', '_')}.lora_{'down' if factor == 'A' else 'up'}.weight": value
        for key, value in fused.items()
        for layer, factor in [key.removeprefix("diffusion_model.").removesuffix(".weight").rsplit(".lora_", 1)]
        if layer.startswith("double_blocks.")
    }
    converted = _convert_kohya_flux_lora_to_diffusers(kohya)
    for name in (one for one in changes if one.startswith(DOUBLE)):
        first, second = (converted[f"transformer.{name}.lora_{factor}.weight"] for factor in "AB")
        torch.testing.assert_close(second @ first, changes[name], rtol=1e-5, atol=1e-5)


def test_swapped_halves_are_swapped_in_a_lora(tmp_path: Path) -> None:
    first, second = _factors(0, WIDTH, 2 * WIDTH)
    layer = "transformer.norm_out.linear"
    save_file({f"{layer}.lora_A.weight": first, f"{layer}.lora_B.weight": second}, tmp_path / "a.safetensors")
    written = _export(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "comfyui")
    swapped = written["diffusion_model.final_layer.adaLN_modulation.1.lora_B.weight"]
    assert swapped.equal(torch.cat([second[WIDTH:], second[:WIDTH]]))
    back = _export(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "diffusers")
    assert back[f"{layer}.lora_B.weight"].equal(second)


def test_z_image_is_written_in_the_names_that_comfyui_knows_and_read_in_both(tmp_path: Path) -> None:
    first, second = _factors(0, 180, 540)
    names = ("to_q", "to_k", "to_v")
    prefix = "diffusion_model.layers.0.attention"
    save_file({f"{prefix}.qkv.lora_A.weight": first, f"{prefix}.qkv.lora_B.weight": second}, tmp_path / "a.safetensors")
    written = _export(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "comfyui", "z-image-turbo")
    assert {f"{prefix}.{name}.lora_{factor}.weight" for name in names for factor in "AB"} == written.keys()
    assert torch.cat([written[f"{prefix}.{name}.lora_B.weight"] for name in names]).equal(second)
    again = _export(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "original", "z-image-turbo")
    assert again["layers.0.attention.to_k.lora_B.default.weight"].equal(second[180:360])


def test_training_and_generation_start_from_fused_files(tiny_models: TinyModels, clips: Path, tmp_path: Path) -> None:
    """What a run saves without learning is the file's, and its export is what it started from."""
    file = tmp_path / "fused.safetensors"
    changes = _fused_file(file, "kohya", 1.0)
    fixed = (
        *("model.variant=flux.1-dev", "data.frames=1", "train.steps=1", "train.learning_rate=0"),
        *(f"lora.init_from={file}", f"lora.rank={RANK}"),
    )
    config = runs.config(tiny_models("flux.1-dev"), clips, tmp_path / "run", *fixed)
    saved = runs.run(config) / "lora.safetensors"
    _close(_changes(saved, None), changes)
    pipeline = FluxPipeline.from_pretrained(tiny_models("flux.1-dev"))
    before = {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}
    pipeline.load_lora_weights(str(saved.parent), weight_name=saved.name)
    pipeline.fuse_lora()
    after = {name.replace(".base_layer.", "."): value for name, value in pipeline.transformer.state_dict().items()}
    _close({name: after[f"{name}.weight"] - before[f"{name}.weight"] for name in changes}, changes)


def test_a_lora_is_merged_into_the_publishers_files(tiny_models: TinyModels, tmp_path: Path) -> None:
    base, file = tmp_path / "base", tmp_path / "lora.safetensors"
    write_tiny_pipeline("flux.1-dev", base, seed=0, form="original")
    changes = _fused_file(file, "kohya", 1.0)
    expected = load_file(next((tiny_models("flux.1-dev") / "transformer").glob("*.safetensors")))
    for name, change in changes.items():
        expected[f"{name}.weight"] = expected[f"{name}.weight"] + change
    fixed = ["export", str(file), "--merge", "--model", str(base)]
    assert main([*fixed, "--format", "diffusers", "--output", str(tmp_path / "merged")]) == 0
    _close(FluxTransformer2DModel.from_pretrained(tmp_path / "merged").state_dict(), expected)
    assert main([*fixed, "--format", "original", "--output", str(tmp_path / "merged.safetensors")]) == 0
    stored = load_file(tmp_path / "merged.safetensors")
    query, key, value = (expected[f"{DOUBLE}.attn.{name}.weight"] for name in ("to_q", "to_k", "to_v"))
    torch.testing.assert_close(stored["double_blocks.0.img_attn.qkv.weight"], torch.cat([query, key, value]))
    assert len(stored) < len(expected)


@pytest.mark.parametrize(
    ("key", "rows", "message"),
    [
        ("diffusion_model.double_blocks.0.img_attn.qkv", 431, r"\(431, 2\) do not fit transformer_blocks.0.attn.to_q"),
        ("diffusion_model.double_blocks.9.img_attn.qkv", 432, "there is no layer 'diffusion_model.double_blocks.9"),
        ("blocks.0.attn.a_to_qkv", 432, "has two adapters for transformer_blocks.0.attn.to_q, one as double_blocks"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    layers: dict[str, tuple[int, ...]], tmp_path: Path, key: str, rows: int, message: str
) -> None:
    file = tmp_path / "lora.safetensors"
    _fused_file(file, "diffsynth", None)
    tensors = load_file(file)
    if not key.startswith("blocks"):
        tensors = {}
    else:
        key = "double_blocks.0.img_attn.qkv"
    tensors |= {f"{key}.lora_A.weight": torch.zeros(RANK, WIDTH), f"{key}.lora_B.weight": torch.zeros(rows, RANK)}
    save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        _changes(file, layers)
