"""The publisher's files of the Wan models with other conditions than text: as the diffusers folder of the same seed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

import flowshard
from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.families.wan_encoders import CLIP_HEADS, load_image_encoder
from flowshard.families.wan_files import CLIP, TEXT_ENCODER, VAE, VAE_2_2, WEIGHTS
from flowshard.train.inputs import check_inputs
from flowshard.weights.source import ModelSource, find_source, recognise_variant
from tests import runs
from tests.wan_variants import PROMPT, TinyModels, open_case, write_data

VARIANTS = (
    "wan2.1-i2v-14b-480p",
    "wan2.1-flf2v-14b-720p",
    "wan2.2-ti2v-5b",
    "wan2.2-t2v-a14b",
    "wan2.2-i2v-a14b",
    "wan2.1-vace-1.3b",
    "wan2.2-vace-fun-a14b",
)
FILE = "diffusion_pytorch_model.safetensors"
HIGH, LOW = "high_noise_model", "low_noise_model"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, clips)
    return folder


def _source(variant: str, *entries: Path | str, expert: str | None = None) -> ModelSource:
    family, row = find_variant(variant, option="model.variant")
    path = str(entries[0]) if len(entries) == 1 else [str(entry) for entry in entries]
    return find_source(path, family, row, option="model.path", expert=expert)


def _recognised(*entries: Path | str) -> str:
    path = str(entries[0]) if len(entries) == 1 else [str(entry) for entry in entries]
    return recognise_variant(path, option="model.path", variant_option="model.variant")


def _linked(folder: Path, to: Path) -> Path:
    """A private copy of a folder of files; one is replaced to change it."""
    to.mkdir()
    for item in folder.iterdir():
        (to / item.name).symlink_to(item)
    return to


def _assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    assert found.training == expected.training
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].equal(value), name


def _settings(config: Any) -> dict[str, Any]:
    plain = config if isinstance(config, dict) else config.to_dict()
    loose = ("dtype", "architectures", "transformers_version")  # of the saved file
    return {name: value for name, value in plain.items() if not name.startswith("_") and name not in loose}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_component_equals_that_of_the_diffusers_folder(
    tiny_models: TinyModels, originals: TinyModels, variant: str
) -> None:
    ours, _ = flowshard.load_pipeline(variant, originals(variant), dtype=torch.bfloat16)
    theirs, _ = flowshard.load_pipeline(variant, tiny_models(variant), dtype=torch.bfloat16)
    for name, expected in theirs.components.items():
        found = getattr(ours, name)
        assert type(found) is type(expected)
        if isinstance(expected, torch.nn.Module):
            _assert_same(found, expected)
        if name == "tokenizer":
            assert found(PROMPT)["input_ids"] == expected(PROMPT)["input_ids"]
        elif name == "image_processor" and expected is not None:
            picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8))
            assert np.array_equal(*(one(picture).pixel_values for one in (found, expected)))
        elif expected is not None:
            assert _settings(found.config) == _settings(expected.config), name
    for key in ("boundary_ratio", "expand_timesteps"):
        assert ours.config.get(key) == theirs.config.get(key)
    clip = torch.randn(1, 3, 5, 64, 32, generator=torch.Generator().manual_seed(0))
    latents = [one.vae.encode(clip).latent_dist.mode() for one in (ours, theirs)]
    torch.testing.assert_close(*latents, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(one.vae.decode(latents[0])[0] for one in (ours, theirs)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "wan2.2-vace-fun-a14b"])
def test_each_transformer_is_the_one_that_is_asked_for(
    tiny_models: TinyModels, originals: TinyModels, variant: str
) -> None:
    folder = originals(variant)
    for expert, own in (("high", HIGH), ("low", LOW)):
        expected, _ = flowshard.load(variant, tiny_models(variant), expert=expert)
        parts = [folder / TEXT_ENCODER, folder / VAE]
        for path in (
            folder,
            folder / own,
            [folder / own / WEIGHTS, *parts],
            [folder / HIGH / WEIGHTS, folder / LOW / WEIGHTS],
        ):
            places = [str(one) for one in path] if isinstance(path, list) else path
            found, _ = flowshard.load(variant, places, expert=expert)
            _assert_same(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_of_the_transformer_are_those_of_the_publisher(
    tiny_models: TinyModels, originals: TinyModels, variant: str
) -> None:
    """Against diffusers' converter, which does not know `img_emb.emb_pos`; the config against the folder's."""
    source = _source(variant, originals(variant))
    stored = {name: info.stored for name, info in source.tensors.items()}
    places = stored.pop("condition_embedder.image_embedder.pos_embed", None)
    assert places == ("img_emb.emb_pos" if variant == "wan2.1-flf2v-14b-720p" else None)
    assert convert_wan_transformer_to_diffusers({name: name for name in stored.values()}) == stored
    folder = tiny_models(variant) / "transformer"
    published = json.loads((folder / "config.json").read_text())
    assert source.config == {name: published[name] for name in source.config}
    assert all(
        published[name] is None
        for name in published.keys() - source.config.keys() - {"rope_max_seq_len"}
        if name[0] != "_"
    )


def test_the_configs_say_what_the_publisher_calls_them(originals: TinyModels) -> None:
    types = {
        "wan2.1-i2v-14b-480p": ("i2v", 36),
        "wan2.1-flf2v-14b-720p": ("flf2v", 36),
        "wan2.2-ti2v-5b": ("ti2v", 48),
        "wan2.1-vace-1.3b": ("vace", 16),
    }
    for variant, (kind, channels) in types.items():
        config = json.loads((originals(variant) / "config.json").read_text())
        assert (config["model_type"], config["in_dim"]) == (kind, channels)
    config = json.loads((originals("wan2.1-vace-1.3b") / "config.json").read_text())
    assert (config["vace_layers"], config["vace_in_dim"]) == ([0, 2], 96)


def _residual(prefix: str, *, shortcut: bool) -> set[str]:
    layers = {f"residual.{place}.gamma" for place in (0, 3)}
    layers |= {f"residual.{place}.{kind}" for place in (2, 6) for kind in ("weight", "bias")}
    if shortcut:
        layers |= {"shortcut.weight", "shortcut.bias"}
    return {f"{prefix}.{layer}" for layer in layers}


def test_names_of_the_vae_2_2_are_those_of_the_publisher(originals: TinyModels) -> None:
    """Of the modules of wan/modules/vae2_2.py; what is not in blocks also against diffusers' converter."""
    stored = torch.load(originals("wan2.2-ti2v-5b") / VAE_2_2, weights_only=True)
    ends = {name for name in stored if "samples" not in name}
    expected: set[str] = set()
    # Where a block changes the channels, and where it also resamples time: none in the last block of a half.
    for half, shortcuts, time, resnets in (
        ("encoder.downsamples", (1, 2), (1, 2), 2),
        ("decoder.upsamples", (2, 3), (0, 1), 3),
    ):
        inner = half.partition(".")[2]
        for block in range(4):
            prefix = f"{half}.{block}.{inner}"
            for place in range(resnets):
                expected |= _residual(f"{prefix}.{place}", shortcut=block in shortcuts and place == 0)
            layers = ["resample.1"] if block < 3 else []
            layers += ["time_conv"] if block in time else []
            expected |= {f"{prefix}.{resnets}.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert stored.keys() - ends == expected
    model, _ = flowshard.load_pipeline("wan2.2-ti2v-5b", originals("wan2.2-ti2v-5b"))
    converted = convert_wan_vae_to_diffusers({name: stored[name] for name in ends})
    own = {name: value for name, value in model.vae.state_dict().items() if "_blocks" not in name}
    assert converted.keys() == own.keys()
    assert all(own[name].equal(value) for name, value in converted.items())


def _publishers_clip(tensors: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """What wan/modules/clip.py computes up to its last block, which Wan does not use."""

    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, tensors[f"visual.{name}.weight"], tensors[f"visual.{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = tensors[f"visual.{name}.weight"], tensors[f"visual.{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    kernel = tensors["visual.patch_embedding.weight"]
    x = functional.conv2d(pixels, kernel, stride=kernel.shape[-1]).flatten(2).transpose(1, 2)
    x = torch.cat([tensors["visual.cls_embedding"].expand(len(x), -1, -1), x], dim=1)
    x = norm("pre_norm", x + tensors["visual.pos_embedding"])
    blocks = {name.split(".")[2] for name in tensors if name.startswith("visual.transformer.")}
    for prefix in (f"transformer.{block}" for block in range(len(blocks) - 1)):
        states = layer(f"{prefix}.attn.to_qkv", norm(f"{prefix}.norm1", x))
        query, key, value = states.unflatten(2, (3, CLIP_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + layer(f"{prefix}.attn.proj", attended)
        x = x + layer(f"{prefix}.mlp.2", functional.gelu(layer(f"{prefix}.mlp.0", norm(f"{prefix}.norm2", x))))
    return x


def test_the_clip_computes_what_the_publishers_does(originals: TinyModels, tmp_path: Path) -> None:
    """With random values for every bias and norm, and with the half that reads text, which is left out."""
    tensors = torch.load(originals("wan2.1-i2v-14b-480p") / CLIP, weights_only=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(value.shape, generator=generator) * 0.3 for name, value in tensors.items()}
    unused = ("visual.head", "log_scale", "textual.token_embedding.weight", "textual.head.0.weight")
    torch.save({**tensors, **{name: torch.zeros(3, 2) for name in unused}}, tmp_path / CLIP)
    encoder = load_image_encoder(tmp_path / CLIP)
    pixels = torch.randn(2, 3, 28, 28, generator=generator)
    found = encoder(pixels, output_hidden_states=True).hidden_states[-2]
    torch.testing.assert_close(found, _publishers_clip(tensors, pixels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["missing", "rows", "odd"])
def test_a_clip_that_is_none_is_refused(originals: TinyModels, tmp_path: Path, change: str) -> None:
    tensors = torch.load(originals("wan2.1-i2v-14b-480p") / CLIP, weights_only=True)
    if change == "missing":
        del tensors["visual.pos_embedding"]
    elif change == "rows":
        tensors["visual.transformer.0.attn.to_qkv.bias"] = torch.zeros(95)
    else:
        tensors["visual.patch_embedding.weight"] = torch.zeros(3)
    torch.save(tensors, tmp_path / CLIP)
    with pytest.raises(UserError, match=rf"{CLIP}: (is no CLIP: .* is missing or odd|.* is not 3 pieces)"):
        load_image_encoder(tmp_path / CLIP)


OTHERS = {  # from the variant that is set to that of the files, and what is said
    "wan2.1-t2v-14b": ("wan2.1-i2v-14b-480p", "has in_channels 36, .* of wan2.1-i2v-14b-480p or wan2.1-i2v-14b-720p"),
    "wan2.1-i2v-14b-480p": ("wan2.1-t2v-14b", "has in_channels 16, .* of wan2.1-t2v-1.3b or wan2.1-t2v-14b"),
    "wan2.1-i2v-14b-720p": ("wan2.1-flf2v-14b-720p", "has pos_embed_seq_len 10, .* of wan2.1-flf2v-14b-720p:"),
    "wan2.1-flf2v-14b-720p": ("wan2.1-i2v-14b-480p", "has pos_embed_seq_len None, .* of wan2.1-i2v-14b-480p"),
    "wan2.2-ti2v-5b": ("wan2.1-t2v-14b", "has out_channels 16, .* of wan2.1-t2v-1.3b"),
    "wan2.1-t2v-1.3b": ("wan2.1-vace-1.3b", "has vace_layers .0, 2., .* of wan2.1-vace-1.3b or wan2.1-vace-14b"),
    "wan2.1-vace-1.3b": ("wan2.1-t2v-1.3b", "has vace_layers None, .* of wan2.1-t2v-1.3b or"),
    "wan2.2-t2v-a14b": ("wan2.2-i2v-a14b", "has in_channels 36, .* of wan2.2-i2v-a14b:"),
    "wan2.2-i2v-a14b": ("wan2.1-i2v-14b-480p", "of a model with one transformer, wan2.2-i2v-a14b has two"),
    "wan2.1-vace-14b": ("wan2.2-vace-fun-a14b", "of a model with two transformers, wan2.1-vace-14b has one"),
}


@pytest.mark.parametrize("variant", OTHERS)
def test_files_of_another_variant_are_refused_by_what_they_are(originals: TinyModels, variant: str) -> None:
    other, message = OTHERS[variant]
    folder = originals(other)
    with pytest.raises(UserError, match=message):
        _source(variant, folder)


@pytest.mark.parametrize("variant", [*VARIANTS, "wan2.1-t2v-1.3b", "wan2.1-t2v-14b"])
def test_variants_are_recognised(originals: TinyModels, tmp_path: Path, variant: str) -> None:
    folder = originals(variant)
    if variant == "wan2.1-i2v-14b-480p":  # that of 720p is no other but for its scheduler, which is in no file
        with pytest.raises(UserError, match=r"set one of wan2.1-i2v-14b-480p, wan2.1-i2v-14b-720p"):
            _recognised(_linked(folder, tmp_path / "other"))
        folder = _linked(folder, tmp_path / "Wan2.1-I2V-14B-480P")  # the publisher's own name
    assert _recognised(folder) == variant
    inner = folder / LOW if (folder / LOW).is_dir() else folder
    assert variant == "wan2.1-i2v-14b-480p" or _recognised(inner) == variant
    if variant == "wan2.1-t2v-14b":  # a file may be one of two as well
        with pytest.raises(UserError, match=r"set one of wan2.1-t2v-14b, wan2.2-t2v-a14b"):
            _recognised(_linked(inner, tmp_path / "plain") / WEIGHTS)


def test_files_without_a_config_are_read_by_their_tensors(originals: TinyModels, tmp_path: Path) -> None:
    for variant in ("wan2.1-flf2v-14b-720p", "wan2.1-vace-1.3b"):
        folder = _linked(originals(variant), tmp_path / variant)
        expected = _source(variant, folder)
        (folder / "config.json").unlink()
        (folder / FILE).unlink()
        tensors = load_file(originals(variant) / FILE)
        save_file({f"model.diffusion_model.{name}": value for name, value in tensors.items()}, folder / FILE)
        assert _source(variant, folder).config == expected.config
        assert _source(variant, folder).tensors.keys() == expected.tensors.keys()


def test_shards_are_read(originals: TinyModels, tmp_path: Path) -> None:
    """As the 5B model comes, with an index beside them."""
    variant = "wan2.2-ti2v-5b"
    folder = _linked(originals(variant), tmp_path / "sharded")
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    for part in range(3):
        own = {name: tensors[name] for name in names[part::3]}
        save_file(own, folder / f"diffusion_pytorch_model-{part + 1:05d}-of-00003.safetensors")
    (folder / f"{FILE}.index.json").write_text("{}")
    source = _source(variant, folder)
    assert source.config == _source(variant, originals(variant)).config
    for name, info in source.tensors.items():
        with safe_open(info.file, framework="pt") as file:
            assert info.read(file, name).equal(tensors[str(info.stored)])
    assert _recognised(folder) == variant


def test_mistakes_about_parts_and_folders_are_named(originals: TinyModels, tmp_path: Path) -> None:
    folder = _linked(originals("wan2.1-i2v-14b-480p"), tmp_path / "clipless")
    (folder / CLIP).unlink()
    with pytest.raises(UserError, match=f"lacks the image_encoder .{CLIP}.; add it to the list"):
        _source("wan2.1-i2v-14b-480p", folder)
    with pytest.raises(UserError, match=f"{CLIP} is no file that wan has"):
        _source("wan2.1-t2v-14b", originals("wan2.1-t2v-14b") / WEIGHTS, originals("wan2.1-i2v-14b-480p") / CLIP)
    with pytest.raises(UserError, match=f"holds no weights of the transformer .{LOW}/"):
        _source("wan2.2-t2v-a14b", originals("wan2.2-t2v-a14b") / HIGH, expert="low")
    vace = Path(shutil.copytree(originals("wan2.1-vace-1.3b"), tmp_path / "vace"))
    config = json.loads((vace / "config.json").read_text())
    (vace / "config.json").write_text(json.dumps({**config, "vace_layers": [0, 1, 2]}))
    with pytest.raises(UserError, match=r"says vace_layers \[0, 1, 2\], but the tensors have 2 vace_blocks"):
        _source("wan2.1-vace-1.3b", vace)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_that_of_the_diffusers_folder(
    tiny_models: TinyModels, originals: TinyModels, data: Path, tmp_path: Path, variant: str
) -> None:
    case = open_case(variant, tiny_models, data)
    expert = () if case.variant.experts is None else ("model.expert=low",)
    losses = []
    for name, path in (("folder", case.folder), ("files", originals(variant))):
        config = case.config(tmp_path / name, f"model.path={path}", *expert, "train.steps=1", "train.global_batch=1")
        inputs = check_inputs(config)
        assert inputs.source.folder == (case.folder if name == "folder" else None)
        runs.run(config)
        losses.append([line[key] for line in runs.metrics(config) for key in ("loss", "grad_norm")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_clips_are_generated_with_both_transformers(
    tiny_models: TinyModels, originals: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = "wan2.2-t2v-a14b"
    size = ["--frames", "1", "--height", "32", "--width", "32", "--steps", "4", "--device", "cpu", "--dtype", "float32"]
    pictures = []
    for number, model in enumerate((tiny_models(variant), originals(variant))):
        file = tmp_path / f"{number}.png"
        command = ["generate", "--variant", variant, *size, "--prompt", PROMPT]
        assert main([*command, "--model", str(model), "--output", str(file)]) == 0
        pictures.append(np.asarray(Image.open(file)).astype(int))
    assert np.abs(pictures[0] - pictures[1]).max() <= 1
    capsys.readouterr()
    one = [*command, "--model", str(originals("wan2.1-t2v-14b") / FILE), "--output", str(file)]
    assert main(one) == 2
    assert (
        "--model: wan2.2-t2v-a14b has two transformers, which single files do not tell apart" in capsys.readouterr().err
    )


def test_fun_control_is_refused_by_name(tiny_models: TinyModels, originals: TinyModels, tmp_path: Path) -> None:
    """Which has the channels of a control clip and of a picture besides those of the noisy clip."""
    folder = _linked(originals("wan2.1-t2v-1.3b"), tmp_path / "fun")
    tensors = load_file(folder / FILE)
    tensors["patch_embedding.weight"] = tensors["patch_embedding.weight"].repeat(1, 3, 1, 1, 1)
    config = json.loads((folder / "config.json").read_text())
    for name in (FILE, "config.json"):
        (folder / name).unlink()
    save_file(tensors, folder / FILE)
    (folder / "config.json").write_text(json.dumps({**config, "in_dim": 48}))
    known = "it is of Wan Fun Control, for which diffusers has no pipeline"
    for variant, mark in (("wan2.1-t2v-1.3b", "in_channels 48"), ("wan2.2-ti2v-5b", "out_channels 16")):
        with pytest.raises(UserError, match=f"has {mark}, which {variant} has not; {known}"):
            _source(variant, folder)
    with pytest.raises(UserError, match=f"model.path: .*fun: {known}"):
        _recognised(folder)
    stock = Path(shutil.copytree(tiny_models("wan2.1-t2v-1.3b"), tmp_path / "stock"))
    settings = json.loads((stock / "transformer" / "config.json").read_text())
    (stock / "transformer" / "config.json").write_text(json.dumps({**settings, "in_channels": 48}))
    with pytest.raises(UserError, match=f"has in_channels 48, which wan2.1-t2v-1.3b has not; {known}"):
        _source("wan2.1-t2v-1.3b", stock)


def test_fun_inp_is_read_as_image_to_video(tmp_path: Path) -> None:
    """Which has the inputs of Wan 2.1 I2V and, in one size, fewer heads."""
    variant = "wan2.1-i2v-14b-480p"
    family, row = find_variant(variant, option="")
    pipeline = family.tiny_pipeline(replace(row, heads=12), seed=0)
    family.write_original(pipeline, tmp_path, row)
    found, report = flowshard.load(variant, tmp_path, dtype=torch.float32)
    assert found.config["num_attention_heads"] == 12 and not report.missing and not report.unexpected
    _assert_same(found.eval(), pipeline.transformer)
