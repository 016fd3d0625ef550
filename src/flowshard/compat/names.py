"""Names of layers and tensors in DiffSynth-Studio's models. Needs no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence

from flowshard.compat.options import FLUX, WAN
from flowshard.errors import UserError
from flowshard.families import Family
from flowshard.families.flux_files import FLUX_DIFFSYNTH_NAMES
from flowshard.weights.names import Vocabulary

DIT, VACE = "dit", "vace"
"""The models of its pipelines that are trained here."""
_LARGE = 512
"""Inputs and outputs of the smallest linear layer that gets an adapter if no targets are given."""
_BLOCK = re.compile(r"^([a-z_]+)\.(\d+)\.")


def vocabulary(family: Family, names: Iterable[str]) -> Vocabulary:
    """diffusers' names and those of DiffSynth-Studio's model, which for most series are the same.

    Args:
        family: of the model.
        names: of its layers or tensors, in diffusers' vocabulary.
    """
    if family.name == WAN:
        return family.names
    if family.name == FLUX:
        return FLUX_DIFFSYNTH_NAMES
    return Vocabulary.unchanged(*dict.fromkeys(name.partition(".")[0] for name in names))


def model_of(name: str) -> str:
    """Which of its models a layer or tensor belongs to, in either vocabulary."""
    return VACE if name.startswith(("vace_blocks.", "vace_patch_embedding.")) else DIT


def lora_targets(
    asked: Sequence[str], family: Family, layers: Mapping[str, tuple[int, ...]], model: str
) -> tuple[list[str], list[str]]:
    """The layers that `--lora_target_modules` means, as patterns of `lora.targets`.

    A target means the layers whose name in DiffSynth-Studio's model it is, or ends with; none at all means the large
    linear layers of the blocks.

    Args:
        asked: the targets.
        family: of the model.
        layers: those that can have an adapter, in diffusers' names, with the shapes of their weights.
        model: which of its models gets adapters.

    Returns:
        The patterns, and the targets that mean no layer.

    Raises:
        UserError: no layer is meant.
    """
    own = {name: shape for name, shape in layers.items() if model_of(name) == model}
    if not asked:
        chosen = [
            name for name, shape in own.items() if len(shape) == 2 and min(shape) >= _LARGE and _in_blocks(name, family)
        ]
        if not chosen:
            raise UserError(
                f"--lora_target_modules: is empty, and no linear layer of the blocks has {_LARGE} inputs and outputs; name "
                f"layers, for example {','.join(family.lora_targets)}"
            )
        return _patterns(chosen, layers), []
    names = vocabulary(family, own)
    spelled = {name: names.to_original(name) or name for name in own}
    meant = {target: [name for name in own if _ends(spelled[name], target)] for target in asked}
    chosen = [name for name in own if any(name in found for found in meant.values())]
    if not chosen:
        example = list(dict.fromkeys(spelled.values()))[:8]
        raise UserError(
            f"--lora_target_modules: {','.join(asked)} names no layer of the model; it has for example {', '.join(example)}"
        )
    return _patterns(chosen, layers), [target for target, found in meant.items() if not found]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _in_blocks(name: str, family: Family) -> bool:
    found = _BLOCK.match(name)
    return found is not None and found[1] in family.block_lists


def _patterns(chosen: Sequence[str], layers: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names with `*` for the number of the block, where all blocks are meant."""
    wanted = set(chosen)
    numbers: dict[str, set[str]] = {}
    for name in layers:
        numbers.setdefault(_BLOCK.sub(r"\1.*.", name), set()).add(name)
    patterns: list[str] = []
    for name in chosen:
        pattern = _BLOCK.sub(r"\1.*.", name)
        patterns.append(pattern if numbers[pattern] <= wanted else name)
    return list(dict.fromkeys(patterns))
