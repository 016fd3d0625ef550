"""`flowshard generate`."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from flowshard.cli import main
from tests import runs

SMALL = [
    "--height",
    "32",
    "--width",
    "48",
    "--steps",
    "2",
    "--prompt",
    "a rabbit",
    "--dtype",
    "float32",
    "--device",
    "cpu",
]


def _clip(file: Path) -> np.ndarray:
    with av.open(str(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _picture(tiny: Path, file: Path, *options: str) -> np.ndarray:
    arguments = ["generate", "--model", str(tiny), *SMALL, "--frames", "1", "--output", str(file), *options]
    assert main(arguments) == 0
    return np.asarray(Image.open(file)).astype(int)


def test_clip_has_the_frames_and_size_asked(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    assert main(["generate", "--model", str(tiny), *SMALL, "--frames", "9", "--fps", "12", "--output", str(file)]) == 0
    assert _clip(file).shape == (9, 32, 48, 3)
    with av.open(str(file)) as container:
        assert container.streams.video[0].average_rate == 12


def test_picture_equals_the_stock_pipeline(tiny: Path, tmp_path: Path) -> None:
    found = _picture(tiny, tmp_path / "one.png", "--seed", "3")
    stock = WanPipeline.from_pretrained(tiny)(
        prompt="a rabbit",
        negative_prompt="",
        height=32,
        width=48,
        num_frames=1,
        num_inference_steps=2,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(3),
    ).frames[0][0]
    assert np.array_equal(found, (stock * 255).round().astype(int))
    assert np.array_equal(found, _picture(tiny, tmp_path / "again.png", "--seed", "3"))
    assert not np.array_equal(found, _picture(tiny, tmp_path / "other.png", "--seed", "4"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_trained_weights_change_the_picture_however_they_are_named(
    tiny: Path, clips: Path, tmp_path: Path, method: str
) -> None:
    options = ("train.learning_rate=1e-2", f"train.method={method}", "save.every=1")
    modules = ("train.modules=[proj_out]",) if method == "lora" else ()
    checkpoint = runs.run(runs.config(tiny, clips, tmp_path / "run", *options, *modules))
    option = "--lora" if method == "lora" else "--weights"
    inner = checkpoint / ("lora.safetensors" if method == "lora" else "transformer")
    base = _picture(tiny, tmp_path / "base.png")
    pictures = [_picture(tiny, tmp_path / "x.png", option, str(path)) for path in (tmp_path / "run", checkpoint, inner)]
    assert np.abs(pictures[0] - base).mean() > 1
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures)
    earlier = _picture(tiny, tmp_path / "y.png", option, str(checkpoint.with_name("step-00000001")))
    assert not np.array_equal(earlier, pictures[0])


def test_a_lora_of_another_model_is_refused(
    tiny: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = load_file(runs.run(runs.config(tiny, clips, tmp_path / "run")) / "lora.safetensors")
    renamed = {name.replace("blocks.2", "blocks.7"): tensor for name, tensor in saved.items()}
    wider = {name: torch.cat([tensor, tensor], dim=1) if "lora_A" in name else tensor for name, tensor in saved.items()}
    for state, problem in ((renamed, "has no layer blocks.7."), (wider, "has another width at blocks.")):
        save_file(state, tmp_path / "other.safetensors")
        arguments = ["generate", "--model", str(tiny), *SMALL, "--frames", "1", "--output", str(tmp_path / "x.png")]
        assert main([*arguments, "--lora", str(tmp_path / "other.safetensors")]) == 2
        assert problem in capsys.readouterr().err
