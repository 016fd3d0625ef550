"""Wan image-to-video: a clip from its first frame, or from its first and last.

The latents of the given frames and a mask that says which they are, are further channels of the transformer's input.
The 14B models of Wan 2.1 also attend to a CLIP embedding of the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from PIL import Image

from flowshard.errors import UserError
from flowshard.families import wan_files
from flowshard.families.variant import Input, Sampling, Size, Variant
from flowshard.families.wan import Wan, experts

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowshard.families.base import Tensors
    from flowshard.families.variant import Inputs

FIRST = Input("input_image", "image", from_clip="first")
LAST = Input("end_image", "image", from_clip="last")
CLIP_TOKENS = 257
"""Of a picture in the published CLIP encoder."""
_WITH_CLIP = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}


class WanImage(Wan):
    """From the first frame, with its CLIP embedding."""

    variants = {
        variant.name: variant
        for variant in (
            Variant(
                "wan2.1-i2v-14b-480p",
                "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
                heads=40,
                scheduler={"flow_shift": 3.0},
                sampling=Sampling(height=480, width=832, frames=81, steps=40, guidance=5.0),
                transformer=_WITH_CLIP,
            ),
            Variant(
                "wan2.1-i2v-14b-720p",
                "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
                heads=40,
                scheduler={"flow_shift": 5.0},
                sampling=Sampling(height=720, width=1280, frames=81, steps=40, guidance=5.0),
                transformer=_WITH_CLIP,
            ),
        )
    }
    pipeline_class = "WanImageToVideoPipeline"
    marks = {"in_channels": 36, "image_dim": True, "pos_embed_seq_len": False}
    inputs: ClassVar[tuple[Input, ...]] = (FIRST,)
    media_components: ClassVar[tuple[str, ...]] = ("vae", "image_encoder", "image_processor")
    original_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Wan.original_parts,
        "image_encoder": (wan_files.CLIP,),
        "image_processor": (wan_files.CLIP,),  # whose size is that of the encoder's pictures
    }
    original_type = "i2v"

    def check_size(self, height: int, width: int, frames: int, *, where: str) -> None:
        super().check_size(height, width, frames, where=where)
        if frames == 1:
            raise UserError(
                f"{where}frames: 1, but image to video makes clips from a picture; use {self.frame_stride + 1} or more"
            )

    def encode_inputs(self, encoders: Any, frames: np.ndarray, inputs: Inputs) -> Tensors:
        """What the pipeline prepares from the pictures.

        Returns:
            `image_condition`, which is mask and latents, of shape (4 + 16, latent frames, height, width); and, where the
            model has a CLIP encoder, `image_embeds` of shape (pictures, tokens, width).
        """
        import torch

        given = [Image.fromarray(inputs[one.column][0]) for one in self.inputs]
        count, height, width, _ = frames.shape
        device = encoders.vae.device
        pixels = [encoders.video_processor.preprocess(one, height, width).to(device) for one in given]
        with torch.no_grad():
            _, condition = encoders.prepare_latents(
                pixels[0],
                1,
                encoders.vae.config.z_dim,
                height,
                width,
                count,
                torch.float32,
                device,
                latents=torch.empty(0),  # those that it would draw
                last_image=pixels[1] if len(pixels) > 1 else None,
            )
            found = {"image_condition": condition[0].cpu()}
            if encoders.image_encoder is not None:
                found["image_embeds"] = encoders.encode_image(given, device).float().cpu()
        return found

    def transformer_inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors) -> Tensors:
        import torch

        own = super().transformer_inputs(noisy, sigma, conditions)
        own["hidden_states"] = torch.cat([noisy, conditions["image_condition"].to(noisy)], dim=1)
        if "image_embeds" in conditions:
            own["encoder_hidden_states_image"] = conditions["image_embeds"].flatten(0, 1)
        return own

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        import torch

        own = super().stand_in(config, size, text_tokens=text_tokens, pictures=pictures)
        channels, given = config["in_channels"] - config["out_channels"], len(self.inputs)
        own["image_condition"] = torch.zeros(channels, *own["latents"].shape[1:])
        if config["image_dim"] is not None:
            tokens = (config["pos_embed_seq_len"] or given * CLIP_TOKENS) // given
            own["image_embeds"] = torch.zeros(given, tokens, config["image_dim"])
        return own

    def stock_inputs(self, inputs: Inputs, frames: int) -> dict[str, Any]:
        del frames
        names = {FIRST.column: "image", LAST.column: "last_image"}
        return {names[one.column]: Image.fromarray(inputs[one.column][0]) for one in self.inputs}

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from flowshard.families import tiny_wan

        clip = "image_encoder" in self.media_components
        return tiny_wan.pipeline(
            self, variant, seed=seed, image_encoder=clip, sizes={"in_channels": 36, **self.tiny_sizes()}
        )

    def tiny_sizes(self) -> dict[str, Any]:
        """Further entries of the config of a tiny transformer."""
        return {}


class WanFirstLast(WanImage):
    """From the first and the last frame, with the CLIP embedding of both and a position embedding to tell them apart."""

    variants = {
        "wan2.1-flf2v-14b-720p": Variant(
            "wan2.1-flf2v-14b-720p",
            "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
            heads=40,
            scheduler={"flow_shift": 16.0},
            sampling=Sampling(height=720, width=1280, frames=81, steps=50, guidance=5.0),
            transformer={**_WITH_CLIP, "pos_embed_seq_len": 2 * CLIP_TOKENS},
        )
    }
    marks = {"in_channels": 36, "image_dim": True, "pos_embed_seq_len": True}
    inputs = (FIRST, LAST)
    original_type = "flf2v"

    def tiny_sizes(self) -> dict[str, Any]:
        from flowshard.families.tiny_wan import IMAGE_TOKENS

        return {"pos_embed_seq_len": 2 * IMAGE_TOKENS}


class WanImageExperts(WanImage):
    """From the first frame, without a CLIP embedding, in two transformers."""

    variants = {
        "wan2.2-i2v-a14b": Variant(
            "wan2.2-i2v-a14b",
            "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
            heads=40,
            scheduler={"flow_shift": 5.0},
            sampling=Sampling(height=720, width=1280, frames=81, steps=40, guidance=3.5),
            experts=experts(0.9),
            transformer={"in_channels": 36},
        )
    }
    marks = {"in_channels": 36, "image_dim": False}
    media_components = ("vae",)
    original_parts = Wan.original_parts
