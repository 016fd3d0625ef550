"""FLUX.2 [klein] (https://bfl.ai/blog/flux2-klein-towards-interactive-visual-intelligence): small, with Qwen3."""

from __future__ import annotations

from typing import Any, ClassVar

from flowshard.families.flux2 import SCHEDULER, Flux2
from flowshard.families.image_files import VAE_FILE, parts
from flowshard.families.variant import Sampling, Variant

_BASE = Sampling(height=1024, width=1024, frames=1, steps=50, guidance=4.0)
_DISTILLED = Sampling(height=1024, width=1024, frames=1, steps=4, guidance=1.0)

_4B = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
_9B = {"num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288, "guidance_embeds": False}
"""https://github.com/black-forest-labs/flux2, src/flux2/model.py."""


class Flux2Klein(Flux2):
    """FLUX.2 [klein] and its base models, which are not distilled and do classifier-free guidance."""

    variants = {
        name.lower(): Variant(
            name.lower(),
            f"black-forest-labs/{name}",
            heads=heads,
            scheduler=SCHEDULER,
            sampling=_DISTILLED if distilled else _BASE,
            known_by={"is_distilled": distilled},
            transformer=_4B if heads == 24 else _9B,
        )
        for name, heads, distilled in (
            ("FLUX.2-klein-4B", 24, True),
            ("FLUX.2-klein-9B", 32, True),
            ("FLUX.2-klein-base-4B", 24, False),
            ("FLUX.2-klein-base-9B", 32, False),
        )
    }
    pipeline_class = "Flux2KleinPipeline"
    original_weights: ClassVar[str | None] = "flux-2-klein*.safetensors"
    original_parts = parts(*Flux2.text_components, vae=("vae", VAE_FILE))
    encoder_classes = {"text_encoder": "Qwen3ForCausalLM"}

    def pipeline_settings(self, variant: Variant) -> dict[str, Any]:
        return dict(variant.known_by)

    def original_file(self, variant: Variant) -> str:
        return f"{variant.name.replace('.', '-')}.safetensors"

    @property
    def guided_by_text(self) -> bool:
        """The base models are guided by an empty text."""
        return True

    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        from flowshard.families import tiny, tiny_encoders

        return self.tiny_of(
            tiny_encoders.qwen_tokenizer(model_max_length=tiny.TEXT_TOKENS),
            tiny_encoders.qwen3_language_model,
            variant,
            seed=seed,
            guidance_embeds=False,
            **variant.known_by,
        )
