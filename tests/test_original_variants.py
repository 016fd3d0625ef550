"""Publishers' files of image variants that are alike but for their names, parts or sizes: told apart, and refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import flowshard
from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.weights.source import ModelSource, find_source, recognise_variant
from tests.pictures import pictures, shrink_references

TinyModels = Callable[[str], Path]
FILES = {
    "flux.1-krea-dev": "flux1-krea-dev.safetensors",
    "flux.1-kontext-dev": "flux1-kontext-dev.safetensors",
    "flux.2-klein-4b": "flux-2-klein-4b.safetensors",
    "flux.2-klein-9b": "flux-2-klein-9b.safetensors",
    "flux.2-klein-base-9b": "flux-2-klein-base-9b.safetensors",
}
"""Variants to the names that their publisher gives the file of the transformer."""


def _source(variant: str, path: Path | list[str]) -> ModelSource:
    family, row = find_variant(variant, option="model.variant")
    return find_source(path if isinstance(path, list) else str(path), family, row, option="model.path")


def _recognised(path: Path | list[str]) -> str:
    return recognise_variant(
        path if isinstance(path, list) else str(path), option="model.path", variant_option="model.variant"
    )


def _linked(folder: Path, to: Path) -> Path:
    to.mkdir()
    for item in folder.iterdir():
        (to / item.name).symlink_to(item)
    return to


@pytest.mark.parametrize("variant", FILES)
def test_variants_are_known_by_the_name_of_their_file(originals: TinyModels, tmp_path: Path, variant: str) -> None:
    folder = _linked(originals(variant), tmp_path / "model")
    assert sorted(file.name for file in folder.glob("*.safetensors")) == sorted(
        [FILES[variant], *(["ae.safetensors"] if "flux.1" in variant else [])]
    )
    assert _recognised(folder) == variant
    if "klein" in variant:  # the tensors say the size, and not whether it is distilled
        (folder / FILES[variant]).rename(folder / "flux-2-klein.safetensors")
        size = variant[-2:]
        with pytest.raises(UserError, match=f"set one of flux.2-klein-{size}, flux.2-klein-base-{size}"):
            _recognised(folder)


def test_models_that_edit_are_known_by_their_processor(originals: TinyModels, tmp_path: Path) -> None:
    folder = _linked(originals("qwen-image-edit"), tmp_path / "model")
    with pytest.raises(UserError, match=r"set one of qwen-image-edit, qwen-image-edit-2509$"):
        _recognised(folder)
    assert _recognised(_linked(folder, tmp_path / "Qwen-Image-Edit-2509")) == "qwen-image-edit-2509"
    assert _recognised(_linked(originals("qwen-image-edit-2511"), tmp_path / "other")) == "qwen-image-edit-2511"
    (folder / "processor").unlink()
    assert _recognised(folder) == "qwen-image"
    with pytest.raises(UserError, match=r"lacks the processor \(processor\); add it to the list"):
        _source("qwen-image-edit", folder)
    elsewhere = originals("qwen-image-edit-2511") / "processor"
    whole = [str(folder / "transformer" / "*.safetensors"), str(folder / "vae"), str(elsewhere)]
    assert _source("qwen-image-edit", whole).parts["processor"] == elsewhere


def test_what_no_tensor_says_comes_from_the_variant(originals: TinyModels, tmp_path: Path) -> None:
    """Of published sizes, for which no config is needed."""
    tensors = _source("qwen-image-edit-2511", originals("qwen-image-edit-2511")).tensors
    head = "transformer_blocks.0.attn.norm_q.weight"
    sizes = {**tensors, head: replace(tensors[head], shape=(128,))}
    for variant, expected in (("qwen-image-edit-2509", False), ("qwen-image-edit-2511", True)):
        family, row = find_variant(variant, option="")
        assert family.transformer_config(None, sizes, row, where="")["zero_cond_t"] is expected
        given = family.transformer_config({"_class_name": family.transformer_class}, sizes, row, where="")
        assert "zero_cond_t" not in given
    for variant, distilled in (("flux.2-klein-4b", True), ("flux.2-klein-base-4b", False)):
        pipeline, _ = flowshard.load_pipeline(variant, originals(variant), dtype=torch.float32)
        assert pipeline.config.is_distilled is distilled


def test_the_series_of_flux2_are_told_apart_by_their_heads(originals: TinyModels) -> None:
    with pytest.raises(
        UserError,
        match=r"has num_attention_heads 24, which flux.2-dev has not; it is of flux.2-klein-4b or .*: give other",
    ):
        _source("flux.2-dev", [str(originals("flux.2-klein-4b") / "*.safetensors")])
    with pytest.raises(
        UserError, match=r"has num_attention_heads 48, which flux.2-klein-9b has not; it is of flux.2-dev:"
    ):
        _source("flux.2-klein-9b", [str(originals("flux.2-dev") / "flux2-dev.safetensors")])


@pytest.mark.parametrize("variant", ["qwen-image-edit-2509", "flux.2-klein-9b"])
def test_prompts_and_pictures_are_read_as_in_the_diffusers_folder(
    tiny_models: TinyModels, originals: TinyModels, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_references(monkeypatch)
    family = find_variant(variant, option="")[0]
    frames, inputs = np.zeros((1, 32, 32, 3), dtype=np.uint8), {"edit_image": pictures()}
    found = []
    for path in (tiny_models(variant), originals(variant)):
        encoders = family.load_encoders(_source(variant, path), dtype=torch.float32, device=torch.device("cpu"))
        own = {**family.encode_media(encoders, frames), **family.encode_inputs(encoders, frames, inputs)}
        found.append({**own, **family.encode_prompt(encoders, "a rabbit", inputs)})
    assert {"latents", "reference.1", "prompt_embeds"} <= found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
