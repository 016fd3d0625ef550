"""What the families' tiny random pipelines share: small encoders, a tokenizer made on the spot, seeded weights."""

import string
from pathlib import Path
from typing import Any

import torch

from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.weights.files import apply_umask

TEXT_WIDTH = 64
"""Width of the text encoders."""


def write_tiny_pipeline(variant_name: str, directory: Path, *, seed: int, form: str = "diffusers") -> None:
    """Write a complete pipeline of a variant, a few megabytes of random weights.

    Args:
        variant_name: of the variant.
        directory: new or empty.
        seed: of the weights.
        form: `diffusers`, or `original` for the publisher's files.

    Raises:
        UserError: the variant does not exist, or the directory holds something already.
    """
    family, variant = find_variant(variant_name, option="VARIANT")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: exists already and is not an empty folder; choose another")
    pipeline = family.tiny_pipeline(variant, seed=seed)
    if form == "original":
        family.write_original(pipeline, directory)
    else:
        pipeline.save_pretrained(directory)
    for file in directory.rglob("*"):
        if file.is_file():
            apply_umask(file)


def t5_tokenizer() -> Any:
    """A T5 tokenizer whose pieces are single printable characters; all others are unknown."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    characters = string.ascii_letters + string.digits + string.punctuation
    pieces = [(piece, -5.0) for piece in ("▁", *characters)]
    return T5Tokenizer(vocab=special + pieces, extra_ids=0)


def umt5_encoder(tokenizer: Any) -> torch.nn.Module:
    """A UMT5 encoder of two layers for that tokenizer."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    encoder: torch.nn.Module = UMT5EncoderModel(config)
    return encoder


def normalise_latents(vae: Any) -> None:
    """Scale the VAE's latents so that its `latents_mean` and `latents_std` are right for smooth moving pictures.

    Its weights are changed and not these constants, which the publisher's files have no place for. The last layer of the
    encoder and the first of the decoder map each latent channel on its own scale.
    """
    frames, height, width = 9, 64, 64
    time, y, x = torch.meshgrid(
        torch.linspace(0, 1, frames), torch.linspace(0, 3, height), torch.linspace(0, 3, width), indexing="ij"
    )
    phases = torch.rand(8, 3, 3, 1, 1, 1) * 6.28
    clips = (phases[:, :, 0] + x + time).sin() * (phases[:, :, 1] + y - time).cos() + phases[:, :, 2].cos() / 2
    with torch.no_grad():
        latents = vae.encode(clips.clamp(-1, 1)).latent_dist.mode()
        mean, std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
        wanted_mean, wanted_std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
        scale, channels = wanted_std / std, len(mean)
        into, out = vae.quant_conv, vae.post_quant_conv
        into.weight[:channels] *= scale.view(-1, 1, 1, 1, 1)
        into.bias[:channels] = (into.bias[:channels] - mean) * scale + wanted_mean
        out.bias += out.weight.flatten(1) @ (mean - wanted_mean / scale)
        out.weight /= scale.view(1, -1, 1, 1, 1)
