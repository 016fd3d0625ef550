"""From a YAML file and dotted overrides to a checked `Config`; and back to text."""

import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flowshard.config import (
    Config,
    DataConfig,
    GroupConfig,
    MemoryConfig,
    ObjectiveConfig,
    PromptConfig,
    SourceConfig,
)
from flowshard.errors import UserError
from flowshard.objective.presets import PLACES

_LISTS: dict[str, type[BaseModel]] = {
    "train.groups": GroupConfig,
    "data.sources": SourceConfig,
    "validation.prompts": PromptConfig,
}
"""Options that are lists of groups of options."""
_EXAMPLES = {
    "train.groups": "[{pattern: lora_B, weight_decay: 0}]",
    "data.sources": "[{metadata: a.csv, weight: 2}]",
    "validation.prompts": "[a fox, {prompt: a dog, seed: 1}]",
}
RECORD_KEY = "record"
"""The key of a run's `config.yaml` under which versions, layout and git state are noted; ignored when read back."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `a.b=value` overrides and check the result.

    Raises:
        UserError: the file cannot be read, an option does not exist or its value is wrong, or two options conflict.
    """
    return config_of(_read_yaml(Path(path)), overrides)


def config_of(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, for options that were read already; overrides change `tree`."""
    tree.pop(RECORD_KEY, None)
    for override in overrides:
        apply_override(tree, override)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(_explain(error)) from None
    check_conflicts(config)
    return config


def dump_config(config: Config, record: Mapping[str, Any]) -> str:
    """The resolved config as YAML that `load_config` reads, with `record` beside it."""
    tree = json.loads(config.model_dump_json())
    return yaml.safe_dump({**tree, RECORD_KEY: dict(record)}, sort_keys=False, allow_unicode=True, width=120)


def options(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All options in the order of the schema, as (dotted name, field)."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from options(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def describe_options(width: int) -> str:
    """Every option with its type, default and description, as text for `--help`."""
    lines = ["options of the config (also as a.b=value):", ""]
    section = None
    for name, field in options():
        head = name.rpartition(".")[0]
        if head != section:
            section = head
            model = Config.model_fields[head].annotation if head else None
            lines += ["", f"{head}: {(model.__doc__ or '').strip()}"] if model is not None else []
        default = (
            "required" if field.is_required() else f"default {_show(field.get_default(call_default_factory=True))}"
        )
        lines.append(f"  {name} ({_type_name(field.annotation)}; {default})")
        text = " ".join((field.description or "").split())
        lines += textwrap.wrap(text, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _type_name(annotation: Any) -> str:
    """A type as a user writes it: `int or 'auto'`."""
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Literal:
        return ", ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type_name(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (list, tuple, dict):
        inner = ", ".join(_type_name(choice) for choice in get_args(annotation))
        return f"{get_origin(annotation).__name__} of {inner}"
    names = {str: "text", bool: "true or false"}
    names.update((model, f"{{{', '.join(model.model_fields)}}}") for model in _LISTS.values())
    return names.get(annotation) or str(getattr(annotation, "__name__", annotation))


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, of which YAML would silently keep the last."""


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key is plain text", key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


# `1e-8` is a number, as in YAML 1.2; PyYAML, which follows 1.1, takes it for text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    tree = _parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a config is a mapping of options such as `output: runs/name`")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Put the value of an `a.b=value` into a tree of options.

    Raises:
        UserError: it is not of that form, or there is no such option.
    """
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UserError(f"{override!r}: an override is written option=value, for example train.steps=10")
    fields = dict(options())
    if (inside := _list_of(name)) is not None:
        raise UserError(f"{name}: a list is overridden as a whole, as in {inside}={_EXAMPLES[inside]}")
    if name not in fields:
        raise UserError(_unknown_option(name))
    value = _parse_yaml(text, override)
    annotation = fields[name].annotation
    takes_text = annotation is str or (get_origin(annotation) in (Union, UnionType) and str in get_args(annotation))
    if takes_text and not isinstance(value, str | list | dict | None):
        value = text  # `output=007` names a folder, not the number 7; nor is `2024-01-31` a date
    *sections, leaf = name.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise UserError(f"{section}: a group of options, not a single value; override {override!r} does not fit")
    tree[leaf] = value


def _list_of(name: str) -> str | None:
    """The option that is a list and holds what has this name, if there is one."""
    return next((option for option in _LISTS if name.startswith(f"{option}.")), None)


def _unknown_option(name: str) -> str:
    known = [option for option, _ in options()]
    inside = [option for option in known if option.startswith(f"{name}.")]
    if inside:
        return f"{name}: a group of options; set one of {', '.join(inside)}"
    if (listed := _list_of(name)) is not None:
        known = [f"{name.rpartition('.')[0]}.{key}" for key in _LISTS[listed].model_fields]
    else:
        known += Config.model_fields
    # First the right leaf in the wrong section, for example `train.frames`.
    nearest = [option for option in known if option != name and option.split(".")[-1] == name.split(".")[-1]][:1]
    if not nearest:
        nearest = difflib.get_close_matches(name, [option for option in known if option != name], n=1, cutoff=0.6)
    advice = f"did you mean {nearest[0]}?" if nearest else "see `flowshard train --help` for all options"
    return f"{name}: unknown option; {advice}"


def _explain(error: ValidationError) -> str:
    """pydantic's findings as one line an option, each with name, value and fix.

    An option with several possible types gives one finding a type; those are joined.
    """
    names = {part for option, _ in options() for part in option.split(".")}
    names.update(key for model in _LISTS.values() for key in model.model_fields)
    reasons: dict[str, tuple[Any, list[str]]] = {}
    lines: list[str] = []
    for problem in error.errors():
        *inner, last = problem["loc"]
        parts = [part for part in inner if isinstance(part, int) or part in names]
        if isinstance(last, int) or last in names or problem["type"] == "extra_forbidden":
            parts.append(last)
        name = ".".join(map(str, parts))
        if problem["type"] == "invalid_key":
            lines.append(_unknown_option(_key(problem["input"])))
        elif problem["type"] == "extra_forbidden":
            lines.append(_unknown_option(name))
        elif problem["type"] == "missing":
            inside = next((of.model_fields for option, of in _LISTS.items() if name.startswith(f"{option}.")), None)
            field = dict(options()).get(name) if inside is None else inside.get(str(last))
            about = f" ({' '.join(field.description.split()).rstrip('.')})" if field and field.description else ""
            lines.append(f"{name}: this option must be given{about}")
        elif problem["type"] == "value_error":
            lines.append(f"{name}: {problem['ctx']['error']}")
        elif problem["type"] == "model_type":
            lines.append(f"{name}: a group of options such as {name}.{_first_option(name)}, not {problem['input']!r}")
        else:
            reason = problem["msg"].removeprefix("Input should be ").split(", unable")[0]
            if problem["type"] in ("too_long", "too_short"):
                reason = "of the right length"
            reasons.setdefault(name, (problem["input"], []))[1].append(reason)
    lines += [f"{name}: {_show(value)} is not {' or '.join(why)}" for name, (value, why) in reasons.items()]
    return "\n".join(lines)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else _show(key)


def _first_option(section: str) -> str:
    return next((name.split(".")[-1] for name, _ in options() if name.startswith(f"{section}.")), "pattern")


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)


def check_conflicts(config: Config) -> None:
    """Refuse what single fields cannot see: options that contradict one another.

    Raises:
        UserError: naming the options.
    """
    if config.memory.budget is not None and config.memory.activations != "auto":
        raise UserError(
            f"memory.budget: {config.memory.budget}, but only memory.activations=auto plans with it; set that, or "
            "memory.budget=null"
        )
    _check_overlap(config.memory)
    _check_parameters(config)
    _check_data(config.data, config.train.micro_batch)
    _check_preset(config.objective)
    train = config.train
    if (train.steps is None) == (train.epochs is None):
        state = "neither is" if train.steps is None else f"train.steps is {train.steps} and train.epochs {train.epochs}"
        raise UserError(f"give exactly one of train.steps and train.epochs ({state}); set the other to null")
    if train.global_batch % train.micro_batch:
        raise UserError(
            f"train.global_batch {train.global_batch} is not a multiple of train.micro_batch {train.micro_batch}; "
            f"use a micro_batch of {_divisors(train.global_batch)}"
        )
    validation = config.validation
    if validation.metadata is not None and validation.fraction is not None:
        raise UserError("give one of validation.metadata and validation.fraction; set the other to null")
    held_out = validation.metadata is not None or validation.fraction is not None
    if validation.every and not held_out and not validation.prompts:
        raise UserError(
            f"validation.every: {validation.every}, but there is nothing to validate with; set validation.fraction or "
            "validation.metadata for the loss on held-out samples, validation.prompts for samples, or validation.every=0"
        )
    if train.method == "full" and config.model.frozen_dtype is not None:
        raise UserError(
            f"model.frozen_dtype: {config.model.frozen_dtype!r} is for weights that are not trained; use train.method=lora, or "
            "model.frozen_dtype=null"
        )
    for option, given in (("lora.targets", config.lora.targets), ("lora.init_from", config.lora.init_from)):
        if train.method == "full" and given is not None:
            raise UserError(f"{option} has no effect with train.method=full; use train.modules or train.method=lora")


def _check_overlap(memory: MemoryConfig) -> None:
    """Refuse overlapping copies where no block makes any."""
    asked = memory.activations
    if not memory.offload_overlap or asked == "offload" or (isinstance(asked, dict) and "offload" in asked):
        return
    if asked == "auto":
        raise UserError(
            "memory.offload_overlap: true, but memory.activations=auto measures one block at a time, where nothing overlaps; "
            "set memory.activations=offload, or blocks by policy, or memory.offload_overlap=false"
        )
    raise UserError(
        f"memory.offload_overlap: true, but memory.activations is {asked if isinstance(asked, str) else dict(asked)}, which "
        "offloads no block; set memory.activations=offload, or memory.offload_overlap=false"
    )


def _check_parameters(config: Config) -> None:
    """Refuse weights in host memory for what needs them on the device."""
    if config.memory.parameters == "device":
        return
    if config.train.method == "full":
        raise UserError(
            "memory.parameters: host, but with train.method=full weights are trained, and those stay on the device; use "
            "train.method=lora, or layout.strategy=fsdp2 with layout.offload_parameters=true"
        )
    if config.memory.compile is True:
        raise UserError(
            "memory.parameters: host, but memory.compile is true, and compiled blocks expect the same weights at every step; "
            "set memory.compile=auto or false"
        )
    if config.model.frozen_dtype is not None:
        raise UserError(
            f"memory.parameters: host, but with model.frozen_dtype={config.model.frozen_dtype} frozen weights are no parameters "
            "that could be streamed; set one of the two to its default"
        )


def _check_preset(objective: ObjectiveConfig) -> None:
    """Refuse options that a preset takes the place of, and those that belong to one."""
    if objective.preset is None:
        if objective.index_range != (0.0, 1.0):
            raise UserError("objective.index_range: counts places of a grid; set objective.preset, or use sigma_range")
        return
    for name in ("sampling", "shift", "sigma_range", "weighting"):
        if getattr(objective, name) != ObjectiveConfig.model_fields[name].default:
            raise UserError(
                f"objective.{name}: {getattr(objective, name)!r} has no effect with objective.preset={objective.preset}; "
                "leave it out, or set objective.preset=null"
            )
    low, high = (int(bound * PLACES) for bound in objective.index_range)
    if low == high:
        raise UserError(
            f"objective.index_range: {list(objective.index_range)} holds none of the {PLACES} places; widen it"
        )


def from_cache(data: DataConfig) -> bool:
    """Whether samples come from a cache folder alone."""
    return data.metadata is None and not data.sources


def _check_data(data: DataConfig, micro_batch: int) -> None:
    if data.metadata is not None and data.sources:
        raise UserError(f"give one of data.metadata ({data.metadata!r}) and data.sources; set the other to null or []")
    cached = from_cache(data)
    if cached and data.cache in ("auto", "off"):
        raise UserError(
            "data.metadata: give data.metadata or data.sources, or set data.cache to a folder that `flowshard cache` has filled"
        )
    if data.cache_set is not None and not cached:
        raise UserError("data.cache_set has no effect with data.metadata or data.sources; set it to null")
    if data.root is not None and data.metadata is None:
        with_what = "without metadata" if cached else "with data.sources; give each source a root"
        raise UserError(f"data.root has no effect {with_what}")
    sides = [data.height, data.width]
    if data.max_pixels is not None and sides != [None, None]:
        raise UserError(
            f"give data.height and data.width, or data.max_pixels ({data.max_pixels}); set the others to null"
        )
    if None in sides and data.max_pixels is None and not (cached and sides == [None, None]):
        raise UserError(
            f"data.{'height' if data.height is None else 'width'}: give data.height and data.width, or data.max_pixels, with "
            "which every sample keeps its own size"
        )
    if data.bucket_step is not None and data.max_pixels is None and not cached:
        raise UserError("data.bucket_step has no effect without data.max_pixels; set it to null")
    if data.buckets == "auto" and data.cache == "off":
        raise UserError(
            "data.buckets: the shapes of samples are known from a cache; use another data.cache than off, or data.buckets=off"
        )
    if data.short == "trim" and micro_batch > 1 and data.buckets == "off":
        raise UserError(
            f"data.short: clips that are trimmed differ in length, but train.micro_batch {micro_batch} needs samples of one "
            "shape; use data.buckets=auto, train.micro_batch=1, or data.short=repeat or refuse"
        )
    if data.short == "trim" and data.cache == "off":
        raise UserError(
            "data.short: how long trimmed clips are is known from a cache, to plan memory with the longest; use another "
            "data.cache than off, or data.short=repeat or refuse"
        )
    if data.on_error == "skip" and data.cache == "off":
        raise UserError(
            "data.on_error: which media are skipped is known from a cache, before the first step; use another data.cache than "
            "off, or data.on_error=stop"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
