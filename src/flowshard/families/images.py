"""What the families that make pictures share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowshard.errors import UserError
from flowshard.families import image_files
from flowshard.families.base import Family
from flowshard.families.pixels import as_bytes
from flowshard.families.variant import Variant

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowshard.weights.files import TensorInfo
    from flowshard.weights.source import ModelSource

FLUX_VAE = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
"""How FLUX.1 and Z-Image normalise the latents of the VAE that they share."""


class ImageFamily(Family):
    """A family whose samples are single pictures, in latents of an eighth of the size and patches of 2 x 2."""

    media_components = ("vae",)
    spatial_multiple = 16
    frame_stride = 1

    encoder_classes: ClassVar[Mapping[str, str]]
    """Text encoders by component, to their class in transformers."""
    vae_class: ClassVar[str]
    """Of the VAE, in diffusers."""
    vae_settings: ClassVar[Mapping[str, Any]] = {}
    """What a VAE's weights do not say of its config."""
    published_settings: ClassVar[Mapping[str, Any]]
    """What a transformer's weights do not say of its config, in the published models."""

    def sizes(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        """What the tensors of a transformer say of its config, in diffusers' terms; needed with `original_weights`.

        Raises:
            KeyError: one is missing.
        """
        raise NotImplementedError(f"{self.name} has no files but those in the diffusers layout")

    def original_file(self, variant: Variant) -> str:
        """The publisher's file of a variant's transformer, where `write_original` puts it; needed with `original_weights`."""
        raise NotImplementedError(f"{self.name} has no files but those in the diffusers layout")

    def check_size(self, height: int, width: int, frames: int, *, where: str) -> None:
        super().check_size(height, width, frames, where=where)
        if frames != 1:
            raise UserError(f"{where}frames: {frames}, but {self.name} makes pictures; use 1")

    def transformer_config(
        self,
        publishers: Mapping[str, Any] | None,
        tensors: Mapping[str, TensorInfo],
        variant: Variant,  # noqa: ARG002 - the tensors say the heads
        *,
        where: str,
    ) -> dict[str, Any]:
        try:
            sizes = self.sizes(tensors)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{where}: the files beside it are no {self.name} transformer: {error} is missing"
            ) from None
        return image_files.checked_config(
            publishers,
            sizes,
            transformer_class=self.transformer_class,
            published=self.published_settings,
            where=where,
        )

    def make_pipeline(self, source: ModelSource, transformer: Any, *, dtype: torch.dtype, **parts: Any) -> Any:
        if source.folder is not None:
            return super().make_pipeline(source, transformer, dtype=dtype, **parts)

        import diffusers

        parts = {**self.own_parts(source), **parts}
        for name, place in source.parts.items():
            if name in parts:
                continue
            if name in self.encoder_classes:
                parts[name] = image_files.load_encoder(place, self.encoder_classes[name], dtype)
            elif name == "vae":
                parts[name] = image_files.load_vae(place, self.vae_class, self.vae_settings)
            else:
                parts[name] = image_files.load_tokenizer(place)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**source.scheduler)
        return getattr(diffusers, self.pipeline_class)(
            scheduler=scheduler, transformer=transformer, **source.pipeline, **parts
        )

    def write_original(self, pipeline: Any, directory: Path, variant: Variant) -> None:
        if self.original_weights is None:
            super().write_original(pipeline, directory, variant)
        vae_file = self.original_parts["vae"][0] == image_files.VAE_FILE
        folders = [name for name in self.original_parts if name != "vae" or not vae_file]
        file = self.original_file(variant)
        image_files.write(pipeline, directory, weights=file, names=self.names, folders=folders, vae_file=vae_file)

    @staticmethod
    def sample(pipeline: Any, arguments: Mapping[str, Any], **own: Any) -> np.ndarray:
        """Call the stock pipeline for one picture; `own` are the family's further arguments. See `Family.generate`."""
        pictures = pipeline(
            **arguments["texts"],
            height=arguments["height"],
            width=arguments["width"],
            num_inference_steps=arguments["steps"],
            generator=arguments["generator"],
            output_type="np",
            **own,
        ).images
        return as_bytes(pictures)

    def scaled_latents(self, vae: Any, frames: np.ndarray) -> torch.Tensor:
        """`scaled` of one picture as uint8 RGB of shape (1, height, width, 3)."""
        return self.scaled(vae, self.pixels(frames, vae.device)[:, :, 0])

    @staticmethod
    def scaled(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Pictures (batch, 3, height, width) through AutoencoderKL: float32, (batch, channels, height / 8, width / 8).

        The mode, not a sample: the encoding is deterministic and the posterior is narrow.
        """
        import torch

        with torch.no_grad():
            latents = vae.encode(pixels).latent_dist.mode()
        scaled: torch.Tensor = (latents.float() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
        return scaled


def prompt_length(tokenizer: Any, published: int) -> int:
    """Length to which prompts are padded: the publisher's, or less if the tokenizer has a limit."""
    return min(published, tokenizer.model_max_length)
