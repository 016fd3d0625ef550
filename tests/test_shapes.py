"""Learning, seen in pixels: the small video model follows its captions, and a LoRA teaches it a shape under any layout."""

import json
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

from flowshard.config import Config
from flowshard.config_file import dump_config, load_config
from flowshard.data.media import read_frames
from tests import runs
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
    asked = random.Random(2).sample(scenes.all_scenes(), 16)
    shares = score.fitting(sample.make(base, asked), asked)
    assert shares["shape"] > 0.7 and shares["colour"] > 0.7 and shares["motion"] > 0.7 and shares["count"] > 0.8, shares


@pytest.fixture(scope="module")
def stars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of stars, two of each caption."""
    folder = tmp_path_factory.mktemp("stars")
    make_clips.write_clips(folder / "clips", scenes.all_scenes((scenes.CONCEPT,), ("a",)) * 2, seed=1)
    return folder


def config(stars: Path, name: str, *more: str) -> Config:
    """The example's LoRA, with smaller steps and no samples."""
    fixed = [
        f"model.path={SHAPES / 'model'}",
        f"data.metadata={stars / 'clips' / 'metadata.csv'}",
        f"data.cache={stars / 'cache'}",
        f"output={stars / name}",
        "train.global_batch=8",
        "train.micro_batch=8",
        "validation.every=0",
        "log.flops=false",
    ]
    return load_config(SHAPES / "lora.yaml", [*fixed, *more])


def clips_of(run: Path) -> list[np.ndarray]:
    (lora,) = run.glob("checkpoints/*/lora.safetensors")
    return sample.make(sample.load(lora=lora), STARS)


def likeness(clips: list[np.ndarray]) -> float:
    """How much of their shapes is a star."""
    return float(np.mean([score.read(clip).overlap[scenes.CONCEPT] for clip in clips]))


def test_a_lora_teaches_the_base_a_shape(base: Any, stars: Path) -> None:
    before = sample.make(base, STARS)
    runs.run(config(stars, "long", "train.steps=160"))
    after = clips_of(stars / "long")
    assert score.fitting(before, STARS)["shape"] == 0
    assert likeness(after) > likeness(before) + 0.08, (likeness(before), likeness(after))
    shares = score.fitting(after, STARS)
    assert shares["shape"] >= 0.25 and shares["colour"] > 0.8 and shares["motion"] > 0.8, shares


def test_every_layout_teaches_the_same(base: Any, stars: Path) -> None:
    """Clips are those of one process, within 2/255 on average."""
    runs.run(config(stars, "single", "train.steps=24"))
    jobs = []
    for name, more in {"zero3": ("layout.strategy=zero3", "train.micro_batch=4"), "sp": ("layout.sequence=2",)}.items():
        (stars / f"{name}.yaml").write_text(dump_config(config(stars, name, "train.steps=24", *more), {}))
        jobs.append({"config": str(stars / f"{name}.yaml"), "stop_after": None})
    (stars / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(2, ["tests.workers.runs", str(stars / "jobs.json")])
    assert done.returncode == 0, done.stderr
    single = np.stack(clips_of(stars / "single")).astype(float)
    # They are other clips than those of the base, so that what follows says something.
    assert np.abs(np.stack(sample.make(base, STARS)) - single).mean() > 4
    for name in ("zero3", "sp"):
        assert np.abs(np.stack(clips_of(stars / name)) - single).mean() < 2, name
