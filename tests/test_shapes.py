"""Learning, seen in pixels: the small video model follows its captions, and a LoRA teaches it a shape under any layout."""

import random
from pathlib import Path
from typing import Any

import make_clips
import numpy as np
import pytest
import sample
import scenes
import score
import torch

from flowshard.cli import main
from flowshard.data.media import read_frames
from tests.conftest import REPOSITORY
from tests.launch import torchrun

SHAPES = REPOSITORY / "examples" / "shapes"
STARS = [
    scenes.Scene(scenes.CONCEPT, colour, motion)
    for colour, motion in zip(
        ("red", "green", "blue", "yellow", "white", "red", "blue", "yellow"),
        ("moves left", "moves right", "moves up", "moves down", "grows", "shrinks", "moves down", "moves left"),
        strict=True,
    )
]
"""The captions whose clips are scored before and after training."""


@pytest.fixture(scope="module")
def base() -> Any:
    return sample.load()


def test_what_is_drawn_is_read_back() -> None:
    """The score knows every scene from its pixels, so a wrong answer is the model's."""
    rng = random.Random(0)
    every = scenes.all_scenes((*scenes.SHAPES, scenes.CONCEPT))
    shares = score.fitting([scenes.draw(one, rng) for one in every], every)
    assert min(shares.values()) > 0.98, shares


def test_noise_and_nothing_are_not_read_as_what_was_asked() -> None:
    nothing = np.full((scenes.FRAMES, scenes.SIDE, scenes.SIDE, 3), scenes.BACKGROUND, np.uint8)
    assert score.read(nothing).shape is None
    noise = np.random.default_rng(0).integers(0, 256, nothing.shape, np.uint8)
    every = scenes.all_scenes()
    assert score.fitting([noise] * len(every), every)["shape"] <= 0.34


def test_the_vae_gives_shapes_and_the_bunny_back(base: Any) -> None:
    rng = random.Random(1)
    shapes = [scenes.draw(scene, rng) for scene in rng.sample(scenes.all_scenes(), 4)]
    bunny = [
        read_frames(path, height=64, width=64, frames=9, where=path.name)
        for path in sorted((REPOSITORY / "examples" / "data" / "bunny").glob("*.mp4"))[:2]
    ]
    for clips, least in ((shapes, 30.0), (bunny, 22.0)):
        pixels = torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        with torch.no_grad():
            back = base.vae.decode(base.vae.encode(pixels).latent_dist.mode()).sample.clamp(-1, 1)
        ratio = 10 * torch.log10(4 / (back - pixels).square().mean(dim=(1, 2, 3, 4)))
        assert ratio.min() > least, ratio


def test_the_base_follows_its_captions(base: Any) -> None:
    """Far above chance, which is 1/3 for shapes, 1/5 for colours, 1/6 for motions and 1/2 for counts."""
    asked = random.Random(2).sample(scenes.all_scenes(), 24)
    shares = score.fitting(sample.make(base, asked), asked)
    assert shares["shape"] > 0.7 and shares["colour"] > 0.7 and shares["motion"] > 0.7 and shares["count"] > 0.8, shares


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The LoRA of the example, shortened, under three layouts."""
    folder = tmp_path_factory.mktemp("stars")
    stars = scenes.all_scenes((scenes.CONCEPT,), ("a",))
    make_clips.write_clips(folder / "clips", stars * 2 + random.Random(1).sample(scenes.all_scenes(), 20), seed=1)

    def arguments(name: str, *more: str) -> list[str]:
        return [
            "train",
            str(SHAPES / "lora.yaml"),
            f"model.path={SHAPES / 'model'}",
            f"data.metadata={folder / 'clips' / 'metadata.csv'}",
            f"data.cache={folder / 'cache'}",
            f"output={folder / name}",
            "train.steps=40",
            "validation.every=0",
            "log.flops=false",
            *more,
        ]

    assert main(arguments("single")) == 0
    for name, more in {
        "zero3": ["layout.strategy=zero3", "train.micro_batch=8"],
        "sequence": ["layout.sequence=2"],
    }.items():
        done = torchrun(2, ["flowshard", *arguments(name, *more)])
        assert done.returncode == 0, done.stderr
    return {
        name: folder / name / "checkpoints" / "step-00000040" / "lora.safetensors"
        for name in ("single", "zero3", "sequence")
    }


def test_the_lora_teaches_the_shape_under_every_layout(base: Any, loras: dict[str, Path]) -> None:
    before = sample.make(base, STARS)
    after = {name: sample.make(sample.load(lora=file), STARS) for name, file in loras.items()}

    def likeness(clips: list[np.ndarray]) -> float:
        return float(np.mean([score.read(clip).overlap[scenes.CONCEPT] for clip in clips]))

    assert likeness(after["single"]) > likeness(before) + 0.1
    assert score.fitting(before, STARS)["shape"] <= 0.25
    assert score.fitting(after["single"], STARS)["shape"] >= 0.75
    assert score.fitting(after["single"], STARS)["colour"] > 0.7
    whole = np.stack(after["single"]).astype(float)
    assert np.abs(np.stack(before) - whole).mean() > 4  # they are other pictures, so that what follows says something
    for name in ("zero3", "sequence"):
        assert np.abs(np.stack(after[name]) - whole).mean() < 2, name
