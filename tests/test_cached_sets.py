"""Training from a cache folder alone: without metadata, media and encoders, to the bit what a run with them does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flowshard.config import Config
from flowshard.errors import UserError
from flowshard.train.check import check
from flowshard.train.encode import check_encoding, encode_samples
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.test_cache import ENCODERS

Make = Callable[..., Config]
NOTHING = ("data.metadata=null", "data.height=null", "data.width=null")


@pytest.fixture
def make(tiny: Path, clips: Path, tmp_path: Path) -> Make:
    """Configs whose media and model are copies that a test may delete, with one cache folder."""
    shutil.copytree(clips, tmp_path / "clips")
    shutil.copytree(tiny, tmp_path / "model")

    def config(name: str, *overrides: str) -> Config:
        cache = f"data.cache={tmp_path / 'filled'}"
        return runs.config(tmp_path / "model", tmp_path / "clips", tmp_path / name, cache, *overrides)

    return config


def _from_set(make: Make, name: str, *overrides: str) -> Config:
    """A config that gives the samples by the folder alone, without the options that only say how they were encoded."""
    config = make(name, *NOTHING, *overrides)
    data = config.data.model_dump(exclude_unset=True)
    del data["frames"]
    return config.model_copy(update={"data": type(config.data).model_validate(data)})


def _lost(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "clips")
    for name in ENCODERS:
        shutil.rmtree(tmp_path / "model" / name)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.caption_dropout=0.5", "data.caption_prefix=sks ", "data.fps=8"),
        ("validation.fraction=0.4", "validation.every=2"),
    ],
    ids=["plain", "captions", "held-out"],
)
def test_nothing_but_the_folder_and_the_transformer_is_needed(
    make: Make, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    whole = make("whole", *overrides)
    runs.run(whole)
    _lost(tmp_path)
    kept = [one for one in overrides if not one.startswith(("data.caption_prefix", "data.fps"))]
    alone = _from_set(make, "alone", *kept)
    runs.run(alone)
    assert [line["loss"] for line in runs.metrics(alone)] == [line["loss"] for line in runs.metrics(whole)]
    held_out = [Path(one.output, "validation.jsonl") for one in (whole, alone)]
    assert len({file.read_text() if file.is_file() else "" for file in held_out}) == 1


def test_the_set_is_written_by_caching_alone_and_replaced_by_the_next_one(make: Make, tmp_path: Path) -> None:
    encode_samples(check_encoding(make("run")))
    (file,) = (tmp_path / "filled" / "sets").iterdir()
    before = file.stat().st_mtime_ns
    encode_samples(check_encoding(make("run")))
    assert file.stat().st_mtime_ns == before, "nothing has changed"
    lines = (tmp_path / "clips" / "metadata.csv").read_text().splitlines()
    (tmp_path / "clips" / "metadata.csv").write_text("\n".join(lines[:-1]))
    encode_samples(check_encoding(make("run")))
    assert list((tmp_path / "filled" / "sets").iterdir()) == [file]
    assert len(check_inputs(_from_set(make, "alone")).data.training.rows) == len(lines) - 2


def test_several_sets_are_told_apart(make: Make) -> None:
    for overrides in ((), ("data.frames=1",)):
        encode_samples(check_encoding(make("run", *overrides)))
    with pytest.raises(UserError, match=r"holds 2 sets that fit; name one of:(\n  metadata-\w+ \(of .*){2}"):
        check_inputs(_from_set(make, "alone"))
    config = make("alone", *NOTHING, "data.frames=1")
    assert check_inputs(config).config.data.height == runs.SIZE
    names = [file.stem for file in Path(config.data.cache, "sets").iterdir()]
    chosen = [check_inputs(_from_set(make, "alone", f"data.cache_set={name}")).config.data.frames for name in names]
    assert sorted(chosen) == [1, runs.FRAMES]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.frames=9",), r"data.frames is 9, it has 5"),
        (("data.height=64", "data.width=64"), r"data.height is 64, it has 32"),
        (("model.dtype=bfloat16",), r"model.dtype is 'bfloat16', it has 'float32'"),
        (("data.cache_set=other",), r"data.cache_set: 'other' begins the name of no set in .*; found metadata-"),
        (("data.short=trim", "train.micro_batch=2"), r"data.short"),
    ],
)
def test_a_set_that_does_not_fit_is_refused_with_the_options(
    make: Make, overrides: tuple[str, ...], message: str
) -> None:
    encode_samples(check_encoding(make("run")))
    with pytest.raises(UserError, match=message):
        check_inputs(make("alone", *NOTHING, *overrides))


def test_a_folder_without_a_set_is_refused(make: Make) -> None:
    with pytest.raises(UserError, match=r"data.cache: .*filled holds no set of encoded samples; give data.metadata"):
        check_inputs(make("alone", *NOTHING))
    with pytest.raises(UserError, match=r"give data.metadata or data.sources: these are the samples that are encoded"):
        check_encoding(make("alone", *NOTHING))


def test_entries_that_are_gone_and_other_encoders_are_named(make: Make, tmp_path: Path) -> None:
    encode_samples(check_encoding(make("run")))
    with pytest.raises(UserError, match=r"data.caption_dropout: the set in .* has no entry of the empty caption"):
        runs.run(_from_set(make, "alone", "data.caption_dropout=0.1"))
    entry = next((tmp_path / "filled" / "media").iterdir())
    entry.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"data.cache: 1 entries are not in .*filled any more"):
        runs.run(_from_set(make, "alone"))
    (tmp_path / "elsewhere").rename(entry)
    settings = tmp_path / "model" / "vae" / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "note": 1}))
    with pytest.raises(UserError, match=r"the vae of .* is not the one that the samples in .*filled were encoded with"):
        runs.run(_from_set(make, "alone"))


def test_skipped_rows_stay_skipped(make: Make, tmp_path: Path) -> None:
    clip = sorted((tmp_path / "clips").glob("*.mp4"))[1]
    clip.write_bytes(b"broken")
    whole = make("whole", "data.on_error=skip")
    runs.run(whole)
    _lost(tmp_path)
    alone = _from_set(make, "alone", "data.on_error=skip")
    runs.run(alone)
    assert [line["loss"] for line in runs.metrics(alone)] == [line["loss"] for line in runs.metrics(whole)]
    with pytest.raises(UserError, match=rf"{clip.name}\): cannot be decoded .*Or set data.on_error=skip"):
        runs.run(_from_set(make, "stopped"))


def test_check_knows_sets(make: Make, tmp_path: Path) -> None:
    encode_samples(check_encoding(make("run")))
    _lost(tmp_path)
    file = tmp_path / "run.yaml"
    report = check(
        file, [*NOTHING, f"data.cache={tmp_path / 'filled'}", f"model.path={tmp_path / 'model'}", "output=x"]
    )
    assert not report.problems, report.as_text()
    assert report.facts["samples"] == 5 and report.facts["data"].startswith("metadata-")
