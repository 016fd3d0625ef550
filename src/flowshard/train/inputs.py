"""Checks everything that can be checked before torch is imported and before a weight is read."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowshard.config import Config
from flowshard.data.metadata import Metadata
from flowshard.data.sizes import run_size, smallest
from flowshard.data.sources import RunData
from flowshard.errors import UserError
from flowshard.families import Family, Variant, find_variant
from flowshard.objective.presets import DIFFSYNTH
from flowshard.parallel.deepspeed_config import check_deepspeed, deepspeed_config
from flowshard.parallel.layout import Layout, check_heads, resolve_layout
from flowshard.patterns import matches, select
from flowshard.train.checkpoint import Checkpoint, check_resumable, find_checkpoint
from flowshard.train.data_inputs import check_batches, check_input_dropout, read_samples
from flowshard.train.sample_inputs import SampleInputs, check_samples
from flowshard.train.trackers import check_trackers
from flowshard.weights.files import (
    TensorInfo,
    check_spec,
)
from flowshard.weights.lora_files import LoraFile, adapted_layers, read_lora
from flowshard.weights.source import ModelSource, OwnFiles, find_source, recognise_variant


@dataclass(frozen=True)
class RunInputs:
    """The checked input of a run."""

    config: Config
    family: Family
    variant: Variant
    recognised: bool
    """Whether the variant was found out and not given."""
    source: ModelSource
    """The model's files."""
    tensors: dict[str, TensorInfo]
    """The transformer's tensors in the files."""
    adapted: list[str]
    """Modules that get an adapter; empty for full training."""
    trained: list[str]
    """Base parameters that are trained."""
    init_from: LoraFile | None
    """Where adapters get their values."""
    presets: tuple[LoraFile, ...]
    """LoRAs that are added to the weights."""
    data: RunData
    """The samples."""
    layout: Layout
    shift: float
    """Sigma shift, resolved."""
    guidance: float | None
    """What guidance-distilled models get as an input; None for others."""
    steps: int
    samples: int
    """Samples of an epoch."""
    checkpoint: Checkpoint | None
    """What the run goes on from."""
    changes: tuple[str, ...]
    """Lines about what has changed since then."""
    sampling: SampleInputs | None
    """What is made during training."""

    @property
    def transformer_config(self) -> Mapping[str, Any]:
        """The transformer's, in diffusers' terms."""
        return self.source.config


def check_inputs(config: Config, environment: Mapping[str, str] | None = None) -> RunInputs:
    """Find what is wrong with a run's input within moments.

    Args:
        config: of the run.
        environment: what the launcher set; the process's own if None.

    Raises:
        UserError: the message names option, file or row, the value, and the fix.
    """
    recognised = config.model.variant is None
    config, family, variant = with_variant(config)
    config = with_expert(config, variant)
    if config.model.extend is not None:
        check_spec(config.model.extend, option="model.extend")
    layout = resolve_layout(config, environment)
    if config.memory.compile is True and layout.strategy == "zero3":
        raise UserError(
            "memory.compile: true, but zero3 gathers parameters between the layers of a block, where compiled code would end; "
            "set memory.compile=auto or false, or layout.strategy=fsdp2, which gathers whole blocks"
        )
    if config.model.frozen_dtype == "nf4" and find_spec("bitsandbytes") is None:
        raise UserError(
            "model.frozen_dtype: 'nf4' needs bitsandbytes, which is not installed; run `pip install 'flowshard[nf4]'`, or use "
            "int8 or float8"
        )
    if layout.strategy.startswith("zero"):
        check_deepspeed(config, layout)
        deepspeed_config(config, layout)  # for its errors
    config, samples = read_samples(config, family)
    data, metadata = config.data, samples.training
    check_batches(config, family, metadata)
    check_input_dropout(config, family, variant, metadata)
    sampling = check_samples(config, family, variant, layout)
    source = find_source(
        config.model.path,
        family,
        variant,
        option="model.path",
        expert=config.model.expert,
        # Else it depends on whether there is something left to encode.
        encoders=config.cache_folder is None or sampling is not None,
        own=OwnFiles.of(config.model),
    )
    whole = dict(source.tensors)
    tensors = _shortened(whole, family, source, config.model.layers)
    for rows in filter(None, (metadata, samples.held_out)):
        _check_sequence(config, layout, family, variant, rows, source)
    layers = adapted_layers((name, info.shape) for name, info in whole.items())
    presets = tuple(
        _only(read_lora(Path(file), layers, family.names, option="lora.preset"), tensors) for file in config.lora.preset
    )
    init = None
    if config.lora.init_from is not None:
        init = _only(read_lora(Path(config.lora.init_from), layers, family.names, option="lora.init_from"), tensors)
    adapted, trained = select_trained(config, family, tensors, init)
    _check_groups(config, adapted, trained)
    checkpoint = find_checkpoint(config)
    changes = () if checkpoint is None else tuple(check_resumable(checkpoint, config, metadata))
    check_trackers(config.log.trackers)
    check_writable(Path(config.output), option="output")
    if config.cache_folder is not None:
        check_writable(config.cache_folder, option="data.cache")
    epoch = len(metadata.epoch) * data.repeat
    steps = count_steps(config, epoch)
    if config.train.warmup_steps > steps:
        raise UserError(
            f"train.warmup_steps: {config.train.warmup_steps} exceeds the {steps} steps of the run; lower it"
        )
    shift = config.objective.shift
    if config.objective.preset is not None:
        grid = DIFFSYNTH.get(family.name)
        if grid is None:
            raise UserError(
                f"objective.preset: there is no grid of {family.name}, only of {', '.join(DIFFSYNTH)}; set it to null"
            )
        shift = grid.shift
    elif shift == "auto":
        shift = family.shift(source.scheduler, family.token_count(*run_size(data, family), data.frames))
    return RunInputs(
        config=config,
        family=family,
        variant=variant,
        recognised=recognised,
        source=source,
        tensors=tensors,
        adapted=adapted,
        trained=trained,
        init_from=init,
        presets=presets,
        data=samples,
        layout=layout,
        shift=shift,
        guidance=_guidance(config, family, source),
        steps=steps,
        samples=epoch,
        checkpoint=checkpoint,
        changes=changes,
        sampling=sampling,
    )


def with_variant(config: Config) -> tuple[Config, Family, Variant]:
    """The config with its variant, which is recognised by the model's files if it is not given.

    Raises:
        UserError: the variant is unknown or cannot be told.
    """
    name = config.model.variant
    if name is None:
        name = recognise_variant(config.model.path, option="model.path", variant_option="model.variant")
        config = config.model_copy(update={"model": config.model.model_copy(update={"variant": name})})
    return config, *find_variant(name, option="model.variant")


def with_expert(config: Config, variant: Variant) -> Config:
    """The config with the range of sigma of the expert that is trained.

    Raises:
        UserError: the variant has experts and none is chosen, or the other way round, or the range is not the expert's.
    """
    expert, objective = config.model.expert, config.objective
    if variant.experts is None:
        if expert is not None:
            raise UserError(
                f"model.expert: {expert!r}, but {variant.name} has one transformer only; set model.expert=null"
            )
        return config
    if expert is None:
        ranges = " or ".join(f"{name} (sigma {low:g} to {high:g})" for name, (low, high) in variant.experts.items())
        raise UserError(f"model.expert: {variant.name} has two transformers; set model.expert to {ranges}")
    if objective.preset is not None:  # which says the range by the places of its grid
        return config
    low, high = variant.experts[expert]
    if objective.sigma_range == (0.0, 1.0):
        objective = objective.model_copy(update={"sigma_range": (low, high)})
    elif not low <= objective.sigma_range[0] < objective.sigma_range[1] <= high:
        first, last = objective.sigma_range
        raise UserError(
            f"objective.sigma_range: [{first:g}, {last:g}] is not inside [{low:g}, {high:g}], for which the {expert} expert "
            "of the model is; change it or model.expert"
        )
    return config.model_copy(update={"objective": objective})


def check_writable(folder: Path, *, option: str) -> None:
    """Refuse a folder in which nothing can be created.

    Raises:
        UserError: naming `option` and the part of the path that is in the way.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{option}: {existing} is a file; choose another folder than {folder}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{option}: {folder} is not writable (no permission in {existing}); choose another folder")


def _shortened(
    tensors: dict[str, TensorInfo], family: Family, source: ModelSource, layers: int | None
) -> dict[str, TensorInfo]:
    """The tensors without those of the blocks beyond the first `layers`."""
    if layers is None:
        return tensors
    kept_config = family.shortened(source.config, layers)
    counts = {
        blocks: value if isinstance(value := kept_config[key], int) else len(value)
        for blocks, key in family.block_lists.items()
    }
    beyond = re.compile(rf"({'|'.join(map(re.escape, family.block_lists))})\.(\d+)\.")
    kept = {}
    for name, info in tensors.items():
        found = beyond.match(name)
        if found is None or int(found[2]) < counts[found[1]]:
            kept[name] = info
    return kept


def count_steps(config: Config, samples: int) -> int:
    """Optimizer updates of the run, with so many samples an epoch."""
    epochs = config.train.epochs
    steps = config.train.steps if epochs is None else -(-epochs * samples // config.train.global_batch)
    assert steps is not None  # noqa: S101 - load_config has seen to exactly one of steps and epochs
    return steps


def is_save_due(config: Config, samples: int, step: int) -> bool:
    """Whether a checkpoint is saved after so many updates, the last one apart; an epoch has so many samples."""
    save = config.save
    passes = completed_epochs(config, samples, step) if save.every_epochs else range(0)
    return (save.every > 0 and step % save.every == 0) or any((done + 1) % save.every_epochs == 0 for done in passes)


def completed_epochs(config: Config, samples: int, step: int) -> range:
    """The passes over the data, from 0, whose last sample was in the last of so many updates."""
    batch = config.train.global_batch
    return range((step - 1) * batch // samples, step * batch // samples)


def _check_sequence(
    config: Config, layout: Layout, family: Family, variant: Variant, metadata: Metadata, source: ModelSource
) -> None:
    """Refuse to share a sample among more processes than it has tokens, or heads that cannot be shared."""
    if layout.sequence == 1:
        return
    check_heads(layout, source.config.get(family.heads_setting, variant.heads))
    data = config.data
    pictures = any(row.is_picture for row in metadata.rows)
    shortest = 1 if pictures or data.short == "trim" else data.frames
    own = [row.size for row in metadata.rows if row.size is not None]
    height, width = smallest(own) if own else run_size(data, family)
    tokens = family.token_count(height, width, shortest)
    if tokens < layout.sequence:
        raise UserError(
            f"layout.sequence: {layout.sequence} processes cannot share a sample of {tokens} tokens "
            f"({width}x{height}{f', {shortest} frame' if shortest < data.frames else ''}); use at most {tokens}"
        )


def _guidance(config: Config, family: Family, source: ModelSource) -> float | None:
    """The guidance value of the run. 1 by default: what is learned is the data, without more contrast than it has."""
    asked = config.objective.guidance
    if family.takes_guidance(source.config):
        return 1.0 if asked == "auto" else asked
    if asked != "auto":
        raise UserError(
            f"objective.guidance: {asked:g}, but {source.label} is not guidance-distilled and takes no such value; set "
            "objective.guidance=auto"
        )
    return None


def _only(file: LoraFile, tensors: dict[str, TensorInfo]) -> LoraFile:
    """The file without layers of blocks that `model.layers` leaves out."""
    return replace(file, layers=tuple(layer for layer in file.layers if f"{layer.name}.weight" in tensors))


def select_trained(
    config: Config, family: Family, tensors: dict[str, TensorInfo], init: LoraFile | None
) -> tuple[list[str], list[str]]:
    """The modules with an adapter and the base parameters that are trained, in the order of the files.

    Args:
        config: of the run.
        family: of the model.
        tensors: of the transformer, of which only names and shapes are looked at.
        init: where adapters get their values.

    Raises:
        UserError: a pattern matches nothing, or what is selected contradicts itself.
    """
    patterns = config.train.modules
    if config.model.extend is None:
        trained = select(tensors, patterns, option="train.modules")
    else:  # patterns may be meant for modules that are not there yet; they are checked when they are
        trained = [name for name in tensors if any(matches(name, pattern) for pattern in patterns)]
    if config.train.method == "full":
        return [], trained if patterns else list(tensors)
    layers = list(adapted_layers((name, info.shape) for name, info in tensors.items()))
    if init is not None and config.lora.targets is None:
        adapted = [layer.name for layer in init.layers]
    else:
        adapted = select(layers, family.resolve_targets(config.lora.targets), option="lora.targets", at_end=True)
    if init is not None:
        _check_init(config, init, adapted)
    both = [name for name in adapted if f"{name}.weight" in trained]
    if both:
        raise UserError(
            f"train.modules: {', '.join(both[:4])} would be trained in full and have an adapter as well; take "
            "them out of train.modules or lora.targets"
        )
    return adapted, trained


def _check_init(config: Config, init: LoraFile, adapted: list[str]) -> None:
    if init.rank != config.lora.rank:
        found = "layers of several ranks" if init.rank is None else f"rank {init.rank}"
        fix = "give a file of one rank" if init.rank is None else f"set lora.rank={init.rank}"
        raise UserError(f"lora.rank: {config.lora.rank}, but {init.path} has {found}; {fix}")
    left = [layer.name for layer in init.layers if layer.name not in adapted]
    if left:
        raise UserError(
            f"lora.targets: leaves out {', '.join(left[:4])}, which {init.path} has; add them, or set lora.targets=null"
        )


def _check_groups(config: Config, adapted: list[str], trained: list[str]) -> None:
    names = [*trained, *(f"{name}.lora_{factor}.weight" for name in adapted for factor in "AB")]
    if config.model.extend is not None:
        return  # groups may be meant for modules that are not there yet
    for index, group in enumerate(config.train.groups):
        if not any(matches(name, group.pattern) for name in names):
            select(names, [group.pattern], option=f"train.groups.{index}.pattern")
