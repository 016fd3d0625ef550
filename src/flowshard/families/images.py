"""What the families that make pictures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError
from flowshard.families.base import Family, as_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch


class ImageFamily(Family):
    """A family whose samples are single pictures, in latents of an eighth of the size and patches of 2 x 2."""

    media_components = ("vae",)
    spatial_multiple = 16
    frame_stride = 1

    def check_size(self, height: int, width: int, frames: int, *, where: str) -> None:
        super().check_size(height, width, frames, where=where)
        if frames != 1:
            raise UserError(f"{where}frames: {frames}, but {self.name} makes pictures; use 1")

    @staticmethod
    def sample(pipeline: Any, arguments: Mapping[str, Any], **own: Any) -> np.ndarray:
        """Call the stock pipeline for one picture; `own` are the family's further arguments. See `Family.generate`."""
        pictures = pipeline(
            prompt=arguments["prompt"],
            height=arguments["height"],
            width=arguments["width"],
            num_inference_steps=arguments["steps"],
            generator=arguments["generator"],
            output_type="np",
            **own,
        ).images
        return as_bytes(pictures)

    def scaled_latents(self, vae: Any, frames: np.ndarray) -> torch.Tensor:
        """A picture through diffusers' AutoencoderKL: float32 of shape (1, channels, height / 8, width / 8).

        The mode, not a sample: the encoding is deterministic and the posterior is narrow.
        """
        import torch

        with torch.no_grad():
            latents = vae.encode(self.pixels(frames, vae.device)[:, :, 0]).latent_dist.mode()
        scaled: torch.Tensor = (latents.float() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
        return scaled


def prompt_length(tokenizer: Any, published: int) -> int:
    """Length to which prompts are padded: the publisher's, or less if the tokenizer has a limit."""
    return min(published, tokenizer.model_max_length)
