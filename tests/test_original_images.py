"""The publishers' own files of the image families, against the diffusers folder of the same seed and diffusers' converters."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_utils import (
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_ldm_vae_checkpoint,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import flowshard
from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.families import all_families, find_variant
from flowshard.parity.command import parity
from flowshard.train.inputs import check_inputs
from flowshard.weights import original
from flowshard.weights import source as sources
from flowshard.weights.files import TensorInfo, read_header
from flowshard.weights.fused import original_tensors
from flowshard.weights.load import build_model
from tests import runs
from tests.pictures import pictures
from tests.test_layouts_agree import options

TinyModels = Callable[[str], Path]
SHARDS = "transformer/diffusion_pytorch_model*.safetensors"
LISTS = {  # as DiffSynth-Studio's command lines have them
    "flux.1-dev": ["flux1-dev.safetensors", "text_encoder/model.safetensors", "text_encoder_2/*.safetensors", "ae.safetensors"],
    "flux.2-dev": ["flux2-dev.safetensors", "text_encoder/*.safetensors", "ae.safetensors"],
    "qwen-image": [SHARDS, "text_encoder/model*.safetensors", "vae/diffusion_pytorch_model.safetensors"],
    "z-image-turbo": [SHARDS, "text_encoder/*.safetensors", "vae/diffusion_pytorch_model.safetensors"],
    "qwen-image-edit-2511": [SHARDS, "text_encoder/model*.safetensors", "vae/diffusion_pytorch_model.safetensors", "processor"],
    "flux.2-klein-base-4b": ["flux-2-klein-base-4b.safetensors", "text_encoder/*.safetensors", "vae/diffusion_pytorch_model.safetensors"],
}  # fmt: skip
IMAGES = tuple(LISTS)


def _weights(variant: str, folder: Path) -> Path:
    return next(folder.glob(str(find_variant(variant, option="")[0].original_weights)))


def _copy(folder: Path, tmp_path: Path) -> Path:
    """A private copy of a few megabytes."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def _source(variant: str, *entries: Path | str) -> sources.ModelSource:
    family, row = find_variant(variant, option="model.variant")
    return sources.find_source([str(entry) for entry in entries], family, row, option="model.path")


def _read(source: sources.ModelSource) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, info in source.tensors.items():
        with safe_open(info.file, framework="pt") as file:
            tensors[name] = info.read(file, name)
        assert tuple(tensors[name].shape) == info.shape
    return tensors


def _settings(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].equal(value), name


@pytest.mark.parametrize("variant", IMAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_component_equals_that_of_the_diffusers_folder(
    tiny_models: TinyModels, originals: TinyModels, variant: str, dtype: torch.dtype
) -> None:
    ours, _ = flowshard.load_pipeline(variant, originals(variant), dtype=dtype)
    theirs, _ = flowshard.load_pipeline(variant, tiny_models(variant), dtype=dtype)
    for name, expected in theirs.components.items():
        found = getattr(ours, name)
        if isinstance(expected, torch.nn.Module):
            _assert_same(found.state_dict(), expected.state_dict())
            assert found.training == expected.training
        elif name.startswith("tokenizer"):
            text = "A rabbit; 3 of them"
            assert found(text)["input_ids"] == expected(text)["input_ids"]
        elif name == "processor":
            assert type(found) is type(expected)
            given = {"text": [f"{found.image_token} A rabbit"], "images": pictures()[:1], "return_tensors": "pt"}
            for one, other in zip(found(**given).values(), expected(**given).values(), strict=True):
                assert torch.equal(one, other)
        elif name == "scheduler":
            assert _settings(found.config) == _settings(expected.config)
    assert ours.config.get("is_distilled") == theirs.config.get("is_distilled")
    for key in ("scaling_factor", "shift_factor", "latents_mean", "batch_norm_eps"):
        assert ours.vae.config.get(key) == theirs.vae.config.get(key)


def _flux_tensors() -> dict[str, torch.Tensor]:
    """FLUX.1 in the publisher's names with its real rows (the converter knows no others) and one column."""
    width = 3072
    rows: dict[str, int] = {}
    for prefix in ("time_in", "vector_in", "guidance_in"):
        rows |= {f"{prefix}.in_layer": width, f"{prefix}.out_layer": width}
    rows |= {"img_in": width, "txt_in": width, "final_layer.linear": 64, "final_layer.adaLN_modulation.1": 2 * width}
    scales = []
    for stream in ("img", "txt"):
        block = "double_blocks.0."
        rows |= {f"{block}{stream}_mod.lin": 6 * width, f"{block}{stream}_mlp.0": 4 * width}
        rows |= {f"{block}{stream}_mlp.2": width, f"{block}{stream}_attn.proj": width}
        rows[f"{block}{stream}_attn.qkv"] = 3 * width
        scales += [f"{block}{stream}_attn.norm.{which}_norm.scale" for which in ("query", "key")]
    rows |= {"single_blocks.0.linear1": 7 * width, "single_blocks.0.linear2": width}
    rows["single_blocks.0.modulation.lin"] = 3 * width
    scales += [f"single_blocks.0.norm.{which}_norm.scale" for which in ("query", "key")]
    tensors = {f"{name}.weight": torch.rand(count, 1) for name, count in rows.items()}
    tensors |= {f"{name}.bias": torch.rand(count) for name, count in rows.items()}
    return tensors | {name: torch.rand(128) for name in scales}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_flux_is_read_and_written_as_diffusers_converts_it(originals: TinyModels, tmp_path: Path, prefix: str) -> None:
    tensors, folder = _flux_tensors(), originals("flux.1-dev")
    file = tmp_path / "flux1.safetensors"
    save_file({prefix + name: value for name, value in tensors.items()}, file)
    parts = [folder / name for name in ("ae.safetensors", "text_encoder", "text_encoder_2")]
    found = _read(_source("flux.1-dev", file, *parts))
    _assert_same(found, convert_flux_transformer_checkpoint_to_diffusers(dict(tensors)))
    names = find_variant("flux.1-dev", option="")[0].names
    _assert_same(original_tensors(found, names, option=""), tensors)


def _random_pipeline(variant: str, folder: Path) -> Any:
    """A tiny pipeline in the publisher's files, whose norms too have values by which they are known."""
    family, row = find_variant(variant, option="")
    pipeline = family.tiny_pipeline(row, seed=0)
    with torch.no_grad():
        for model in (pipeline.transformer, pipeline.vae):
            for value in model.state_dict().values():
                value.copy_(torch.rand(value.shape))
    family.write_original(pipeline, folder, row)
    return pipeline


def test_flux2_is_written_as_diffusers_converts_it(tmp_path: Path) -> None:
    pipeline = _random_pipeline("flux.2-dev", tmp_path)
    stored = load_file(tmp_path / "flux2-dev.safetensors")
    assert {"double_blocks.0.img_attn.qkv.weight", "single_stream_modulation.lin.weight"} <= stored.keys()
    _assert_same(convert_flux2_transformer_checkpoint_to_diffusers(stored), pipeline.transformer.state_dict())
    _assert_same(_read(_source("flux.2-dev", tmp_path)), pipeline.transformer.state_dict())


@pytest.mark.parametrize("variant", ["flux.1-dev", "flux.2-dev"])
def test_the_vae_is_written_and_read_as_diffusers_converts_it(tmp_path: Path, variant: str) -> None:
    expected = _random_pipeline(variant, tmp_path).vae
    stored = load_file(tmp_path / "ae.safetensors")
    assert stored["encoder.mid.attn_1.q.weight"].ndim == 4
    # FLUX.2 has these inside, which scripts/convert_flux2_to_diffusers.py renames, and a batch norm.
    for half, name in (("encoder", "quant_conv"), ("decoder", "post_quant_conv")):
        for kind in ("weight", "bias"):
            if f"{half}.{name}.{kind}" in stored:
                stored[f"{name}.{kind}"] = stored.pop(f"{half}.{name}.{kind}")
    norm = {name: value for name, value in stored.items() if name.startswith("bn.")}
    state = expected.state_dict()
    found = convert_ldm_vae_checkpoint(stored, expected.config) | norm
    _assert_same({name: value.view_as(state[name]) for name, value in found.items()}, state)
    read, _ = flowshard.load_pipeline(variant, tmp_path)
    _assert_same(read.vae.state_dict(), state)


def test_z_image_is_written_for_comfyui_and_read_as_diffusers_converts_it(tmp_path: Path) -> None:
    transformer = _random_pipeline("z-image-turbo", tmp_path).transformer
    output = tmp_path / "z_image.safetensors"
    source = ["export", str(tmp_path), "--variant", "z-image-turbo"]
    assert main([*source, "--format", "comfyui", "--output", str(output)]) == 0
    stored = load_file(output)
    names = ("layers.0.attention.qkv.weight", "x_embedder.bias", "noise_refiner.1.attention.k_norm.weight")
    assert {f"model.diffusion_model.{name}" for name in names} <= stored.keys()
    save_file(stored | {"model.diffusion_model.norm_final.weight": torch.ones(1)}, output)
    shutil.copy(tmp_path / "transformer" / "config.json", tmp_path)
    _assert_same(_read(_source("z-image-turbo", output)), transformer.state_dict())
    _assert_same(convert_z_image_transformer_checkpoint_to_diffusers(stored), transformer.state_dict())


@pytest.mark.parametrize("form", ["original", "comfyui"])
@pytest.mark.parametrize("variant", ["flux.1-dev", "flux.2-dev", "qwen-image"])
def test_whole_weights_are_exported(
    tiny_models: TinyModels, originals: TinyModels, tmp_path: Path, variant: str, form: str
) -> None:
    """To the bit what the publisher's files have."""
    output = tmp_path / "whole.safetensors"
    arguments = ["export", str(tiny_models(variant)), "--variant", variant, "--format", form, "--output", str(output)]
    assert main(arguments) == 0
    prefix = "model.diffusion_model." if form == "comfyui" else ""
    expected = load_file(_weights(variant, originals(variant)))
    _assert_same(load_file(output), {prefix + name: value for name, value in expected.items()})


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=pytest.mark.slow if "flux" in name or "edit" in name else []) for name in IMAGES],
)
def test_training_from_a_list_is_that_from_the_diffusers_folder(
    tiny_models: TinyModels, originals: TinyModels, clips: Path, tmp_path: Path, variant: str
) -> None:
    losses = []
    paths = [str(originals(variant) / entry) for entry in LISTS[variant]]
    for name, more in (("a", []), ("b", [f"model.path={json.dumps(paths)}", "model.variant=null"])):
        fixed = [f"model.variant={variant}", "data.frames=1", "train.steps=2", "train.learning_rate=1e-2"]
        if any(one.required for one in find_variant(variant, option="")[0].inputs):  # at the published sizes
            fixed += [f"data.metadata={clips / 'metadata_edit.json'}", "train.global_batch=1", "model.layers=1"]
        config = runs.config(tiny_models(variant), clips, tmp_path / name, *fixed, *more)
        runs.run(config)
        losses.append([line["loss"] for line in runs.metrics(config)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_fused_tensors_are_mapped_not_copied(originals: TinyModels, clips: Path, tmp_path: Path) -> None:
    fixed = ("model.variant=flux.1-dev", "data.frames=1", "lora.targets=[ff.net.2]")
    model = runs.fill_model(check_inputs(runs.config(originals("flux.1-dev"), clips, tmp_path / "run", *fixed))).model
    query, key = (model.get_parameter(f"transformer_blocks.0.attn.{name}.weight") for name in ("to_q", "to_k"))
    assert key.data_ptr() - query.data_ptr() == query.numel() * query.element_size()
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith("flux1-dev.safetensors")]
    assert any(int(start, 16) <= key.data_ptr() < int(end, 16) for start, end in ranges)


@pytest.mark.slow
def test_every_layout_loads_the_publishers_files(originals: TinyModels) -> None:
    folder = originals("flux.1-dev")
    more = ["model.variant=flux.1-dev", "data.frames=1", "train.method=full"]
    parity(options(folder, ["single", "zero3:2", "fsdp2:2"], *more))


PUBLISHED: dict[str, dict[str, Any]] = {  # the config.json of each repository, with fewer blocks
    "flux.1-dev": {"num_layers": 1, "num_single_layers": 2, "guidance_embeds": True},
    "flux.2-dev": {"num_layers": 1, "num_single_layers": 2},
    "qwen-image": {"num_layers": 2},
    "z-image-turbo": {"n_layers": 2, "axes_lens": [1536, 512, 512]},
    "qwen-image-edit-2511": {"num_layers": 2, "zero_cond_t": True},
    "flux.2-klein-base-4b": {
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    },
}


@pytest.mark.parametrize("variant", IMAGES)
def test_the_config_of_published_weights_follows_from_their_shapes(variant: str) -> None:
    family, row = find_variant(variant, option="")
    published = build_model(family.transformer_class, PUBLISHED[variant])
    tensors = {
        name: TensorInfo(Path("x"), "BF16", tuple(value.shape)) for name, value in published.state_dict().items()
    }
    found = family.transformer_config(None, tensors, row, where="")
    built = build_model(family.transformer_class, found)
    plain = [json.loads(json.dumps(_settings(model.config))) for model in (built, published)]
    assert plain[0] == plain[1]
    assert found[family.heads_setting] == row.heads
    assert {name: value.shape for name, value in built.state_dict().items()} == {
        name: value.shape for name, value in published.state_dict().items()
    }


@pytest.mark.parametrize("variant", IMAGES)
@pytest.mark.parametrize("form", ["folder", "list"])
def test_files_are_recognised_by_few_headers(
    originals: TinyModels, monkeypatch: pytest.MonkeyPatch, variant: str, form: str
) -> None:
    folder, opened = originals(variant), []

    def read(file: Path) -> dict[str, TensorInfo]:
        opened.append(file)
        return read_header(file)

    monkeypatch.setattr(original, "read_header", read)
    path = str(folder) if form == "folder" else [str(folder / entry) for entry in LISTS[variant]]
    assert sources.recognise_variant(path, option="model.path", variant_option="model.variant") == variant
    assert opened == [_weights(variant, folder)]


def test_landmarks_are_of_one_series_each(tiny_models: TinyModels) -> None:
    for variant in ("wan2.1-t2v-1.3b", *IMAGES):
        names = load_file(next((tiny_models(variant) / "transformer").glob("*.safetensors")))
        with_it = {family.landmark for family in all_families() if family.landmark in names}
        assert with_it == {find_variant(variant, option="")[0].landmark}


def _without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        place = folder / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return change


def _save(name: str, *tensors: str, rows: int = 1) -> Callable[[Path], None]:
    return lambda folder: save_file({tensor: torch.zeros(rows, 1) for tensor in tensors}, folder / name)


def _set(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def _cut(folder: Path) -> None:
    tensors = load_file(folder / "flux1-dev.safetensors")
    tensors["single_blocks.0.linear1.weight"] = tensors["single_blocks.0.linear1.weight"][:-1].contiguous()
    save_file(tensors, folder / "flux1-dev.safetensors")


WHOLE, BESIDE = ("",), ("flux1-dev.safetensors", "more.safetensors")


@pytest.mark.parametrize(
    ("entries", "change", "message"),
    [
        (WHOLE, _without("text_encoder_2"), r"lacks the text_encoder_2 \(text_encoder_2\); add it to the list"),
        (WHOLE, _without("ae.safetensors"), r"lacks the vae \(ae.safetensors or vae\); add it"),
        (
            WHOLE,
            _without("text_encoder/config.json"),
            "text_encoder lacks config.json; copy it as well, from black-forest-labs/FLUX.1-dev",
        ),
        (WHOLE, _save("text_encoder_2/m.safetensors", "x"), "text_encoder_2 lacks the .safetensors.index.json of its"),
        (WHOLE, _cut, r"single_blocks.0.linear1.weight of shape \(1007, 144\) is not 7 pieces of one size"),
        (WHOLE, lambda folder: _set(folder, num_layers=19), "says num_layers 19, but the tensors have 2; these files do"),
        (WHOLE, _without("config.json"), "is needed, as the model has heads of 6 channels, and the published one of 128"),
        (BESIDE, _save("more.safetensors", "img_in.bias"), "both hold the transformer's x_embedder.bias; give one"),
        (
            BESIDE,
            _save("more.safetensors", "encoder.block.0.layer.0.SelfAttention.q.weight"),
            "more.safetensors is a text encoder in one file; flux takes text_encoder of its publisher",
        ),
        (
            ("x.safetensors",),
            _save("x.safetensors", "single_stream_modulation.lin.weight", "double_stream_modulation_img.lin.weight"),
            "holds a transformer of flux2, and the variant is one of flux; .* set the variant to flux.2-dev",
        ),
        (
            ("x.safetensors",),
            _save("x.safetensors", "joint_blocks.0.x_block.attn.qkv.weight"),
            "is no transformer of flux, as it lacks vector_in.in_layer.weight; it has joint_blocks.0",
        ),
        (("x.safetensors",), _save("x.safetensors", "a.lora_A.weight"), "x.safetensors is a LoRA, not weights"),
    ],
)  # fmt: skip
def test_files_that_are_no_model_are_refused(
    originals: TinyModels, tmp_path: Path, entries: tuple[str, ...], change: Callable[[Path], None], message: str
) -> None:
    folder = _copy(originals("flux.1-dev"), tmp_path)
    change(folder)
    with pytest.raises(UserError, match=message):
        _source("flux.1-dev", *(folder / entry for entry in entries))


def test_a_vae_needs_no_config(originals: TinyModels, tiny_models: TinyModels, tmp_path: Path) -> None:
    """As DiffSynth-Studio downloads it."""
    for variant in ("flux.2-dev", "qwen-image", "z-image-turbo"):
        stored = next((tiny_models(variant) / "vae").glob("*.safetensors"))
        folder = tmp_path / variant / "vae"
        folder.mkdir(parents=True)
        shutil.copy(stored, folder)
        entries = [originals(variant) / entry for entry in LISTS[variant][:-1]]
        source = _source(variant, *entries, folder / stored.name)
        vae = (
            find_variant(variant, option="")[0]
            .load_encoders(source, dtype=torch.float32, device=torch.device("cpu"))
            .vae
        )
        _assert_same(
            vae.state_dict(), getattr(diffusers, type(vae).__name__).from_pretrained(stored.parent).state_dict()
        )


def test_transformers_in_diffusers_names_are_read_from_a_list(tiny_models: TinyModels) -> None:
    """As DiffSynth-Studio has FLUX.2."""
    for variant in ("flux.1-dev", "flux.2-dev"):
        folder = tiny_models(variant)
        path = [str(folder / f"{part}/*.safetensors") for part in ("transformer", "text_encoder*", "vae")]
        assert sources.recognise_variant(path, option="", variant_option="") == variant
        expected = load_file(next((folder / "transformer").glob("*.safetensors")))
        _assert_same(_read(_source(variant, *path)), expected)


def test_parts_of_a_fused_tensor_alone_are_not_exported(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = "train.modules=[transformer_blocks.0.attn.to_q]"
    fixed = ("model.variant=flux.1-dev", "data.frames=1", "train.steps=1", "lora.targets=[ff.net.2]", modules)
    config = runs.config(tiny_models("flux.1-dev"), clips, tmp_path / "run", *fixed)
    runs.run(config)
    assert main(["export", config.output, "--format", "comfyui", "--output", str(tmp_path / "x.safetensors")]) == 2
    assert "attn.to_k.bias, transformer_blocks.0.attn.to_v.bias is not there" in capsys.readouterr().err
