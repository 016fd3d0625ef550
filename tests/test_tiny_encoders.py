"""The tiny tokenizers, text encoders and VAEs: what the stock image pipelines make of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, Flux2Pipeline, FluxPipeline, QwenImagePipeline
from diffusers.pipelines.flux2.pipeline_flux2 import format_input

from flowshard.families import find_variant, tiny_encoders
from flowshard.families.tiny import TEXT_WIDTH
from flowshard.seeds import isolated_rng


class _Pair(NamedTuple):
    """A pipeline as it was built and as diffusers reads its folder."""

    built: Any
    read: Any
    folder: Path


@pytest.fixture(scope="module", params=["qwen-image", "flux.1-dev", "flux.2-dev", "z-image-turbo"])
def pair(request: pytest.FixtureRequest, tiny_models: Callable[[str], Path]) -> _Pair:
    family, variant = find_variant(request.param, option="VARIANT")
    built, folder = family.tiny_pipeline(variant, seed=0), tiny_models(request.param)
    read = DiffusionPipeline.from_pretrained(folder)
    for pipeline in (built, read):
        pipeline.set_progress_bar_config(disable=True)
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
    return _Pair(built, read, folder)


def _embeddings(pipeline: Any, prompt: str) -> list[torch.Tensor]:
    """Of the tokens, (tokens, channels), and where there is one of the whole prompt, (1, channels)."""
    with torch.no_grad():
        embeddings, second = pipeline.encode_prompt(prompt, max_sequence_length=64)[:2]
    return [embeddings[0], second] if isinstance(pipeline, FluxPipeline) else [embeddings[0]]


def test_the_stock_pipeline_reads_it_and_generates(pair: _Pair) -> None:
    assert type(pair.read) is type(pair.built)
    picture = pair.read(
        prompt="a cat", height=32, width=32, num_inference_steps=2, max_sequence_length=64, output_type="np"
    ).images[0]
    assert picture.shape == (32, 32, 3)
    assert np.isfinite(picture).all()
    assert picture.std() > 0


def test_prompts_are_told_apart_and_encoded_equally_after_the_round_trip(pair: _Pair) -> None:
    cat, bat = (_embeddings(pair.built, prompt) for prompt in ("cat on a wall", "bat on a wall"))
    for ours, theirs in zip(cat, _embeddings(pair.read, "cat on a wall"), strict=True):
        assert torch.equal(ours, theirs)
    for one, other in zip(cat, bat, strict=True):
        assert one.isfinite().all()
        # The last token knows of the first letter.
        assert float((one - other)[-1].norm()) > 0.01 * float(one[-1].norm()) > 0


def test_encoders_and_vae_are_small(pair: _Pair) -> None:
    files = [file for file in pair.folder.rglob("*") if file.is_file() and file.parent.name != "transformer"]
    assert sum(file.stat().st_size for file in files) < 3 * 2**20


def test_latents_of_smooth_pictures_have_unit_scale(pair: _Pair) -> None:
    vae = pair.read.vae
    y, x = torch.meshgrid(torch.linspace(0, 4, 64), torch.linspace(0, 2, 64), indexing="ij")
    pictures = torch.stack([(x * a + y + b).sin() * (y * a - b).cos() for a in (0.5, 1, 2) for b in range(6)])
    pictures = pictures.unflatten(0, (6, 3))
    is_qwen = isinstance(pair.read, QwenImagePipeline)
    with torch.no_grad():
        latents = vae.encode(pictures.unsqueeze(2) if is_qwen else pictures).latent_dist.mode()
    if is_qwen:
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
        latents = (latents - mean) / std
    elif isinstance(pair.read, Flux2Pipeline):
        mean, variance = (v.view(1, -1, 1, 1) for v in (vae.bn.running_mean, vae.bn.running_var))
        latents = (pair.read._patchify_latents(latents) - mean) / (variance + vae.config.batch_norm_eps).sqrt()
    else:
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    assert abs(float(latents.mean())) < 0.2
    assert 0.7 < float(latents.std()) < 1.4


def test_the_decoder_takes_back_what_the_normalisation_did() -> None:
    with isolated_rng(0, "tiny"):
        vae = tiny_encoders.qwen_vae().eval()
        pictures = tiny_encoders.smooth_clips(1)
    with torch.no_grad():
        before = vae.decode(vae.encode(pictures).latent_dist.mode()).sample
        tiny_encoders.normalise_latents(vae, pictures, mean=torch.full([16], 5.0), std=torch.full([16], 0.1))
        after = vae.encode(pictures).latent_dist.mode()
        torch.testing.assert_close(after.mean(dim=(0, 2, 3, 4)), torch.full([16], 5.0))
        torch.testing.assert_close(after.std(dim=(0, 2, 3, 4)), torch.full([16], 0.1))
        torch.testing.assert_close(vae.decode(after).sample, before, atol=1e-3, rtol=1e-3)


def test_one_seed_gives_equal_weights() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        with isolated_rng(seed, "tiny"):
            return [*tiny_encoders.qwen3_encoder(tokenizer).parameters(), *tiny_encoders.flux2_vae().buffers()]

    tokenizer = tiny_encoders.qwen_tokenizer()
    assert all(torch.equal(one, other) for one, other in zip(weights(0), weights(0), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(weights(0), weights(1), strict=True))


def test_what_qwen_image_writes_before_a_prompt_has_as_many_tokens_as_it_cuts_off() -> None:
    family, variant = find_variant("qwen-image", option="VARIANT")
    pipeline = family.tiny_pipeline(variant, seed=0)
    before, after = pipeline.prompt_template_encode.split("{}")
    assert len(pipeline.tokenizer(before).input_ids) == pipeline.prompt_template_encode_start_idx == 34
    assert len(pipeline.tokenizer(after).input_ids) == 5
    assert _embeddings(pipeline, "cat")[0].shape == (3 + 5, TEXT_WIDTH)


@pytest.mark.parametrize(
    "text", ["A system's user, 2 dogs!\n", "  日本の猫 🐈", "<|im_start|>user\nThe image<|im_end|>"]
)
def test_byte_level_tokenizers_give_back_any_text(text: str) -> None:
    for tokenizer in (tiny_encoders.qwen_tokenizer(), tiny_encoders.mistral_tokenizer()):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_is_that_of_qwen3() -> None:
    text = tiny_encoders.qwen_tokenizer().apply_chat_template(
        [{"role": "user", "content": "a {cat}"}], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert text == "<|im_start|>user\na {cat}<|im_end|>\n<|im_start|>assistant\n"


def test_clip_knows_all_of_ascii_and_ends_where_it_should() -> None:
    tokenizer = tiny_encoders.clip_tokenizer()
    printable = "".join(chr(code) for code in range(33, 127))
    assert (
        tokenizer.decode(tokenizer(printable).input_ids, skip_special_tokens=True).replace(" ", "") == printable.lower()
    )
    ids = tokenizer("x" * 100, padding="max_length", truncation=True).input_ids
    assert len(ids) == 77
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer.eos_token_id == len(tokenizer) - 1


def _flux2_inputs(tokenizer: Any) -> Any:
    return tokenizer.apply_chat_template(
        format_input(["a cat", "a tall cat"]),
        add_generation_prompt=False,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=128,
    )


def test_the_messages_of_flux2_fit_and_are_padded_on_the_left() -> None:
    tokenizer = tiny_encoders.mistral_tokenizer()
    inputs = _flux2_inputs(tokenizer)
    assert inputs["input_ids"].shape == (2, 128)
    assert tokenizer.decode(inputs["input_ids"][1]).endswith("speculation.[/SYSTEM_PROMPT][INST]a tall cat[/INST]")
    assert inputs["attention_mask"].sum(dim=1).tolist() == [36, 40]
    assert (inputs["input_ids"][inputs["attention_mask"] == 0] == tokenizer.pad_token_id).all()
    assert inputs["attention_mask"][:, -36:].all()


@pytest.mark.parametrize("side", ["qwen", "mistral"])
def test_the_vision_towers_work(side: str) -> None:
    with isolated_rng(0, "tiny"), torch.no_grad():
        if side == "qwen":
            tokenizer = tiny_encoders.qwen_tokenizer()
            ids = tokenizer("<|vision_start|><|image_pad|><|vision_end|>cat", return_tensors="pt").input_ids
            picture = {"pixel_values": torch.rand(4, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 2, 2]])}
            encoder = tiny_encoders.qwen_vl_encoder(tokenizer).eval()
            types = {"mm_token_type_ids": (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()}
        else:
            tokenizer = tiny_encoders.mistral_tokenizer()
            ids = tokenizer("[IMG][IMG][IMG_END]cat", return_tensors="pt").input_ids
            picture = {"pixel_values": torch.rand(1, 3, 28, 56), "image_sizes": torch.tensor([[28, 56]])}
            encoder, types = tiny_encoders.mistral3_encoder(tokenizer).eval(), {}
        seen = encoder(input_ids=ids, **types, **picture).logits
        dark = encoder(input_ids=ids, **types, **{**picture, "pixel_values": 0 * picture["pixel_values"]}).logits
    assert seen.isfinite().all() and not torch.equal(seen, dark)
