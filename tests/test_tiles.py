"""Clips encoded in tiles."""

from pathlib import Path

import pytest
import torch

import flowshard
from flowshard.config import Config
from flowshard.data.dataset import Encoder
from flowshard.data.samples import decode
from flowshard.errors import UserError
from flowshard.train.encode import check_encoding
from tests import runs

SIZE = ("data.height=64", "data.width=48")


def _latents(config: Config) -> torch.Tensor:
    inputs = check_encoding(config)
    device = torch.device("cpu")
    encoder = Encoder(config, inputs.family, inputs.source, inputs.data.training, torch.float32, device)
    return encoder.media(inputs.data.training.rows[0])["latents"]


def test_each_tile_is_encoded_on_its_own(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Without overlap the parts of the latents are those of the parts of the clip; tiles that hold all change nothing."""
    whole = runs.config(tiny, clips, tmp_path / "whole", *SIZE)
    tiled = _latents(runs.config(tiny, clips, tmp_path / "tiled", *SIZE, "data.tiles=[32,48,32,48]"))
    inputs = check_encoding(whole)
    frames = decode(inputs.data.training.rows[0], whole.data, inputs.family, seed=whole.seed)
    stock, _ = flowshard.load_pipeline("wan2.1-t2v-1.3b", tiny, dtype=torch.float32)
    parts = [inputs.family.encode_media(stock, frames[:, start : start + 32])["latents"] for start in (0, 32)]
    torch.testing.assert_close(tiled, torch.cat(parts, dim=2), rtol=1e-5, atol=1e-5)
    expected = _latents(whole)
    assert (tiled - expected).norm() > 1e-3 * expected.norm()
    one = _latents(runs.config(tiny, clips, tmp_path / "one", *SIZE, "data.tiles=[272,272,144,128]"))
    assert torch.equal(one, expected)


def test_tiles_that_do_not_fit_are_refused(tiny: Path, clips: Path, tmp_path: Path) -> None:
    for tiles, message in (
        ("[32,36,32,32]", r"data.tiles: tiles of 36 pixels at steps of 32; use multiples of 8"),
        (
            "[32,32,40,32]",
            r"data.tiles: tiles of 32 pixels at steps of 40; use multiples of 8, and steps that are not larger",
        ),
    ):
        with pytest.raises(UserError, match=message):
            check_encoding(runs.config(tiny, clips, tmp_path / "run", f"data.tiles={tiles}"))
    other = runs.config(
        tiny, clips, tmp_path / "run", "model.variant=qwen-image", "data.frames=1", "data.tiles=[8,8,8,8]"
    )
    with pytest.raises(UserError, match=r"data.tiles: qwen-image encodes whole pictures; set data.tiles=null"):
        check_encoding(other)
