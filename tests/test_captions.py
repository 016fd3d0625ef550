"""Captions that are left out, chosen among several, or begin with a prefix: by the draws and by what is encoded."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowshard.data.captions import caption_of, captions_of
from flowshard.data.metadata import Row
from flowshard.train.batches import StepBatches
from flowshard.train.inputs import check_inputs
from tests import runs

ROW = Row(1, Path("m.json"), Path("a.mp4"), ("one", "two", "three"))


def _drawn(row: Row, dropout: float, *, seed: int = 0) -> list[str]:
    return [
        caption_of(row, seed=seed, step=step, position=position, dropout=dropout)
        for step in range(300)
        for position in range(4)
    ]


def test_captions_are_left_out_at_the_rate_and_chosen_alike() -> None:
    count = Counter(_drawn(ROW, 0.1))
    # Of 1200 draws: 120 with a standard deviation of 10, and 360 each with one of 16.
    assert abs(count[""] - 120) < 40
    assert all(abs(count[prompt] - 360) < 64 for prompt in ROW.prompts)
    assert Counter(_drawn(ROW, 0.0))[""] == 0
    assert set(_drawn(ROW, 1.0)) == {""}


def test_a_draw_depends_on_seed_step_and_position_alone() -> None:
    assert _drawn(ROW, 0.3) == _drawn(replace(ROW, number=7, media=Path("b.mp4")), 0.3)
    assert _drawn(ROW, 0.3) != _drawn(ROW, 0.3, seed=1)
    # What is left out is left out whichever captions there are, and at a higher rate as well.
    low, high = _drawn(ROW, 0.2), _drawn(replace(ROW, prompts=("x",)), 0.4)
    assert all(other == "" for one, other in zip(low, high, strict=True) if one == "")


def test_all_captions_that_can_be_drawn_are_known_beforehand() -> None:
    assert captions_of(ROW, dropout=0.0) == ["one", "two", "three"]
    assert captions_of(ROW, dropout=0.1) == ["one", "two", "three", ""]
    assert captions_of(replace(ROW, prompts=("", "x", "x")), dropout=0.1) == ["", "x"]


@pytest.fixture
def data(tmp_path: Path, clips: Path) -> Path:
    """Two clips, of which the first has two captions."""
    rows = [{"video": "clip_0.mp4", "prompt": ["a", "b b"]}, {"video": "clip_1.mp4", "prompt": "c c c"}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "m.json").write_text(json.dumps(rows))
    return tmp_path / "data" / "m.json"


def _batches(tiny: Path, clips: Path, data: Path, name: str, *overrides: str) -> StepBatches:
    own = (
        f"data.metadata={data}",
        f"data.root={clips}",
        "data.frames=1",
        "data.caption_dropout=0.4",
        'data.caption_prefix="sks "',
    )
    return runs.batches(check_inputs(runs.config(tiny, clips, data.parent / name, *own, *overrides)))


def test_what_is_encoded_is_the_caption_that_was_drawn(tiny: Path, clips: Path, data: Path) -> None:
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(tiny, dtype=torch.float32)

    def embeds(text: str) -> torch.Tensor:
        found, _ = pipeline.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=512)
        embedded: torch.Tensor = found[0]
        return embedded

    with torch.no_grad():
        texts = {text: embeds(text) for text in ("sks a", "sks b b", "sks c c c", "")}
    seen = set()
    cached = _batches(tiny, clips, data, "cached")
    online = _batches(tiny, clips, data, "online", "data.cache=off")
    for one, other in zip(cached.micro_batches(0), online.micro_batches(0), strict=True):
        assert torch.equal(one.conditions["prompt_embeds"], other.conditions["prompt_embeds"])
    for step in range(4):
        for one in cached.micro_batches(step):
            (row,), (position,) = one.rows, one.positions
            expected = caption_of(row, seed=0, step=step, position=position, dropout=0.4)
            torch.testing.assert_close(one.conditions["prompt_embeds"][0], texts[expected], atol=1e-5, rtol=1e-5)
            seen.add(expected)
    assert seen == set(texts)
    # Each text once, and the empty one once for all.
    assert len(list((data.parent / "cache" / "text").iterdir())) == 4


def test_micro_batches_do_not_change_the_captions(tiny: Path, clips: Path, data: Path) -> None:
    one = _batches(tiny, clips, data, "one")
    two = _batches(tiny, clips, data, "two", "train.micro_batch=2")
    for step in range(2):
        singles = torch.cat([batch.conditions["prompt_embeds"] for batch in one.micro_batches(step)])
        pairs = torch.cat([batch.conditions["prompt_embeds"] for batch in two.micro_batches(step)])
        assert torch.equal(singles, pairs)
