"""Tiny random pipelines of Wan: the real number of heads on small encoders, VAEs and transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import torch

from flowshard.families import tiny, tiny_encoders
from flowshard.seeds import isolated_rng

if TYPE_CHECKING:
    from flowshard.families.base import Family, Variant

_IMAGE_WIDTH, _IMAGE_SIZE, _IMAGE_PATCH = 32, 28, 14
IMAGE_TOKENS = (_IMAGE_SIZE // _IMAGE_PATCH) ** 2 + 1
"""Tokens of a picture in the CLIP vision encoder, the class token among them."""
_WIDE = 24
"""Number of heads from which on they are of the smallest size that rotary embedding in three dimensions takes."""

# Of the VAE of Wan 2.2: https://github.com/Wan-Video/Wan2.2, wan/modules/vae2_2.py.
_MEAN_2_2 = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891),
    *(0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723),
    *(-0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
_STD_2_2 = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901),
    *(0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944),
    *(0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)


def pipeline(
    family: Family,
    variant: Variant,
    *,
    seed: int,
    vae_2_2: bool = False,
    image_encoder: bool = False,
    sizes: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Any:
    """The stock pipeline of a variant.

    Args:
        family: whose classes it has.
        variant: whose heads, scheduler and experts it has.
        seed: of the weights.
        vae_2_2: take the form of the VAE of Wan 2.2, else that of Wan 2.1.
        image_encoder: give it a CLIP vision encoder and make the transformer take what that gives.
        sizes: further entries of the transformer's config.
        settings: further arguments of the pipeline.
    """
    tokenizer = tiny.t5_tokenizer()
    parts = dict(settings or {})
    with isolated_rng(seed, "tiny", variant.name):
        text_encoder = tiny.umt5_encoder(tokenizer)
        vae = _vae_2_2() if vae_2_2 else diffusers.AutoencoderKLWan(base_dim=4)
        transformer = _transformer(family, variant, image_encoder=image_encoder, **(sizes or {}))
        if variant.experts is not None:
            second = _transformer(family, variant, image_encoder=image_encoder, **(sizes or {}))
            parts |= {"transformer_2": second.eval(), "boundary_ratio": variant.experts["low"][1]}
        if image_encoder:
            parts |= {"image_encoder": _clip_vision_encoder().eval(), "image_processor": _image_processor()}
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
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=list(_MEAN_2_2),
        latents_std=list(_STD_2_2),
    )


def _clip_vision_encoder() -> Any:
    """A CLIP vision encoder of three layers; Wan reads what goes into the last."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=_IMAGE_WIDTH,
        intermediate_size=2 * _IMAGE_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=_IMAGE_SIZE,
        patch_size=_IMAGE_PATCH,
        hidden_act="gelu",
    )
    return CLIPVisionModel(config)


def _image_processor() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(
        size={"shortest_edge": _IMAGE_SIZE}, crop_size={"height": _IMAGE_SIZE, "width": _IMAGE_SIZE}
    )
