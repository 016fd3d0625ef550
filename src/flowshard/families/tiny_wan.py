"""Tiny random pipelines of Wan: the real number of heads on small encoders, VAEs and transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import torch

from flowshard.families import tiny, tiny_encoders, wan_encoders
from flowshard.seeds import isolated_rng

if TYPE_CHECKING:
    from flowshard.families.base import Family
    from flowshard.families.variant import Variant

_IMAGE_WIDTH, _IMAGE_SIZE, _IMAGE_PATCH = 32, 28, 14
IMAGE_TOKENS = (_IMAGE_SIZE // _IMAGE_PATCH) ** 2 + 1
"""Tokens of a picture in the CLIP vision encoder, the class token among them."""
_WIDE = 24
"""Number of heads from which on they are of the smallest size that rotary embedding in three dimensions takes."""


def pipeline(
    family: Family,
    variant: Variant,
    *,
    seed: int,
    vae_2_2: bool = False,
    image_encoder: bool = False,
    sizes: dict[str, Any] | None = None,
) -> Any:
    """The stock pipeline of a variant.

    Args:
        family: whose classes it has.
        variant: whose heads, scheduler and experts it has.
        seed: of the weights.
        vae_2_2: take the form of the VAE of Wan 2.2, else that of Wan 2.1.
        image_encoder: give it a CLIP vision encoder and make the transformer take what that gives.
        sizes: further entries of the transformer's config.
    """
    tokenizer = tiny.t5_tokenizer()
    parts = family.pipeline_settings(variant)
    with isolated_rng(seed, "tiny", variant.name):
        text_encoder = tiny.umt5_encoder(tokenizer)
        vae = _vae_2_2() if vae_2_2 else diffusers.AutoencoderKLWan(base_dim=4)
        transformer = _transformer(family, variant, image_encoder=image_encoder, **(sizes or {}))
        if variant.experts is not None:
            second = _transformer(family, variant, image_encoder=image_encoder, **(sizes or {}))
            parts["transformer_2"] = second.eval()
        if image_encoder:
            parts["image_encoder"] = _clip_vision_encoder().eval()
            parts["image_processor"] = wan_encoders.image_processor(_IMAGE_SIZE)
        tiny_encoders.normalise_latents(
            vae,
            tiny_encoders.smooth_clips(9),
            mean=torch.tensor(vae.config.latents_mean),
            std=torch.tensor(vae.config.latents_std),
        )
    return getattr(diffusers, family.pipeline_class)(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, **variant.scheduler
        ),
        **parts,
    )


def _transformer(family: Family, variant: Variant, *, image_encoder: bool, **sizes: Any) -> Any:
    head_size = 8 if variant.heads >= _WIDE else 16
    if image_encoder:
        sizes |= {"image_dim": _IMAGE_WIDTH, "added_kv_proj_dim": variant.heads * head_size}
    model = getattr(diffusers, family.transformer_class)(
        num_attention_heads=variant.heads,
        attention_head_dim=head_size,
        text_dim=tiny.TEXT_WIDTH,
        ffn_dim=256,
        **{"num_layers": 3 if variant.experts is None else 2, **sizes},
    )
    places = model.condition_embedder.image_embedder.pos_embed if image_encoder else None
    if places is not None:
        torch.nn.init.normal_(places)  # zeros in a new model
    return model


def _vae_2_2() -> Any:
    """The VAE of Wan 2.2: 48 channels of 16 times smaller latents, of pictures that it first folds by 2."""
    return diffusers.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=48,
        in_channels=12,
        out_channels=12,
        **wan_encoders.VAE_2_2,
    )


def _clip_vision_encoder() -> Any:
    """A CLIP vision encoder of three layers; Wan reads what goes into the last."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=_IMAGE_WIDTH,
        intermediate_size=2 * _IMAGE_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=wan_encoders.CLIP_HEADS,
        image_size=_IMAGE_SIZE,
        patch_size=_IMAGE_PATCH,
        hidden_act="gelu",
    )
    return CLIPVisionModel(config)
