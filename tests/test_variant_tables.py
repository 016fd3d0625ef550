"""The tables of the pages on variants say what the registry and the tests have."""

from flowshard.families import all_families
from flowshard.families.base import Family
from flowshard.families.variant import Variant
from tests import pictures, test_families, test_original_images, test_original_wan, test_wan_variants
from tests.conftest import REPOSITORY

TESTED, SAME = "tested", "same code"
OWN = {*test_families.BASES, *test_wan_variants.VARIANTS, *pictures.PICTURES, *pictures.TEXT_ONLY}
"""Variants that are trained under several layouts as they are."""
RUN = {*OWN, *pictures.OTHERS}
"""Variants that are trained and sampled."""
FILES = {
    "wan2.1-t2v-1.3b",
    *test_original_wan.VARIANTS,
    *test_original_images.LISTS,
    "qwen-image-edit-2509",
    "flux.2-klein-4b",
    "flux.2-klein-9b",
}
"""Variants whose publisher's files are read; of the last three in `test_original_variants`."""
EXAMPLES = dict(zip(test_families.BASES, ("wan", "qwen_image", "flux", "flux2", "z_image"), strict=True))
"""Where the name of the example is not that of the variant."""


def _table(file: str, first: str) -> dict[str, list[str]]:
    """The rows of the table whose first head is `first`, by the name in their first cell."""
    lines = (REPOSITORY / "docs" / file).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    end = next(number for number, line in enumerate(lines[start:]) if not line.startswith("|"))
    return {name.strip("`"): cells for name, *cells in rows[2:end]}


def _all() -> list[tuple[Family, Variant]]:
    return [(family, variant) for family in all_families() for variant in family.variants.values()]


def _inputs(family: Family) -> str:
    if not family.inputs:
        return "none"
    notes = {"first": " (or the first frame)", "last": " (or the last frame)", None: " (optional)"}
    return ", ".join(
        f"`{one.column}`" + ("" if one.required and not one.from_clip else notes[one.from_clip])
        for one in family.inputs
    )


def test_every_variant_is_in_the_table_as_it_is() -> None:
    expected = {}
    for family, variant in _all():
        name = variant.name
        example = f"examples/{EXAMPLES.get(name, name)}_lora.yaml"
        assert (REPOSITORY / example).is_file()
        runs, layouts, files = (TESTED if name in names else SAME for names in (RUN, OWN, FILES))
        dropout = "yes" if family.optional_conditions else "no"
        experts = "none" if variant.experts is None else ", ".join(f"`{one}`" for one in variant.experts)
        what = [_inputs(family), dropout, str(variant.heads), experts, f"`{example}`"]
        expected[name] = [*what, runs, runs, layouts, layouts, layouts, runs, files, "no"]
    assert _table("families.md", "variant | inputs") == expected


def test_the_table_of_defaults_is_how_variants_are_sampled() -> None:
    found = _table("generate.md", "variant | `--frames`")
    for _, variant in _all():
        one = variant.sampling
        low = "" if one.guidance_low is None else f", low noise {one.guidance_low:g}"
        size = f"{one.height} x {one.width}"
        assert found.pop(variant.name) == [str(one.frames), size, str(one.steps), f"{one.guidance:g}{low}"], (
            variant.name
        )
    assert not found


def test_the_page_on_variants_names_every_input() -> None:
    text = (REPOSITORY / "docs" / "variants.md").read_text(encoding="utf-8")
    assert all(f"`{one.column}`" in text for family, _ in _all() for one in family.inputs)
