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
TEXT_TOKENS = 48
"""Limit of tokenizers for models that pad every prompt, so that a tiny model does not spend its time on padding.
Among hundreds of equal keys of padding gradients of keys also lose more to rounding than layouts may differ by."""


def write_tiny_pipeline(variant_name: str, directory: Path, *, seed: int, form: str = "diffusers") -> None:
    """Write a complete pipeline of a variant, 5 to 30 MB of random weights.

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
        family.write_original(pipeline, directory, variant)
    else:
        pipeline.save_pretrained(directory)
    for file in directory.rglob("*"):
        if file.is_file():
            apply_umask(file)


def t5_tokenizer(**settings: Any) -> Any:
    """A T5 tokenizer whose pieces are single printable characters; all others are unknown."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    characters = string.ascii_letters + string.digits + string.punctuation
    pieces = [(piece, -5.0) for piece in ("▁", *characters)]
    return T5Tokenizer(vocab=special + pieces, extra_ids=0, **settings)


def umt5_encoder(tokenizer: Any) -> torch.nn.Module:
    """A UMT5 encoder of two layers for that tokenizer."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    encoder: torch.nn.Module = UMT5EncoderModel(config)
    return encoder
