"""Wan (https://github.com/Wan-Video/Wan2.1, https://arxiv.org/abs/2503.20314): what its models share, and text to video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowshard.families import wan_encoders, wan_files, wan_names
from flowshard.families.base import Family
from flowshard.families.pixels import as_bytes
from flowshard.families.rotary import rotate
from flowshard.families.sequence import SequencePlan, Tokens
from flowshard.families.variant import Sampling, Size, Variant

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowshard.families.base import Tensors
    from flowshard.families.variant import Inputs
    from flowshard.weights.files import TensorInfo
    from flowshard.weights.source import ModelSource

TEXT_TOKENS = 512
"""Length to which the pipeline pads a prompt's embedding with zeros; the transformer attends to the padding."""
PATCH = 2
"""Side of a token in latent pixels."""
TIMESTEPS = 1000
"""The transformer's timestep is sigma times this."""


def experts(boundary: float) -> dict[str, tuple[float, float]]:
    """The ranges of sigma of two transformers that change over at a noise level."""
    return {"high": (boundary, 1.0), "low": (0.0, boundary)}


class Wan(Family):
    """Wan 2.1 and 2.2 text-to-video. The other kinds of conditioning are classes made from this one."""

    name = "wan"
    variants = {
        variant.name: variant
        for variant in (
            Variant(
                "wan2.1-t2v-1.3b",
                "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
                heads=12,
                scheduler={"flow_shift": 3.0},
                sampling=Sampling(height=480, width=832, frames=81, steps=50, guidance=5.0),
                transformer={"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
            ),
            Variant(
                "wan2.1-t2v-14b",
                "Wan-AI/Wan2.1-T2V-14B-Diffusers",
                heads=40,
                scheduler={"flow_shift": 5.0},
                sampling=Sampling(height=720, width=1280, frames=81, steps=50, guidance=5.0),
            ),
            Variant(
                "wan2.2-t2v-a14b",
                "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
                heads=40,
                scheduler={"flow_shift": 12.0},
                sampling=Sampling(height=720, width=1280, frames=81, steps=40, guidance=4.0, guidance_low=3.0),
                experts=experts(0.875),
            ),
        )
    }
    pipeline_class = "WanPipeline"
    transformer_class = "WanTransformer3DModel"
    marks: ClassVar[Mapping[str, int | bool]] = {
        "out_channels": 16,
        "in_channels": 16,
        "image_dim": False,
        "vace_layers": False,
    }
    media_components: ClassVar[tuple[str, ...]] = ("vae",)
    text_components = ("text_encoder", "tokenizer")
    takes_negative_prompt = True
    spatial_multiple = 16
    takes_tiles = True
    frame_stride = 4
    block_lists = {"blocks": "num_layers"}
    heads_setting = "num_attention_heads"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    lora_aliases = {
        "q": ("to_q",),
        "k": ("to_k",),
        "v": ("to_v",),
        "o": ("to_out.0",),
        "k_img": ("add_k_proj",),
        "v_img": ("add_v_proj",),
        "ffn.0": ("ffn.net.0.proj",),
        "ffn.2": ("ffn.net.2",),
    }
    names = wan_names.NAMES
    text_tokens = TEXT_TOKENS
    encoding_version = 1

    original_weights = wan_files.WEIGHTS
    original_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text_encoder": (wan_files.TEXT_ENCODER,),
        "vae": (wan_files.VAE,),
        "tokenizer": (wan_files.TOKENIZER,),
    }
    original_experts = wan_files.EXPERTS
    original_type: ClassVar[str] = "t2v"
    """What the publisher's config calls these models."""
    landmark = "condition_embedder.time_embedder.linear_1.weight"

    def other_kind(self, config: Mapping[str, Any]) -> str | None:
        return wan_files.other_kind(config)

    def own_parts(self, source: ModelSource) -> dict[str, Any]:
        """No second transformer, unless it is given."""
        del source
        return {"transformer_2": None}

    def make_pipeline(self, source: ModelSource, transformer: Any, *, dtype: torch.dtype, **parts: Any) -> Any:
        if source.folder is not None:
            return super().make_pipeline(source, transformer, dtype=dtype, **parts)

        import diffusers
        from transformers import AutoTokenizer

        if "image_encoder" in source.parts:
            encoder: Any = wan_encoders.load_image_encoder(source.parts["image_encoder"])
            processor = wan_encoders.image_processor(encoder.config.image_size)
            parts |= {"image_encoder": encoder, "image_processor": processor}
        return getattr(diffusers, self.pipeline_class)(
            tokenizer=AutoTokenizer.from_pretrained(source.parts["tokenizer"], local_files_only=True),
            text_encoder=wan_encoders.load_text_encoder(source.parts["text_encoder"], dtype),
            vae=wan_encoders.load_vae(source.parts["vae"]),
            transformer=transformer,
            scheduler=diffusers.UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, **source.scheduler
            ),
            **source.pipeline,
            **parts,
        )

    def pipeline_settings(self, variant: Variant) -> dict[str, Any]:
        return {} if variant.experts is None else {"boundary_ratio": variant.experts["low"][1]}

    def transformer_config(
        self, publishers: Mapping[str, Any] | None, tensors: Mapping[str, TensorInfo], variant: Variant, *, where: str
    ) -> dict[str, Any]:
        return wan_files.transformer_config(publishers, tensors, variant, where=where)

    def encode_media(self, encoders: Any, frames: np.ndarray) -> Tensors:
        import torch

        vae = encoders.vae
        with torch.no_grad():
            # The mode, not a sample: the encoding is deterministic and the posterior is narrow.
            latents = vae.encode(self.pixels(frames, vae.device)).latent_dist.mode()
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return {"latents": ((latents - mean) / std)[0].float().cpu()}

    def encode_text(self, encoders: Any, prompt: str) -> Tensors:
        import torch

        with torch.no_grad():
            padded, _ = encoders.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS, device=encoders.device
            )
        used = padded[0].ne(0).any(dim=-1).nonzero()
        length = int(used[-1]) + 1 if len(used) else 0
        return {"prompt_embeds": padded[0, :length].cpu().contiguous()}

    def batch_conditions(self, conditions: Sequence[Tensors]) -> Tensors:
        import torch

        embeds = [condition["prompt_embeds"] for condition in conditions]
        padded = embeds[0].new_zeros(len(embeds), TEXT_TOKENS, embeds[0].shape[-1])
        for row, embed in zip(padded, embeds, strict=True):
            row[: len(embed)] = embed
        names = [name for name in conditions[0] if name != "prompt_embeds"]
        return {"prompt_embeds": padded, **{name: torch.stack([one[name] for one in conditions]) for name in names}}

    def denoise(
        self, transformer: torch.nn.Module, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors
    ) -> torch.Tensor:
        prediction: torch.Tensor = transformer(**self.transformer_inputs(noisy, sigma, conditions), return_dict=False)[
            0
        ]
        return prediction

    def transformer_inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors) -> Tensors:
        """The arguments of the transformer; see `denoise`."""
        return {
            "hidden_states": noisy,
            "timestep": sigma * TIMESTEPS,
            "encoder_hidden_states": conditions["prompt_embeds"],
        }

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        import torch

        del pictures
        stride = self.spatial_multiple // PATCH
        frames = (size.frames - 1) // self.frame_stride + 1
        return {
            "latents": torch.zeros(config["out_channels"], frames, size.height // stride, size.width // stride),
            "prompt_embeds": torch.zeros(text_tokens, config["text_dim"], dtype=torch.bfloat16),
        }

    def sequence_plan(self, transformer: torch.nn.Module, tokens: Tokens) -> SequencePlan:
        """Split after the patch embedding, gather after the last projection; text is not divided."""

        def patches(output: torch.Tensor) -> torch.Tensor:
            # The model flattens what it gets to (batch, tokens, channels) and takes the clip's shape from its input.
            return tokens.split(output.flatten(2), 2, stream="video")[..., None, None]

        def rotary(output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(tokens.split(table, 1, stream="video") for table in output)

        def conditions(output: tuple[Any, ...]) -> tuple[Any, ...]:
            embedding, modulation, *rest = output
            if embedding.ndim == 3:  # a timestep for each token
                embedding, modulation = (tokens.split(t, 1, stream="video") for t in (embedding, modulation))
            return embedding, modulation, *rest

        def whole(output: torch.Tensor) -> torch.Tensor:
            return tokens.gather(output, 1, stream="video")

        return SequencePlan(
            outputs={"rope": rotary, "patch_embedding": patches, "condition_embedder": conditions, "proj_out": whole},
            processors={
                f"{blocks}.{index}.attn1": SelfAttention(tokens)
                for blocks in self.block_lists
                for index in range(len(getattr(transformer, blocks)))
            },
        )

    def prepare_for_npu(self, transformer: torch.nn.Module, device: torch.device) -> None:
        from flowshard import npu

        del device  # the rotary tables are real ones, made on the CPU by the constructor
        for blocks in self.block_lists:
            for block in getattr(transformer, blocks):
                if npu.is_stock(block.attn2):
                    block.attn2.set_processor(CrossAttention())

    def tokens(self, shape: torch.Size) -> int:
        _, frames, height, width = shape
        return frames * (height // PATCH) * (width // PATCH)

    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        video = pipeline(
            **arguments["texts"],
            height=arguments["height"],
            width=arguments["width"],
            num_frames=arguments["frames"],
            num_inference_steps=arguments["steps"],
            guidance_scale=arguments["guidance"],
            guidance_scale_2=arguments["guidance_low"],
            generator=arguments["generator"],
            max_sequence_length=TEXT_TOKENS,
            output_type="np",
            **self.stock_inputs(arguments["inputs"], arguments["frames"]),
        ).frames[0]
        return as_bytes(video)

    def stock_inputs(self, inputs: Inputs, frames: int) -> dict[str, Any]:  # noqa: ARG002
        """What the stock pipeline's call gets for these inputs of a clip of `frames` frames."""
        return {}

    def write_original(self, pipeline: Any, directory: Path, variant: Variant) -> None:
        del variant  # the files of all have the same names
        wan_files.write(pipeline, directory, self, self.original_type)

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from flowshard.families import tiny_wan

        return tiny_wan.pipeline(self, variant, seed=seed)


class SelfAttention:
    """The self-attention of a block, with the attention itself over all processes that hold tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """What diffusers asks of a processor. The model passes neither other states nor a mask to self-attention."""
        assert encoder_hidden_states is None and attention_mask is None and rotary_emb is not None  # noqa: S101
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        query, key, value = (t.unflatten(2, (attn.heads, -1)) for t in (query, key, attn.to_v(hidden_states)))
        query, key = rotate(query, *rotary_emb), rotate(key, *rotary_emb)
        result = self._tokens.attention(query, key, value, streams=("video",)).flatten(2).type_as(query)
        for layer in attn.to_out:
            result = layer(result)
        return result


class CrossAttention:
    """The attention of a block to the text and, in models that take a picture, to what the image encoder saw in it."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """What diffusers asks of a processor. The last `TEXT_TOKENS` of the other states are the text."""
        from flowshard import npu

        assert encoder_hidden_states is not None and attention_mask is None and rotary_emb is None  # noqa: S101

        def heads(states: torch.Tensor) -> torch.Tensor:
            return states.unflatten(2, (attn.heads, -1))

        text = encoder_hidden_states
        query = heads(attn.norm_q(attn.to_q(hidden_states)))
        if attn.add_k_proj is not None:
            picture, text = text[:, :-TEXT_TOKENS], text[:, -TEXT_TOKENS:]
        result = npu.attention(query, heads(attn.norm_k(attn.to_k(text))), heads(attn.to_v(text))).type_as(query)
        if attn.add_k_proj is not None:
            key, value = heads(attn.norm_added_k(attn.add_k_proj(picture))), heads(attn.add_v_proj(picture))
            result = result + npu.attention(query, key, value).type_as(query)
        result = result.flatten(2)
        for layer in attn.to_out:
            result = layer(result)
        return result
