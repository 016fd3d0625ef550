"""Tensors and LoRA factors in the publisher's names, where several of diffusers' may be one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from flowshard.errors import UserError
from flowshard.weights.names import Part, Vocabulary

if TYPE_CHECKING:
    from flowshard.weights.lora_files import Factors


def grouped(names: Iterable[str], vocabulary: Vocabulary) -> dict[str, tuple[Part, ...]]:
    """diffusers' names by the publisher's name of what holds them, with all that this holds.

    What the vocabulary does not know, such as tensors of added modules, keeps its name.
    """
    groups: dict[str, tuple[Part, ...]] = {}
    for name in names:
        original = vocabulary.to_original(name)
        if original is None:
            groups[name] = (Part(name),)
        elif original not in groups:
            groups[original] = vocabulary.parts(original) or (Part(name),)
    return groups


def original_tensors(
    tensors: Mapping[str, torch.Tensor], vocabulary: Vocabulary, *, option: str
) -> dict[str, torch.Tensor]:
    """Tensors in the publisher's names; one that is the same in both is not copied.

    Args:
        tensors: in diffusers' names.
        vocabulary: of the publisher.
        option: names the option in messages.

    Raises:
        UserError: only some of those are there that the publisher has as one.
    """
    result: dict[str, torch.Tensor] = {}
    for original, parts in grouped(tensors, vocabulary).items():
        absent = [part.name for part in parts if part.name not in tensors]
        if absent:
            raise UserError(
                f"{option}: {original} of the publisher's files holds {', '.join(part.name for part in parts)}, of which "
                f"{', '.join(absent)} is not there; use --format diffusers"
            )
        result[original] = stacked(parts, {part.name: tensors[part.name] for part in parts})
    return result


def stacked(parts: Sequence[Part], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The publisher's tensor, from all of diffusers' that it holds."""
    if parts[0].is_whole:
        return tensors[parts[0].name]
    pieces: dict[int, torch.Tensor] = {}
    for part in parts:
        pieces.update(zip(part.pieces, tensors[part.name].chunk(len(part.pieces)), strict=True))
    return torch.cat([pieces[index] for index in sorted(pieces)])


def fused_factors(parts: Sequence[Part], factors: Mapping[str, Factors]) -> Factors:
    """The LoRA factors of the publisher's layer whose change is that of diffusers' layers in it; exact.

    If these have one A in common, as those have that were read from such a file, it stays, and so does the rank. Otherwise
    the result has the sum of their ranks: all A, one below the other, and a B in which each layer's rows use its own. The
    rows of layers without an adapter are zero.

    Args:
        parts: what the publisher's layer holds.
        factors: by diffusers' name, of at least one of them.
    """
    from flowshard.weights.lora_files import Factors

    own = {part.name: factors[part.name] for part in parts if part.name in factors}
    first = next(iter(own.values()))
    if len(own) == len(parts) and all(
        one.alpha == first.alpha and one.first.equal(first.first) for one in own.values()
    ):
        second = stacked(parts, {name: one.second for name, one in own.items()})
        return Factors(first.first, second, first.alpha)
    rank = sum(one.first.shape[0] for one in own.values())
    known = next(part for part in parts if part.name in own)
    size = own[known.name].second.shape[0] // len(known.pieces)
    padded, column = {}, 0
    for part in parts:
        padded[part.name] = first.second.new_zeros(size * len(part.pieces), rank)
        one = own.get(part.name)
        if one is not None:
            end = column + one.first.shape[0]
            padded[part.name][:, column:end] = one.folded()
            column = end
    return Factors(torch.cat([one.first for one in own.values()]), stacked(parts, padded), float(rank))
