"""Make clips with the small video model of this folder, score them, and show them as one picture.

`python examples/shapes/sample.py --output gallery.png` makes one clip for every caption of a list, through the stock
pipeline of diffusers; `--lora FILE` with a LoRA that `flowshard train` wrote.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from scenes import FRAMES, SIDE, Scene
from score import fitting, read

from flowshard.families.pixels import as_bytes

MODEL = Path(__file__).parent / "model"
STEPS, GUIDANCE = 20, 2.0
GALLERY = (
    Scene("circle", "red", "moves left"),
    Scene("square", "blue", "moves down"),
    Scene("triangle", "green", "grows"),
    Scene("circle", "yellow", "shrinks"),
    Scene("square", "white", "moves right"),
    Scene("triangle", "red", "moves up", "two"),
    Scene("square", "yellow", "grows", "two"),
    Scene("circle", "blue", "moves right", "two"),
)
_LINE, _GAP = 22, 6


def load(model: Path = MODEL, lora: Path | None = None) -> Any:
    """The stock pipeline in float32, with a LoRA if one is given."""
    pipeline = diffusers.WanPipeline.from_pretrained(model, torch_dtype=torch.float32)
    if lora is not None:
        pipeline.load_lora_weights(str(lora.parent), weight_name=lora.name)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make(pipeline: Any, scenes: Sequence[Scene], *, seed: int = 0) -> list[np.ndarray]:
    """A clip for each scene's caption, the seed of each one more than that before.

    Returns:
        uint8 RGB of shape (FRAMES, SIDE, SIDE, 3) each.
    """
    videos = pipeline(
        prompt=[scene.caption for scene in scenes],
        negative_prompt=[""] * len(scenes),
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        generator=[torch.Generator().manual_seed(seed + index) for index in range(len(scenes))],
        output_type="np",
    ).frames
    return [as_bytes(video) for video in videos]


def picture(clips: Sequence[np.ndarray], captions: Sequence[str], *, columns: int = 2) -> Image.Image:
    """Every other frame of each clip side by side, below its caption."""
    strips = [np.concatenate(clip[::2], axis=1) for clip in clips]
    height, width = strips[0].shape[:2]
    rows = -(-len(strips) // columns)
    result = Image.new("RGB", (columns * (width + _GAP) - _GAP, rows * (height + _LINE + _GAP) - _GAP), "white")
    pencil, font = ImageDraw.Draw(result), ImageFont.load_default(15)
    for index, (strip, caption) in enumerate(zip(strips, captions, strict=True)):
        left, top = index % columns * (width + _GAP), index // columns * (height + _LINE + _GAP)
        pencil.text((left + 2, top + 2), caption, "black", font)
        result.paste(Image.fromarray(strip), (left, top + _LINE))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the pipeline")
    parser.add_argument("--lora", type=Path, help="LoRA file")
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    clips = make(load(options.model, options.lora), GALLERY, seed=options.seed)
    picture(clips, [scene.caption for scene in GALLERY]).save(options.output)
    for scene, clip in zip(GALLERY, clips, strict=True):
        seen = read(clip)
        print(f"{scene.caption}: {seen.count} {seen.colour} {seen.shape}, {seen.motion}")
    print("clips that fit their captions: " + ", ".join(f"{k} {v:.2f}" for k, v in fitting(clips, GALLERY).items()))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
