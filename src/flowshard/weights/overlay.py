"""Weights of a transformer from a file of its own, in place of those of the model. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path

from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.weights.files import TensorInfo, read_header
from flowshard.weights.original import transformer_tensors


def with_weights(
    tensors: Mapping[str, TensorInfo], file: Path, family: Family, *, option: str
) -> Mapping[str, TensorInfo]:
    """The tensors of a transformer with those of a file in their place.

    Args:
        tensors: in diffusers' names.
        file: some of them or all, in diffusers' or the publisher's names.
        family: of the model.
        option: names the option in messages.

    Raises:
        UserError: it is a LoRA, or has a tensor that the model does not have or has in another shape.
    """
    header = read_header(file)
    if any(".lora_" in name for name in header):
        raise UserError(f"{option}: {file} is a LoRA, not weights; give it as lora.init_from or lora.preset")
    own = transformer_tensors([file], family, lambda _: header, option)
    for name, info in own.items():
        if name not in tensors:
            raise UserError(f"{option}: {file} has {info.stored or name}, which the model does not have")
        if info.shape != tensors[name].shape:
            raise UserError(
                f"{option}: {file} has {info.stored or name} of shape {info.shape}, and the model {tensors[name].shape}"
            )
    return {**tensors, **own}
