"""Z-Image (https://github.com/Tongyi-MAI/Z-Image, https://arxiv.org/abs/2511.22699)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flowshard.families.image_files import VAE_FILE, count_blocks, parts
from flowshard.families.images import FLUX_VAE, ImageFamily
from flowshard.families.rotary import real_tables, rotate_complex
from flowshard.families.sequence import SequencePlan, Tokens
from flowshard.families.variant import Sampling, Size, Variant
from flowshard.weights.names import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowshard.families.base import Tensors
    from flowshard.weights.files import TensorInfo

TEXT_TOKENS = 512
"""The longest prompt, in tokens, that the pipeline encodes; the rest is cut off."""
PATCH = 2
"""Side of a token in latent pixels."""
_PROMPT = "prompt_embeds."
"""Conditions of a batch have the embedding of each sample's prompt under this name and its place."""
_BLOCKS = ("noise_refiner", "context_refiner", "layers")
_TRANSFORMER: Mapping[str, Any] = {"axes_lens": [1536, 512, 512]}
_ONLY_PATCH = f"{PATCH}-1"
"""The model's name for the only patch size that it is published with."""

COMFYUI_NAMES = Vocabulary(
    [
        (f"all_x_embedder.{_ONLY_PATCH}", "x_embedder"),
        (f"all_final_layer.{_ONLY_PATCH}", "final_layer"),
        *(
            (f"{blocks}.*.attention.{ours}", f"{blocks}.*.attention.{theirs}")
            for blocks in _BLOCKS
            for ours, theirs in (("to_out.0", "out"), ("norm_q", "q_norm"), ("norm_k", "k_norm"))
        ),
    ],
    fused={
        f"{blocks}.*.attention.qkv": {
            f"{blocks}.*.attention.{name}": (place,) for place, name in enumerate(("to_q", "to_k", "to_v"))
        }
        for blocks in _BLOCKS
    },
    unused=["norm_final"],
)
"""diffusers' names and ComfyUI's (https://github.com/comfyanonymous/ComfyUI, comfy/utils.py), where they differ."""


class ZImage(ImageFamily):
    """Z-Image."""

    name = "z-image"
    variants = {
        variant.name: variant
        for variant in (
            Variant(
                "z-image-turbo",
                "Tongyi-MAI/Z-Image-Turbo",
                heads=30,
                scheduler={"use_dynamic_shifting": False, "shift": 3.0},
                sampling=Sampling(height=1024, width=1024, frames=1, steps=8, guidance=0.0),
                known_by={"shift": 3.0},
                transformer=_TRANSFORMER,
            ),
            Variant(
                "z-image",
                "Tongyi-MAI/Z-Image",
                heads=30,
                scheduler={"use_dynamic_shifting": False, "shift": 6.0},
                sampling=Sampling(height=1280, width=720, frames=1, steps=50, guidance=4.0),
                known_by={"shift": 6.0},
                transformer=_TRANSFORMER,
            ),
        )
    }
    pipeline_class = "ZImagePipeline"
    transformer_class = "ZImageTransformer2DModel"
    text_components = ("text_encoder", "tokenizer")
    takes_negative_prompt = True
    block_lists = {"noise_refiner": "n_refiner_layers", "context_refiner": "n_refiner_layers", "layers": "n_layers"}
    heads_setting = "n_heads"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3")
    lora_aliases = {"qkv": ("to_q", "to_k", "to_v"), "attention.out": ("to_out.0",)}
    # The publisher gives out the weights in the diffusers layout.
    names = Vocabulary.unchanged(
        *block_lists,
        "all_x_embedder",
        "all_final_layer",
        "cap_embedder",
        "t_embedder",
        "x_pad_token",
        "cap_pad_token",
        others=[COMFYUI_NAMES],
    )
    comfyui_names = COMFYUI_NAMES
    remembering = ("rope_embedder",)
    text_tokens = TEXT_TOKENS
    pads_text = False
    encoding_version = 1

    original_weights = "transformer/diffusion_pytorch_model*.safetensors"
    original_parts = parts(*text_components, vae=("vae", VAE_FILE))
    encoder_classes = {"text_encoder": "Qwen3Model"}
    vae_class = "AutoencoderKL"
    vae_settings = FLUX_VAE
    landmark = "cap_embedder.0.weight"
    published_settings = {
        "all_patch_size": (PATCH,),
        "all_f_patch_size": (1,),
        "norm_eps": 1e-5,
        "qk_norm": True,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
        "axes_dims": [32, 48, 48],
        **_TRANSFORMER,
    }

    def original_file(self, variant: Variant) -> str:
        del variant  # the files of all have the same names
        return "transformer/diffusion_pytorch_model.safetensors"

    def sizes(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        width, channels = tensors[f"all_x_embedder.{_ONLY_PATCH}.weight"].shape
        head_size = tensors["layers.0.attention.norm_q.weight"].shape[0]
        return {
            "in_channels": channels // PATCH**2,
            "dim": width,
            "n_layers": count_blocks(tensors, "layers"),
            "n_refiner_layers": count_blocks(tensors, "noise_refiner"),
            "n_heads": width // head_size,
            "n_kv_heads": tensors["layers.0.attention.to_k.weight"].shape[0] // head_size,
            "cap_feat_dim": tensors["cap_embedder.0.weight"].shape[0],
        }

    def encode_media(self, encoders: Any, frames: np.ndarray) -> Tensors:
        return {"latents": self.scaled_latents(encoders.vae, frames)[0].cpu()}

    def encode_text(self, encoders: Any, prompt: str) -> Tensors:
        import torch

        with torch.no_grad():
            embeddings, _ = encoders.encode_prompt(
                prompt, device=encoders.device, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
            )
        return {"prompt_embeds": embeddings[0].cpu()}

    def batch_conditions(self, conditions: Sequence[Tensors]) -> Tensors:
        """A tensor for each sample, as the transformer takes a list: so their lengths are known without a device."""
        return {f"{_PROMPT}{place}": one["prompt_embeds"] for place, one in enumerate(conditions)}

    def pipeline_texts(self, encoded: Tensors) -> dict[str, Any]:
        return {"prompt_embeds": [encoded["prompt_embeds"]]}

    def denoise(
        self, transformer: torch.nn.Module, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors
    ) -> torch.Tensor:
        """The model goes from noise at 0 to the picture at 1 and predicts `clean - noise`."""
        import torch

        pictures = transformer(
            list(noisy.unsqueeze(2).unbind(0)),
            1 - sigma,
            [conditions[f"{_PROMPT}{place}"] for place in range(len(noisy))],
            return_dict=False,
        )[0]
        return -torch.stack(pictures).squeeze(2)

    def tokens(self, shape: torch.Size) -> int:
        _, height, width = shape
        return (height // PATCH) * (width // PATCH)

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        import torch

        del pictures
        stride = self.spatial_multiple // PATCH
        return {
            "latents": torch.zeros(config["in_channels"], size.height // stride, size.width // stride),
            "prompt_embeds": torch.zeros(text_tokens, config["cap_feat_dim"], dtype=torch.bfloat16),
        }

    def sequence_plan(self, transformer: torch.nn.Module, tokens: Tokens) -> SequencePlan:
        """Refiners divide the stream that they refine; then the model joins both, and its layers divide the result.

        The model pads each stream to a multiple of 32 tokens, and those of a batch to the longest; masks say which count.
        """
        inputs: dict[str, dict[str, tuple[str, int]]] = {}
        outputs: dict[str, Callable[[Any], Any]] = {}
        processors: dict[str, Any] = {}
        final = next(iter(transformer.get_submodule("all_final_layer").named_children()))[0]
        for blocks, stream, last in (
            ("noise_refiner", "image", None),
            ("context_refiner", "text", None),
            ("layers", "joint", f"all_final_layer.{final}"),
        ):
            count = len(getattr(transformer, blocks))
            for index in range(count):
                inputs[f"{blocks}.{index}"] = {"freqs_cis": (stream, 1)}
                processors[f"{blocks}.{index}.attention"] = SingleAttention(tokens, stream)
            inputs[f"{blocks}.0"]["x"] = (stream, 1)
            # After a refiner each process goes on with other tokens than it has refined.
            outputs[last or f"{blocks}.{count - 1}"] = partial(tokens.gather, dim=1, stream=stream, summed=last is None)
        return SequencePlan(inputs=inputs, outputs=outputs, processors=processors)

    def prepare_for_npu(self, transformer: torch.nn.Module, device: torch.device) -> None:
        del device  # it follows from the positions, which the model makes itself
        model: Any = transformer
        model.rope_embedder = RealTables(model.rope_embedder)

    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        return self.sample(
            pipeline,
            arguments,
            guidance_scale=arguments["guidance"],
            max_sequence_length=TEXT_TOKENS,
        )

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

        from flowshard.families import tiny_encoders
        from flowshard.families.tiny import TEXT_WIDTH
        from flowshard.seeds import isolated_rng

        tokenizer = tiny_encoders.qwen_tokenizer()
        axes = [2, 2, 2]
        with isolated_rng(seed, "tiny", variant.name):
            text_encoder = tiny_encoders.qwen3_encoder(tokenizer)
            vae = tiny_encoders.picture_vae(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159)
            transformer = ZImageTransformer2DModel(
                n_layers=2,
                n_refiner_layers=2,
                dim=variant.heads * sum(axes),
                n_heads=variant.heads,
                n_kv_heads=variant.heads,
                cap_feat_dim=TEXT_WIDTH,
                axes_dims=axes,
                axes_lens=[1536, 512, 512],
            )
        return ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**variant.scheduler),
            vae=vae.eval(),
            text_encoder=text_encoder.eval(),
            tokenizer=tokenizer,
            transformer=transformer.eval(),
        )


class RealTables:
    """The model's maker of rotary tables, with tables that a device without complex numbers can hold."""

    def __init__(self, stock: Any) -> None:
        """In the place of the stock one."""
        self._stock = stock
        self._tables: list[torch.Tensor] = []
        """For each axis, of all positions."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """From positions, (tokens, axes), to what `real_tables` gives, on the device of the positions."""
        import torch

        if not self._tables or self._tables[0].device != ids.device:
            stock = self._stock
            whole = stock.precompute_freqs_cis(stock.axes_dims, stock.axes_lens, theta=stock.theta)
            self._tables = [real_tables(axis).to(ids.device) for axis in whole]
        return torch.cat([table[ids[:, axis]] for axis, table in enumerate(self._tables)], dim=-1)


class SingleAttention:
    """Self-attention over the tokens of one stream, wherever they are."""

    def __init__(self, tokens: Tokens, stream: str) -> None:
        """Of the tokens of `stream`."""
        self._tokens = tokens
        self._stream = stream

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What diffusers asks of a processor.

        Args:
            attn: the attention module.
            hidden_states: own tokens, (batch, tokens, width).
            encoder_hidden_states: the model has no cross-attention.
            attention_mask: of the whole stream, (batch, tokens), True for tokens that count.
            freqs_cis: rotary tables of own tokens; see `rotate_complex`.
        """
        assert encoder_hidden_states is None and freqs_cis is not None  # noqa: S101
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = rotate_complex(attn.norm_q(query), freqs_cis), rotate_complex(attn.norm_k(key), freqs_cis)
        result = self._tokens.attention(query, key, value, streams=(self._stream,), mask=attention_mask)
        output = result.flatten(2).type_as(query)
        for layer in attn.to_out:
            output = layer(output)
        return output
