"""Qwen-Image (https://github.com/QwenLM/Qwen-Image, https://arxiv.org/abs/2508.02324)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flowshard.families.image_files import count_blocks, parts
from flowshard.families.joint import JointAttention, JointFamily, grids, join_grids, stack_references, to_grid
from flowshard.families.rotary import make_on_cpu, rotate_complex
from flowshard.families.sequence import SequencePlan, Tokens
from flowshard.families.variant import Sampling, Size, Variant
from flowshard.weights.names import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowshard.families.base import Tensors
    from flowshard.weights.files import TensorInfo

SCHEDULER: Mapping[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
TEXT_TOKENS = 1024
"""The longest prompt, in tokens, that the pipeline encodes; the rest is cut off."""
PATCH = 2
"""Side of a token in latent pixels."""


class QwenImage(JointFamily):
    """Qwen-Image."""

    name = "qwen-image"
    variants = {
        variant.name: variant
        for variant in (
            Variant(
                "qwen-image",
                "Qwen/Qwen-Image",
                heads=24,
                scheduler=SCHEDULER,
                sampling=Sampling(height=1328, width=1328, frames=1, steps=50, guidance=4.0),
                known_by={"zero_cond_t": False},
            ),
            Variant(
                "qwen-image-2512",
                "Qwen/Qwen-Image-2512",
                heads=24,
                scheduler=SCHEDULER,
                sampling=Sampling(height=1328, width=1328, frames=1, steps=50, guidance=4.0),
                known_by={"zero_cond_t": False},
            ),
        )
    }
    pipeline_class = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    text_components: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    takes_negative_prompt = True
    block_lists = {"transformer_blocks": "num_layers"}
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
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    # The publisher gives out the weights in the diffusers layout.
    names = Vocabulary.unchanged(
        "transformer_blocks", "img_in", "txt_in", "txt_norm", "time_text_embed", "norm_out", "proj_out"
    )
    remembering = ("pos_embed",)
    text_tokens = TEXT_TOKENS
    pads_text = False
    encoding_version = 1

    original_weights = "transformer/diffusion_pytorch_model*.safetensors"
    original_parts = parts(*text_components, vae=("vae",))
    encoder_classes = {"text_encoder": "Qwen2_5_VLForConditionalGeneration"}
    vae_class = "AutoencoderKLQwenImage"
    landmark = "txt_norm.weight"
    published_settings = {"patch_size": PATCH, "guidance_embeds": False, "axes_dims_rope": (16, 56, 56)}

    def original_file(self, variant: Variant) -> str:
        del variant  # the files of all have the same names
        return "transformer/diffusion_pytorch_model.safetensors"

    def sizes(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        width, channels = tensors["img_in.weight"].shape
        head_size = tensors["transformer_blocks.0.attn.norm_q.weight"].shape[0]
        return {
            "in_channels": channels,
            "out_channels": tensors["proj_out.weight"].shape[0] // PATCH**2,
            "num_layers": count_blocks(tensors, "transformer_blocks"),
            "attention_head_dim": head_size,
            "num_attention_heads": width // head_size,
            "joint_attention_dim": tensors["txt_in.weight"].shape[1],
        }

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.no_grad():
            latents = vae.encode(pixels.unsqueeze(2)).latent_dist.mode()[:, :, 0].float()
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return torch.pixel_unshuffle((latents - mean) / std, PATCH)

    def encode_text(self, encoders: Any, prompt: str) -> Tensors:
        import torch

        with torch.no_grad():
            embeddings, _ = encoders.encode_prompt(prompt, device=encoders.device, max_sequence_length=TEXT_TOKENS)
        return {"prompt_embeds": embeddings[0].cpu()}

    def batch_conditions(self, conditions: Sequence[Tensors]) -> Tensors:
        """Pad to the longest prompt, with a mask if they differ; the transformer attends to no padding."""
        import torch

        references = stack_references(conditions)
        embeddings = [one["prompt_embeds"] for one in conditions]
        lengths = torch.tensor([len(one) for one in embeddings])
        padded = torch.nn.utils.rnn.pad_sequence(embeddings, batch_first=True)
        longest = padded.shape[1]
        if bool((lengths == longest).all()):
            return {"prompt_embeds": padded, **references}
        return {"prompt_embeds": padded, **references, "prompt_mask": torch.arange(longest) < lengths[:, None]}

    def pipeline_texts(self, encoded: Tensors) -> dict[str, Any]:
        texts = super().pipeline_texts(encoded)
        return {**texts, "prompt_embeds_mask": texts["prompt_embeds"].new_ones(texts["prompt_embeds"].shape[:2]).bool()}

    def denoise(
        self, transformer: torch.nn.Module, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors
    ) -> torch.Tensor:
        images = grids(noisy, conditions)
        prediction = transformer(
            hidden_states=join_grids(images),
            timestep=sigma,
            encoder_hidden_states=conditions["prompt_embeds"],
            encoder_hidden_states_mask=conditions.get("prompt_mask"),
            img_shapes=[[(1, *image.shape[2:]) for image in images]] * len(noisy),
            return_dict=False,
        )[0]
        return to_grid(prediction, noisy)

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        import torch

        own = super().stand_in(config, size, text_tokens=text_tokens, pictures=pictures)
        return {**own, "prompt_embeds": torch.zeros(text_tokens, config["joint_attention_dim"], dtype=torch.bfloat16)}

    def sequence_plan(self, transformer: torch.nn.Module, tokens: Tokens) -> SequencePlan:
        """Split before the first block, as the model takes the length of the text from the embedding."""

        def rotary(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            image, text = output
            return tokens.split(image, 0, stream="image"), tokens.split(text, 0, stream="text")

        def whole(output: torch.Tensor) -> torch.Tensor:
            return tokens.gather(output, 1, stream="image")

        inputs: dict[str, dict[str, tuple[str, int]]] = {}
        if transformer.zero_cond_t:
            # Which tokens are of the sample and which of references, whose timestep is zero.
            inputs |= {
                f"transformer_blocks.{index}": {"modulate_index": ("image", 1)}
                for index in range(len(self.blocks(transformer)))
            }
        first = inputs.setdefault("transformer_blocks.0", {})
        first |= {"hidden_states": ("image", 1), "encoder_hidden_states": ("text", 1)}
        return SequencePlan(
            inputs=inputs,
            outputs={"pos_embed": rotary, "proj_out": whole},
            processors={
                f"transformer_blocks.{index}.attn": JointAttention(tokens, _rotate)
                for index in range(len(self.blocks(transformer)))
            },
        )

    def prepare_for_npu(self, transformer: torch.nn.Module, device: torch.device) -> None:
        make_on_cpu(transformer.get_submodule("pos_embed"), device)

    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        return self.sample(
            pipeline,
            arguments,
            true_cfg_scale=arguments["guidance"],
            max_sequence_length=TEXT_TOKENS,
        )

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from flowshard.families import tiny_encoders

        return self.tiny_of(tiny_encoders.qwen_tokenizer(), variant, seed=seed)

    def tiny_of(self, tokenizer: Any, variant: Variant, *, seed: int, **parts: Any) -> Any:
        """The tiny pipeline with this tokenizer and, where it has more `parts`, with these."""
        import diffusers
        from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

        from flowshard.families import tiny_encoders
        from flowshard.families.tiny import TEXT_WIDTH
        from flowshard.seeds import isolated_rng

        with isolated_rng(seed, "tiny", variant.name):
            text_encoder = tiny_encoders.qwen_vl_encoder(tokenizer)
            vae = tiny_encoders.qwen_vae()
            transformer = QwenImageTransformer2DModel(
                num_layers=3,
                attention_head_dim=6,
                num_attention_heads=variant.heads,
                joint_attention_dim=TEXT_WIDTH,
                axes_dims_rope=(2, 2, 2),
                zero_cond_t=variant.known_by.get("zero_cond_t", False),
            )
        return getattr(diffusers, self.pipeline_class)(
            scheduler=FlowMatchEulerDiscreteScheduler(**variant.scheduler),
            vae=vae.eval(),
            text_encoder=text_encoder.eval(),
            tokenizer=tokenizer,
            transformer=transformer.eval(),
            **parts,
        )


def _rotate(states: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    import torch

    image, text = tables
    return rotate_complex(states, torch.cat([text, image]))
