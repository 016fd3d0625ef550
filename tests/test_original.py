"""The publisher's own files: the same model, to the bit, as the diffusers folder of the same seed."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from PIL import Image
from safetensors.torch import load_file, save_file

import flowshard
from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.families.tiny import write_tiny_pipeline
from flowshard.families.wan_encoders import VAE_NAMES
from flowshard.families.wan_files import TEXT_ENCODER, TOKENIZER, VAE
from flowshard.train.inputs import check_inputs
from flowshard.weights.source import ModelSource, find_source
from tests import runs

VARIANT = "wan2.1-t2v-1.3b"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the `tiny` fixture in the publisher's files."""
    folder = tmp_path_factory.mktemp("original") / "wan"
    write_tiny_pipeline(VARIANT, folder, seed=0, form="original")
    return folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """A private copy, by links; a file is replaced to change it."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for item in original.iterdir():
        (folder / item.name).symlink_to(item)
    return folder


def _source(path: str | list[str]) -> ModelSource:
    family, variant = find_variant(VARIANT, option="model.variant")
    return find_source(path, family, variant, option="model.path")


def test_the_files_have_the_publishers_names(original: Path) -> None:
    assert {item.name for item in original.iterdir()} == {WEIGHTS, "config.json", TEXT_ENCODER, VAE, "google"}
    assert (original / TOKENIZER / "tokenizer.json").is_file()
    assert {"blocks.0.self_attn.q.weight", "head.head.bias", "blocks.2.modulation"} <= load_file(
        original / WEIGHTS
    ).keys()
    text = torch.load(original / TEXT_ENCODER, weights_only=True)
    assert {
        "token_embedding.weight",
        "blocks.1.ffn.gate.0.weight",
        "blocks.0.pos_embedding.embedding.weight",
    } <= text.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_component_equals_that_of_the_diffusers_folder(tiny: Path, original: Path, dtype: torch.dtype) -> None:
    ours, _ = flowshard.load_pipeline(VARIANT, original, dtype=dtype)
    theirs, _ = flowshard.load_pipeline(VARIANT, tiny, dtype=dtype)
    for part in ("transformer", "text_encoder", "vae"):
        found, expected = getattr(ours, part).state_dict(), getattr(theirs, part).state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, (part, name)
            assert found[name].equal(value), (part, name)
    assert ours.vae.config.latents_mean == theirs.vae.config.latents_mean
    assert ours.scheduler.config.flow_shift == theirs.scheduler.config.flow_shift
    text = "A rabbit; 3 of them"
    assert ours.tokenizer(text)["input_ids"] == theirs.tokenizer(text)["input_ids"]
    embeddings = [one.encode_prompt(text, do_classifier_free_guidance=False)[0] for one in (ours, theirs)]
    if dtype == torch.float32:  # where a weight lies in memory decides how its products are rounded
        torch.testing.assert_close(embeddings[0], embeddings[1], rtol=1e-5, atol=1e-5)
    clip = torch.randn(1, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    latents = [one.vae.encode(clip).latent_dist.mode() for one in (ours, theirs)]
    torch.testing.assert_close(latents[0], latents[1], rtol=1e-5, atol=1e-5)


def test_names_of_the_vae_are_those_of_the_publisher(original: Path) -> None:
    """Against diffusers' own converter."""
    names = list(torch.load(original / VAE, weights_only=True))
    converted = convert_wan_vae_to_diffusers({name: name for name in names})
    assert converted == {VAE_NAMES.from_original(name): name for name in names}


@pytest.mark.parametrize(
    "form",
    [
        "list",
        "repository",
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("folder", "base path", "prefixed")),
    ],
)
def test_training_is_that_of_the_diffusers_folder(
    tiny: Path, original: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    expected = runs.config(tiny, clips, tmp_path / "expected", "train.steps=2")
    runs.run(expected)
    path: Any = str(original)
    if form == "list":
        path = [f"{original}/diffusion_pytorch_model*.safetensors", f"{original}/{TEXT_ENCODER}", f"{original}/{VAE}"]
    if form in ("repository", "base path"):
        base = tmp_path / ("models" if form == "repository" else "elsewhere")
        (base / "Wan-AI").mkdir(parents=True)
        (base / "Wan-AI" / "Wan2.1-T2V-1.3B").symlink_to(original)
        monkeypatch.chdir(tmp_path)
        if form == "base path":
            monkeypatch.setenv("DIFFSYNTH_MODEL_BASE_PATH", str(base))
        path = [
            f"Wan-AI/Wan2.1-T2V-1.3B:{name}" for name in ("diffusion_pytorch_model*.safetensors", TEXT_ENCODER, VAE)
        ]
    if form == "prefixed":  # as ComfyUI has them, without a config
        tensors = {f"model.diffusion_model.{name}": value for name, value in load_file(original / WEIGHTS).items()}
        save_file(tensors, tmp_path / "wan.safetensors")
        path = [str(tmp_path / "wan.safetensors"), *(str(original / name) for name in (TEXT_ENCODER, VAE))]
    config = runs.config(tiny, clips, tmp_path / "run", "train.steps=2", f"model.path={json.dumps(path)}")
    runs.run(config)
    losses = [[line["loss"] for line in runs.metrics(one)] for one in (config, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_generation_is_that_of_the_diffusers_folder(tiny: Path, original: Path, tmp_path: Path) -> None:
    size = ["--frames", "1", "--height", "32", "--width", "32", "--steps", "2", "--device", "cpu", "--dtype", "float32"]
    pictures: list[np.ndarray] = []
    for model, more in ((tiny, []), (original, ["--variant", VARIANT])):
        file = tmp_path / f"{model.name}-{len(pictures)}.png"
        arguments = ["generate", "--model", str(model), *more, "--prompt", "a rabbit", *size, "--output", str(file)]
        assert main(arguments) == 0
        pictures.append(np.asarray(Image.open(file)).astype(int))
    assert np.abs(pictures[0] - pictures[1]).max() <= 1


def _settings(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps({**settings, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 1536}, r"config.json: says dim 1536, but the tensors have 192; these files do not belong together"),
        ({"num_layers": 30}, "says num_layers 30, but the tensors have 3"),
        ({"num_heads": 7}, "7 heads do not divide a width of 192; check model.variant"),
    ],
)
def test_a_config_that_disagrees_is_refused(copy: Path, changes: dict[str, Any], message: str) -> None:
    _settings(copy, **changes)
    with pytest.raises(UserError, match=message):
        _source(str(copy))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["{copy}/nothing*.safetensors"], "model.path: {copy}/nothing.*.safetensors matches no file"),
        (["{copy}/" + TEXT_ENCODER, "{copy}/" + VAE], "holds no weights of the transformer"),
        (["{copy}/odd.pth", "{copy}"], "odd.pth is no file that wan has; it has models_t5_umt5-xxl-enc-bf16.pth"),
        (["{empty}"], "{empty} is neither a diffusers pipeline, .* nor has it the publisher's diffusion_pytorch_model"),
    ],
)
def test_lists_that_are_no_model_are_refused(copy: Path, tmp_path: Path, entries: list[str], message: str) -> None:
    (copy / "odd.pth").write_bytes(b"")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=message.format(copy=copy, empty=empty)):
        _source([entry.format(copy=copy, empty=empty) for entry in entries])


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_the_variant_is_recognised_and_said(
    tiny: Path,
    original: Path,
    clips: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layout: str,
) -> None:
    path = tiny if layout == "diffusers" else original
    overrides = [f"model.path={path}", "model.variant=null", "train.steps=1"]
    config = runs.config(tiny, clips, tmp_path / "run", *overrides)
    runs.run(config)
    assert f"{VARIANT} (recognised) from {path}" in capsys.readouterr().out
    assert f"variant: {VARIANT}" in Path(config.output, "config.yaml").read_text()


def test_a_variant_that_cannot_be_told_is_asked_for(copy: Path, tiny: Path, clips: Path, tmp_path: Path) -> None:
    _settings(copy, num_heads=6)
    with pytest.raises(UserError, match=r"model.variant: cannot tell what .* is; set one of wan2.1-t2v-1.3b"):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", f"model.path={copy}", "model.variant=null"))


@pytest.mark.parametrize("name", [TEXT_ENCODER, VAE, "google"])
def test_a_missing_part_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    part = {TEXT_ENCODER: "text_encoder", VAE: "vae", "google": "tokenizer"}[name]
    with pytest.raises(UserError, match=f"lacks the {part} .* add it to the list"):
        _source(str(copy))


class _Evil:
    """Would create a file if it were unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", [TEXT_ENCODER, VAE])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("evil", "holds more than tensors, which is not executed here"),
        ("cut", "cannot be read .* copy or download it again"),
        ("other", "(lacks|is no) "),
        ("list", "is not a mapping of names to tensors"),
    ],
)
def test_a_pth_that_is_no_such_model_is_refused_and_never_executed(
    tiny: Path,
    copy: Path,
    clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    kind: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = copy / name
    content = file.read_bytes()
    file.unlink()
    if kind == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        torch.save({"evil": _Evil(), "other": {"a": torch.zeros(1)}, "list": [torch.zeros(1)]}[kind], file)
    config = runs.config(tiny, clips, tmp_path / "run", f"model.path={copy}", "data.cache=off")
    assert main(["train", str(_dump(config))]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert any(part in error for part in message.split(" .* ")) or kind == "other"
    assert not Path("executed").exists()
    assert not Path(config.output, "metrics.jsonl").exists()


def _dump(config: Any) -> Path:
    from flowshard.config_file import dump_config

    file = Path(config.output).with_suffix(".dumped.yaml")
    file.write_text(dump_config(config, {}), encoding="utf-8")
    return file


def test_the_cache_knows_the_files_apart(tiny: Path, original: Path, copy: Path, clips: Path, tmp_path: Path) -> None:
    """Another VAE under the same name encodes anew."""
    first = runs.config(tiny, clips, tmp_path / "first", f"model.path={original}", "train.steps=1")
    runs.run(first)
    entries = set((tmp_path / "cache").rglob("*.safetensors"))
    other = torch.load(copy / VAE, weights_only=True)
    other["conv1.bias"] = other["conv1.bias"] + 1
    (copy / VAE).unlink()
    torch.save(other, copy / VAE)
    runs.run(runs.config(tiny, clips, tmp_path / "second", f"model.path={copy}", "train.steps=1"))
    assert len(set((tmp_path / "cache").rglob("*.safetensors")) - entries) == 5


def test_other_weights_of_a_single_file_are_refused_by_name(
    copy: Path, clips: Path, tiny: Path, tmp_path: Path
) -> None:
    tensors = load_file(copy / WEIGHTS)
    tensors["ref_conv.weight"] = torch.zeros(1)
    (copy / WEIGHTS).unlink()
    save_file(tensors, copy / WEIGHTS)
    with pytest.raises(UserError, match=r"the model has no place for ref_conv.weight"):
        runs.fill_model(check_inputs(runs.config(tiny, clips, tmp_path / "run", f"model.path={copy}")))
