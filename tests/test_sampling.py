"""How clips are sampled in a run: what the cache keeps apart, random places, and clips that are trimmed."""

import json
from pathlib import Path

import pytest
import torch

from flowshard.config_file import load_config
from flowshard.data.cache import EncodedCache
from flowshard.data.samples import cut_of, decode
from flowshard.errors import UserError
from flowshard.train.inputs import RunInputs, check_inputs
from tests import runs


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Clips of 33 and 25 frames, a part of one, and a picture."""
    from PIL import Image

    rows = [
        {"video": "clip_1.mp4", "prompt": "x", "start": 0.6},
        {"video": "clip_0.mp4", "prompt": "y"},
        {"video": "clip_1.mp4", "prompt": "z"},
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "m.json").write_text(json.dumps(rows))
    Image.new("RGB", (64, 64), (200, 10, 10)).save(tmp_path / "data" / "red.png")
    return tmp_path / "data" / "m.json"


def _inputs(tiny: Path, clips: Path, data: Path, *overrides: str) -> RunInputs:
    own = (f"data.metadata={data}", f"data.root={clips}")
    return check_inputs(runs.config(tiny, clips, data.parent / "run", *own, *overrides))


def test_every_option_that_changes_pixels_makes_other_entries(tiny: Path, clips: Path, data: Path) -> None:
    def entries(*overrides: str) -> set[Path]:
        inputs = _inputs(tiny, clips, data, *overrides)
        cache = EncodedCache(data.parent, inputs.config, inputs.family, inputs.source, torch.float32)
        return {cache._media_file(row) for row in inputs.metadata.rows}

    first = entries()
    known = set(first)
    assert len(known) == 3
    for overrides in (
        ("data.fps=12",),
        ("data.sampling=even",),
        ("data.sampling=random",),
        ("data.sampling=random", "seed=1"),
        ("data.short=trim",),
        ("data.short=repeat",),
        ("data.frames=9",),
    ):
        new = entries(*overrides)
        assert len(new) == 3
        assert not new & known, overrides
        known |= new
    for option in ("train.steps=7", "seed=5", "data.repeat=3", "data.caption_prefix=p", "data.on_error=skip"):
        assert entries(option) == first


def test_a_random_place_is_fixed_for_each_row_by_the_seed(tiny: Path, clips: Path, data: Path) -> None:
    def draws(*overrides: str) -> list[float]:
        inputs = _inputs(tiny, clips, data, "data.sampling=random", *overrides)
        config = inputs.config
        return [cut_of(row, config.data, inputs.family, seed=config.seed).draw for row in inputs.metadata.rows]

    assert draws() == draws("train.steps=9", "train.global_batch=2")
    assert draws() != draws("seed=1")
    assert len(set(draws())) == 3
    assert all(0 <= draw < 1 for draw in draws())


def test_trimmed_clips_train_together_and_memory_is_planned_with_the_longest(
    tiny: Path, clips: Path, data: Path
) -> None:
    inputs = _inputs(tiny, clips, data, "data.short=trim", "data.frames=29", "train.steps=2", "train.global_batch=3")
    frames = [len(decode(row, inputs.config.data, inputs.family, seed=0)) for row in inputs.metadata.rows]
    # 25 frames a second: 10 are left of the first, and the others have 33 and 25.
    assert frames == [9, 29, 25]
    batches = runs.batches(inputs)
    assert batches.largest_micro_batch().latents.shape[2] == 8
    lengths = sorted(batch.latents.shape[2] for batch in batches.micro_batches(0))
    assert lengths == [3, 7, 8]
    checkpoint = runs.run(inputs.config)
    assert checkpoint.name == "step-00000002"


def test_short_clips_are_repeated(tiny: Path, clips: Path, data: Path) -> None:
    inputs = _inputs(tiny, clips, data, "data.short=repeat", "data.frames=29")
    frames = decode(inputs.metadata.rows[0], inputs.config.data, inputs.family, seed=0)
    assert len(frames) == 29
    assert (frames[9] == frames[28]).all()
    assert (frames[4] != frames[28]).any()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.short=trim", "train.micro_batch=2", "train.global_batch=2"),
            "data.short: clips that are trimmed differ",
        ),
        (("data.short=trim", "data.cache=off"), "data.short: how long trimmed clips are is known from a cache"),
        (("data.sources=[{metadata: a.csv}]",), "give exactly one of data.metadata and data.sources"),
        (("data.metadata=null",), "give exactly one of data.metadata and data.sources (neither is given)"),
        (("data.metadata=null", "data.sources=[{metadata: a.csv}]", "data.root=x"), "data.root has no effect"),
        (
            ("data.metadata=null", "data.sources=[{metadata: a.csv, wieght: 2}]"),
            "data.sources.0.wieght: unknown option; did",
        ),
        (
            ("data.metadata=null", "data.sources=[{weight: 2}]"),
            "data.sources.0.metadata: this option must be given (As",
        ),
        (("data.sources.0.weight=2",), "data.sources.0.weight: a list is overridden as a whole, as in data.sources=["),
        (("data.caption_dropout=1.5",), "data.caption_dropout: 1.5 is not less than or equal to 1"),
        (("data.fps=0",), "data.fps: 0 is not greater than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    text = "output: x\nmodel: {variant: wan2.1-t2v-1.3b, path: x}\ndata: {metadata: m.csv, height: 32, width: 32}\n"
    (tmp_path / "config.yaml").write_text(f"{text}train: {{steps: 1}}\n")
    with pytest.raises(UserError) as error:
        load_config(tmp_path / "config.yaml", overrides)
    assert str(error.value).startswith(message)
