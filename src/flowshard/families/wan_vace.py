"""Wan VACE (https://arxiv.org/abs/2503.07598): a clip from another clip, a mask of what is to change, and pictures.

A second branch of blocks reads these and adds what it finds to the states of the first. Reference pictures are latent
frames before those of the clip, in what the branch reads and in what is denoised.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flowshard.errors import UserError
from flowshard.families.sequence import SequencePlan, Tokens
from flowshard.families.variant import Input, Sampling, Size, Variant
from flowshard.families.wan import PATCH, Wan, experts

if TYPE_CHECKING:
    import torch

    from flowshard.families.base import Tensors
    from flowshard.families.variant import Inputs
    from flowshard.weights.source import ModelSource

VIDEO = Input("vace_video", "video", required=False)
MASK = Input("vace_video_mask", "video", required=False)
REFERENCES = Input("vace_reference_image", "images", required=False)


class WanVace(Wan):
    """Wan 2.1 VACE, and the version of it for Wan 2.2 with two transformers."""

    variants = {
        variant.name: variant
        for variant in (
            Variant(
                "wan2.1-vace-1.3b",
                "Wan-AI/Wan2.1-VACE-1.3B-diffusers",
                heads=12,
                scheduler={"flow_shift": 16.0},
                sampling=Sampling(height=480, width=832, frames=81, steps=50, guidance=5.0),
                transformer={
                    "num_attention_heads": 12,
                    "num_layers": 30,
                    "ffn_dim": 8960,
                    "vace_layers": list(range(0, 30, 2)),
                },
            ),
            Variant(
                "wan2.1-vace-14b",
                "Wan-AI/Wan2.1-VACE-14B-diffusers",
                heads=40,
                scheduler={"flow_shift": 16.0},
                sampling=Sampling(height=720, width=1280, frames=81, steps=50, guidance=5.0),
            ),
            Variant(
                "wan2.2-vace-fun-a14b",
                "linoyts/Wan2.2-VACE-Fun-14B-diffusers",
                heads=40,
                scheduler={"flow_shift": 12.0},
                sampling=Sampling(height=480, width=832, frames=81, steps=50, guidance=5.0),
                experts=experts(0.875),
            ),
        )
    }
    pipeline_class = "WanVACEPipeline"
    transformer_class = "WanVACETransformer3DModel"
    inputs = (VIDEO, MASK, REFERENCES)
    block_lists = {"vace_blocks": "vace_layers", "blocks": "num_layers"}
    marks = {"vace_layers": True}
    original_type = "vace"

    def check_given(self, columns: Set[str], *, where: str) -> None:
        if not columns & {VIDEO.column, REFERENCES.column}:
            raise UserError(f"{where}has no {VIDEO.column!r} and no {REFERENCES.column!r}; VACE needs one of them")
        if MASK.column in columns and VIDEO.column not in columns:
            raise UserError(f"{where}has {MASK.column!r} without {VIDEO.column!r}, of which it is the mask")

    def shortened(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        kept = [layer for layer in config["vace_layers"] if layer < layers]
        return {"num_layers": min(layers, config["num_layers"]), "vace_layers": kept}

    def few_blocks(self, config: Mapping[str, Any], count: int) -> dict[str, Any]:
        """As many of the branch as of the others."""
        layers = list(range(min(count, len(config["vace_layers"]))))
        return {"num_layers": min(count, config["num_layers"]), "vace_layers": layers}

    def load_encoders(self, source: ModelSource, *, dtype: torch.dtype, device: torch.device) -> Any:
        encoders = super().load_encoders(source, dtype=dtype, device=device)
        # Where the pipeline's functions that prepare conditions look up the size of a patch.
        encoders.transformer = SimpleNamespace(config=SimpleNamespace(patch_size=(1, PATCH, PATCH)))
        return encoders

    def encode_inputs(self, encoders: Any, frames: np.ndarray, inputs: Inputs) -> Tensors:
        """What the pipeline prepares for the branch.

        Returns:
            `control` of shape (96, latent frames, height, width): latents of what is kept, of what is to change, and the
            mask. With reference pictures also `latents`, those of the clip with the pictures' before them.
        """
        import torch

        count, height, width, _ = frames.shape
        device = encoders.vae.device
        given = self.stock_inputs(inputs, count)
        with torch.no_grad():
            video, mask, references = encoders.preprocess_conditions(
                given["video"], given["mask"], given["reference_images"], 1, height, width, count, torch.float32, device
            )
            latents = encoders.prepare_video_latents(video, mask, references, device=device)
            control = torch.cat([latents, encoders.prepare_masks(mask, references)], dim=1)[0].cpu()
        pictures = len(references[0])
        if not pictures:
            return {"control": control}
        own = self.encode_media(encoders, frames)["latents"]
        return {"control": control, "latents": torch.cat([control[: len(own), :pictures], own], dim=1)}

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        import torch

        own = super().stand_in(config, size, text_tokens=text_tokens, pictures=pictures)
        channels, frames, height, width = own["latents"].shape
        own["latents"] = torch.zeros(channels, frames + pictures, height, width)
        own["control"] = torch.zeros(config["vace_in_channels"], frames + pictures, height, width)
        return own

    def transformer_inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors) -> Tensors:
        own = super().transformer_inputs(noisy, sigma, conditions)
        return {**own, "control_hidden_states": conditions["control"].to(noisy)}

    def sequence_plan(self, transformer: torch.nn.Module, tokens: Tokens) -> SequencePlan:
        """The branch is divided like the rest, at its own patch embedding."""
        plan = super().sequence_plan(transformer, tokens)
        return replace(plan, outputs={**plan.outputs, "vace_patch_embedding": plan.outputs["patch_embedding"]})

    def stock_inputs(self, inputs: Inputs, frames: int) -> dict[str, Any]:
        """A clip as a list of pictures, cut to the frames of the sample; of a still picture, all the same."""
        clips = {}
        for name, one in (("video", VIDEO), ("mask", MASK)):
            clip = inputs.get(one.column)
            if clip is not None:
                clip = [Image.fromarray(frame) for frame in np.resize(clip, (frames, *clip.shape[1:]))]
            clips[name] = clip
        return {**clips, "reference_images": inputs.get(REFERENCES.column)}

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from flowshard.families import tiny_wan

        layers = [0, 2] if variant.experts is None else [0]
        return tiny_wan.pipeline(self, variant, seed=seed, sizes={"vace_layers": layers})
