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
from flowshard.weights.files import TensorInfo, read_header
from flowshard.weights.names import Part, Rows, Vocabulary

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
    "pipe.vace.",
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
    rows: Rows = ()
    """The rows of B that are the layer's, if the file has one B for several layers."""


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
    kohya = {one.replace(".", "_"): one for layer in layers or () for one in names.spellings(layer)}
    keys_of: dict[str, dict[str, str]] = {}
    places: dict[str, Part] = {}
    for key in header:
        found = _KEY.match(key)
        if found is None:
            raise UserError(
                f"{option}: {path}: {key!r} is no tensor of a LoRA as it is known here (lora_A / lora_B, lora_down / "
                "lora_up and alpha)"
            )
        parts = _resolve(found["layer"], layers, names, kohya)
        if parts is None:
            raise UserError(f"{option}: {path} was trained on another model: there is no layer {found['layer']!r} here")
        kind = "alpha" if found["alpha"] else ("first" if found["factor"] in _FIRST else "second")
        for part in parts:
            keys = keys_of.setdefault(part.name, {})
            if kind in keys or places.setdefault(part.name, part) != part:
                raise UserError(
                    f"{option}: {path} has two adapters for {part.name}, one as {key}; take one of them out"
                )
            keys[kind] = key
    where = f"{option}: {path}"
    shapes = layers or {}
    result = [_layer(places[name], keys, header, shapes.get(name), where) for name, keys in keys_of.items()]
    if not result:
        raise UserError(f"{option}: {path} holds no adapters")
    if layers is not None:
        order = {layer: place for place, layer in enumerate(layers)}
        result.sort(key=lambda one: order[one.name])
    return LoraFile(path, tuple(result))


def _layer(
    part: Part, keys: Mapping[str, str], header: Mapping[str, TensorInfo], weight: tuple[int, ...] | None, where: str
) -> LoraLayer:
    """One layer from the keys of its tensors; `weight` is the shape of its weight if that is known.

    Raises:
        UserError: a factor is missing, or they do not fit the weight.
    """
    if "first" not in keys or "second" not in keys:
        raise UserError(f"{where}: the layer {part.name} has only one of its two factors")
    first, second = header[keys["first"]].shape, header[keys["second"]].shape
    divided = second[0] % part.of == 0
    rows = part.rows(second[0]) if divided and not part.is_whole else ()
    outputs = sum(end - start for start, end in rows) or second[0]
    fits = weight is None or (math.prod(first[1:]), outputs) == (math.prod(weight[1:]), weight[0])
    if first[0] != second[1] or not divided or not fits:
        known = "" if weight is None else f", whose weight is {weight}"
        raise UserError(f"{where}: factors of shape {first} and {second} do not fit {part.name}{known}")
    return LoraLayer(part.name, keys["first"], keys["second"], keys.get("alpha"), first[0], rows)


def _resolve(
    name: str, layers: Mapping[str, Any] | None, names: Vocabulary, kohya: Mapping[str, str]
) -> tuple[Part, ...] | None:
    """The model's layers that a file calls `name`, in diffusers' vocabulary; several if the publisher has them as one."""
    if name.startswith(_KOHYA):
        spelled = kohya.get(name.removeprefix(_KOHYA))
        return None if spelled is None else _resolve(spelled, layers, names, kohya)

    def known(layer: str) -> bool:
        return layer in layers if layers is not None else names.to_original(layer) is not None

    for prefix in ("", *_PREFIXES):
        if not name.startswith(prefix):
            continue
        bare = name.removeprefix(prefix)
        ours, theirs = (Part(bare),), names.parts(bare)
        # Where the model is not known, `known` goes by how names begin, and the publisher's are the exact ones.
        for parts in (theirs, ours) if layers is None else (ours, theirs):
            if parts and all(known(part.name) for part in parts):
                return parts
    if layers is None and name.startswith(_DIFFUSERS):  # diffusers' own names need no vocabulary
        return (Part(name.removeprefix(_DIFFUSERS)),)
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

    def folded(self) -> "torch.Tensor":
        """B, (outputs, rank), times the scale, in its own type."""
        return self.second if self.scale == 1.0 else (self.second.float() * self.scale).to(self.second.dtype)

    def added_to(self, weight: "torch.Tensor") -> "torch.Tensor":
        """The weight with the change, in its own type; the sum is made in float32."""
        change = self.scale * (self.second.float().flatten(1) @ self.first.float().flatten(1))
        return (weight.float() + change.view_as(weight)).to(weight.dtype)


def load_factors(file: LoraFile) -> dict[str, Factors]:
    """The tensors of a file by layer, mapped. Without an alpha it is the rank."""
    import torch
    from safetensors import safe_open

    loaded = {}
    with safe_open(file.path, framework="pt") as tensors:
        for layer in file.layers:
            alpha = float(tensors.get_tensor(layer.alpha)) if layer.alpha else float(layer.rank)
            first, second = tensors.get_tensor(layer.first), tensors.get_tensor(layer.second)
            if layer.rows:  # A is that of other layers as well, each of which gets its own
                first, second = first.clone(), torch.cat([second[start:end] for start, end in layer.rows])
            loaded[layer.name] = Factors(first, second, alpha)
    return loaded


def lora_tensors(factors: Mapping[str, Factors], names: Vocabulary, form: Format) -> "dict[str, torch.Tensor]":
    """A LoRA in the names of a format, types kept.

    `comfyui` stores alpha where it is not the rank; the others have none, and get it folded into B.

    Raises:
        UserError: a layer has no name in the publisher's vocabulary.
    """
    import torch

    from flowshard.weights.fused import fused_factors, grouped

    if form == "diffusers":
        renamed = {f"transformer.{layer}": one for layer, one in factors.items()}
    else:
        unknown = [layer for layer in factors if names.to_original(layer) is None]
        if unknown:
            raise UserError(f"--format: the layer {unknown[0]} has no name in the publisher's files; use diffusers")
        prefix = "diffusion_model." if form == "comfyui" else ""
        renamed = {
            prefix + original: fused_factors(parts, factors) for original, parts in grouped(factors, names).items()
        }
    adapter = ".default" if form == "original" else ""
    tensors: dict[str, torch.Tensor] = {}
    for prefix, one in renamed.items():
        second = one.second if form == "comfyui" else one.folded()
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
