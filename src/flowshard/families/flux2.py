"""FLUX.2 (https://github.com/black-forest-labs/flux2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from flowshard.errors import UserError
from flowshard.families.flux import TEXT_TOKENS, plan_of_two_streams, rotate_tokens
from flowshard.families.flux_files import FLUX2_NAMES, flux2_sizes
from flowshard.families.image_files import VAE_FILE, parts
from flowshard.families.images import prompt_length
from flowshard.families.joint import REFERENCE, JointFamily, grids, join_grids, stack_references, to_grid
from flowshard.families.rotary import make_on_cpu
from flowshard.families.sequence import SequencePlan, Tokens
from flowshard.families.variant import Input, Sampling, Size, Variant

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

    from flowshard.families.base import Tensors
    from flowshard.weights.files import TensorInfo
    from flowshard.weights.source import ModelSource

SCHEDULER: Mapping[str, Any] = {"use_dynamic_shifting": True, "shift": 3.0}
REFERENCE_AREA = 1024 * 1024
"""Pixels of a reference picture; larger ones are made smaller."""
_SHORTEST_SIDE, _LARGEST_RATIO = 64, 8
"""What the pipeline asks of reference pictures."""
_FIRST_REFERENCE, _BETWEEN_REFERENCES = 10, 10
"""Places of reference pictures on the first axis, where the sample itself is at 0."""
_STEPS = 50
"""Sampling steps for which the shift is taken, which depends on them."""


class Flux2(JointFamily):
    """FLUX.2."""

    name = "flux2"
    variants = {
        variant.name: variant
        for variant in (
            Variant(
                "flux.2-dev",
                "black-forest-labs/FLUX.2-dev",
                heads=48,
                scheduler=SCHEDULER,
                sampling=Sampling(height=1024, width=1024, frames=1, steps=_STEPS, guidance=4.0),
            ),
        )
    }
    pipeline_class = "Flux2Pipeline"
    inputs = (Input("edit_image", "images", required=False, several=True),)
    optional_conditions = (REFERENCE,)
    transformer_class = "Flux2Transformer2DModel"
    text_components = ("text_encoder", "tokenizer")
    takes_negative_prompt = False
    block_lists = {"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"}
    heads_setting = "num_attention_heads"
    lora_targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "linear_in",
        "linear_out",
        "to_qkv_mlp_proj",
        "single_transformer_blocks.*.attn.to_out",
    )
    lora_aliases = {
        "img_attn.qkv": ("to_q", "to_k", "to_v"),
        "txt_attn.qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
        "img_attn.proj": ("to_out.0",),
        "txt_attn.proj": ("to_add_out",),
        "img_mlp.0": ("ff.linear_in",),
        "img_mlp.2": ("ff.linear_out",),
        "txt_mlp.0": ("ff_context.linear_in",),
        "txt_mlp.2": ("ff_context.linear_out",),
        "linear1": ("to_qkv_mlp_proj",),
        "linear2": ("single_transformer_blocks.*.attn.to_out",),
    }
    names = FLUX2_NAMES
    text_tokens = TEXT_TOKENS
    encoding_version = 1

    original_weights: ClassVar[str | None] = "flux2*.safetensors"
    original_parts = parts(*text_components, vae=(VAE_FILE, "vae"))
    encoder_classes = {"text_encoder": "Mistral3ForConditionalGeneration"}
    vae_class = "AutoencoderKLFlux2"
    landmark = "double_stream_modulation_img.linear.weight"
    published_settings = {"patch_size": 1, "axes_dims_rope": (32, 32, 32, 32), "rope_theta": 2000, "eps": 1e-6}

    def original_file(self, variant: Variant) -> str:
        return f"{variant.name.replace('flux.', 'flux')}.safetensors"

    def sizes(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        return flux2_sizes(tensors)

    def takes_guidance(self, config: Mapping[str, Any]) -> bool:
        # The config of FLUX.2-dev is older than this entry, whose default is true.
        return bool(config.get("guidance_embeds", True))

    def input_shape(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = size
        if min(size) < _SHORTEST_SIDE or max(size) > _LARGEST_RATIO * min(size):
            raise UserError(
                f"a picture of {width}x{height}; {self.name} takes sides of at least {_SHORTEST_SIDE} pixels, one at most "
                f"{_LARGEST_RATIO} times the other"
            )
        if width * height > REFERENCE_AREA:
            scale = math.sqrt(REFERENCE_AREA / (width * height))
            width, height = int(width * scale), int(height * scale)
        multiple = self.spatial_multiple
        return height // multiple * multiple, width // multiple * multiple

    def dynamic_shift(self, scheduler: Mapping[str, Any], tokens: int) -> float:
        """mu as the publisher's sampler has it: a line for 10 steps and one for 200, and between them for others.

        https://github.com/black-forest-labs/flux2, src/flux2/sampling.py, `compute_empirical_mu`.
        """
        del scheduler  # the sampler's constants are in no config
        at_200 = 0.00016927 * tokens + 0.45666666
        if tokens > 4300:
            return at_200
        at_10 = 8.73809524e-05 * tokens + 1.89833333
        return at_200 + (at_10 - at_200) * (200 - _STEPS) / 190

    def own_parts(self, source: ModelSource) -> dict[str, Any]:
        """The tokenizer alone: the processor that it is published in does the same to text, but needs torchvision."""
        from transformers import AutoTokenizer

        return {"tokenizer": AutoTokenizer.from_pretrained(source.parts["tokenizer"], local_files_only=True)}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.no_grad():
            latents = vae.encode(pixels).latent_dist.mode().float()
        statistics = vae.bn
        mean, variance = (one.view(1, -1, 1, 1).float() for one in (statistics.running_mean, statistics.running_var))
        return (torch.pixel_unshuffle(latents, 2) - mean) / (variance + vae.config.batch_norm_eps).sqrt()

    def reference_pixels(self, processor: Any, picture: Image.Image, height: int, width: int) -> torch.Tensor:
        smaller = processor._resize_if_exceeds_area(picture, REFERENCE_AREA)
        pixels: torch.Tensor = processor.preprocess(smaller, height=height, width=width, resize_mode="crop")
        return pixels

    def encode_text(self, encoders: Any, prompt: str) -> Tensors:
        import torch

        with torch.no_grad():
            embeddings, _ = encoders.encode_prompt(
                prompt, device=encoders.device, max_sequence_length=prompt_length(encoders.tokenizer, TEXT_TOKENS)
            )
        return {"prompt_embeds": embeddings[0].cpu()}

    def batch_conditions(self, conditions: Sequence[Tensors]) -> Tensors:
        import torch

        prompts = torch.stack([one["prompt_embeds"] for one in conditions])
        return {"prompt_embeds": prompts, **stack_references(conditions)}

    def denoise(
        self, transformer: torch.nn.Module, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors
    ) -> torch.Tensor:
        import torch

        from flowshard.device import tables_device

        images = grids(noisy, conditions)
        text = conditions["prompt_embeds"]
        device = tables_device(noisy.device)

        def places(first: int, rows: int, columns: int, length: int) -> torch.Tensor:
            axes = [torch.arange(size, device=device) for size in (rows, columns, length)]
            whole = torch.cartesian_prod(torch.full((1,), first, device=device), *axes)
            return whole.expand(len(noisy), -1, -1)

        firsts = [0, *(_FIRST_REFERENCE + index * _BETWEEN_REFERENCES for index in range(len(images) - 1))]
        of_images = [
            places(first, image.shape[2], image.shape[3], 1) for first, image in zip(firsts, images, strict=True)
        ]
        prediction = transformer(
            hidden_states=join_grids(images),
            encoder_hidden_states=text,
            timestep=sigma,
            guidance=conditions.get("guidance"),
            img_ids=torch.cat(of_images, dim=1),
            txt_ids=places(0, 1, 1, text.shape[1]),
            return_dict=False,
        )[0]
        return to_grid(prediction, noisy)

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        import torch

        own = super().stand_in(config, size, text_tokens=text_tokens, pictures=pictures)
        return {**own, "prompt_embeds": torch.zeros(text_tokens, config["joint_attention_dim"], dtype=torch.bfloat16)}

    def sequence_plan(self, transformer: torch.nn.Module, tokens: Tokens) -> SequencePlan:
        """As that of FLUX.1, but for the blocks with one stream, which compute attention and feed-forward in one."""
        plan = plan_of_two_streams(self, transformer, tokens)
        parallel = {name: ParallelAttention(tokens) for name in plan.processors if name.startswith("single_")}
        return replace(plan, processors={**plan.processors, **parallel})

    def prepare_for_npu(self, transformer: torch.nn.Module, device: torch.device) -> None:
        make_on_cpu(transformer.get_submodule("pos_embed"), device)

    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        pipeline.vae.to(pipeline.transformer.dtype)  # the pipeline does not convert what it decodes
        length = prompt_length(pipeline.tokenizer, TEXT_TOKENS)
        return self.sample(
            pipeline,
            arguments,
            image=arguments["inputs"].get("edit_image"),
            guidance_scale=arguments["guidance"],
            max_sequence_length=length,
        )

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from flowshard.families import tiny_encoders

        tokenizer = tiny_encoders.mistral_tokenizer()
        tokenizer.model_max_length = 128  # of which the template takes a quarter
        return self.tiny_of(tokenizer, tiny_encoders.mistral3_encoder, variant, seed=seed, guidance_embeds=True)

    def tiny_of(
        self,
        tokenizer: Any,
        make_text_encoder: Callable[[Any], Any],
        variant: Variant,
        *,
        seed: int,
        guidance_embeds: bool,
        **settings: Any,
    ) -> Any:
        """The tiny pipeline with this tokenizer, a text encoder for it and, where it has more `settings`, with these."""
        import diffusers
        from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel

        from flowshard.families import tiny_encoders
        from flowshard.seeds import isolated_rng

        with isolated_rng(seed, "tiny", variant.name):
            text_encoder = make_text_encoder(tokenizer)
            vae = tiny_encoders.flux2_vae()
            transformer = Flux2Transformer2DModel(
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=8,
                num_attention_heads=variant.heads,
                joint_attention_dim=3 * tiny_encoders.NARROW_WIDTH,
                mlp_ratio=1.0,
                axes_dims_rope=(2, 2, 2, 2),
                guidance_embeds=guidance_embeds,
            )
        return getattr(diffusers, self.pipeline_class)(
            scheduler=FlowMatchEulerDiscreteScheduler(**variant.scheduler),
            vae=vae.eval(),
            text_encoder=text_encoder.eval(),
            tokenizer=tokenizer,
            transformer=transformer.eval(),
            **settings,
        )


class ParallelAttention:
    """Attention of a block that projects to queries, keys, values and feed-forward at once."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """What diffusers asks of a processor: `hidden_states` are own text and own image tokens."""
        import torch

        assert attention_mask is None and image_rotary_emb is not None  # noqa: S101
        projected = attn.to_qkv_mlp_proj(hidden_states)
        qkv, feed_forward = projected.split([3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor], dim=-1)
        query, key, value = qkv.unflatten(-1, (3, attn.heads, -1)).unbind(2)
        query, key = (
            rotate_tokens(normalised, image_rotary_emb) for normalised in (attn.norm_q(query), attn.norm_k(key))
        )
        result = self._tokens.attention(query, key, value, streams=("text", "image")).flatten(2).type_as(query)
        output: torch.Tensor = attn.to_out(torch.cat([result, attn.mlp_act_fn(feed_forward)], dim=-1))
        return output
