"""What transformers with a text and an image stream share: latents as sequences of tokens, and joint attention.

Latents are kept as a grid of tokens, (channels, height, width) with a patch of 2 x 2 in the channels, in the order in
which these models take them: that of `torch.pixel_unshuffle`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError
from flowshard.families.images import ImageFamily
from flowshard.families.sequence import Tokens

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

    from flowshard.families.base import Tensors
    from flowshard.families.variant import Inputs, Size

Rotate = Callable[..., "torch.Tensor"]
"""Applies rotary tables to (batch, tokens, heads, size)."""

REFERENCE = "reference."
"""Conditions have the latents of each reference picture under this name and its place."""


class JointFamily(ImageFamily):
    """A family whose transformer takes a sequence of image tokens beside one of text tokens.

    Reference pictures (`Family.inputs`) are further image tokens, clean, behind those of the sample.
    """

    def encode_inputs(self, encoders: Any, frames: np.ndarray, inputs: Inputs) -> Tensors:  # noqa: ARG002
        pictures = [picture for one in self.inputs for picture in inputs.get(one.column, ())]
        return {
            f"{REFERENCE}{place}": self.encode_reference(encoders, picture).cpu().contiguous()
            for place, picture in enumerate(pictures)
        }

    def encode_media(self, encoders: Any, frames: np.ndarray) -> Tensors:
        vae = encoders.vae
        return {"latents": self.encode_pixels(vae, self.pixels(frames, vae.device)[:, :, 0])[0].cpu()}

    def encode_reference(self, encoders: Any, picture: Image.Image) -> torch.Tensor:
        """Latents of a reference picture of any size as the pipeline prepares them: a grid of tokens without batch."""
        vae = encoders.vae
        pixels = self.reference_pixels(encoders.image_processor, picture, *self.input_shape(picture.size))
        return self.encode_pixels(vae, pixels.to(vae.device, vae.dtype))[0]

    def reference_pixels(self, processor: Any, picture: Image.Image, height: int, width: int) -> torch.Tensor:
        """A reference picture as the pipeline's image processor makes it: (1, 3, height, width) in [-1, 1]."""
        pixels: torch.Tensor = processor.preprocess(picture, height, width)
        return pixels

    @abstractmethod
    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Pictures as normalised latents, grids of tokens in float32.

        The mode, not a sample: the encoding is deterministic and the posterior is narrow.

        Args:
            vae: of the pipeline.
            pixels: (batch, 3, height, width) in [-1, 1].
        """

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        """The latents of a sample and of reference pictures of its size; the text is the family's."""
        import torch

        del text_tokens

        def grid(height: int, width: int) -> torch.Tensor:
            side = self.spatial_multiple
            return torch.zeros(config["in_channels"], height // side, width // side)

        shape = self.input_shape((size.width, size.height)) if pictures and self.inputs else (0, 0)
        references = {f"{REFERENCE}{place}": grid(*shape) for place in range(pictures * len(self.inputs))}
        return {"latents": grid(size.height, size.width), **references}

    def tokens(self, shape: torch.Size) -> int:
        _, height, width = shape
        return height * width

    def reference_tokens(self, conditions: Tensors) -> int:
        return sum(t.shape[2] * t.shape[3] for name, t in conditions.items() if name.startswith(REFERENCE))


def stack_references(conditions: Sequence[Tensors]) -> Tensors:
    """The reference pictures of a micro-batch, each (batch, channels, height, width).

    Raises:
        UserError: the samples differ in their number or in their sizes.
    """
    import torch

    each = [{name: one[name] for name in one if name.startswith(REFERENCE)} for one in conditions]
    shapes = [{name: tensor.shape for name, tensor in one.items()} for one in each]
    if any(shape != shapes[0] for shape in shapes):
        raise UserError(
            "train.micro_batch: samples of one micro-batch have reference pictures of other number or size; use "
            "data.buckets=auto or train.micro_batch=1"
        )
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def grids(noisy: torch.Tensor, conditions: Tensors) -> list[torch.Tensor]:
    """Latents of the sample and, in order, of its reference pictures, each (batch, channels, height, width)."""
    count = sum(name.startswith(REFERENCE) for name in conditions)
    return [noisy, *(conditions[f"{REFERENCE}{place}"] for place in range(count))]


def join_grids(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Grids one after another as (batch, tokens, channels)."""
    import torch

    return torch.cat([to_sequence(part) for part in parts], dim=1)


def to_sequence(latents: torch.Tensor) -> torch.Tensor:
    """(batch, channels, height, width) to (batch, height * width, channels)."""
    return latents.flatten(2).transpose(1, 2)


def to_grid(sequence: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The opposite of `to_sequence`, in the shape of `like`; tokens behind those of `like` are left out."""
    own = sequence[:, : like.shape[2] * like.shape[3]]
    return own.transpose(1, 2).reshape(like.shape)


class JointAttention:
    """Attention of text and image tokens to one another, over all processes that hold them.

    In the form of diffusers' processors for FLUX.1, FLUX.2 and Qwen-Image: blocks with two streams have projections for
    each, those with one get text and image tokens one after another and project the result themselves.
    """

    def __init__(self, tokens: Tokens, rotate: Rotate) -> None:
        """Use `rotate(states, tables)` for the rotary embedding."""
        self._tokens = tokens
        self.rotate = rotate

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What diffusers asks of a processor.

        Args:
            attn: the attention module.
            hidden_states: own image tokens, or own text and image tokens; (batch, tokens, width).
            encoder_hidden_states: own text tokens, if they have projections of their own.
            attention_mask: none of the models passes one.
            image_rotary_emb: tables of own tokens.
            encoder_hidden_states_mask: of the whole text stream, (batch, tokens), True for tokens that count.
        """
        import torch

        assert attention_mask is None  # noqa: S101
        query = attn.norm_q(_heads(attn, attn.to_q(hidden_states)))
        key = attn.norm_k(_heads(attn, attn.to_k(hidden_states)))
        value = _heads(attn, attn.to_v(hidden_states))
        text = 0
        if encoder_hidden_states is not None:
            text = encoder_hidden_states.shape[1]
            text_query = attn.norm_added_q(_heads(attn, attn.add_q_proj(encoder_hidden_states)))
            text_key = attn.norm_added_k(_heads(attn, attn.add_k_proj(encoder_hidden_states)))
            text_value = _heads(attn, attn.add_v_proj(encoder_hidden_states))
            query, key, value = (
                torch.cat(pair, dim=1) for pair in ((text_query, query), (text_key, key), (text_value, value))
            )
        query, key = self.rotate(query, image_rotary_emb), self.rotate(key, image_rotary_emb)
        mask = None
        if encoder_hidden_states_mask is not None:
            image = encoder_hidden_states_mask.new_ones(len(hidden_states), self._tokens.length("image"))
            mask = torch.cat([encoder_hidden_states_mask, image], dim=1)
        result = self._tokens.attention(query, key, value, streams=("text", "image"), mask=mask)
        result = result.flatten(2).type_as(query)
        if encoder_hidden_states is None:
            return result
        of_image = result[:, text:]
        for layer in attn.to_out:
            of_image = layer(of_image)
        return of_image, attn.to_add_out(result[:, :text])


def _heads(attn: Any, states: torch.Tensor) -> torch.Tensor:
    return states.unflatten(-1, (attn.heads, -1))
