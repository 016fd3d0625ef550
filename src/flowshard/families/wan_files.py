"""The files that the publisher of Wan gives out (https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B), read and written.

Transformer in safetensors with the names of `Wan.names`, text encoder, VAE and CLIP as `.pth` (`wan_encoders`), tokenizer
in a folder. Of a model with two transformers each is in a folder of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError
from flowshard.families import wan_encoders

if TYPE_CHECKING:
    from flowshard.families.base import Family
    from flowshard.families.variant import Variant
    from flowshard.weights.files import TensorInfo

WEIGHTS = "diffusion_pytorch_model*.safetensors"
TEXT_ENCODER = "models_t5_umt5-xxl-enc-bf16.pth"
VAE = "Wan2.1_VAE.pth"
VAE_2_2 = "Wan2.2_VAE.pth"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
TOKENIZER = "google/umt5-xxl"
EXPERTS = {"high": "high_noise_model", "low": "low_noise_model"}
"""Folders of the transformers of a model with two."""
_FUN = {48: "Wan Fun Control", 52: "Wan Fun Control", 32: "Wan Fun Control Camera"}
"""Channels of the noisy clip, a control and a picture together (https://github.com/aigc-apps/VideoX-Fun)."""


def other_kind(config: Mapping[str, Any]) -> str | None:
    """What a transformer with this config is, if it is one of a series by others that diffusers has no pipeline for."""
    if config.get("out_channels") != 16:
        return None
    return _FUN.get(config.get("in_channels", 16))


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
            "num_layers": _blocks(tensors, "blocks"),
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
        **_image_config(tensors),
        **_vace_config(publishers or {}, tensors, sizes["num_layers"], where),
    }


def _blocks(tensors: Mapping[str, TensorInfo], prefix: str) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith(f"{prefix}.")})


def _image_config(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What is in the config of a model that attends to the CLIP embedding of pictures."""
    found = {
        "image_dim": ("condition_embedder.image_embedder.norm1.weight", 0),
        "added_kv_proj_dim": ("blocks.0.attn2.add_k_proj.weight", 1),
        "pos_embed_seq_len": ("condition_embedder.image_embedder.pos_embed", 1),
    }
    return {key: tensors[name].shape[axis] for key, (name, axis) in found.items() if name in tensors}


def _vace_config(
    publishers: Mapping[str, Any], tensors: Mapping[str, TensorInfo], layers: int, where: str
) -> dict[str, Any]:
    """What is in the config of a model with the branch of VACE.

    Raises:
        UserError: the publisher's config names another number of blocks.
    """
    embedding = tensors.get("vace_patch_embedding.weight")
    if embedding is None:
        return {}
    count = _blocks(tensors, "vace_blocks")
    if not count:
        raise UserError(f"{where}: the files beside it have a vace_patch_embedding and no vace_blocks; add the others")
    # Published branches are at every second or every fifth block, from the first on.
    places = publishers.get("vace_layers") or list(range(0, layers, -(-layers // count)))
    if len(places) != count:
        raise UserError(
            f"{where}: says vace_layers {places}, but the tensors have {count} vace_blocks; these files do not belong "
            "together"
        )
    return {"vace_layers": places, "vace_in_channels": embedding.shape[1]}


def write(pipeline: Any, directory: Path, family: Family, model_type: str) -> None:
    """Write a pipeline's parts as the publisher does.

    Args:
        pipeline: of the family.
        directory: where to.
        family: whose names and files these are.
        model_type: what the publisher calls the kind of model.
    """
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    if pipeline.transformer_2 is None:
        _write_transformer(pipeline.transformer, directory, family, model_type)
    else:
        _write_transformer(pipeline.transformer, directory / EXPERTS["high"], family, model_type)
        _write_transformer(pipeline.transformer_2, directory / EXPERTS["low"], family, model_type)
    torch.save(wan_encoders.text_tensors(pipeline.text_encoder), directory / TEXT_ENCODER)
    torch.save(wan_encoders.vae_tensors(pipeline.vae), directory / family.original_parts["vae"][0])
    if "image_encoder" in family.original_parts:
        torch.save(wan_encoders.image_encoder_tensors(pipeline.image_encoder), directory / CLIP)
    pipeline.tokenizer.save_pretrained(directory / TOKENIZER)


def _write_transformer(transformer: Any, directory: Path, family: Family, model_type: str) -> None:
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    config = transformer.config
    tensors = {
        family.names.to_original(name) or name: value.contiguous() for name, value in transformer.state_dict().items()
    }
    save_file(tensors, directory / "diffusion_pytorch_model.safetensors")
    settings = {
        "_class_name": "WanModel",
        "model_type": model_type,
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
    if config.get("vace_layers") is not None:
        settings |= {
            "_class_name": "VaceWanModel",
            "vace_layers": list(config.vace_layers),
            "vace_in_dim": config.vace_in_channels,
        }
    (directory / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
