"""Names and sizes of the FLUX transformers in Black Forest Labs' own files, and names in DiffSynth-Studio's.

https://github.com/black-forest-labs/flux, src/flux/model.py; https://github.com/black-forest-labs/flux2;
https://github.com/modelscope/DiffSynth-Studio, diffsynth/models/flux_dit.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowshard.families.image_files import count_blocks
from flowshard.weights.names import Fused, Pair, Vocabulary

if TYPE_CHECKING:
    from flowshard.weights.files import TensorInfo

_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_QKV, _ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def _joined(names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Those of a block with two streams, one below the other."""
    return {f"{_DOUBLE}.attn.{name}": (place,) for place, name in enumerate(names)}


_SINGLE_QKV_MLP: dict[str, tuple[int, ...]] = {
    **{f"{_SINGLE}.attn.{name}": (place,) for place, name in enumerate(_QKV)},
    f"{_SINGLE}.proj_mlp": (3, 4, 5, 6),  # four times as wide as the model
}
_FUSED: Fused = {
    "double_blocks.*.img_attn.qkv": _joined(_QKV),
    "double_blocks.*.txt_attn.qkv": _joined(_ADDED_QKV),
    "final_layer.adaLN_modulation.1": {"norm_out.linear": (1, 0)},  # shift and scale, diffusers has scale and shift
}
_SAME: list[Pair] = [
    ("x_embedder", "img_in"),
    ("context_embedder", "txt_in"),
    ("proj_out", "final_layer.linear"),
    (f"{_DOUBLE}.attn.to_out.0", "double_blocks.*.img_attn.proj"),
    (f"{_DOUBLE}.attn.to_add_out", "double_blocks.*.txt_attn.proj"),
    *(
        (f"{block}.attn.{ours}.weight", f"{theirs}.scale")
        for block, ours, theirs in (
            (_DOUBLE, "norm_q", "double_blocks.*.img_attn.norm.query_norm"),
            (_DOUBLE, "norm_k", "double_blocks.*.img_attn.norm.key_norm"),
            (_DOUBLE, "norm_added_q", "double_blocks.*.txt_attn.norm.query_norm"),
            (_DOUBLE, "norm_added_k", "double_blocks.*.txt_attn.norm.key_norm"),
            (_SINGLE, "norm_q", "single_blocks.*.norm.query_norm"),
            (_SINGLE, "norm_k", "single_blocks.*.norm.key_norm"),
        )
    ),
]


def _embedder(ours: str, theirs: str) -> list[Pair]:
    return [(f"{ours}.linear_1", f"{theirs}.in_layer"), (f"{ours}.linear_2", f"{theirs}.out_layer")]


FLUX_DIFFSYNTH_NAMES = Vocabulary(
    [
        ("x_embedder", "x_embedder"),
        ("context_embedder", "context_embedder"),
        ("proj_out", "final_proj_out"),
        *(
            (f"time_text_embed.{ours}.linear_{place}", f"{theirs}.{2 * (place - 1)}")
            for ours, theirs in (
                ("timestep_embedder", "time_embedder.timestep_embedder"),
                ("guidance_embedder", "guidance_embedder.timestep_embedder"),
                ("text_embedder", "pooled_text_embedder"),
            )
            for place in (1, 2)
        ),
        *(
            (f"{_DOUBLE}.attn.{ours}", f"blocks.*.attn.{theirs}")
            for ours, theirs in (
                ("norm_q", "norm_q_a"),
                ("norm_k", "norm_k_a"),
                ("norm_added_q", "norm_q_b"),
                ("norm_added_k", "norm_k_b"),
            )
        ),
        (f"{_SINGLE}.attn.norm_q", "single_blocks.*.norm_q_a"),
        (f"{_SINGLE}.attn.norm_k", "single_blocks.*.norm_k_a"),
        (f"{_DOUBLE}.attn.to_out.0", "blocks.*.attn.a_to_out"),
        (f"{_DOUBLE}.attn.to_add_out", "blocks.*.attn.b_to_out"),
        (f"{_DOUBLE}.ff.net.0.proj", "blocks.*.ff_a.0"),
        (f"{_DOUBLE}.ff.net.2", "blocks.*.ff_a.2"),
        (f"{_DOUBLE}.ff_context.net.0.proj", "blocks.*.ff_b.0"),
        (f"{_DOUBLE}.ff_context.net.2", "blocks.*.ff_b.2"),
        (f"{_DOUBLE}.norm1.linear", "blocks.*.norm1_a.linear"),
        (f"{_DOUBLE}.norm1_context.linear", "blocks.*.norm1_b.linear"),
        (f"{_SINGLE}.norm.linear", "single_blocks.*.norm.linear"),
        (f"{_SINGLE}.proj_out", "single_blocks.*.proj_out"),
    ],
    fused={
        "blocks.*.attn.a_to_qkv": _joined(_QKV),
        "blocks.*.attn.b_to_qkv": _joined(_ADDED_QKV),
        "single_blocks.*.to_qkv_mlp": _SINGLE_QKV_MLP,
        "final_norm_out.linear": {"norm_out.linear": (1, 0)},  # shift and scale, as the publisher has them
    },
)
"""Of FLUX.1: diffusers' names and those of DiffSynth-Studio's model."""

FLUX_NAMES = Vocabulary(
    [
        *_SAME,
        *_embedder("time_text_embed.timestep_embedder", "time_in"),
        *_embedder("time_text_embed.text_embedder", "vector_in"),
        *_embedder("time_text_embed.guidance_embedder", "guidance_in"),
        (f"{_DOUBLE}.norm1.linear", "double_blocks.*.img_mod.lin"),
        (f"{_DOUBLE}.norm1_context.linear", "double_blocks.*.txt_mod.lin"),
        (f"{_DOUBLE}.ff.net.0.proj", "double_blocks.*.img_mlp.0"),
        (f"{_DOUBLE}.ff.net.2", "double_blocks.*.img_mlp.2"),
        (f"{_DOUBLE}.ff_context.net.0.proj", "double_blocks.*.txt_mlp.0"),
        (f"{_DOUBLE}.ff_context.net.2", "double_blocks.*.txt_mlp.2"),
        (f"{_SINGLE}.norm.linear", "single_blocks.*.modulation.lin"),
        (f"{_SINGLE}.proj_out", "single_blocks.*.linear2"),
    ],
    fused={**_FUSED, "single_blocks.*.linear1": _SINGLE_QKV_MLP},
    others=[FLUX_DIFFSYNTH_NAMES],
)
"""Of FLUX.1: diffusers' names and the publisher's; DiffSynth-Studio's are read as well."""

FLUX2_NAMES = Vocabulary(
    [
        *_SAME,
        *_embedder("time_guidance_embed.timestep_embedder", "time_in"),
        *_embedder("time_guidance_embed.guidance_embedder", "guidance_in"),
        ("double_stream_modulation_img.linear", "double_stream_modulation_img.lin"),
        ("double_stream_modulation_txt.linear", "double_stream_modulation_txt.lin"),
        ("single_stream_modulation.linear", "single_stream_modulation.lin"),
        (f"{_DOUBLE}.ff.linear_in", "double_blocks.*.img_mlp.0"),
        (f"{_DOUBLE}.ff.linear_out", "double_blocks.*.img_mlp.2"),
        (f"{_DOUBLE}.ff_context.linear_in", "double_blocks.*.txt_mlp.0"),
        (f"{_DOUBLE}.ff_context.linear_out", "double_blocks.*.txt_mlp.2"),
        (f"{_SINGLE}.attn.to_qkv_mlp_proj", "single_blocks.*.linear1"),
        (f"{_SINGLE}.attn.to_out", "single_blocks.*.linear2"),
    ],
    fused=_FUSED,
)
"""Of FLUX.2: diffusers' names and the publisher's."""


def flux_sizes(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What the tensors of FLUX.1 say of its config."""
    return {
        **_sizes(tensors),
        "pooled_projection_dim": tensors["time_text_embed.text_embedder.linear_1.weight"].shape[1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in tensors,
    }


def flux2_sizes(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What the tensors of FLUX.2 say of its config."""
    width, feed_forward = tensors["transformer_blocks.0.ff.linear_out.weight"].shape
    return {
        **_sizes(tensors),
        "timestep_guidance_channels": tensors["time_guidance_embed.timestep_embedder.linear_1.weight"].shape[1],
        "mlp_ratio": feed_forward / width,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in tensors,
    }


def _sizes(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    width, channels = tensors["x_embedder.weight"].shape
    head_size = tensors["transformer_blocks.0.attn.norm_q.weight"].shape[0]
    return {
        "in_channels": channels,
        "num_layers": count_blocks(tensors, "transformer_blocks"),
        "num_single_layers": count_blocks(tensors, "single_transformer_blocks"),
        "attention_head_dim": head_size,
        "num_attention_heads": width // head_size,
        "joint_attention_dim": tensors["context_embedder.weight"].shape[1],
    }
