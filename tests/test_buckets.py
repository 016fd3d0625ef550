"""`data.buckets=auto`: media of several shapes in batches, under every layout, compared with one sample at a time."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowshard.config import Config
from flowshard.config_file import dump_config
from flowshard.data.media import write_video
from flowshard.errors import UserError
from flowshard.parity.command import parity
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.launch import torchrun
from tests.pictures import run_config, shrink_references
from tests.test_check import FAULTS, MADE
from tests.test_layouts_agree import options

TinyModels = Callable[[str], Path]
OWN = ("data.height=null", "data.width=null", "data.max_pixels=2048", "data.buckets=auto")
MEDIA = {"wide": (64, 32), "tall": (32, 64), "small": (32, 32), "square": (90, 90), "clip": (48, 32), "other": (48, 32)}
"""Width and height; those of the last two are clips of 5 frames, one of 9."""
LATENTS = {"clip": (16, 2, 4, 6), "other": (16, 2, 4, 6), "wide": (16, 1, 4, 8), "tall": (16, 1, 8, 4)}
LATENTS |= {"small": (16, 1, 4, 4), "square": (16, 1, 4, 4)}
"""By hand: an eighth of each side of the largest multiples of 16 within 2048 pixels, a frame and one for each four."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Pictures and clips of several shapes."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = []
    generator = np.random.default_rng(0)
    for name, (width, height) in MEDIA.items():
        if name in ("clip", "other"):
            frames = generator.integers(0, 256, (9 if name == "other" else 5, height, width, 3), dtype=np.uint8)
            write_video(folder / f"{name}.mp4", frames, fps=8)
            rows.append({"video": f"{name}.mp4", "prompt": name})
        else:
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}.png")
            rows.append({"image": f"{name}.png", "prompt": f"a {name} picture"})
    (folder / "metadata.json").write_text(json.dumps(rows))
    return folder


def _config(tiny: Path, data: Path, name: str, *overrides: str) -> Config:
    more = (*OWN, f"data.metadata={data / 'metadata.json'}", *overrides)
    return runs.config(tiny, data, data.parent / name, *more)


def _losses(config: Config) -> list[float]:
    return [line["loss"] for line in runs.metrics(config)]


def test_a_step_has_samples_of_one_shape_and_the_first_those_of_the_largest(tiny: Path, data: Path) -> None:
    batches = runs.batches(check_inputs(_config(tiny, data, "run", "train.global_batch=2", "train.micro_batch=2")))
    seen: Counter[str] = Counter()
    for step in range(len(MEDIA)):
        (batch,) = batches.micro_batches(step)
        for row in batch.rows:
            assert tuple(batch.latents.shape[1:]) == LATENTS[row.media.stem]
            seen[row.media.stem] += 1
        if step == 0:
            assert {row.media.stem for row in batch.rows} == {"clip", "other"}
    assert seen == dict.fromkeys(MEDIA, 2)
    assert tuple(batches.largest_micro_batch().latents.shape) == (2, *LATENTS["clip"])


def test_batches_give_the_losses_of_single_samples_and_go_on_after_a_stop(tiny: Path, data: Path) -> None:
    batch = ("train.global_batch=4", "train.steps=6")
    singles = _config(tiny, data, "singles", *batch)
    runs.run(singles)
    for micro in (2, 4):
        several = _config(tiny, data, f"micro-{micro}", *batch, f"train.micro_batch={micro}")
        runs.run(several)
        assert _losses(several) == pytest.approx(_losses(singles), rel=1e-6)
    for steps in (3, 6):
        parts = _config(tiny, data, "parts", *batch, "train.micro_batch=4", f"train.steps={steps}", "resume=auto")
        runs.run(parts)
    assert _losses(parts) == _losses(several)


def test_a_bucket_that_no_step_reaches_is_named(tiny: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.run(_config(tiny, data, "run", "train.steps=2"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bucket")]
    # Of 2, 1, 1 and 2 samples of 6: due at 0, 3, 3 and 1.5.
    assert lines == [
        "bucket      latents (16, 2, 4, 6), 12 tokens: 2 samples",
        "bucket      latents (16, 1, 4, 8), 8 tokens: 1 samples; warning: first used in step 4, after the end of this run",
        "bucket      latents (16, 1, 8, 4), 8 tokens: 1 samples; warning: first used in step 5, after the end of this run",
        "bucket      latents (16, 1, 4, 4), 4 tokens: 2 samples",
    ]


def test_trimmed_clips_are_batched_by_their_length(tiny: Path, tmp_path: Path) -> None:
    rows = []
    for number, frames in enumerate((5, 9, 10, 7, 1)):
        write_video(tmp_path / f"{number}.mp4", np.full((frames, 32, 32, 3), 50 * number, dtype=np.uint8), fps=8)
        rows.append({"video": f"{number}.mp4", "prompt": "x"})
    (tmp_path / "metadata.json").write_text(json.dumps(rows))
    more = ("data.frames=9", "data.short=trim", "data.buckets=auto", "train.global_batch=2", "train.micro_batch=2")
    config = runs.config(tiny, tmp_path, tmp_path / "run", f"data.metadata={tmp_path / 'metadata.json'}", *more)
    batches = runs.batches(check_inputs(config))
    lengths = [next(batches.micro_batches(step)).latents.shape[2] for step in range(5)]
    assert lengths[0] == 3 and Counter(lengths) == {3: 2, 2: 2, 1: 1}


def test_reference_pictures_of_other_shapes_are_other_buckets(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = "qwen-image-edit-2509"
    shrink_references(monkeypatch)
    Image.new("RGB", (100, 200), "red").save(tmp_path / "tall.png")
    one, two = (str(clips / f"clip_{number}.mp4") for number in (1, 2))
    names = [[one], [str(tmp_path / "tall.png")], [one, two]]
    rows = [{"video": two, "edit_image": column} for column in names]
    batch = (f"data.cache={tmp_path / 'filled'}", "data.root=/", "train.global_batch=2", "train.steps=3")
    losses = []
    for micro in (1, 2):
        more = (*batch, "data.buckets=auto", f"train.micro_batch={micro}")
        config = run_config(tiny_models(variant), variant, tmp_path / "data", rows, *more)
        runs.run(config)
        losses.append(_losses(config))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    alone = (*batch, "data.metadata=null", "data.root=null", "train.micro_batch=2")
    with pytest.raises(UserError, match=r"there are 3 shapes in the cache.*use data.buckets=auto"):
        runs.batches(check_inputs(run_config(tiny_models(variant), variant, tmp_path / "data", rows, *alone)))


def test_mixed_media_are_those_of_one_process_under_every_layout(
    tiny: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [*OWN, "data.frames=5", f"data.metadata={data / 'metadata.json'}", "train.global_batch=4"]
    layouts = [
        "single",
        "ddp:2,micro_batch=2",
        "zero3:2,activations=offload",
        "fsdp2:2,micro_batch=2",
        "sp:2,micro_batch=2",
    ]
    parity(options(tiny, layouts, *own, layers=1, steps=6))
    assert "all layouts agree" in capsys.readouterr().out


@pytest.mark.slow
def test_the_rest_of_a_folder_of_faults_is_trained_on_under_zero3(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    frames = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), dtype=np.uint8)
    write_video(data / "clip.mp4", frames, fps=8)
    Image.fromarray(frames[0]).save(data / "picture.png")
    for name, make in MADE.items():
        make(data / name)
    good = [
        json.dumps({"video": "clip.mp4", "prompt": f"a good one, number {number}"}) for number in range(len(FAULTS))
    ]
    faults = [row if isinstance(row, str) else json.dumps(row) for _, _, row in FAULTS]
    (data / "metadata.jsonl").write_text("\n".join(row for pair in zip(faults, good, strict=True) for row in pair))
    (data / "good.jsonl").write_text("\n".join(good))
    skip = ("data.on_error=skip", "data.max_skipped=30", f"data.metadata={data / 'metadata.jsonl'}", "train.steps=4")
    alone = runs.config(tiny, data, tmp_path / "alone", *skip)
    runs.run(alone)
    config = runs.config(tiny, data, tmp_path / "sharded", *skip, "layout.strategy=zero3")
    file = tmp_path / "sharded.yaml"
    file.write_text(dump_config(config, {}))
    done = torchrun(2, ["flowshard", "train", str(file)])
    assert done.returncode == 0, done.stderr
    assert f"{len(FAULTS)} rows were skipped (data.on_error=skip)" in done.stdout
    assert _losses(config) == pytest.approx(_losses(alone), rel=1e-6)
