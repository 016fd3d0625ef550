"""Tiny models of the Wan variants with everything that they get besides the prompt, and what their stock pipelines do."""

import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from PIL import Image

from flowshard.data.media import read_frames, write_video
from flowshard.families import Family, Variant, find_variant
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.runs import relative_error

HEIGHT, WIDTH, FRAMES = 64, 32, 5
PROMPT = "a rabbit"
TinyModels = Callable[[str], Path]
INPUTS = {
    "input_image": "first.png",
    "end_image": "last.png",
    "vace_video": "control.mp4",
    "vace_video_mask": "mask.png",
    "vace_reference_image": "reference.png",
}


@dataclass
class Case:
    """A variant and the stock pipeline of its tiny model."""

    name: str
    family: Family
    variant: Variant
    pipeline: Any
    folder: Path
    data: Path

    def config(self, output: Path, *overrides: str, metadata: str | None = None) -> Any:
        """A small run; `metadata` names the file, by default the one with all inputs of the variant."""
        expert = () if self.variant.experts is None else ("model.expert=high",)
        size = (f"data.height={HEIGHT}", f"data.width={WIDTH}", f"data.frames={FRAMES}")
        file = f"data.metadata={self.data / (metadata or f'{self.family.pipeline_class}.csv')}"
        return runs.config(
            self.folder, self.data, output, f"model.variant={self.name}", *expert, *size, file, *overrides
        )

    def batch(self, output: Path, *overrides: str, **more: str) -> Any:
        """The first micro-batch of such a run."""
        return next(runs.batches(check_inputs(self.config(output, *overrides, **more))).micro_batches(0))

    def stock(self, **more: Any) -> Any:
        """Call the stock pipeline with the inputs of the metadata, without classifier-free guidance."""
        given = {one.column for one in self.family.inputs}
        picture = {name: Image.open(self.data / file) for name, file in INPUTS.items() if file.endswith("png")}
        own: dict[str, Any] = {"input_image": {"image": picture["input_image"]}}
        own["end_image"] = {"last_image": picture["end_image"]}
        own["vace_video"] = {"video": self.control()}
        own["vace_video_mask"] = {"mask": [picture["vace_video_mask"]] * FRAMES}
        own["vace_reference_image"] = {"reference_images": [picture["vace_reference_image"]]}
        arguments = {key: value for column in given for key, value in own[column].items()}
        fixed = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "max_sequence_length": 512, "prompt": PROMPT}
        steps = 2 if self.variant.experts is None else 4
        rest = {"guidance_scale": 1.0, "num_inference_steps": steps, "output_type": "latent"}
        return self.pipeline(**{**fixed, **arguments, **rest, **more}).frames

    def control(self) -> list[Image.Image]:
        """The clip that VACE gets."""
        clip = read_frames(self.data / "control.mp4", height=HEIGHT, width=WIDTH, frames=FRAMES, where="")
        return [Image.fromarray(frame) for frame in clip]


def write_data(folder: Path, clips: Path) -> None:
    """A clip, and everything that a model can get besides its prompt; pictures that no clip contains."""
    shutil.copy(clips / "clip_0.mp4", folder)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH] / 12
    for seed, name in enumerate(("first", "last", "reference")):
        waves = np.stack([np.sin(x + y * seed), np.cos(y - x + seed), np.sin(2 * y + seed)], axis=-1)
        Image.fromarray(((waves + 1) * 127).astype(np.uint8)).save(folder / f"{name}.png")
    Image.open(folder / "reference.png").resize((24, 40)).save(folder / "reference.png")
    Image.fromarray(np.where(x > 1, 255, 0).astype(np.uint8)).convert("RGB").save(folder / "mask.png")
    shades = np.linspace(30, 200, FRAMES, dtype=np.uint8)[:, None, None, None]
    write_video(folder / "control.mp4", np.broadcast_to(shades, (FRAMES, HEIGHT, WIDTH, 3)).copy(), fps=8)
    (folder / "plain.csv").write_text(f"video,prompt\nclip_0.mp4,{PROMPT}\n")
    for pipeline, columns in {
        "WanPipeline": ["input_image"],
        "WanImageToVideoPipeline": ["input_image", "end_image"],
        "WanVACEPipeline": ["vace_video", "vace_video_mask", "vace_reference_image"],
    }.items():
        files = ",".join(INPUTS[column] for column in columns)
        text = f"video,prompt,{','.join(columns)}\nclip_0.mp4,{PROMPT},{files}\n"
        (folder / f"{pipeline}.csv").write_text(text)
    mixed = f"clip_0.mp4,{PROMPT},control.mp4,\nclip_0.mp4,{PROMPT},control.mp4,reference.png\n"
    (folder / "mixed.csv").write_text(f"video,prompt,vace_video,vace_reference_image\n{mixed}")
    (folder / "mask_alone.csv").write_text(f"video,prompt,vace_video_mask\nclip_0.mp4,{PROMPT},mask.png\n")
    (folder / "picture.csv").write_text(f"image,prompt\nfirst.png,{PROMPT}\n")


def open_case(name: str, tiny_models: TinyModels, data: Path) -> Case:
    """The case of a variant on the files of `write_data`."""
    family, variant = find_variant(name, option="VARIANT")
    folder = tiny_models(name)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline).__name__ == family.pipeline_class
    if family.pipeline_class == "WanPipeline" and family.inputs:
        pipeline = WanImageToVideoPipeline(**pipeline.components, expand_timesteps=True)
    pipeline.set_progress_bar_config(disable=True)
    return Case(name, family, variant, pipeline, folder, data)


@dataclass
class Call:
    """A step of the stock pipeline."""

    model: Any
    arguments: dict[str, Any]
    prediction: torch.Tensor
    sigma: Any = None
    sample: Any = None


def record(pipeline: Any, patch: pytest.MonkeyPatch) -> list[Call]:
    """Notes what the transformers of a pipeline get and give, and what the scheduler does with it."""
    calls: list[Call] = []

    def forward(model: Any, stock: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        calls.append(Call(model, tensors, output[0].clone()))
        return output

    def step(stock: Any, prediction: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, **more: Any) -> Any:
        calls[-1].sigma, calls[-1].sample = timestep.reshape(1) / 1000, sample.clone()
        return stock(prediction, timestep, sample, **more)

    for model in (pipeline.transformer, getattr(pipeline, "transformer_2", None)):
        if model is not None:
            patch.setattr(model, "forward", partial(forward, model, model.forward))
    patch.setattr(pipeline.scheduler, "step", partial(step, pipeline.scheduler.step))
    return calls


def assert_same_calls(case: Case, calls: list[Call], conditions: dict[str, torch.Tensor]) -> None:
    """`denoise` calls the transformers with the same tensors as the stock pipeline, and gets the same."""
    for call in list(calls):
        before = len(calls)
        with torch.no_grad():
            case.family.denoise(call.model, call.sample, call.sigma, conditions)
        own = calls[before]
        call.arguments.pop("control_hidden_states_scale", None)  # ones, the model's default
        assert own.arguments.keys() == call.arguments.keys()
        for name, expected in call.arguments.items():
            assert relative_error(own.arguments[name].float(), expected.float()) <= 1e-6, name
        assert relative_error(own.prediction, call.prediction) <= 1e-6
