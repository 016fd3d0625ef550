"""How clips are sampled in a run: what the cache keeps apart, random places, and clips that are trimmed."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from flowshard.config_file import load_config
from flowshard.data.cache import EncodedCache
from flowshard.data.order import Order
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
        return {cache._media_file(row) for row in inputs.data.training.rows}

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
        return [cut_of(row, config.data, inputs.family, seed=config.seed).draw for row in inputs.data.training.rows]

    assert draws() == draws("train.steps=9", "train.global_batch=2")
    assert draws() != draws("seed=1")
    assert len(set(draws())) == 3
    assert all(0 <= draw < 1 for draw in draws())


def test_trimmed_clips_train_together_and_memory_is_planned_with_the_longest(
    tiny: Path, clips: Path, data: Path
) -> None:
    inputs = _inputs(tiny, clips, data, "data.short=trim", "data.frames=29", "train.steps=2", "train.global_batch=3")
    frames = [len(decode(row, inputs.config.data, inputs.family, seed=0)) for row in inputs.data.training.rows]
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
    frames = decode(inputs.data.training.rows[0], inputs.config.data, inputs.family, seed=0)
    assert len(frames) == 29
    assert (frames[9] == frames[28]).all()
    assert (frames[4] != frames[28]).any()


def test_bad_media_are_skipped_and_the_next_row_takes_their_place(
    tiny: Path, clips: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("clip_0.mp4", "clip_1.mp4"):
        shutil.copy(clips / name, data.parent)
    (data.parent / "broken.mp4").write_bytes(b"no clip")
    # The second and the last cannot be used: 25 frames of 29, and broken.
    names = ["clip_0.mp4", "clip_1.mp4", "clip_0.mp4", "broken.mp4"]
    prompts = ["a", "b", "c", "d"]
    rows = [{"video": name, "prompt": prompt} for name, prompt in zip(names, prompts, strict=True)]
    data.write_text(json.dumps(rows))
    own = (f"data.root={data.parent}", "data.frames=29", "train.global_batch=4", "data.on_error=skip")
    inputs = _inputs(tiny, clips, data, *own)
    for _ in range(2):  # what failed is tried again, and fails again
        batches = runs.batches(inputs)
        printed = capsys.readouterr().out
        for part in ("row 2 ", "has 25 frames, data.frames asks for 29", "row 4 ", "cannot be decoded"):
            assert part in printed
    instead = {1: "c", 3: "a"}
    for step in range(3):
        order = Order(0, [range(4)], global_batch=4).batch(step)
        expected = [instead.get(index, prompts[index]) for index in order]
        assert [row.prompt for row in batches.rows(step)] == expected
        assert [row.prompt for batch in batches.micro_batches(step) for row in batch.rows] == expected
    # Mended, it is used.
    shutil.copy(clips / "clip_2.mp4", data.parent / "broken.mp4")
    assert sorted(row.prompt for row in runs.batches(inputs).rows(0)) == ["a", "c", "c", "d"]
    (data.parent / "broken.mp4").write_bytes(b"no clip")
    with pytest.raises(
        UserError, match=r"^data\.max_skipped: 2 of 4 rows cannot be used, and at most 1 may be skipped"
    ):
        runs.batches(_inputs(tiny, clips, data, *own, "data.max_skipped=1"))
    with pytest.raises(UserError, match=r"row 2 .* has 25 frames"):
        runs.batches(_inputs(tiny, clips, data, *own[:-1]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.on_error=skip", "data.cache=off"), "data.on_error: which media are skipped is known from a cache"),
        (
            ("data.short=trim", "train.micro_batch=2", "train.global_batch=2"),
            "data.short: clips that are trimmed differ",
        ),
        (("data.short=trim", "data.cache=off"), "data.short: how long trimmed clips are is known from a cache"),
        (("data.sources=[{metadata: a.csv}]",), "give one of data.metadata ('m.csv') and data.sources"),
        (("data.metadata=null",), "data.metadata: give data.metadata or data.sources, or set data.cache to a folder"),
        (("data.cache_set=a",), "data.cache_set has no effect with data.metadata or data.sources"),
        (("data.metadata=null", "data.cache=x", "data.root=y"), "data.root has no effect without metadata"),
        (("data.height=null",), "data.height: give data.height and data.width, or data.max_pixels"),
        (
            ("data.max_pixels=4096",),
            "give data.height and data.width, or data.max_pixels (4096); set the others to null",
        ),
        (("data.bucket_step=64",), "data.bucket_step has no effect without data.max_pixels"),
        (("data.buckets=auto", "data.cache=off"), "data.buckets: the shapes of samples are known from a cache"),
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
