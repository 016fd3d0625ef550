"""Tokenizers, text encoders and VAEs for the image families' tiny pipelines: random, of a few hundred kilobytes each.

They draw from torch's global generator, so the caller isolates and seeds it. The tokenizers are made of single bytes and
of the words that the stock pipelines wrap around every prompt, so that these take about as many tokens as they really do.
"""

from typing import Any

import torch

from flowshard.families.tiny import TEXT_WIDTH

NARROW_WIDTH = 32
"""Width of the text encoders of FLUX.2, which puts three of their layers side by side, 96 channels."""

_QWEN_WORDS = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:\nuser\nassistant\n"
)
"""What `QwenImagePipeline` and the chat template of Qwen3 write around a prompt."""

_QWEN_EDIT_WORDS = (
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), then explain "
    "how the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate.\nuser\nassistant\nPicture :"
)
"""What the pipelines of Qwen-Image-Edit write around a prompt."""

_QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% set tag = {'system': 'SYSTEM_PROMPT', 'user': 'INST'}[message.role] %}"
    "[{{ tag }}]{% for part in message.content %}{{ part.text }}{% endfor %}[/{{ tag }}]{% endfor %}"
)

_QWEN_SPECIAL = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "additional_special_tokens": [
        *("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    ],
}

_MISTRAL_SPECIAL = {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "additional_special_tokens": [
        *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ],
}

_CHANNELS: dict[str, Any] = {"block_out_channels": (4, 4, 8, 8), "norm_num_groups": 4}


def qwen_tokenizer(*, edit: bool = False, **settings: Any) -> Any:
    """A Qwen2 tokenizer with the chat template of Qwen3, for Qwen-Image, Z-Image and FLUX.2 klein.

    `QwenImagePipeline` cuts off the first 34 tokens, those of Qwen-Image-Edit (`edit`) the first 64: the number that
    their template has before the prompt with the real tokenizer and therefore has to have with this one.
    """
    from transformers import Qwen2Tokenizer

    words = _QWEN_EDIT_WORDS if edit else _QWEN_WORDS
    vocabulary, merges = _byte_level_bpe(words, Qwen2Tokenizer().backend_tokenizer.pre_tokenizer)
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, chat_template=_QWEN_CHAT, **_QWEN_SPECIAL, **settings)


def qwen_processor() -> Any:
    """What reads prompts with pictures, for `qwen_vl_encoder`.

    The published one, `Qwen2VLProcessor`, needs torchvision as it takes videos too; this one does the same to pictures.
    They come out small, at most 16 tokens each.
    """
    from transformers import PaddleOCRVLProcessor, Qwen2VLImageProcessorPil

    tokenizer = qwen_tokenizer(edit=True, image_token="<|image_pad|>")  # noqa: S106
    pictures = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28})
    return PaddleOCRVLProcessor(pictures, tokenizer)


def _byte_level_bpe(text: str, pre_tokenizer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of the 256 bytes and of the text's words, each grown from its first letter."""
    from tokenizers.pre_tokenizers import ByteLevel

    # Words with their space ("Ġ", after all letters) come first: the pieces of one without, such as "us" of "user", could
    # otherwise be merged in the middle of another word, which would then not grow past them.
    words = sorted({word for word, _ in pre_tokenizer.pre_tokenize_str(text)}, reverse=True)
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    pieces = [*sorted(ByteLevel.alphabet()), *(left + right for left, right in merges)]
    return {piece: index for index, piece in enumerate(pieces)}, merges


def qwen_vl_encoder(tokenizer: Any) -> torch.nn.Module:
    """A Qwen2.5-VL model of two layers for that tokenizer, as Qwen-Image has it."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            **_decoder_sizes(TEXT_WIDTH, tokenizer),
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 8,
            "num_heads": 1,
            "intermediate_size": 8,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [0],
        },
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _decoder_sizes(width: int, tokenizer: Any) -> dict[str, Any]:
    """What the configurations of the decoder-only text encoders have in common."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 32,
        # Layers that keep the scale of their input. The default, 0.02, is for widths of thousands; at this one attention
        # would be uniform and the embeddings near zero.
        "initializer_range": width**-0.5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def qwen3_encoder(tokenizer: Any) -> torch.nn.Module:
    """A Qwen3 model of three layers for that tokenizer; Z-Image reads what the last but one gives."""
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(**_decoder_sizes(TEXT_WIDTH, tokenizer), num_hidden_layers=3, head_dim=16))


def qwen3_language_model(tokenizer: Any) -> torch.nn.Module:
    """A Qwen3 model of 27 layers, the last that FLUX.2 klein reads, for that tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_decoder_sizes(NARROW_WIDTH, tokenizer), num_hidden_layers=27, head_dim=16))


def clip_tokenizer() -> Any:
    """A CLIP tokenizer whose pieces are single bytes, in or at the end of a word.

    It cuts off what is beyond 77 tokens, as the real one does: here a prompt of more than 75 bytes.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    characters = sorted(ByteLevel.alphabet())
    # The end of the text has the highest id, as in the real vocabulary.
    pieces = [*characters, *(f"{character}</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        model_max_length=77,
    )


def clip_text_encoder(tokenizer: Any) -> torch.nn.Module:
    """A CLIP text encoder of two layers for that tokenizer; FLUX.1 reads its output at the first end of text."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=128,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def t5_encoder(tokenizer: Any) -> torch.nn.Module:
    """A T5 (v1.1) encoder of two layers for that tokenizer."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def mistral_tokenizer() -> Any:
    """A tokenizer with the special tokens, chat template and left padding of Mistral Small 3.

    `Flux2Pipeline` works with it in place of the published `PixtralProcessor`, which needs torchvision.
    """
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    splitter = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    backend = Tokenizer(BPE(*_byte_level_bpe(SYSTEM_MESSAGE, splitter)))
    backend.pre_tokenizer, backend.decoder = splitter, ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side="left", chat_template=_MISTRAL_CHAT, **_MISTRAL_SPECIAL
    )


def mistral3_encoder(tokenizer: Any) -> torch.nn.Module:
    """A Mistral 3 model of 30 layers, the last that FLUX.2 reads, for `mistral_tokenizer`."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    config = Mistral3Config(
        text_config={
            **_decoder_sizes(NARROW_WIDTH, tokenizer),
            "model_type": "mistral",
            "num_hidden_layers": 30,
            "head_dim": 16,
            "sliding_window": None,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 56,
            "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    return Mistral3ForConditionalGeneration(config)


def picture_vae(latent_channels: int, scaling_factor: float, shift_factor: float) -> Any:
    """A VAE of the form that FLUX.1 and Z-Image have: 8 times smaller latents, one mean and deviation for all channels."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        latent_channels=latent_channels,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **_CHANNELS,
    )
    ones = torch.ones(latent_channels)
    normalise_latents(vae, smooth_clips(1)[:, :, 0], mean=shift_factor * ones, std=ones / scaling_factor)
    return vae


def flux2_vae() -> Any:
    """The VAE of FLUX.2, whose batch norm holds the mean and deviation of its 128 patchified channels."""
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(**_CHANNELS)
    with torch.no_grad():
        latents = vae.encode(smooth_clips(1)[:, :, 0]).latent_dist.mode()
        patches = torch.nn.functional.pixel_unshuffle(latents, 2)
        vae.bn.running_mean.copy_(patches.mean(dim=(0, 2, 3)))
        vae.bn.running_var.copy_(patches.var(dim=(0, 2, 3)) - vae.config.batch_norm_eps)
    return vae


def qwen_vae() -> Any:
    """The VAE of Qwen-Image with the published mean and deviation of each latent channel, for pictures of one frame."""
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage(base_dim=4)
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    normalise_latents(vae, smooth_clips(1), mean=mean, std=std)
    return vae


def smooth_clips(frames: int) -> torch.Tensor:
    """Eight smooth moving pictures, (8, 3, frames, 64, 64), between -1 and 1."""
    height, width = 64, 64
    time, y, x = torch.meshgrid(
        torch.linspace(0, 1, frames), torch.linspace(0, 3, height), torch.linspace(0, 3, width), indexing="ij"
    )
    phases = torch.rand(8, 3, 3, 1, 1, 1) * 6.28
    clips = (phases[:, :, 0] + x + time).sin() * (phases[:, :, 1] + y - time).cos() + phases[:, :, 2].cos() / 2
    return clips.clamp(-1, 1)


def normalise_latents(vae: Any, pictures: torch.Tensor, *, mean: torch.Tensor, std: torch.Tensor) -> None:
    """Change the VAE's weights so that the latents of those pictures have that mean and deviation in each channel.

    The constants that the pipelines normalise with are not changed: the publisher's files have no place for them. The
    last layer of the encoder maps each channel on its own scale and the first of the decoder back (up to its padding,
    where it looks at more than one position).

    Args:
        vae: in diffusers' form.
        pictures: what it encodes, (batch, channels, [frames,] height, width).
        mean: wanted, (latent_channels,).
        std: wanted, (latent_channels,).
    """
    into = vae.encoder.conv_out if vae.quant_conv is None else vae.quant_conv
    out = vae.decoder.conv_in if vae.post_quant_conv is None else vae.post_quant_conv
    with torch.no_grad():
        latents = vae.encode(pictures).latent_dist.mode()
        dims, ones = [0, *range(2, latents.ndim)], [1] * (latents.ndim - 2)
        found_mean, scale, channels = latents.mean(dim=dims), std / latents.std(dim=dims), len(mean)
        into.weight[:channels] *= scale.view(-1, 1, *ones)
        into.bias[:channels] = (into.bias[:channels] - found_mean) * scale + mean
        out.bias += out.weight.flatten(2).sum(2) @ (found_mean - mean / scale)
        out.weight /= scale.view(1, -1, *ones)
