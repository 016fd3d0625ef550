"""Overrides on the command line, the resolved config as a file, and the options as help text."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flowshard.config import Config, GroupConfig
from flowshard.config_file import describe_options, dump_config, load_config, options
from flowshard.errors import UserError

BASE = """
output: runs/x
model: {variant: wan2.1-t2v-1.3b, path: models/wan}
data: {metadata: data/metadata.csv, height: 32, width: 48}
train: {steps: 10, global_batch: 4, micro_batch: 2}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


def _refusal(file: Path, override: str) -> str:
    with pytest.raises(UserError) as raised:
        load_config(file, [override])
    return str(raised.value)


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("train.steps=3", "train.steps", 3),
        ("train.learning_rate=1e-4", "train.learning_rate", 1e-4),
        ("train.learning_rate=1.0e-4", "train.learning_rate", 1e-4),
        ("train.learning_rate=2", "train.learning_rate", 2.0),
        ("train.clip_norm=null", "train.clip_norm", None),
        ("train.clip_norm=", "train.clip_norm", None),
        ("train.modules=[attn1, norm_q]", "train.modules", ["attn1", "norm_q"]),
        ("lora.targets=[q,k]", "lora.targets", ["q", "k"]),
        ("objective.sigma_range=[0.1, 0.9]", "objective.sigma_range", (0.1, 0.9)),
        ("objective.shift=3", "objective.shift", 3.0),
        ("objective.shift=auto", "objective.shift", "auto"),
        ("objective.stratified=false", "objective.stratified", False),
        ("train.optimizer_options={betas: [0.9, 0.99]}", "train.optimizer_options", {"betas": [0.9, 0.99]}),
        # Numbers within free options of a library are numbers, however they are written.
        ("train.optimizer_options={eps: 1e-8}", "train.optimizer_options", {"eps": 1e-8}),
        # Text options take text as it stands, whatever YAML would make of it.
        ("output=007", "output", "007"),
        ("output=1e5", "output", "1e5"),
        ("output=3.10", "output", "3.10"),
        ("output=2024-01-31", "output", "2024-01-31"),
        ("output=yes", "output", "yes"),
        ("output=runs/a=b", "output", "runs/a=b"),
        ("data.root=2024", "data.root", "2024"),
        ("data.root=null", "data.root", None),
        ("data.cache=0", "data.cache", "0"),
        ("data.cache=off", "data.cache", "off"),
    ],
)
def test_override_is_read_like_the_file(file: Path, override: str, name: str, value: Any) -> None:
    found = _value(load_config(file, [override]), name)
    assert found == value
    assert type(found) is type(value)


def test_override_of_groups_takes_a_list_of_mappings(file: Path) -> None:
    config = load_config(file, ["train.groups=[{pattern: lora_B, learning_rate: 1e-3}]"])
    assert config.train.groups == [GroupConfig(pattern="lora_B", learning_rate=0.001)]


def test_later_override_counts_and_the_rest_of_the_file_stays(file: Path) -> None:
    config = load_config(file, ["train.steps=3", "train.steps=4"])
    assert (config.train.steps, config.train.micro_batch, config.train.global_batch) == (4, 2, 4)


def test_override_creates_a_section_that_is_absent_or_empty(file: Path) -> None:
    assert load_config(file, ["save.every=7"]).save.every == 7
    file.write_text(f"{BASE}save:\n", encoding="utf-8")
    assert load_config(file, ["save.every=7"]).save.every == 7


@pytest.mark.parametrize("override", ["train.steps", "=3", "train", "output", ""])
def test_override_without_name_or_value_is_refused(file: Path, override: str) -> None:
    assert _refusal(file, override).startswith(f"{override!r}: an override is written option=value")


def test_section_overridden_by_a_single_value_lists_its_options(file: Path) -> None:
    assert _refusal(file, "lora=16") == (
        "lora: a group of options; set one of lora.rank, lora.alpha, lora.targets, lora.init, lora.init_from, lora.preset"
    )


def test_override_below_a_single_value_of_the_file_is_refused(file: Path) -> None:
    file.write_text(f"{BASE}lora: 16\n", encoding="utf-8")
    message = _refusal(file, "lora.rank=4")
    assert message.startswith("lora: a group of options, not a single value")
    assert "'lora.rank=4'" in message


def test_override_that_is_broken_yaml_is_named(file: Path) -> None:
    message = _refusal(file, "train.modules=[attn1")
    assert message.startswith("train.modules=[attn1: not valid YAML")
    assert "\n" not in message


# Differs from the default in every kind of value: number, text with a colon, null, list, mapping, pair.
CHANGES = [
    "seed=7",
    "output='runs/größe: 一'",
    "data.root=media",
    "data.frames=5",
    "train.epochs=3",
    "train.steps=null",
    "train.global_batch=6",
    "train.micro_batch=3",
    "train.learning_rate=3.3e-7",
    "train.optimizer=torch.optim.SGD",
    "train.optimizer_options={momentum: 0.5, betas: [0.9, 0.99]}",
    "train.clip_norm=null",
    "train.modules=[norm_q, 'a*']",
    "train.groups=[{pattern: a, weight_decay: 0}, {pattern: b, learning_rate: 1e-3}]",
    "lora.targets=[q]",
    "objective.shift=2.5",
    "objective.sigma_range=[0.25, 0.75]",
    "objective.stratified=false",
    "save.dtype=bfloat16",
]


@pytest.mark.parametrize("overrides", [[], CHANGES], ids=["defaults", "changed"])
def test_dumped_config_loads_as_the_same_config(file: Path, overrides: list[str]) -> None:
    config = load_config(file, overrides)
    file.write_text(dump_config(config, {"versions": {"torch": "2.8"}, "git": None}), encoding="utf-8")
    assert load_config(file) == config


def test_dumped_config_names_every_option_and_the_record(file: Path) -> None:
    tree = yaml.safe_load(dump_config(load_config(file), {"versions": {"torch": "2.8"}}))
    assert tree.pop("record") == {"versions": {"torch": "2.8"}}
    leaves = {
        f"{key}.{leaf}" if isinstance(value, dict) else key
        for key, value in tree.items()
        for leaf in (value if isinstance(value, dict) else [""])
    }
    assert leaves == {name for name, _ in options()}


def test_options_are_those_of_the_schema() -> None:
    names = [name for name, _ in options()]
    assert len(names) == len(set(names))
    schema = Config.model_json_schema()
    expected = set()
    for key, entry in schema["properties"].items():
        section = schema["$defs"].get(entry.get("$ref", "").rpartition("/")[2])
        expected |= {f"{key}.{leaf}" for leaf in section["properties"]} if section else {key}
    assert set(names) == expected


def test_every_option_is_described_in_the_help() -> None:
    text = describe_options(100)
    words = "".join(text.split())  # without spaces, as a line may end within a hyphenated word
    for name, field in options():
        assert field.description, name
        assert f"\n  {name} (" in text
        assert "".join(field.description.split()) in words
    assert max(len(line) for line in text.splitlines() if line.startswith("      ")) <= 100


@pytest.mark.parametrize(
    "line",
    [
        "output (text; required)",
        "data.frames (int; default 1)",
        "data.root (text or null; default null)",
        "train.method (lora, full; default 'lora')",
        "train.steps (int or null; default null)",
        "objective.shift (float or auto; default 'auto')",
        "objective.sigma_range (tuple of float, float; default (0.0, 1.0))",
        "memory.compile (true or false or auto; default 'auto')",
        "lora.targets (list of text or null; default null)",
        "train.groups (list of {pattern, learning_rate, weight_decay}; default [])",
    ],
)
def test_help_gives_type_and_default(line: str) -> None:
    assert f"\n  {line}\n" in describe_options(100)


@pytest.mark.parametrize(
    ("override", "wrong", "nearest"),
    [
        ("train.stepz=3", "train.stepz", "train.steps"),
        ("steps=3", "steps", "train.steps"),
        ("train.frames=3", "train.frames", "data.frames"),
    ],
)
def test_unknown_override_is_refused_with_the_nearest_name(file: Path, override: str, wrong: str, nearest: str) -> None:
    assert _refusal(file, override) == f"{wrong}: unknown option; did you mean {nearest}?"


def test_override_into_a_list_is_not_answered_with_its_own_name(file: Path) -> None:
    name = "train.groups.0.learning_rate"
    message = _refusal(file, f"{name}=1")
    assert message.startswith(f"{name}: ")
    assert f"did you mean {name}?" not in message
