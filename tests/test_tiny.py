"""Tiny pipelines: complete, loadable by stock diffusers, reproducible."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from transformers import AutoTokenizer

from flowshard.cli import main
from flowshard.families.tiny import write_tiny_pipeline


def _tensors(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


def test_the_stock_pipeline_loads_it_and_generates(tiny: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(tiny)
    assert isinstance(pipeline, WanPipeline)
    video = pipeline(prompt="a cat", height=32, width=48, num_frames=5, num_inference_steps=2, output_type="np").frames[
        0
    ]
    assert video.shape == (5, 32, 48, 3)
    assert pipeline.scheduler.config.flow_shift == 3.0


def test_it_is_small_and_has_the_real_head_count(tiny: Path) -> None:
    assert sum(file.stat().st_size for file in tiny.rglob("*") if file.is_file()) < 10 * 2**20
    assert DiffusionPipeline.from_pretrained(tiny).transformer.config.num_attention_heads == 12


def test_the_tokenizer_tells_texts_apart_and_survives_the_unknown(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / "tokenizer")
    assert tokenizer.decode(tokenizer("A cat, 2 dogs!").input_ids, skip_special_tokens=True) == "A cat, 2 dogs!"
    assert tokenizer("日本").input_ids[-1] == tokenizer.eos_token_id
    assert tokenizer("cat").input_ids != tokenizer("dog").input_ids


def test_latents_of_smooth_pictures_are_near_unit_scale(tiny: Path) -> None:
    vae = DiffusionPipeline.from_pretrained(tiny).vae
    x = torch.linspace(0, 3, 32)
    picture = (x[None, :] + x[:, None]).sin().expand(1, 3, 1, 32, 32)
    with torch.no_grad():
        latents = vae.encode(picture).latent_dist.mode()
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    assert 0.1 < float(((latents - mean) / std).square().mean().sqrt()) < 4.0


def test_one_seed_gives_equal_files_and_leaves_the_global_generator_alone(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    write_tiny_pipeline("wan2.1-t2v-1.3b", tmp_path / "same", seed=0)
    write_tiny_pipeline("wan2.1-t2v-1.3b", tmp_path / "other", seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert _tensors(tmp_path / "same") == _tensors(tiny)
    assert _tensors(tmp_path / "other") != _tensors(tiny)


def test_the_command_writes_lists_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "model"
    assert main(["tiny", "wan2.1-t2v-1.3b", str(folder), "--seed", "5"]) == 0
    assert (folder / "model_index.json").is_file()
    assert main(["tiny", "--list"]) == 0
    assert "wan2.1-t2v-1.3b" in capsys.readouterr().out
    for arguments, message in (
        (["wan2.1-t2v-1.3b", str(folder)], "exists already"),
        (["wan2.1-t2v-1.3", str(tmp_path / "x")], "did you mean wan2.1-t2v-1.3b?"),
        (["wan2.1-t2v-1.3b"], "give VARIANT and DIR"),
    ):
        assert main(["tiny", *arguments]) == 2
        assert message in capsys.readouterr().err
