"""What `flowshard plan` is asked, checked; neither weights nor data need to be there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowshard.config import Config
from flowshard.config_conflicts import from_cache
from flowshard.config_file import load_config
from flowshard.data.cached_sets import find_set
from flowshard.data.sizes import check_budget, run_size
from flowshard.errors import UserError
from flowshard.families import Family, Variant
from flowshard.families.variant import Size
from flowshard.parallel.layout import Layout, divisors
from flowshard.plan.hardware import DEFAULT, Hardware, find_hardware, parse_bytes
from flowshard.train.inputs import with_expert, with_variant
from flowshard.weights.files import LOW_EXPERT_FOLDER, TRANSFORMER_FOLDER, read_json
from flowshard.weights.lora_files import LoraFile
from flowshard.weights.places import is_original
from flowshard.weights.source import find_source


@dataclass(frozen=True)
class PlanOptions:
    """The command line."""

    config: Path
    overrides: Sequence[str]
    devices: int
    nodes: int
    device: str | None
    device_memory: str | None
    text_tokens: int | None
    references: int | None


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made of."""

    config: Config
    family: Family
    variant: Variant
    transformer_config: Mapping[str, Any]
    adapted: list[str]
    trained: list[str]
    init_from: LoraFile | None
    layout: Layout
    """Some; a plan is made for many."""


@dataclass(frozen=True)
class Question:
    """Checked options."""

    config: Config
    family: Family
    variant: Variant
    settings: Mapping[str, Any]
    """The transformer's config, without the defaults of its class."""
    known_from: str
    """Where from."""
    size: Size
    """Of a sample."""
    devices: int
    nodes: int
    hardware: Hardware
    memory: int
    """Bytes of a device."""
    text_tokens: int
    pictures: int
    """For each input of a sample that is pictures."""


def check_plan(options: PlanOptions) -> Question:
    """Check all that can be checked without torch.

    Raises:
        UserError: the message names the option, its value and the fix.
    """
    for name in ("devices", "nodes"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name}: {getattr(options, name)} is not at least 1")
    if options.devices % options.nodes:
        raise UserError(
            f"--nodes: {options.devices} devices cannot be divided among {options.nodes} machines; use one of "
            f"{', '.join(map(str, divisors(options.devices)))}"
        )
    hardware = find_hardware(options.device or DEFAULT)
    memory = int(hardware.memory)
    if options.device_memory is not None:
        memory = parse_bytes(options.device_memory, option="--device-memory")
    config = load_config(options.config, options.overrides)
    here = _is_here(config.model.path)
    if config.model.variant is None and not here:
        raise UserError(f"model.variant: {config.model.path} is not here to be recognised; set model.variant")
    config, family, variant = with_variant(config)
    config = with_expert(config, variant)
    if from_cache(config.data):
        config, _ = find_set(config, family)
    check_budget(config.data, family)
    size = Size(*run_size(config.data, family), config.data.frames)
    family.check_size(*size, where="data.")
    settings, known_from = _transformer(config, family, variant)
    return Question(
        config=config,
        family=family,
        variant=variant,
        settings=settings,
        known_from=known_from,
        size=size,
        devices=options.devices,
        nodes=options.nodes,
        hardware=hardware,
        memory=memory,
        text_tokens=_text_tokens(options.text_tokens, family),
        pictures=_pictures(options.references, family),
    )


def _is_here(path: str | list[str]) -> bool:
    return not isinstance(path, str) or Path(path).exists()


def _transformer(config: Config, family: Family, variant: Variant) -> tuple[Mapping[str, Any], str]:
    """The transformer's config from the model's files if they are here, else from the table of variants."""
    path = config.model.path
    folder = LOW_EXPERT_FOLDER if config.model.expert == "low" else TRANSFORMER_FOLDER
    if isinstance(path, str) and not is_original(path):
        file = Path(path) / folder / "config.json"
        if not file.is_file():
            return variant.transformer, f"the published sizes of {variant.name}"
        settings = read_json(file)
        mark = family.foreign_mark(settings)
        if mark is not None:
            raise UserError(
                f"model.path: {file} has {mark} {settings.get(mark)}, which {variant.name} has not; give the right folder or "
                "change model.variant"
            )
        return settings, str(file)
    source = find_source(path, family, variant, option="model.path", expert=config.model.expert, encoders=False)
    return source.config, source.label


def _text_tokens(asked: int | None, family: Family) -> int:
    longest = getattr(family, "text_tokens", 0)
    if asked is None:
        return longest
    if family.pads_text and asked != longest:
        raise UserError(f"--text-tokens: {family.name} pads every prompt to {longest} tokens; leave the option out")
    if not 1 <= asked <= longest:
        raise UserError(f"--text-tokens: {asked} is not between 1 and {longest}, the most that {family.name} takes")
    return asked


def _pictures(asked: int | None, family: Family) -> int:
    kinds = [one for one in family.inputs if one.kind == "images"]
    if asked is None:
        return int(any(one.required for one in kinds))
    if asked and not kinds:
        raise UserError(f"--references: {asked}, but {family.name} takes no reference pictures; leave the option out")
    if asked < int(any(one.required for one in kinds)) or (asked > 1 and not any(one.several for one in kinds)):
        raise UserError(f"--references: {asked} is not a number of reference pictures that {family.name} takes; use 1")
    return asked


def with_layout(config: Config, **changes: Any) -> Config:
    """The config with other values in its section `layout`."""
    return config.model_copy(update={"layout": config.layout.model_copy(update=changes)})
