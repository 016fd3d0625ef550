"""Each sample at its own size under a budget of pixels, against the rule in plain numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from flowshard.config import Config, DataConfig
from flowshard.data.media import write_video
from flowshard.data.samples import decode
from flowshard.data.sizes import fitted, row_size
from flowshard.data.sources import read_data
from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.train.data_inputs import check_batches, read_samples
from tests import runs

FAMILY = find_variant("wan2.1-t2v-1.3b", option="x")[0]
OWN = ("data.height=null", "data.width=null")


@pytest.mark.parametrize("budget", [4096, 1280 * 720, 1024 * 1024])
def test_sizes_are_as_large_as_the_budget_allows_and_never_larger_than_the_medium(budget: int) -> None:
    generator = np.random.default_rng(0)
    for width, height in generator.integers(16, 5000, (500, 2)).tolist():
        scale = min(1.0, math.sqrt(budget / (width * height)))
        found = fitted(width, height, max_pixels=budget, step=16)
        # By hand, but where rounding of the root itself decides.
        for side, own in zip(found, (height * scale, width * scale), strict=True):
            assert side == int(own) // 16 * 16 or abs(own - round(own)) < 1e-6
        assert found[0] * found[1] <= budget
        assert found <= (height, width) and found[1] <= width


@pytest.mark.parametrize(
    ("medium", "step", "size"),
    [
        ((1920, 1080), 16, (720, 1280)),
        ((1080, 1920), 16, (1280, 720)),
        ((900, 500), 16, (496, 896)),
        ((1000, 1000), 64, (960, 960)),
        ((1000, 1000), 128, (896, 896)),
        ((10000, 10), 16, (0, 10000)),
        ((17, 40), 16, (32, 16)),
    ],
)
def test_sizes_by_hand(medium: tuple[int, int], step: int, size: tuple[int, int]) -> None:
    assert fitted(*medium, max_pixels=1280 * 720, step=step) == size


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Pictures upright and turned, a clip, a sequence, and one that is too narrow."""
    folder = tmp_path / "data"
    (folder / "sequence").mkdir(parents=True)
    Image.new("RGB", (100, 60), "red").save(folder / "wide.png")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (100, 60), "green").save(folder / "turned.jpg", exif=exif)
    write_video(folder / "clip.mp4", np.zeros((5, 48, 64, 3), dtype=np.uint8), fps=8)
    for number in range(5):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(folder / "sequence" / f"{number}.png")
    Image.new("RGB", (200, 12)).save(folder / "narrow.png")
    return folder


def _config(tiny: Path, data: Path, media: list[str], *overrides: str) -> Config:
    rows = [json.dumps({"media": name, "prompt": name}) for name in media]
    (data / "metadata.jsonl").write_text("\n".join(rows))
    more = (*OWN, f"data.metadata={data / 'metadata.jsonl'}", "data.max_pixels=3000", *overrides)
    return runs.config(tiny, data, data.parent / "run", *more)


def test_every_kind_of_medium_is_decoded_at_its_own_size(tiny: Path, data: Path) -> None:
    config = _config(tiny, data, ["wide.png", "turned.jpg", "clip.mp4", "sequence"])
    rows = read_samples(config, FAMILY)[1].training.rows
    expected = [(32, 64), (64, 32), (32, 48), (32, 32)]  # of 100x60, 60x100, 64x48 and 40x40 in 3000 pixels
    assert [row.size for row in rows] == expected
    for row, (height, width) in zip(rows, expected, strict=True):
        frames = 1 if row.is_picture else 5
        assert decode(row, config.data, FAMILY, seed=0).shape == (frames, height, width, 3)
        assert row_size(replace(row, size=None), config.data, FAMILY) == (height, width)


def test_a_medium_of_which_nothing_is_left_is_named(tiny: Path, data: Path) -> None:
    config = _config(tiny, data, ["wide.png", "narrow.png"])
    with pytest.raises(
        UserError, match=r"row 2 \(.*narrow.png\): is 200x12, and nothing is left of a side within 3000"
    ):
        read_samples(config, FAMILY)


def test_broken_media_are_kept_to_be_skipped(tiny: Path, data: Path) -> None:
    (data / "broken.png").write_bytes(b"not a picture")
    config = _config(tiny, data, ["wide.png", "broken.png"], "data.on_error=skip")
    assert [row.size for row in read_samples(config, FAMILY)[1].training.rows] == [(32, 64), None]
    with pytest.raises(UserError, match=r"row 2 .*broken.png"):
        read_samples(_config(tiny, data, ["wide.png", "broken.png"]), FAMILY)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.max_pixels=100"], "data.max_pixels: 100 is less than 16x16, the smallest size; raise it"),
        (["data.bucket_step=24"], "data.bucket_step: 24 is not a multiple of 16, which wan needs; use 32"),
        (["data.bucket_step=64"], "data.max_pixels: 3000 is less than 64x64"),
    ],
)
def test_a_budget_that_fits_nothing_is_refused(tiny: Path, data: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_samples(_config(tiny, data, ["wide.png"], *overrides), FAMILY)
    assert str(error.value).startswith(message)


def test_a_micro_batch_of_several_sizes_is_refused_without_buckets(tiny: Path, data: Path) -> None:
    batch = ("train.micro_batch=2", "train.global_batch=2")
    config = _config(tiny, data, ["wide.png", "turned.jpg"], *batch)
    with pytest.raises(UserError, match=r"row 1 of .* has 64x32 and row 2 32x64; use data.buckets=auto"):
        check_batches(config, FAMILY, read_samples(config, FAMILY)[1].training)
    for more in (("data.buckets=auto",), ("train.micro_batch=1",)):
        config = _config(tiny, data, ["wide.png", "turned.jpg"], *batch, *more)
        check_batches(config, FAMILY, read_samples(config, FAMILY)[1].training)


def test_without_a_budget_rows_have_no_size_of_their_own(data: Path) -> None:
    (data / "metadata.jsonl").write_text(json.dumps({"image": "wide.png", "prompt": "x"}))
    config = DataConfig(metadata=str(data / "metadata.jsonl"), height=32, width=48)
    (row,) = read_data(config).rows
    assert row.size is None and row_size(row, config, FAMILY) == (32, 48)
