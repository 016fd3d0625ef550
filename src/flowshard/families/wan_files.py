"""The files that the publisher of Wan gives out (https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B), read and written.

Transformer in safetensors with the names of `Wan.names`, text encoder and VAE as `.pth`, tokenizer in a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError
from flowshard.weights.names import Vocabulary

if TYPE_CHECKING:
    import torch

    from flowshard.families.base import Variant
    from flowshard.weights.files import TensorInfo

WEIGHTS = "diffusion_pytorch_model*.safetensors"
TEXT_ENCODER = "models_t5_umt5-xxl-enc-bf16.pth"
VAE = "Wan2.1_VAE.pth"
TOKENIZER = "google/umt5-xxl"

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
_UP_BLOCKS, _RESNETS = 4, 3


def _vae_names() -> Vocabulary:
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
    pairs += [(f"encoder.down_blocks.*.{ours}", f"encoder.downsamples.*.{theirs}") for ours, theirs in _RESIDUAL]
    pairs += [(f"encoder.down_blocks.*.{same}", f"encoder.downsamples.*.{same}") for same in ("resample", "time_conv")]
    for block in range(_UP_BLOCKS):
        first = block * (_RESNETS + 1)  # the publisher counts through all blocks
        for place in range(_RESNETS):
            pairs += [
                (f"decoder.up_blocks.{block}.resnets.{place}.{ours}", f"decoder.upsamples.{first + place}.{theirs}")
                for ours, theirs in _RESIDUAL
            ]
        pairs.append((f"decoder.up_blocks.{block}.upsamplers.0", f"decoder.upsamples.{first + _RESNETS}"))
    return Vocabulary(pairs)


VAE_NAMES = _vae_names()
"""Of the VAE: diffusers' names and the publisher's."""


def transformer_config(
    publishers: Mapping[str, Any] | None, tensors: Mapping[str, TensorInfo], variant: Variant, *, where: str
) -> dict[str, Any]:
    """diffusers' config of a transformer, from the shapes of its tensors and, for the heads, the publisher's config.

    Raises:
        UserError: the publisher's config says another size than the tensors have; the message starts with `where`.
    """
    try:
        dim, in_channels, *patch = tensors["patch_embedding.weight"].shape
        sizes = {
            "dim": dim,
            "in_dim": in_channels,
            "out_dim": tensors["proj_out.weight"].shape[0] // (patch[0] * patch[1] * patch[2]),
            "ffn_dim": tensors["blocks.0.ffn.net.0.proj.weight"].shape[0],
            "freq_dim": tensors["condition_embedder.time_embedder.linear_1.weight"].shape[1],
            "num_layers": len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
        }
        text_dim = tensors["condition_embedder.text_embedder.linear_1.weight"].shape[1]
    except (KeyError, ValueError) as error:
        raise UserError(f"{where}: the files beside it are no Wan transformer: {error} is missing or odd") from None
    for key, size in sizes.items():
        if publishers is not None and publishers.get(key, size) != size:
            raise UserError(
                f"{where}: says {key} {publishers[key]}, but the tensors have {size}; these files do not belong together"
            )
    heads = variant.heads if publishers is None else publishers.get("num_heads", variant.heads)
    if dim % heads:
        raise UserError(f"{where}: {heads} heads do not divide a width of {dim}; check model.variant")
    return {
        "patch_size": patch,
        "num_attention_heads": heads,
        "attention_head_dim": dim // heads,
        "in_channels": in_channels,
        "out_channels": sizes["out_dim"],
        "text_dim": text_dim,
        "freq_dim": sizes["freq_dim"],
        "ffn_dim": sizes["ffn_dim"],
        "num_layers": sizes["num_layers"],
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
    }


def load_text_encoder(file: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The UMT5 encoder of a `.pth`, whose shapes say its sizes.

    Raises:
        UserError: the file is broken, holds more than tensors, or is another model.
    """
    from transformers import UMT5Config, UMT5EncoderModel

    from flowshard.weights.pth import fill, read_pth

    stored = read_pth(file)
    tensors = {TEXT_NAMES.from_original(name) or name: value for name, value in stored.items()}
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
    """The VAE of a `.pth`, in float32.

    Raises:
        UserError: the file is broken, holds more than tensors, or is another model.
    """
    import torch
    from diffusers import AutoencoderKLWan

    from flowshard.weights.pth import fill, read_pth

    stored = read_pth(file)
    tensors = {VAE_NAMES.from_original(name) or name: value for name, value in stored.items()}
    try:
        settings = {
            "base_dim": tensors["encoder.conv_in.weight"].shape[0],
            "z_dim": tensors["post_quant_conv.bias"].shape[0],
        }
    except KeyError as error:
        raise UserError(f"{file}: is no Wan 2.1 VAE, as it lacks {error}") from None
    return fill(AutoencoderKLWan, settings, tensors, torch.float32, file)


def write(pipeline: Any, directory: Path, original: Vocabulary) -> None:
    """Write a pipeline's parts as the publisher does."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    transformer, config = pipeline.transformer, pipeline.transformer.config
    tensors = {
        original.to_original(name) or name: value.contiguous() for name, value in transformer.state_dict().items()
    }
    save_file(tensors, directory / "diffusion_pytorch_model.safetensors")
    settings = {
        "_class_name": "WanModel",
        "model_type": "t2v",
        "dim": config.num_attention_heads * config.attention_head_dim,
        "ffn_dim": config.ffn_dim,
        "freq_dim": config.freq_dim,
        "in_dim": config.in_channels,
        "out_dim": config.out_channels,
        "num_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "text_len": 512,
        "eps": config.eps,
    }
    (directory / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    text = pipeline.text_encoder.state_dict()
    text.pop("encoder.embed_tokens.weight", None)  # tied
    torch.save({TEXT_NAMES.to_original(name): value for name, value in text.items()}, directory / TEXT_ENCODER)
    vae = pipeline.vae.state_dict()
    torch.save({VAE_NAMES.to_original(name): value for name, value in vae.items()}, directory / VAE)
    pipeline.tokenizer.save_pretrained(directory / TOKENIZER)
