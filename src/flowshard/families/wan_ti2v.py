"""Wan 2.2 TI2V 5B: text and image to video in one model, on the latents of the VAE of Wan 2.2.

The picture is the first latent frame itself: it is put in clean, its tokens have timestep 0, and it is not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from PIL import Image

from flowshard.families import wan_files
from flowshard.families.variant import Input, Sampling, Size, Variant
from flowshard.families.wan import PATCH, Wan

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowshard.families.base import Tensors
    from flowshard.families.variant import Inputs

FIRST = Input("input_image", "image", from_clip="first", required=False)
_CONDITION = "first_frame"


class WanTextImage(Wan):
    """Clips are trained from their first frame, pictures and clips without it from text alone."""

    variants = {
        "wan2.2-ti2v-5b": Variant(
            "wan2.2-ti2v-5b",
            "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
            heads=24,
            scheduler={"flow_shift": 5.0},
            sampling=Sampling(height=704, width=1280, frames=121, steps=50, guidance=5.0),
            transformer={
                "num_attention_heads": 24,
                "num_layers": 30,
                "ffn_dim": 14336,
                "in_channels": 48,
                "out_channels": 48,
            },
        )
    }
    marks = {"out_channels": 48}
    inputs = (FIRST,)
    optional_conditions = (_CONDITION,)
    spatial_multiple = 32
    takes_tiles = False  # diffusers compares the size of tiles with that of 2 x 2 pixels
    original_parts = {**Wan.original_parts, "vae": (wan_files.VAE_2_2,)}
    original_type = "ti2v"

    def pipeline_settings(self, variant: Variant) -> dict[str, Any]:
        return {**super().pipeline_settings(variant), "expand_timesteps": True}

    def encode_inputs(self, encoders: Any, frames: np.ndarray, inputs: Inputs) -> Tensors:
        """`first_frame` of shape (48, 1, height, width), for clips."""
        if len(frames) == 1:
            return {}
        return {_CONDITION: self.encode_media(encoders, inputs[FIRST.column])["latents"]}

    def transformer_inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors) -> Tensors:
        """A timestep for each token, (batch, tokens)."""
        import torch

        own = super().transformer_inputs(noisy, sigma, conditions)
        batch, _, frames, height, width = noisy.shape
        noisy_frames = noisy.new_ones(frames, dtype=torch.float32)
        if _CONDITION in conditions:
            own["hidden_states"] = torch.cat([conditions[_CONDITION].to(noisy), noisy[:, :, 1:]], dim=2)
            noisy_frames[0] = 0.0
        tokens = noisy_frames.repeat_interleave((height // PATCH) * (width // PATCH))
        own["timestep"] = own["timestep"].view(batch, 1) * tokens
        return own

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        own = super().stand_in(config, size, text_tokens=text_tokens, pictures=pictures)
        if size.frames > 1:
            own[_CONDITION] = own["latents"][:, :1].clone()
        return own

    def learned(self, latents: torch.Tensor, conditions: Tensors) -> torch.Tensor:
        """All but the first frame where that is given."""
        return latents[:, :, 1:] if _CONDITION in conditions else latents

    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        """With a picture through the image-to-video pipeline, which has the same parts."""
        if FIRST.column in arguments["inputs"]:
            from diffusers import WanImageToVideoPipeline

            settings = getattr(pipeline, "_progress_bar_config", {})
            pipeline = WanImageToVideoPipeline(**pipeline.components, expand_timesteps=True)
            pipeline.set_progress_bar_config(**settings)
        return super().generate(pipeline, **arguments)

    def stock_inputs(self, inputs: Inputs, frames: int) -> dict[str, Any]:
        del frames
        return {"image": Image.fromarray(inputs[FIRST.column][0])} if FIRST.column in inputs else {}

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from flowshard.families import tiny_wan

        return tiny_wan.pipeline(
            self,
            variant,
            seed=seed,
            vae_2_2=True,
            sizes={"in_channels": 48, "out_channels": 48},
        )
