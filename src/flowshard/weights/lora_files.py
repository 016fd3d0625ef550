"""Reading and writing LoRA files in the names that the field uses.

| format | a key |
|---|---|
| diffusers | `transformer.blocks.0.attn1.to_q.lora_A.weight` |
| original | `blocks.0.self_attn.q.lora_A.default.weight` (DiffSynth-Studio; also without `default`) |
| comfyui | `diffusion_model.blocks.0.self_attn.q.lora_A.weight`, with `.alpha` beside it if it is not the rank |

Read are also `lora_down` / `lora_up`, the prefixes of other trainers, and kohya's `lora_unet_blocks_0_self_attn_q`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowshard.errors import UserError
from flowshard.weights.files import read_header
from flowshard.weights.names import Vocabulary

if TYPE_CHECKING:
    import torch

Format = Literal["diffusers", "original", "comfyui"]
_DIFFUSERS = "transformer."
_PREFIXES = (
    "base_model.model.",
    _DIFFUSERS,
    "model.diffusion_model.",
    "diffusion_model.",
    "pipe.dit.",
    "dit.",
    "model.",
)
_KOHYA = "lora_unet_"
_KEY = re.compile(
    r"(?P<layer>.+)\.(?:lora_(?P<factor>A|B|down|up)(?:\.\w+)?\.weight|(?P<alpha>alpha))$",
)
_FIRST = ("A", "down")


@dataclass(frozen=True)
class LoraLayer:
    """One adapted layer of a file."""

    name: str
    """Of the layer, in diffusers' vocabulary."""
    first: str
    """Key of A, (rank, inputs)."""
    second: str
    """Key of B, (outputs, rank)."""
    alpha: str | None
    """Key of alpha, a scalar."""
    rank: int


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file by its layers. No tensor has been read."""

    path: Path
    layers: tuple[LoraLayer, ...]

    @property
    def rank(self) -> int | None:
        """The rank of all layers; None if they have several."""
        ranks = {layer.rank for layer in self.layers}
        return ranks.pop() if len(ranks) == 1 else None


def read_lora(path: Path, layers: Mapping[str, tuple[int, ...]] | None, names: Vocabulary, *, option: str) -> LoraFile:
    """Find out what a LoRA file holds.

    Args:
        path: the file.
        layers: of the model, in diffusers' vocabulary, with the shapes of their weights; None if they are not known.
        names: of the family.
        option: names the option in messages.

    Raises:
        UserError: it is no LoRA file, or not one of this model; the message names the key.
    """
    header = read_header(path)
    kohya = {(names.to_original(layer) or layer).replace(".", "_"): layer for layer in layers or ()}
    parts: dict[str, dict[str, str]] = {}
    for key in header:
        found = _KEY.match(key)
        if found is None:
            raise UserError(
                f"{option}: {path}: {key!r} is no tensor of a LoRA as it is known here (lora_A / lora_B, lora_down / "
                "lora_up and alpha)"
            )
        layer = _resolve(found["layer"], layers, names, kohya)
        if layer is None:
            raise UserError(f"{option}: {path} was trained on another model: there is no layer {found['layer']!r} here")
        kind = "alpha" if found["alpha"] else ("first" if found["factor"] in _FIRST else "second")
        parts.setdefault(layer, {})[kind] = key
    result = []
    for layer, keys in parts.items():
        if "first" not in keys or "second" not in keys:
            raise UserError(f"{option}: {path}: the layer {layer} has only one of its two factors")
        first, second = header[keys["first"]].shape, header[keys["second"]].shape
        expected = (second[0], *first[1:]) if layers is None else layers[layer]
        if first[0] != second[1] or (math.prod(first[1:]), second[0]) != (math.prod(expected[1:]), expected[0]):
            raise UserError(
                f"{option}: {path}: factors of shape {first} and {second} do not fit {layer}, whose weight is {expected}"
            )
        result.append(LoraLayer(layer, keys["first"], keys["second"], keys.get("alpha"), first[0]))
    if not result:
        raise UserError(f"{option}: {path} holds no adapters")
    if layers is not None:
        order = {layer: place for place, layer in enumerate(layers)}
        result.sort(key=lambda one: order[one.name])
    return LoraFile(path, tuple(result))


def _resolve(name: str, layers: Mapping[str, Any] | None, names: Vocabulary, kohya: Mapping[str, str]) -> str | None:
    """The model's layer that a file calls `name`, in diffusers' vocabulary."""
    if name.startswith(_KOHYA):
        return kohya.get(name.removeprefix(_KOHYA))
    for prefix in ("", *_PREFIXES):
        if not name.startswith(prefix):
            continue
        bare = name.removeprefix(prefix)
        for candidate in (bare, names.from_original(bare)):
            if candidate is None:
                continue
            if candidate in layers if layers is not None else names.to_original(candidate) is not None:
                return candidate
    if layers is None and name.startswith(_DIFFUSERS):  # diffusers' own names need no vocabulary
        return name.removeprefix(_DIFFUSERS)
    return None


@dataclass(frozen=True)
class Factors:
    """The tensors of one adapted layer; the change of the weight is `alpha / rank * second @ first`."""

    first: "torch.Tensor"
    second: "torch.Tensor"
    alpha: float

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.first.shape[0]

    def added_to(self, weight: "torch.Tensor") -> "torch.Tensor":
        """The weight with the change, in its own type; the sum is made in float32."""
        change = self.scale * (self.second.float().flatten(1) @ self.first.float().flatten(1))
        return (weight.float() + change.view_as(weight)).to(weight.dtype)


def load_factors(file: LoraFile) -> dict[str, Factors]:
    """The tensors of a file by layer, mapped. Without an alpha it is the rank."""
    from safetensors import safe_open

    loaded = {}
    with safe_open(file.path, framework="pt") as tensors:
        for layer in file.layers:
            alpha = float(tensors.get_tensor(layer.alpha)) if layer.alpha else float(layer.rank)
            loaded[layer.name] = Factors(tensors.get_tensor(layer.first), tensors.get_tensor(layer.second), alpha)
    return loaded


def lora_tensors(factors: Mapping[str, Factors], names: Vocabulary, form: Format) -> "dict[str, torch.Tensor]":
    """A LoRA in the names of a format, types kept.

    `comfyui` stores alpha where it is not the rank; the others have none, and get it folded into B.

    Raises:
        UserError: a layer has no name in the publisher's vocabulary.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for layer, one in factors.items():
        stored = form == "comfyui" or one.scale == 1.0
        second = one.second if stored else (one.second.float() * one.scale).to(one.second.dtype)
        prefix, adapter = f"transformer.{layer}", ""
        if form != "diffusers":
            original = names.to_original(layer)
            if original is None:
                raise UserError(f"--format: the layer {layer} has no name in the publisher's files; use diffusers")
            prefix = f"diffusion_model.{original}" if form == "comfyui" else original
            adapter = "" if form == "comfyui" else ".default"
        tensors[f"{prefix}.lora_A{adapter}.weight"] = one.first.contiguous()
        tensors[f"{prefix}.lora_B{adapter}.weight"] = second.contiguous()
        if form == "comfyui" and one.scale != 1.0:
            tensors[f"{prefix}.alpha"] = torch.tensor(one.alpha)
    return tensors


def adapted_layers(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """The layers that can have an adapter among tensors with their shapes: linear layers and convolutions."""
    return {
        name.removesuffix(".weight"): shape for name, shape in shapes if name.endswith(".weight") and len(shape) >= 2
    }
