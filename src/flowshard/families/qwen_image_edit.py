"""Qwen-Image-Edit (https://github.com/QwenLM/Qwen-Image): reference pictures as image tokens and before the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flowshard.families.qwen_image import SCHEDULER, QwenImage
from flowshard.families.variant import Input, Sampling, Size, Variant

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from flowshard.families.base import Tensors
    from flowshard.families.variant import Inputs
    from flowshard.weights.files import TensorInfo
    from flowshard.weights.source import ModelSource

_AREA = 1024 * 1024
_SEEN_TOKEN = 28
"""Side, in pixels, of a token of a picture in the text encoder."""


class QwenImageEdit(QwenImage):
    """The first model, for one reference picture."""

    variants = {
        "qwen-image-edit": Variant(
            "qwen-image-edit",
            "Qwen/Qwen-Image-Edit",
            heads=24,
            scheduler=SCHEDULER,
            sampling=Sampling(height=1024, width=1024, frames=1, steps=50, guidance=4.0),
            known_by={"zero_cond_t": False},
        )
    }
    pipeline_class = "QwenImageEditPipeline"
    inputs = (Input("edit_image", "images"),)
    text_inputs = ("edit_image",)
    text_components = (*QwenImage.text_components, "processor")
    original_parts = {**QwenImage.original_parts, "processor": ("processor",)}
    reference_area: ClassVar[int] = _AREA
    """Pixels, about, of a reference picture as image tokens."""
    seen_area: ClassVar[int] = _AREA
    """Pixels, about, of a reference picture as the text encoder gets it."""

    def input_shape(self, size: tuple[int, int]) -> tuple[int, int]:
        return _of_area(size, self.reference_area)

    def own_parts(self, source: ModelSource) -> dict[str, Any]:
        """A processor for pictures alone: the published one takes videos too, and for that needs torchvision."""
        from flowshard.families.qwen_processor import read_processor

        return {"processor": read_processor(source.parts["processor"])}

    def encode_prompt(self, encoders: Any, prompt: str, inputs: Inputs) -> Tensors:
        """Of any length, as the pipelines do not cut these prompts."""
        import torch

        resize = encoders.image_processor.resize
        pictures = [resize(picture, *_of_area(picture.size, self.seen_area)) for picture in inputs["edit_image"]]
        with torch.no_grad():
            embeddings, _ = encoders.encode_prompt(prompt, image=self.as_given(pictures), device=encoders.device)
        return {"prompt_embeds": embeddings[0].cpu()}

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        """The prompt has the reference pictures in it."""
        text_tokens += pictures * self.seen_area // _SEEN_TOKEN**2
        return super().stand_in(config, size, text_tokens=text_tokens, pictures=pictures)

    @staticmethod
    def as_given(pictures: list[Image.Image]) -> Any:
        """Reference pictures in the form in which the pipeline takes them."""
        return pictures[0]

    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        pipeline.vae.to(pipeline.transformer.dtype)  # the pipeline does not convert the pictures that it encodes
        return self.sample(
            pipeline,
            arguments,
            image=self.as_given(arguments["inputs"]["edit_image"]),
            true_cfg_scale=arguments["guidance"],
        )

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from flowshard.families import tiny_encoders

        processor = tiny_encoders.qwen_processor()
        return self.tiny_of(processor.tokenizer, variant, seed=seed, processor=processor)


class QwenImageEditPlus(QwenImageEdit):
    """The models for any number of reference pictures."""

    variants = {
        variant.name: variant
        for variant in (
            Variant(
                "qwen-image-edit-2509",
                "Qwen/Qwen-Image-Edit-2509",
                heads=24,
                scheduler=SCHEDULER,
                sampling=Sampling(height=1024, width=1024, frames=1, steps=40, guidance=4.0),
                known_by={"zero_cond_t": False},
            ),
            Variant(
                "qwen-image-edit-2511",
                "Qwen/Qwen-Image-Edit-2511",
                heads=24,
                scheduler=SCHEDULER,
                sampling=Sampling(height=1024, width=1024, frames=1, steps=40, guidance=4.0),
                known_by={"zero_cond_t": True},
                transformer={"zero_cond_t": True},
            ),
        )
    }
    pipeline_class = "QwenImageEditPlusPipeline"
    inputs = (Input("edit_image", "images", several=True),)
    seen_area = 384 * 384

    def transformer_config(
        self, publishers: Mapping[str, Any] | None, tensors: Mapping[str, TensorInfo], variant: Variant, *, where: str
    ) -> dict[str, Any]:
        config = super().transformer_config(publishers, tensors, variant, where=where)
        return config if publishers is not None else {**config, **variant.known_by}  # which no tensor says

    @staticmethod
    def as_given(pictures: list[Image.Image]) -> Any:
        return pictures


def _of_area(size: tuple[int, int], area: int) -> tuple[int, int]:
    """Height and width of about `area` pixels, multiples of 32, with the aspect ratio of a (width, height) picture."""
    ratio = size[0] / size[1]
    width = math.sqrt(area * ratio)
    return round(width / ratio / 32) * 32, round(width / 32) * 32
