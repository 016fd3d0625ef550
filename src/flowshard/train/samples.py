"""Samples of the model during training, through the stock pipeline, under any layout.

All processes go through the same denoising with the same noise, as engines and sequence parallelism need every process
in each forward pass; the main one writes the files. Nothing that training draws or keeps is touched.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowshard.data.media import read_inputs, write_video
from flowshard.device import autocast
from flowshard.errors import RunError
from flowshard.families.variant import Inputs
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import Strategy
from flowshard.seeds import isolated_rng
from flowshard.train.inputs import RunInputs
from flowshard.train.sample_files import sample_folder, write_grid
from flowshard.train.sample_inputs import SampleInput
from flowshard.weights.files import sync

_FRAMES_PER_SECOND = 16


class Samples:
    """Makes the samples of a run; of one that asks for none, none are ever due."""

    def __init__(self, inputs: RunInputs, processes: Processes, *, dtype: torch.dtype) -> None:
        """Encode the prompts, for which the text encoders are loaded and let go of again.

        Args:
            inputs: of the run.
            processes: this one and its peers.
            dtype: in which the model computes.

        Raises:
            UserError: a file of a prompt cannot be decoded.
        """
        self._inputs, self._processes, self._dtype = inputs, processes, dtype
        self._asked = inputs.sampling
        self._folder = Path(inputs.config.output) / "samples"
        if self._asked is None:
            return
        family = inputs.family
        # Now, as all processes have to have them whatever becomes of the files.
        self._given = [self._decoded(one) for one in self._asked.samples]
        with isolated_rng(inputs.config.seed, "samples"):
            self._pipeline = family.load_encoders(inputs.source, dtype=dtype, device=processes.device)
            self._texts = [
                family.encode_for_pipeline(self._pipeline, one.prompt, one.negative_prompt, given)
                for one, given in zip(self._asked.samples, self._given, strict=True)
            ]
        for name in family.text_components:
            if isinstance(getattr(self._pipeline, name), torch.nn.Module):
                setattr(self._pipeline, name, None)
        self._pipeline.transformer = None
        self._pipeline.set_progress_bar_config(disable=True)
        self._pipeline.to("cpu")

    def due(self, step: int) -> bool:
        """Whether samples are to be made after so many steps."""
        if self._asked is None:
            return False
        return step % self._asked.every == 0 or step == self._inputs.steps

    def begin(self, step: int, strategy: Strategy) -> None:
        """Make the samples that are due before the first step of this process, unless an earlier one has made them."""
        if self.due(step) and not self._processes.share(sample_folder(self._folder, step).is_dir()):
            self.make(step, strategy)

    def make(self, step: int, strategy: Strategy) -> None:
        """Make the samples of the weights after so many steps. Collective.

        What cannot be made or written is named and left out: the training is worth more.
        """
        assert self._asked is not None  # noqa: S101
        device, pipeline = self._processes.device, self._pipeline
        with strategy.evaluation() as model, isolated_rng(self._inputs.config.seed, "samples", step):
            pipeline.to(device)
            pipeline.transformer = _Transformer(model, self._dtype, device)
            try:
                made = {}
                for index in range(len(self._texts)):
                    try:
                        made[index] = self._generate(index)
                    except RunError as error:  # after the last call of the model, so all processes go on together
                        self._processes.say(f"warning: no sample of prompt {index} at step {step}: {error}")
            finally:
                pipeline.transformer = None
                pipeline.to("cpu")
        if self._processes.is_main and made:
            try:
                self._write(step, made)
            except OSError as error:
                self._processes.say(f"warning: cannot write the samples of step {step} in {self._folder}: {error}")

    def _generate(self, index: int) -> np.ndarray:
        assert self._asked is not None  # noqa: S101
        one = self._asked.samples[index]
        return self._inputs.family.generate(
            self._pipeline,
            texts=_moved(self._texts[index], self._processes.device),
            **asdict(self._asked.sampling),
            inputs=self._given[index],
            generator=torch.Generator("cpu").manual_seed(one.seed),
        )

    def _decoded(self, one: SampleInput) -> Inputs:
        assert self._asked is not None  # noqa: S101
        sampling = self._asked.sampling
        return read_inputs(
            self._inputs.family.inputs,
            one.inputs,
            own=None,
            height=sampling.height,
            width=sampling.width,
            frames=sampling.frames,
            where="validation.prompts",
        )

    def _write(self, step: int, made: Mapping[int, np.ndarray]) -> None:
        assert self._asked is not None  # noqa: S101
        final = sample_folder(self._folder, step)
        partial = self._folder / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(parents=True)
        for index, frames in made.items():
            file = partial / f"{index:02d}.{'png' if len(frames) == 1 else 'mp4'}"
            if len(frames) == 1:
                Image.fromarray(frames[0]).save(file)
            else:
                write_video(file, frames, fps=_FRAMES_PER_SECOND)
            sync(file)
        partial.rename(final)
        sync(self._folder)
        write_grid(self._folder, [one.prompt for one in self._asked.samples])


class _Transformer:
    """The model in training as a pipeline calls its transformer: in training's own types, and under autocast.

    No module, so that a pipeline that moves its parts to another device lets it be.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._device = model, device
        self.dtype = dtype
        """In which the pipeline passes latents and embeddings; weights that are trained have another."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(self._device, self.dtype):
            return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _moved(texts: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Embeddings, or lists of them, on a device."""
    return {
        name: [one.to(device) for one in value] if isinstance(value, list) else value.to(device)
        for name, value in texts.items()
    }
