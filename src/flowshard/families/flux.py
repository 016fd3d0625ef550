"""FLUX.1 (https://github.com/black-forest-labs/flux)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowshard.families.flux_files import FLUX_NAMES, flux_sizes
from flowshard.families.image_files import VAE_FILE, parts
from flowshard.families.images import FLUX_VAE, prompt_length
from flowshard.families.joint import JointAttention, JointFamily, grids, join_grids, stack_references, to_grid
from flowshard.families.rotary import make_on_cpu, rotate
from flowshard.families.sequence import SequencePlan, Tokens
from flowshard.families.variant import Sampling, Size, Variant

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowshard.families.base import Tensors
    from flowshard.weights.files import TensorInfo

SCHEDULER: Mapping[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "shift": 3.0,
}
DISTILLED: Mapping[str, Any] = {"guidance_embeds": True}
TEXT_TOKENS = 512
"""Length to which a prompt is padded; the transformer attends to the padding."""
_QKV, _ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


class Flux(JointFamily):
    """FLUX.1."""

    name = "flux"
    variants = {
        variant.name: variant
        for variant in (
            Variant(
                "flux.1-dev",
                "black-forest-labs/FLUX.1-dev",
                heads=24,
                scheduler=SCHEDULER,
                sampling=Sampling(height=1024, width=1024, frames=1, steps=50, guidance=3.5),
                transformer=DISTILLED,
            ),
            Variant(
                "flux.1-krea-dev",
                "black-forest-labs/FLUX.1-Krea-dev",
                heads=24,
                scheduler=SCHEDULER,
                sampling=Sampling(height=1024, width=1024, frames=1, steps=28, guidance=4.5),
                transformer=DISTILLED,
            ),
        )
    }
    pipeline_class = "FluxPipeline"
    transformer_class = "FluxTransformer2DModel"
    text_components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    takes_negative_prompt = False
    block_lists = {"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"}
    heads_setting = "num_attention_heads"
    lora_targets = (
        *_QKV,
        "to_out.0",
        *_ADDED_QKV,
        "to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
        "proj_mlp",
        "single_transformer_blocks.*.proj_out",
    )
    lora_aliases = {
        # of DiffSynth-Studio
        "a_to_qkv": _QKV,
        "b_to_qkv": _ADDED_QKV,
        "a_to_out": ("to_out.0",),
        "b_to_out": ("to_add_out",),
        "ff_a.0": ("ff.net.0.proj",),
        "ff_a.2": ("ff.net.2",),
        "ff_b.0": ("ff_context.net.0.proj",),
        "ff_b.2": ("ff_context.net.2",),
        "norm1_a.linear": ("norm1.linear",),
        "norm1_b.linear": ("norm1_context.linear",),
        "to_qkv_mlp": (*(f"single_transformer_blocks.*.attn.{name}" for name in _QKV), "proj_mlp"),
        "proj_out": ("single_transformer_blocks.*.proj_out",),
        # of the publisher
        "img_attn.qkv": _QKV,
        "txt_attn.qkv": _ADDED_QKV,
        "img_attn.proj": ("to_out.0",),
        "txt_attn.proj": ("to_add_out",),
        "img_mlp.0": ("ff.net.0.proj",),
        "img_mlp.2": ("ff.net.2",),
        "txt_mlp.0": ("ff_context.net.0.proj",),
        "txt_mlp.2": ("ff_context.net.2",),
        "linear1": (*(f"single_transformer_blocks.*.attn.{name}" for name in _QKV), "proj_mlp"),
        "linear2": ("single_transformer_blocks.*.proj_out",),
    }
    names = FLUX_NAMES
    text_tokens = TEXT_TOKENS
    encoding_version = 1

    original_weights = "flux1*.safetensors"
    original_parts = parts(*text_components, vae=(VAE_FILE, "vae"))
    encoder_classes = {"text_encoder": "CLIPTextModel", "text_encoder_2": "T5EncoderModel"}
    vae_class = "AutoencoderKL"
    vae_settings = FLUX_VAE
    landmark = "time_text_embed.text_embedder.linear_1.weight"
    published_settings = {"patch_size": 1, "axes_dims_rope": (16, 56, 56)}

    def original_file(self, variant: Variant) -> str:
        return f"{variant.name.replace('flux.', 'flux')}.safetensors"

    def sizes(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        return flux_sizes(tensors)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.pixel_unshuffle(self.scaled(vae, pixels), 2)

    def encode_text(self, encoders: Any, prompt: str) -> Tensors:
        import torch

        with torch.no_grad():
            embeddings, pooled, _ = encoders.encode_prompt(
                prompt, device=encoders.device, max_sequence_length=prompt_length(encoders.tokenizer_2, TEXT_TOKENS)
            )
        return {"prompt_embeds": embeddings[0].cpu(), "pooled_prompt_embeds": pooled[0].cpu()}

    def batch_conditions(self, conditions: Sequence[Tensors]) -> Tensors:
        import torch

        text = ("prompt_embeds", "pooled_prompt_embeds")
        stacked = {name: torch.stack([one[name] for one in conditions]) for name in text}
        return {**stacked, **stack_references(conditions)}

    def denoise(
        self, transformer: torch.nn.Module, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors
    ) -> torch.Tensor:
        import torch

        from flowshard.device import tables_device

        images = grids(noisy, conditions)
        text = conditions["prompt_embeds"]
        device = tables_device(noisy.device)

        def places(index: int, image: torch.Tensor) -> torch.Tensor:
            axes = [torch.arange(size, device=device, dtype=torch.float32) for size in image.shape[2:]]
            return torch.cartesian_prod(torch.full((1,), float(index), device=device), *axes)

        prediction = transformer(
            hidden_states=join_grids(images),
            encoder_hidden_states=text,
            pooled_projections=conditions["pooled_prompt_embeds"],
            timestep=sigma,
            guidance=conditions.get("guidance"),
            img_ids=torch.cat([places(index, image) for index, image in enumerate(images)]),
            txt_ids=torch.zeros(text.shape[1], 3, device=device),
            return_dict=False,
        )[0]
        return to_grid(prediction, noisy)

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        import torch

        return {
            **super().stand_in(config, size, text_tokens=text_tokens, pictures=pictures),
            "prompt_embeds": torch.zeros(text_tokens, config["joint_attention_dim"], dtype=torch.bfloat16),
            "pooled_prompt_embeds": torch.zeros(config["pooled_projection_dim"], dtype=torch.bfloat16),
        }

    def sequence_plan(self, transformer: torch.nn.Module, tokens: Tokens) -> SequencePlan:
        """Split all that the model gets, so that each process embeds its own tokens only; gather the projections."""
        return plan_of_two_streams(self, transformer, tokens)

    def prepare_for_npu(self, transformer: torch.nn.Module, device: torch.device) -> None:
        make_on_cpu(transformer.get_submodule("pos_embed"), device)

    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        return self.sample_flux(pipeline, arguments)

    def sample_flux(self, pipeline: Any, arguments: Mapping[str, Any], **own: Any) -> np.ndarray:
        """`generate` with further arguments of the pipeline."""
        pipeline.vae.to(pipeline.transformer.dtype)  # the pipeline does not convert what it decodes
        length = prompt_length(pipeline.tokenizer_2, TEXT_TOKENS)
        guidance = arguments["guidance"]
        return self.sample(pipeline, arguments, guidance_scale=guidance, max_sequence_length=length, **own)

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        import diffusers
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

        from flowshard.families import tiny, tiny_encoders
        from flowshard.seeds import isolated_rng

        tokenizer, tokenizer_2 = tiny_encoders.clip_tokenizer(), tiny.t5_tokenizer(model_max_length=tiny.TEXT_TOKENS)
        with isolated_rng(seed, "tiny", variant.name):
            text_encoder = tiny_encoders.clip_text_encoder(tokenizer)
            text_encoder_2 = tiny_encoders.t5_encoder(tokenizer_2)
            vae = tiny_encoders.picture_vae(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159)
            transformer = FluxTransformer2DModel(
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=6,
                num_attention_heads=variant.heads,
                joint_attention_dim=tiny.TEXT_WIDTH,
                pooled_projection_dim=tiny.TEXT_WIDTH,
                guidance_embeds=True,
                axes_dims_rope=(2, 2, 2),
            )
        return getattr(diffusers, self.pipeline_class)(
            scheduler=FlowMatchEulerDiscreteScheduler(**variant.scheduler),
            vae=vae.eval(),
            text_encoder=text_encoder.eval(),
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2.eval(),
            tokenizer_2=tokenizer_2,
            transformer=transformer.eval(),
        )


def rotate_tokens(states: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply the model's tables, cosine and sine of shape (tokens, size)."""
    cos, sin = (table.unsqueeze(1) for table in tables)
    return rotate(states, cos, sin)


def plan_of_two_streams(family: JointFamily, transformer: torch.nn.Module, tokens: Tokens) -> SequencePlan:
    """The plan of a model with FLUX's inputs and names."""

    def whole(output: torch.Tensor) -> torch.Tensor:
        return tokens.gather(output, 1, stream="image")

    return SequencePlan(
        inputs={
            "": {
                "hidden_states": ("image", 1),
                "encoder_hidden_states": ("text", 1),
                "img_ids": ("image", -2),
                "txt_ids": ("text", -2),
            }
        },
        outputs={"proj_out": whole},
        processors={
            f"{blocks}.{index}.attn": JointAttention(tokens, rotate_tokens)
            for blocks in family.block_lists
            for index in range(len(getattr(transformer, blocks)))
        },
    )
