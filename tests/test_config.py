"""The config: what is accepted, and what is refused with which words."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowshard.config import Config
from flowshard.config_file import load_config, options
from flowshard.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
BASE: dict[str, Any] = {
    "output": "runs/x",
    "model": {"variant": "wan2.1-t2v-1.3b", "path": "models/wan"},
    "data": {"metadata": "data/metadata.csv", "height": 32, "width": 48},
    "train": {"steps": 10},
}
# The block of the design document, in which all names of the schema are fixed.
DESIGN = """
seed: 0
output: runs/bunny
model:
  variant: wan2.1-t2v-1.3b     # decides family, conditions, default shift, expert boundary
  path: models/wan             # a diffusers folder, a hub id, or a list/glob of original files
  extend: null                 # "file.py:function" or "package.module:function": adds modules before weights load
  dtype: bfloat16              # of frozen weights and of autocast; trainable weights are fp32
data:
  metadata: data/bunny/metadata.csv   # .csv, .json or .jsonl; media paths relative to `root`
  root: null                   # default: the metadata's folder
  height: 176
  width: 320
  frames: 25
  repeat: 1
  cache: auto                  # auto: encode once, then train without encoders; off; or a folder
train:
  method: lora                 # lora | full
  steps: 200                   # or epochs
  global_batch: 4              # accumulation = global_batch / (micro_batch * dp)
  micro_batch: 1
  learning_rate: 1.0e-4
  weight_decay: 0.01
  optimizer: adamw             # or an import path
  schedule: constant           # constant | linear | cosine; warmup_steps
  clip_norm: 1.0
  modules: []                  # lora: modules trained in full beside it; full: if given, only these (patterns)
  groups: []                   # learning rate and decay per pattern; norms and biases without decay by default
lora: {rank: 32, alpha: 32, targets: null, init_from: null, preset: []}
objective: {sampling: uniform, shift: auto, sigma_range: [0.0, 1.0], weighting: none, stratified: true, guidance: auto}
layout: {strategy: auto, sequence: 1, ulysses: auto, ring: auto}
memory: {activations: keep, compile: false}   # keep | selective | recompute | offload | auto
save: {every: 100, keep: 3}    # every: 0 saves at the end only
validation: {every: 0, prompts: [], steps: 20}
log: {trackers: []}
"""


class Loader:
    """Writes a config, as text or as `BASE` with changes by dotted name, and loads it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def text(self, text: str) -> Config:
        self.file.write_text(text, encoding="utf-8")
        return load_config(self.file)

    def changed(self, changes: dict[str, Any]) -> Config:
        tree = copy.deepcopy(BASE)
        for name, value in changes.items():
            section, _, leaf = name.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[leaf] = value
        return self.text(yaml.safe_dump(tree))

    def refusal(self, changes: dict[str, Any]) -> str:
        with pytest.raises(UserError) as raised:
            self.changed(changes)
        return str(raised.value)

    def text_refusal(self, text: str) -> str:
        with pytest.raises(UserError) as raised:
            self.text(text)
        return str(raised.value)


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path / "config.yaml")


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_every_name_of_the_design_is_accepted_as_it_stands(load: Loader) -> None:
    config = load.text(DESIGN)
    tree = yaml.safe_load(DESIGN)
    flat = {
        f"{section}.{leaf}" if isinstance(value, dict) else section: inner
        for section, value in tree.items()
        for leaf, inner in (value.items() if isinstance(value, dict) else [("", value)])
    }
    assert len(flat) == 47
    for name, value in flat.items():
        found = _value(config, name)
        assert (list(found) if isinstance(found, tuple) else found) == value, name


@pytest.mark.parametrize("name", ["wan_lora.yaml", "wan_full.yaml"])
def test_examples_are_accepted(name: str) -> None:
    assert load_config(REPOSITORY / "examples" / name).model.variant == "wan2.1-t2v-1.3b"


def test_file_with_a_byte_order_mark_is_read(load: Loader) -> None:
    assert load.text("\ufeff" + yaml.safe_dump({**BASE, "seed": 5})).seed == 5


@pytest.mark.parametrize(
    ("changes", "wrong", "nearest"),
    [
        ({"sead": 1}, "sead", "seed"),
        ({"outputs": "x"}, "outputs", "output"),
        ({"train.stepz": 1}, "train.stepz", "train.steps"),
        ({"train.learning_rte": 1}, "train.learning_rte", "train.learning_rate"),
        ({"data.hieght": 1}, "data.hieght", "data.height"),
        ({"lora.ranks": 4}, "lora.ranks", "lora.rank"),
        ({"trian": {"steps": 1}}, "trian", "train"),
        ({"objectives": {"shift": 1}}, "objectives", "objective"),
        (
            {"train.groups": [{"pattern": "a", "learning_rat": 1}]},
            "train.groups.0.learning_rat",
            "train.groups.0.learning_rate",
        ),
        (
            {"train.groups": [{"pattern": "a"}, {"patern": "b", "pattern": "b"}]},
            "train.groups.1.patern",
            "train.groups.1.pattern",
        ),
        # The right option at the top level or in the wrong section.
        ({"learning_rate": 1}, "learning_rate", "train.learning_rate"),
        ({"rank": 4}, "rank", "lora.rank"),
        ({"train.rank": 4}, "train.rank", "lora.rank"),
        ({"train.frames": 5}, "train.frames", "data.frames"),
        ({"train.height": 32}, "train.height", "data.height"),
        ({"train.shift": 3}, "train.shift", "objective.shift"),
        ({"train.variant": "x"}, "train.variant", "model.variant"),
        ({"data.path": "x"}, "data.path", "model.path"),
        ({"train.seed": 3}, "train.seed", "seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_option_is_refused_with_the_nearest_name(
    load: Loader, changes: dict[str, Any], wrong: str, nearest: str
) -> None:
    assert load.refusal(changes) == f"{wrong}: unknown option; did you mean {nearest}?"


def test_unknown_option_unlike_any_points_to_the_help(load: Loader) -> None:
    assert load.refusal({"zzz": 1}) == "zzz: unknown option; see `flowshard train --help` for all options"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train.steps", "many", "train.steps: 'many' is not a valid integer"),
        ("train.steps", 1.5, "train.steps: 1.5 is not a valid integer"),
        ("train.steps", 0, "train.steps: 0 is not greater than 0"),
        ("train.steps", True, "train.steps: True is not "),
        ("train.learning_rate", True, "train.learning_rate: True is not "),
        ("seed", -1, "seed: -1 is not greater than or equal to 0"),
        ("data.height", -16, "data.height: -16 is not greater than 0"),
        ("data.metadata", 3, "data.metadata: 3 is not a valid string"),
        ("model.path", {"a": 1}, "model.path: {'a': 1} is not a valid string or a valid list"),
        ("memory.compile", "perhaps", "memory.compile: 'perhaps' is not a valid boolean or 'auto'"),
        ("train.learning_rate", float("nan"), "train.learning_rate: nan is not "),
        ("train.learning_rate", float("inf"), "train.learning_rate: inf is not "),
        ("train.clip_norm", 0, "train.clip_norm: 0 is not greater than 0"),
        ("train.method", "qlora", "train.method: 'qlora' is not 'lora' or 'full'"),
        ("model.dtype", "fp16", "model.dtype: 'fp16' is not 'float32', 'bfloat16' or 'float16'"),
        ("train.modules", "attn1", "train.modules: 'attn1' is not a valid list"),
        ("train.modules", ["attn1", 5], "train.modules.1: 5 is not a valid string"),
        ("train.groups", {"pattern": "a"}, "train.groups: {'pattern': 'a'} is not a valid list"),
        ("objective.mode_scale", 1.8, "objective.mode_scale: 1.8 is not less than or equal to 1.75"),
        ("objective.sigma_range", [0, "x"], "objective.sigma_range.1: 'x' is not a valid number"),
        # Options of several types: the reasons of all of them, once.
        ("objective.shift", "big", "objective.shift: 'big' is not a valid number or 'auto'"),
        ("objective.shift", 0, "objective.shift: 0 is not greater than 0 or 'auto'"),
        ("objective.shift", None, "objective.shift: null is not a valid number or 'auto'"),
        ("layout.ulysses", "all", "layout.ulysses: 'all' is not a valid integer or 'auto'"),
        # A group of options that is something else.
        ("train", 5, "train: a group of options such as train.method, not 5"),
        ("lora", "big", "lora: a group of options such as lora.rank, not 'big'"),
        ("train.groups", ["attn1"], "train.groups.0: a group of options such as train.groups.0.pattern, not 'attn1'"),
    ],
)
def test_value_of_the_wrong_type_is_refused_by_name(load: Loader, name: str, value: Any, message: str) -> None:
    assert load.refusal({name: value}).startswith(message)


def test_all_wrong_options_are_named_at_once(load: Loader) -> None:
    lines = load.refusal({"train.steps": "x", "data.height": 0, "sead": 1}).splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == ["data.height", "sead", "train.steps"]


@pytest.mark.parametrize("name", ["output", "model.path"])
def test_missing_option_is_named_with_what_it_means(load: Loader, name: str) -> None:
    tree = copy.deepcopy(BASE)
    section, _, leaf = name.rpartition(".")
    del (tree[section] if section else tree)[leaf]
    message = load.text_refusal(yaml.safe_dump(tree))
    description = " ".join((dict(options())[name].description or "").split()).rstrip(".")
    assert message == f"{name}: this option must be given ({description})"


@pytest.mark.parametrize("name", ["height", "width"])
def test_missing_side_is_named_with_what_may_stand_for_it(load: Loader, name: str) -> None:
    tree = copy.deepcopy(BASE)
    del tree["data"][name]
    message = load.text_refusal(yaml.safe_dump(tree))
    assert message.startswith(f"data.{name}: give data.height and data.width, or data.max_pixels")


def test_missing_pattern_of_a_group_is_named(load: Loader) -> None:
    message = load.refusal({"train.groups": [{"learning_rate": 1.0}]})
    assert message.startswith("train.groups.0.pattern: this option must be given")


def test_missing_section_is_named(load: Loader) -> None:
    assert load.text_refusal("output: x\nmodel: {variant: a, path: b}").startswith("data: this option must be given")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed: 1\noutput: x\nseed: 2\n", ["'seed' is given twice", "line 3"]),
        ("train:\n  steps: 1\n  micro_batch: 1\n  steps: 2\n", ["'steps' is given twice", "line 4"]),
        ("train: {groups: [{pattern: a, pattern: b}]}", ["'pattern' is given twice", "line 1"]),
        ("train: {steps: [}", ["not valid YAML", "line 1"]),
        ("seed: 1\n\ttrain: 1", ["not valid YAML", "line 2"]),
        ("output: a: b", ["not valid YAML", "line 1"]),
        ("output: *nothing", ["not valid YAML", "nothing"]),
        ("output: !!python/object/apply:os.getcwd []", ["not valid YAML", "python/object"]),
        ("? [a]\n: b\n", []),
        ("", ["a mapping of options"]),
        ("# only a comment\n", ["a mapping of options"]),
        ("- seed\n- output\n", ["a mapping of options"]),
        ("just text", ["a mapping of options"]),
    ],
)
def test_text_that_is_no_config_is_refused_with_the_file_and_place(load: Loader, text: str, parts: list[str]) -> None:
    message = load.text_refusal(text)
    assert "\n" not in message
    for part in (str(load.file), *parts):
        assert part in message


@pytest.mark.parametrize("key", ["5", "true", "1.5", "null"])
def test_key_that_is_no_text_is_an_unknown_option(load: Loader, key: str) -> None:
    message = load.text_refusal(f"{yaml.safe_dump(BASE)}{key}: 1\n")
    assert key in message.lower()
    assert "unknown option" in message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"config file {tmp_path / 'no.yaml'} does not exist")):
        load_config(tmp_path / "no.yaml")


def test_folder_and_other_encodings_are_no_config_file(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("output: größe".encode("latin-1"))
    for path in (tmp_path, latin):
        with pytest.raises(UserError, match=re.escape(f"config file {path} cannot be read")):
            load_config(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train.epochs": 2},
            "give exactly one of train.steps and train.epochs (train.steps is 10 and train.epochs 2); "
            "set the other to null",
        ),
        ({"train.steps": None}, "give exactly one of train.steps and train.epochs (neither is); set the other to null"),
        (
            {"train.global_batch": 6, "train.micro_batch": 4},
            "train.global_batch 6 is not a multiple of train.micro_batch 4; use a micro_batch of 1, 2, 3, 6",
        ),
        (
            {"train.micro_batch": 2},
            "train.global_batch 1 is not a multiple of train.micro_batch 2; use a micro_batch of 1",
        ),
        (
            {"train.method": "full", "lora.targets": ["q"]},
            "lora.targets has no effect with train.method=full; use train.modules or train.method=lora",
        ),
        (
            {"objective.preset": "diffsynth", "objective.shift": 3.0},
            "objective.shift: 3.0 has no effect with objective.preset=diffsynth; leave it out, or set objective.preset=null",
        ),
        (
            {"objective.index_range": [0.0, 0.4]},
            "objective.index_range: counts places of a grid; set objective.preset, or use sigma_range",
        ),
        (
            {"objective.preset": "diffsynth", "objective.index_range": [0.1, 0.1005]},
            "objective.index_range: [0.1, 0.1005] holds none of the 1000 places; widen it",
        ),
    ],
)
def test_options_that_contradict_one_another_are_refused_with_the_fix(
    load: Loader, changes: dict[str, Any], message: str
) -> None:
    assert load.refusal(changes) == message


@pytest.mark.parametrize(
    "changes",
    [
        {"train.steps": None, "train.epochs": 2},
        {"train.global_batch": 6, "train.micro_batch": 3},
        {"train.warmup_steps": 10},
        {"train.method": "full"},
        {"lora.targets": ["q"]},
        {"model.dtype": "float32"},
        {"objective.sigma_range": [0, 1]},
        {"objective.sigma_range": [0.25, 0.5]},
        {"objective.preset": "diffsynth", "objective.index_range": [0.0, 0.358]},
    ],
)
def test_neighbours_of_refused_combinations_are_accepted(load: Loader, changes: dict[str, Any]) -> None:
    config = load.changed(changes)
    for name, value in changes.items():
        found = _value(config, name)
        assert (list(found) if isinstance(found, tuple) else found) == value


@pytest.mark.parametrize(
    "value", [[0.5, 0.5], [0.6, 0.5], [-0.1, 1], [0, 1.1], [0, float("nan")], [0.5], [0.1, 0.5, 0.9], 0.5, None]
)
def test_noise_range_that_is_no_range_is_refused_by_name(load: Loader, value: Any) -> None:
    message = load.refusal({"objective.sigma_range": value})
    assert message.startswith("objective.sigma_range")
    assert "Tuple" not in message
