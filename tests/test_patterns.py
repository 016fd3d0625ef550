"""Patterns over dotted names: what matches, what is selected, and the message when nothing is."""

import pytest

from flowshard.errors import UserError
from flowshard.patterns import matches, select

NAMES = [
    "blocks.0.attn1.to_q.weight",
    "blocks.0.attn1.to_q.bias",
    "blocks.0.attn2.to_q.weight",
    "blocks.0.ffn.net.0.proj.weight",
    "blocks.10.attn1.to_q.weight",
    "proj_out.weight",
]


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("blocks.0.attn1.to_q.weight", "attn1", True),
        ("blocks.0.attn1.to_q.weight", "attn1.to_q", True),
        ("blocks.0.attn1.to_q.weight", "blocks.0.attn1.to_q.weight", True),
        ("blocks.0.attn1.to_q.weight", "blocks", True),
        ("blocks.0.attn1.to_q.weight", "weight", True),
        # A component is matched whole, never as a part of the text.
        ("blocks.0.attn1.to_q.weight", "attn", False),
        ("blocks.0.attn1.to_q.weight", "to_q.w", False),
        ("blocks.10.attn1.to_q.weight", "0", False),
        ("blocks.10.attn1.to_q.weight", "blocks.1", False),
        ("blocks.0.attn1.to_q.weight", "ATTN1", False),
        # Components have to stand next to each other, in this order.
        ("blocks.0.attn1.to_q.weight", "blocks.attn1", False),
        ("blocks.0.attn1.to_q.weight", "to_q.attn1", False),
        ("blocks.0.attn1.to_q.weight", "a.blocks.0.attn1.to_q.weight", False),
        # `*` and `?` stay within a component.
        ("blocks.0.attn1.to_q.weight", "attn?", True),
        ("blocks.0.attn1.to_q.weight", "attn*.to_*", True),
        ("blocks.0.attn1.to_q.weight", "blocks.*.attn1", True),
        ("blocks.0.attn1.to_q.weight", "blocks.*.to_q", False),
        ("blocks.0.attn1.to_q.weight", "blocks*weight", False),
        ("blocks.10.attn1.to_q.weight", "blocks.?.attn1", False),
        ("blocks.10.attn1.to_q.weight", "blocks.??.attn1", True),
        ("blocks.0.attn1.to_q.weight", "*.*.*.*.*", True),
        ("blocks.0.attn1.to_q.weight", "*.*.*.*.*.*", False),
        ("proj_out", "proj_out", True),
    ],
)
def test_pattern_matches_neighbouring_whole_components(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("blocks.0.attn1.to_q", "to_q", True),
        ("blocks.0.attn1.to_q", "attn1.to_q", True),
        ("blocks.0.attn1.to_q", "attn*.to_q", True),
        ("to_q", "to_q", True),
        ("blocks.0.attn1.to_q.weight", "to_q", False),
        ("blocks.0.attn1.to_q", "attn1", False),
        ("blocks.0.attn1.add_to_q", "to_q", False),
        ("to_q", "attn1.to_q", False),
        ("blocks.0.ffn.net.0.proj", "net.0.proj", True),
        ("blocks.0.ffn.net.2", "ffn.net.0", False),
    ],
)
def test_pattern_at_end_covers_the_last_components(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern, at_end=True) is expected


def test_selection_keeps_the_order_of_the_names_and_lists_each_once() -> None:
    assert select(NAMES, ["proj_out", "attn1", "to_q.weight"], option="train.modules") == [
        "blocks.0.attn1.to_q.weight",
        "blocks.0.attn1.to_q.bias",
        "blocks.0.attn2.to_q.weight",
        "blocks.10.attn1.to_q.weight",
        "proj_out.weight",
    ]


def test_selection_takes_an_iterator_once() -> None:
    assert select(iter(NAMES), ["attn2", "proj_out"], option="x") == ["blocks.0.attn2.to_q.weight", "proj_out.weight"]


def test_no_patterns_select_nothing() -> None:
    assert select(NAMES, [], option="train.modules") == []


def test_selection_at_end_uses_the_end_only() -> None:
    modules = ["blocks.0.attn1.to_q", "blocks.0.attn1.to_q.inner", "to_q"]
    assert select(modules, ["to_q"], option="lora.targets", at_end=True) == ["blocks.0.attn1.to_q", "to_q"]


def test_pattern_without_a_match_is_refused_even_beside_one_that_matches() -> None:
    with pytest.raises(UserError) as raised:
        select(NAMES, ["attn1", "to_w.weight"], option="train.modules")
    message = str(raised.value)
    assert message.startswith("train.modules: ")
    assert "'to_w.weight'" in message
    assert "attn1" not in message.partition(";")[0]
    assert "the closest names are to_q.weight" in message


@pytest.mark.parametrize(("pattern", "closest"), [("atn1", "attn1"), ("bloks", "blocks"), ("attn1.toq", "attn1.to_q")])
def test_closest_names_come_from_wherever_the_pattern_may_match(pattern: str, closest: str) -> None:
    with pytest.raises(UserError) as raised:
        select(NAMES, [pattern], option="train.modules")
    assert f"the closest names are {closest}" in str(raised.value)


def test_refused_pattern_lists_existing_names_when_none_is_close() -> None:
    with pytest.raises(UserError) as raised:
        select(["alpha.to_q", "beta.to_k"], ["zzz"], option="lora.targets", at_end=True)
    assert str(raised.value).endswith("there are, for example, to_q, to_k")


def test_refused_pattern_lists_few_names_of_a_large_model() -> None:
    with pytest.raises(UserError) as raised:
        select([f"layer{index}" for index in range(1000)], ["§"], option="lora.targets")
    assert str(raised.value).count("layer") <= 8
