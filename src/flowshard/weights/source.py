"""Where a model's parts are: a diffusers folder, or the publisher's own files. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowshard.config import ModelConfig
from flowshard.errors import UserError
from flowshard.families import all_families, families_of_pipeline, find_variant
from flowshard.families.base import Family
from flowshard.families.variant import Variant
from flowshard.weights.files import (
    LOW_EXPERT_FOLDER,
    TRANSFORMER_FOLDER,
    TensorInfo,
    check_pipeline,
    check_pipeline_class,
    find_pipeline,
    read_headers,
    read_json,
    scheduler_settings,
)
from flowshard.weights.original import (
    find_original_encoders,
    is_transformer_file,
    other_kind_message,
    read_original,
    recognise_files,
)
from flowshard.weights.overlay import with_weights
from flowshard.weights.places import all_of, is_original, label


@dataclass(frozen=True)
class ModelSource:
    """The files of a model."""

    label: str
    """For messages."""
    folder: Path | None
    """Of a pipeline in the diffusers layout; None for the publisher's files."""
    parts: Mapping[str, Path]
    """Encoders and tokenizer by diffusers' component name: a folder, or the publisher's file."""
    tensors: Mapping[str, TensorInfo]
    """The transformer's, in diffusers' names."""
    config: Mapping[str, Any]
    """The transformer's, in diffusers' terms."""
    scheduler: Mapping[str, Any]
    """Settings of the scheduler in diffusers' terms, the sigma shift among them."""
    transformer_folder: str = TRANSFORMER_FOLDER
    """Name of the transformer's folder in a pipeline."""
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline that are no components, where no folder says them."""

    def check_parts(self, components: Sequence[str], *, option: str, wanted: str = "") -> None:
        """Refuse a model that lacks one of these components.

        Args:
            components: their names.
            option: names the option of the path in messages.
            wanted: what they are needed for, if that is not plain.

        Raises:
            UserError: naming what is missing.
        """
        missing = [name for name in components if not (name in self.parts and self.parts[name].exists())]
        if missing:
            raise UserError(f"{option}: {self.label} lacks {', '.join(missing)}{wanted}; add what is missing")

    @property
    def transformer(self) -> Path:
        """Where the transformer's weights are, for messages."""
        return Path(self.label) if self.folder is None else self.folder / self.transformer_folder


@dataclass(frozen=True)
class OwnFiles:
    """Files besides those of a model's path."""

    parts: Mapping[str, str] = field(default_factory=dict)
    """`model.parts`."""
    weights: str | None = None
    """`model.weights`."""

    @classmethod
    def of(cls, model: ModelConfig) -> "OwnFiles":
        """Those of a config."""
        return cls(model.parts, model.weights)

    def places(self, family: Family) -> dict[str, Path]:
        """Where the parts are.

        Raises:
            UserError: the family has no such part, or it is not there.
        """
        for part, place in self.parts.items():
            if part not in family.original_parts:
                raise UserError(
                    f"model.parts: {family.name} has no part {part!r}; it has {', '.join(family.original_parts)}"
                )
            if not Path(place).exists():
                raise UserError(f"model.parts.{part}: {place} does not exist")
        return {part: Path(place) for part, place in self.parts.items()}


_NONE = OwnFiles()


def find_any_source(
    path: str, variant: str | None, *, option: str, expert: str | None = None, encoders: bool = True
) -> tuple[Family, Variant, ModelSource]:
    """`find_source`, for a model whose variant may have to be recognised.

    Raises:
        UserError: as there, or it cannot be told.
    """
    name = recognise_variant(path, option=option, variant_option="--variant") if variant is None else variant
    family, row = find_variant(name, option="--variant")
    return family, row, find_source(path, family, row, option=option, expert=expert, encoders=encoders)


def recognise_variant(
    path: str | Sequence[str], *, option: str, variant_option: str, own_schedule: bool = False
) -> str:
    """The variant that a model's files hold, by pipeline or tensors, heads, settings, and names of folders and files.

    Of variants that are alike in all but their weights it is the first, unless the path has the name of another.

    Args:
        path: as for `find_source`.
        option: names the option of the path in messages.
        variant_option: names the option with which the user says it.
        own_schedule: whether what is done has a sigma shift of its own, so that variants may differ in theirs.

    Raises:
        UserError: it cannot be told; the message lists what it might be.
    """
    candidates: list[tuple[Family, Variant, Mapping[str, Any]]] = []
    if isinstance(path, str) and not is_original(path):
        folder = find_pipeline(path, option=option)
        name = read_json(folder / "model_index.json").get("_class_name")
        families = families_of_pipeline(str(name))
        if not families:
            known = ", ".join(dict.fromkeys(one.pipeline_class for one in all_families()))
            raise UserError(f"{option}: {folder} holds a {name}, which is none of {known}; give another model")
        files = ("model_index.json", f"{TRANSFORMER_FOLDER}/config.json", "scheduler/scheduler_config.json")
        settings: dict[str, Any] = {}
        for file in files:
            settings |= read_json(folder / file) if (folder / file).is_file() else {}
        candidates = [
            (family, variant, settings)
            for family in families
            for variant in family.variants.values()
            if (variant.experts is not None) == _has_low_expert(folder)
        ]
    else:
        candidates = recognise_files(path, option)
    fitting = [(family, one) for family, one, config in candidates if _fits(family, one, config)]
    found = [one for _, one in fitting]
    others = [message for family, _, config in candidates if (message := other_kind_message(family, config))]
    if others and not found:
        raise UserError(f"{option}: {path}: {others[0]}")
    names = _names_in([path] if isinstance(path, str) else _of_transformer(path, option))
    named = [one for one in found if short_name(Path(one.hub_id).name) in names]
    alike = len({family for family, _ in fitting}) == 1 and all(
        _is_alike(one, found[0], own_schedule=own_schedule) for one in found
    )
    if named or alike:
        return (named or found)[0].name
    possible = [one.name for one in found or [one for _, one, _ in candidates]]
    possible = possible or [name for family in all_families() for name in family.variants]
    raise UserError(f"{variant_option}: cannot tell what {path} is; set one of {', '.join(possible)}")


def _of_transformer(paths: Sequence[str], option: str) -> Sequence[str]:
    """The entries of a list that hold the transformer: encoders may come from the repository of another model."""
    own = [path for path in paths if any(one.is_dir() or is_transformer_file(one) for one in all_of(path, option))]
    return own or paths


def _names_in(paths: Sequence[str]) -> set[str]:
    """The names of folders, repositories and files in paths, and of the weights in a folder."""
    parts = [part for path in paths for part in Path(path.replace(":", "/")).parts]
    parts += [file.name for path in paths if Path(path).is_dir() for file in Path(path).glob("*.safetensors")]
    return {short_name(part.removesuffix(".safetensors")) for part in parts}


def short_name(name: str) -> str:
    """A model's name in letters and digits: its repository has one more in diffusers' layout, its file no dot."""
    return "".join(filter(str.isalnum, name.lower().removesuffix("-diffusers")))


def _fits(family: Family, variant: Variant, settings: Mapping[str, Any]) -> bool:
    """Whether a model with these settings can be the variant."""
    # A number that the files do not say, such as the shift of a scheduler, excludes nothing.
    known = all(
        settings.get(key, False if isinstance(value, bool) else value) == value
        for key, value in variant.known_by.items()
    )
    heads = bool(settings.get(family.heads_setting, variant.heads) == variant.heads)
    return known and heads and family.foreign_mark(settings) is None


def _is_alike(one: Variant, other: Variant, *, own_schedule: bool) -> bool:
    """Whether two variants differ in nothing but their weights and how they are best sampled: either name will do."""
    if own_schedule:
        one = replace(one, scheduler=other.scheduler)
    return replace(one, name=other.name, hub_id=other.hub_id, sampling=other.sampling) == other


def find_source(
    path: str | Sequence[str],
    family: Family,
    variant: Variant,
    *,
    option: str,
    expert: str | None = None,
    encoders: bool = True,
    own: OwnFiles = _NONE,
) -> ModelSource:
    """Find and check a model's files; no tensor is read.

    Args:
        path: a diffusers folder, a hub id, a folder of the publisher's files, or a list of files, globs, folders and
            `REPOSITORY:PATTERN`.
        family: of the model.
        variant: whose table has what the files do not say.
        option: names the option in messages.
        expert: which transformer of a model with two, `high` or `low`.
        encoders: whether it is an error if encoders are missing; else `parts` may be without them, or name what is not
            there.
        own: files besides those of `path`.

    Raises:
        UserError: something is missing or broken; the message names it.
    """
    source = _find_source(path, family, variant, option=option, expert=expert, encoders=encoders, own=own)
    if own.weights is None:
        return source
    return replace(source, tensors=with_weights(source.tensors, Path(own.weights), family, option="model.weights"))


def _find_source(
    path: str | Sequence[str],
    family: Family,
    variant: Variant,
    *,
    option: str,
    expert: str | None,
    encoders: bool,
    own: OwnFiles,
) -> ModelSource:
    """`find_source` without the weights of `own`."""
    if isinstance(path, str) and not is_original(path):
        folder = find_pipeline(path, option=option)
        _refuse_parts(own, folder)
        transformer = LOW_EXPERT_FOLDER if expert == "low" else TRANSFORMER_FOLDER
        check_pipeline(folder, family, option=option, transformer=transformer)
        config = read_json(folder / transformer / "config.json")
        mark = family.foreign_mark(config)
        if mark is not None:
            fix = other_kind_message(family, config) or "give the right folder or change model.variant"
            raise UserError(
                f"{option}: {folder / transformer} has {mark} {config.get(mark)}, which {variant.name} has not; {fix}"
            )
        if _has_low_expert(folder) != (variant.experts is not None):
            found, wanted = ("two transformers", "one") if variant.experts is None else ("one transformer", "two")
            raise UserError(
                f"{option}: {folder} has {found}, {variant.name} has {wanted}; give the right folder or change model.variant"
            )
        source = _without_transformer(folder, family, variant)
        if encoders:
            source.check_parts([*source.parts], option=option)
        return replace(
            source,
            tensors=read_headers(folder / transformer),
            config=config,
            transformer_folder=transformer,
        )
    files = read_original(
        path, family, variant, option=option, expert=expert, encoders=encoders, own=own.places(family)
    )
    return ModelSource(
        label=label(path),
        folder=None,
        parts=files.parts,
        tensors=files.tensors,
        config=files.config,
        scheduler=variant.scheduler,
        pipeline=family.pipeline_settings(variant),
    )


def _refuse_parts(own: OwnFiles, folder: Path) -> None:
    if own.parts:
        raise UserError(
            f"model.parts: {folder} is a pipeline in the diffusers layout, which has its parts; set model.parts={{}}"
        )


def find_encoders(
    path: str | Sequence[str], family: Family, variant: Variant, *, option: str, own: OwnFiles = _NONE
) -> ModelSource:
    """Find and check what a model encodes samples with; the transformer need not be there.

    Args:
        path: as for `find_source`.
        family: of the model.
        variant: of the family.
        option: names the option in messages.
        own: files besides those of `path`.

    Raises:
        UserError: something is missing; the message names it.
    """
    if isinstance(path, str) and not is_original(path):
        folder = find_pipeline(path, option=option)
        _refuse_parts(own, folder)
        check_pipeline_class(folder, family, option=option)
        source = _without_transformer(folder, family, variant)
        source.check_parts([*source.parts], option=option)
        return source
    return ModelSource(
        label=label(path),
        folder=None,
        parts=find_original_encoders(path, family, variant, option=option, own=own.places(family)),
        tensors={},
        config={},
        scheduler=variant.scheduler,
        pipeline=family.pipeline_settings(variant),
    )


def _without_transformer(folder: Path, family: Family, variant: Variant) -> ModelSource:
    """What a folder in the diffusers layout has besides the transformer."""
    components = dict.fromkeys((*family.media_components, *family.text_components))
    return ModelSource(
        label=str(folder),
        folder=folder,
        parts={name: folder / name for name in components},
        tensors={},
        config={},
        scheduler=scheduler_settings(folder, variant.scheduler),
    )


def _has_low_expert(folder: Path) -> bool:
    return (folder / LOW_EXPERT_FOLDER / "config.json").is_file()
