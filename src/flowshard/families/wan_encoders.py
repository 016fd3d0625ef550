"""The encoders of Wan in the publisher's `.pth` files, read and written.

Text encoder, VAE of Wan 2.1 and of Wan 2.2, and CLIP, of which only what sees pictures is used
(https://github.com/Wan-Video/Wan2.2, wan/modules/{t5,vae2_1,vae2_2}.py; https://github.com/Wan-Video/Wan2.1,
wan/modules/clip.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError
from flowshard.weights.names import Part, Vocabulary

if TYPE_CHECKING:
    import torch

TEXT_NAMES = Vocabulary(
    [
        ("shared", "token_embedding"),
        ("encoder.final_layer_norm", "norm"),
        ("encoder.block.*.layer.0.layer_norm", "blocks.*.norm1"),
        ("encoder.block.*.layer.0.SelfAttention.q", "blocks.*.attn.q"),
        ("encoder.block.*.layer.0.SelfAttention.k", "blocks.*.attn.k"),
        ("encoder.block.*.layer.0.SelfAttention.v", "blocks.*.attn.v"),
        ("encoder.block.*.layer.0.SelfAttention.o", "blocks.*.attn.o"),
        ("encoder.block.*.layer.0.SelfAttention.relative_attention_bias", "blocks.*.pos_embedding.embedding"),
        ("encoder.block.*.layer.1.layer_norm", "blocks.*.norm2"),
        ("encoder.block.*.layer.1.DenseReluDense.wi_0", "blocks.*.ffn.gate.0"),
        ("encoder.block.*.layer.1.DenseReluDense.wi_1", "blocks.*.ffn.fc1"),
        ("encoder.block.*.layer.1.DenseReluDense.wo", "blocks.*.ffn.fc2"),
    ]
)
"""Of the text encoder: transformers' names and the publisher's."""

_RESIDUAL = (
    ("norm1", "residual.0"),
    ("conv1", "residual.2"),
    ("norm2", "residual.3"),
    ("conv2", "residual.6"),
    ("conv_shortcut", "shortcut"),
)
_UP_BLOCKS = 4
_DOWN_RESNETS, _UP_RESNETS = 2, 3
"""Residual blocks of a block of the encoder and of the decoder."""


def _vae_ends() -> list[tuple[str, str]]:
    """All but the blocks, which are the same in both VAEs."""
    pairs = [("quant_conv", "conv1"), ("post_quant_conv", "conv2")]
    for half in ("encoder", "decoder"):
        pairs += [
            (f"{half}.conv_in", f"{half}.conv1"),
            (f"{half}.norm_out", f"{half}.head.0"),
            (f"{half}.conv_out", f"{half}.head.2"),
            (f"{half}.mid_block.attentions.0", f"{half}.middle.1"),
        ]
        for place, number in ((0, 0), (1, 2)):
            pairs += [
                (f"{half}.mid_block.resnets.{place}.{ours}", f"{half}.middle.{number}.{theirs}")
                for ours, theirs in _RESIDUAL
            ]
    return pairs


def _vae_names() -> Vocabulary:
    pairs = _vae_ends()
    pairs += [(f"encoder.down_blocks.*.{ours}", f"encoder.downsamples.*.{theirs}") for ours, theirs in _RESIDUAL]
    pairs += [(f"encoder.down_blocks.*.{same}", f"encoder.downsamples.*.{same}") for same in ("resample", "time_conv")]
    for block in range(_UP_BLOCKS):
        first = block * (_UP_RESNETS + 1)  # the publisher counts through all blocks
        for place in range(_UP_RESNETS):
            pairs += [
                (f"decoder.up_blocks.{block}.resnets.{place}.{ours}", f"decoder.upsamples.{first + place}.{theirs}")
                for ours, theirs in _RESIDUAL
            ]
        pairs.append((f"decoder.up_blocks.{block}.upsamplers.0", f"decoder.upsamples.{first + _UP_RESNETS}"))
    return Vocabulary(pairs)


def _vae_2_2_names() -> Vocabulary:
    pairs = _vae_ends()
    for ours, theirs, resnets, last in (
        ("encoder.down_blocks", "downsamples", _DOWN_RESNETS, "downsampler"),
        ("decoder.up_blocks", "upsamples", _UP_RESNETS, "upsampler"),
    ):
        block = f"{ours.partition('.')[0]}.{theirs}.*.{theirs}"
        pairs += [(f"{ours}.*.resnets.*.{name}", f"{block}.*.{original}") for name, original in _RESIDUAL]
        pairs.append((f"{ours}.*.{last}", f"{block}.{resnets}"))  # after the residual blocks
    return Vocabulary(pairs)


VAE_NAMES = _vae_names()
"""Of the VAE of Wan 2.1: diffusers' names and the publisher's."""
VAE_2_2_NAMES = _vae_2_2_names()
"""Of the VAE of Wan 2.2."""

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
VAE_2_2: Mapping[str, Any] = {
    "is_residual": True,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [*_MEAN_2_2],
    "latents_std": [*_STD_2_2],
}
"""What sets the VAE of Wan 2.2 apart, besides sizes: it folds pictures by 2 before the first layer."""

_CLIP_LAYER = ("encoder.layers.*", "visual.transformer.*")
CLIP_NAMES = Vocabulary(
    [
        ("embeddings.class_embedding", "visual.cls_embedding"),
        ("embeddings.position_embedding.weight", "visual.pos_embedding"),
        ("embeddings.patch_embedding", "visual.patch_embedding"),
        ("pre_layrnorm", "visual.pre_norm"),
        ("post_layernorm", "visual.post_norm"),
        *(
            (f"{_CLIP_LAYER[0]}.{ours}", f"{_CLIP_LAYER[1]}.{theirs}")
            for ours, theirs in (
                ("layer_norm1", "norm1"),
                ("layer_norm2", "norm2"),
                ("self_attn.out_proj", "attn.proj"),
                ("mlp.fc1", "mlp.0"),
                ("mlp.fc2", "mlp.2"),
            )
        ),
    ],
    fused={
        f"{_CLIP_LAYER[1]}.attn.to_qkv": {
            f"{_CLIP_LAYER[0]}.self_attn.{one}_proj": (place,) for place, one in enumerate("qkv")
        }
    },
    unused=("visual.head", "textual", "log_scale"),
)
"""Of the CLIP vision encoder: transformers' names and the publisher's."""
CLIP_HEADS = 16


def load_text_encoder(file: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The UMT5 encoder of a `.pth`, whose shapes say its sizes.

    Raises:
        UserError: the file is broken, holds more than tensors, or is another model.
    """
    from transformers import UMT5Config, UMT5EncoderModel

    from flowshard.weights.pth import fill, read_pth

    tensors = _translated(read_pth(file), TEXT_NAMES, file)
    try:
        bias = tensors["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        vocabulary, width = tensors["shared.weight"].shape
        inner = tensors["encoder.block.0.layer.0.SelfAttention.q.weight"].shape[0]
        feed_forward = tensors["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"].shape[0]
    except KeyError as error:
        raise UserError(f"{file}: is no UMT5 encoder, as it lacks {error}") from None
    buckets, heads = bias.shape
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=inner // heads,
        d_ff=feed_forward,
        num_layers=len({name.split(".")[2] for name in tensors if name.startswith("encoder.block.")}),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        dropout_rate=0.0,
    )
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]
    return fill(UMT5EncoderModel, config, tensors, dtype, file)


def load_vae(file: Path) -> torch.nn.Module:
    """The VAE of Wan 2.1 or 2.2 of a `.pth`, in float32.

    Raises:
        UserError: the file is broken, holds more than tensors, or is another model.
    """
    import torch
    from diffusers import AutoencoderKLWan

    from flowshard.weights.pth import fill, read_pth

    stored = read_pth(file)
    residual = any(name.startswith("encoder.downsamples.0.downsamples.") for name in stored)
    tensors = _translated(stored, VAE_2_2_NAMES if residual else VAE_NAMES, file)
    try:
        settings: dict[str, Any] = {
            "base_dim": tensors["encoder.conv_in.weight"].shape[0],
            "z_dim": tensors["post_quant_conv.bias"].shape[0],
        }
        if residual:
            settings |= {
                **VAE_2_2,
                "decoder_base_dim": tensors["decoder.norm_out.gamma"].shape[0],
                "in_channels": tensors["encoder.conv_in.weight"].shape[1],
                "out_channels": tensors["decoder.conv_out.weight"].shape[0],
            }
    except KeyError as error:
        raise UserError(f"{file}: is no Wan VAE, as it lacks {error}") from None
    return fill(AutoencoderKLWan, settings, tensors, torch.float32, file)


def load_image_encoder(file: Path) -> torch.nn.Module:
    """What sees pictures in the CLIP of a `.pth`, in float32.

    Raises:
        UserError: the file is broken, holds more than tensors, or is another model.
    """
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from flowshard.weights.pth import fill, read_pth

    tensors = _translated(read_pth(file), CLIP_NAMES, file)
    try:
        places = tensors["embeddings.position_embedding.weight"].flatten(0, -2)
        tensors["embeddings.position_embedding.weight"] = places
        tensors["embeddings.class_embedding"] = tensors["embeddings.class_embedding"].flatten()
        width, _, _, patch = tensors["embeddings.patch_embedding.weight"].shape
        feed_forward = tensors["encoder.layers.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise UserError(f"{file}: is no CLIP: {error} is missing or odd") from None
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=len({name.split(".")[2] for name in tensors if name.startswith("encoder.layers.")}),
        num_attention_heads=CLIP_HEADS,
        image_size=round((len(places) - 1) ** 0.5) * patch,
        patch_size=patch,
        hidden_act="gelu",
    )
    return fill(CLIPVisionModel, config, tensors, torch.float32, file)


def image_processor(size: int) -> Any:
    """What the published pipelines put before a CLIP vision encoder of pictures with sides of `size`."""
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def text_tensors(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The publisher's tensors of a text encoder."""
    tensors = encoder.state_dict()
    tensors.pop("encoder.embed_tokens.weight", None)  # tied
    return {TEXT_NAMES.to_original(name) or name: value for name, value in tensors.items()}


def vae_tensors(vae: Any) -> dict[str, torch.Tensor]:
    """The publisher's tensors of a VAE."""
    names = VAE_2_2_NAMES if vae.config.is_residual else VAE_NAMES
    return {names.to_original(name) or name: value for name, value in vae.state_dict().items()}


def image_encoder_tensors(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The publisher's tensors of a CLIP vision encoder, without CLIP's other half."""
    from flowshard.weights.fused import original_tensors

    tensors = original_tensors(encoder.state_dict(), CLIP_NAMES, option="--format original")
    tensors["visual.cls_embedding"] = tensors["visual.cls_embedding"].reshape(1, 1, -1)
    tensors["visual.pos_embedding"] = tensors["visual.pos_embedding"][None]
    return tensors


def _translated(stored: Mapping[str, torch.Tensor], names: Vocabulary, file: Path) -> dict[str, torch.Tensor]:
    """Tensors in the names of the model's class; what is not known keeps its own, what is not used is left out.

    Raises:
        UserError: one that holds several cannot be cut into them.
    """
    tensors = {}
    for name, value in stored.items():
        parts = names.parts(name)
        for part in (Part(name),) if parts is None else parts:
            if part.is_whole:
                tensors[part.name] = value
                continue
            try:
                ((start, end),) = part.rows(value.shape[0] if value.ndim else 1)
            except ValueError:
                raise UserError(f"{file}: {name} of shape {tuple(value.shape)} is not {part.of} pieces") from None
            tensors[part.name] = value[start:end]
    return tensors
