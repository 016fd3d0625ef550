"""Model series: one file a family, found here by the name of a variant. Needs no torch."""

import difflib
import importlib
from functools import cache

from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.families.variant import Variant

__all__ = ["Family", "Variant", "all_families", "families_of_pipeline", "find_variant", "get_family", "key_of"]

# A new family, or another kind of conditions in a series, is one new file and its line here.
_FAMILIES = {
    "wan": "flowshard.families.wan:Wan",
    "wan-image": "flowshard.families.wan_image:WanImage",
    "wan-first-last": "flowshard.families.wan_image:WanFirstLast",
    "wan-image-experts": "flowshard.families.wan_image:WanImageExperts",
    "wan-ti2v": "flowshard.families.wan_ti2v:WanTextImage",
    "wan-vace": "flowshard.families.wan_vace:WanVace",
    "qwen-image": "flowshard.families.qwen_image:QwenImage",
    "qwen-image-edit": "flowshard.families.qwen_image_edit:QwenImageEdit",
    "qwen-image-edit-plus": "flowshard.families.qwen_image_edit:QwenImageEditPlus",
    "flux": "flowshard.families.flux:Flux",
    "flux-kontext": "flowshard.families.flux_kontext:FluxKontext",
    "flux2": "flowshard.families.flux2:Flux2",
    "flux2-klein": "flowshard.families.flux2_klein:Flux2Klein",
    "z-image": "flowshard.families.z_image:ZImage",
}


@cache
def get_family(name: str) -> Family:
    """The family of that key."""
    module, _, attribute = _FAMILIES[name].partition(":")
    family: Family = getattr(importlib.import_module(module), attribute)()
    return family


def key_of(family: Family) -> str:
    """The key of a family, with which `get_family` finds it."""
    return next(key for key in _FAMILIES if get_family(key) is family)


def all_families() -> list[Family]:
    """Every family that there is."""
    return [get_family(name) for name in _FAMILIES]


def find_variant(name: str, *, option: str) -> tuple[Family, Variant]:
    """The family and the table row of a variant.

    Raises:
        UserError: no family has it; the message names `option` and the nearest variant.
    """
    for family in all_families():
        if name in family.variants:
            return family, family.variants[name]
    known = [variant for family in all_families() for variant in family.variants]
    nearest = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {nearest[0]}?" if nearest else f"available: {', '.join(known)}"
    raise UserError(f"{option}: unknown variant {name!r}; {advice}")


def families_of_pipeline(pipeline_class: str) -> list[Family]:
    """The families whose diffusers pipeline has that class name."""
    return [family for family in all_families() if family.pipeline_class == pipeline_class]
