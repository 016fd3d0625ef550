"""Variants with reference pictures, as several tests use them: sizes, pictures, runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from flowshard.config import Config
from flowshard.families import flux_kontext
from flowshard.families.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from tests import runs
from tests.conftest import REPOSITORY

TinyModels = Callable[[str], Path]
PICTURES = {
    "qwen-image-edit": 1,
    "qwen-image-edit-2509": 2,
    "qwen-image-edit-2511": 2,
    "flux.1-kontext-dev": 1,
    "flux.2-dev": 2,
    "flux.2-klein-9b": 1,
    "flux.2-klein-base-4b": 2,
}
"""Variants with reference pictures: how many of them the tests give."""
MUCH_LIKE_OTHERS = ("qwen-image-edit-2509", "flux.2-klein-base-4b")
REQUIRED = ("qwen-image-edit", "qwen-image-edit-2511", "flux.1-kontext-dev")
TEXT_ONLY = ("qwen-image-2512", "flux.1-krea-dev", "z-image")
OTHERS = ("flux.2-klein-4b", "flux.2-klein-base-9b")
NEW = (*TEXT_ONLY, *(name for name in PICTURES if name != "flux.2-dev"), *OTHERS)


def shrink_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """References of a few tokens in place of some thousands, in our code and in the pipelines alike."""
    whole = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: whole(area // 128, ratio))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 96 * 96)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", 64 * 64)
    monkeypatch.setattr(QwenImageEdit, "reference_area", 1024 * 1024 // 128)
    monkeypatch.setattr(QwenImageEdit, "seen_area", 1024 * 1024 // 128)
    monkeypatch.setattr(QwenImageEditPlus, "reference_area", 96 * 96, raising=False)
    monkeypatch.setattr(QwenImageEditPlus, "seen_area", 64 * 64)
    sizes = [(48, 112), (80, 64), (64, 80)]
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    monkeypatch.setattr(flux_kontext, "SIZES", tuple(sizes))


def pictures() -> list[Image.Image]:
    """Two, of different size."""
    found = []
    for width, height in ((96, 72), (80, 130)):
        x = torch.linspace(0, 4, width)[None, :] + torch.linspace(0, 3, height)[:, None]
        channels = torch.stack([x.sin(), (x * 1.7).cos(), (x + width).sin()], dim=-1)
        found.append(Image.fromarray(((channels + 1) * 127).to(torch.uint8).numpy()))
    return found


def run_config(model: Path, variant: str, folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Config:
    """A run on rows whose media are the repository's clips."""
    folder.mkdir(exist_ok=True)
    metadata = folder / "metadata.json"
    clips = REPOSITORY / "examples" / "data" / "bunny"
    metadata.write_text(json.dumps([{"video": "clip_0.mp4", "prompt": "a rabbit", **row} for row in rows]))
    own = (f"model.variant={variant}", f"data.metadata={metadata}", f"data.root={clips}", "data.frames=1")
    return runs.config(model, clips, folder / "run", *own, *overrides)
