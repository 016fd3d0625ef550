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

from flowshard.config import Config, GroupConfig, PromptConfig, SourceConfig
from flowshard.config_conflicts import check_conflicts
from flowshard.errors import UserError

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
