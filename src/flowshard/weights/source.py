"""Where a model's parts are: a diffusers folder, or the publisher's own files. Needs no torch."""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from flowshard.errors import UserError
from flowshard.families import all_families, families_of_pipeline, find_variant
from flowshard.families.base import Family, Variant
from flowshard.weights.files import (
    LOW_EXPERT_FOLDER,
    TRANSFORMER_FOLDER,
    TensorInfo,
    check_pipeline,
    download,
    find_pipeline,
    read_header,
    read_headers,
    read_json,
    scheduler_settings,
)

_REPOSITORY_FILES = re.compile(r"(?P<id>[\w.-]+/[\w.-]+):(?P<pattern>.+)")
_WRAPPERS = ("model.diffusion_model.", "diffusion_model.", "pipe.dit.")
"""Prefixes of single files that hold the transformer as a part of something."""


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

    @property
    def transformer(self) -> Path:
        """Where the transformer's weights are, for messages."""
        return Path(self.label) if self.folder is None else self.folder / self.transformer_folder


def find_any_source(
    path: str, variant: str | None, *, option: str, expert: str | None = None
) -> tuple[Family, Variant, ModelSource]:
    """`find_source`, for a model whose variant may have to be recognised.

    Raises:
        UserError: as there, or it cannot be told.
    """
    name = recognise_variant(path, option=option, variant_option="--variant") if variant is None else variant
    family, row = find_variant(name, option="--variant")
    return family, row, find_source(path, family, row, option=option, expert=expert)


def recognise_variant(path: str | Sequence[str], *, option: str, variant_option: str) -> str:
    """The variant that a model's files hold, by pipeline or tensors, heads, settings, and the name of the folder.

    Of variants that are alike in all but their weights it is the first, unless the folder has the name of another.

    Args:
        path: as for `find_source`.
        option: names the option of the path in messages.
        variant_option: names the option with which the user says it.

    Raises:
        UserError: it cannot be told; the message lists what it might be.
    """
    if isinstance(path, str) and not _is_original(path):
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
        candidates: list[tuple[Family, Variant, Mapping[str, Any]]] = [
            (family, variant, settings) for family in families for variant in family.variants.values()
        ]
    else:
        candidates = []
        problems: list[UserError] = []
        for family in (one for one in all_families() if one.original_weights is not None):
            for variant in family.variants.values():
                try:
                    source = find_source(path, family, variant, option=option)
                except UserError as error:
                    problems.append(error)
                else:
                    candidates.append((family, variant, source.config))
        if len(problems) == 1 and not candidates:
            raise problems[0]
    found = [one for family, one, config in candidates if _fits(family, one, config)]
    named = [one for one in found if isinstance(path, str) and Path(path).name.lower() == Path(one.hub_id).name.lower()]
    if named or (found and all(_is_alike(one, found[0]) for one in found)):
        return (named or found)[0].name
    possible = [one.name for one in found or [one for _, one, _ in candidates]]
    possible = possible or [name for family in all_families() for name in family.variants]
    raise UserError(f"{variant_option}: cannot tell what {path} is; set one of {', '.join(possible)}")


def _fits(family: Family, variant: Variant, settings: Mapping[str, Any]) -> bool:
    """Whether a model with these settings can be the variant."""
    marks = all(settings.get(key, False) == value for key, value in variant.marks.items())
    return marks and bool(settings.get(family.heads_setting, variant.heads) == variant.heads)


def _is_alike(one: Variant, other: Variant) -> bool:
    """Whether two variants differ in nothing but their weights and how they are best sampled: either name will do."""
    return replace(one, name=other.name, hub_id=other.hub_id, sampling=other.sampling) == other


def find_source(
    path: str | Sequence[str], family: Family, variant: Variant, *, option: str, expert: str | None = None
) -> ModelSource:
    """Find and check a model's files; no tensor is read.

    Args:
        path: a diffusers folder, a hub id, a folder of the publisher's files, or a list of files, globs, folders and
            `REPOSITORY:PATTERN`.
        family: of the model.
        variant: whose table has what the files do not say.
        option: names the option in messages.
        expert: which transformer of a model with two, `high` or `low`.

    Raises:
        UserError: something is missing or broken; the message names it.
    """
    if isinstance(path, str) and not _is_original(path):
        folder = find_pipeline(path, option=option)
        transformer = LOW_EXPERT_FOLDER if expert == "low" else TRANSFORMER_FOLDER
        check_pipeline(folder, family, option=option, transformer=transformer)
        components = dict.fromkeys((*family.media_components, *family.text_components))
        return ModelSource(
            label=str(folder),
            folder=folder,
            parts={name: folder / name for name in components},
            tensors=read_headers(folder / transformer),
            config=read_json(folder / transformer / "config.json"),
            scheduler=scheduler_settings(folder, variant.scheduler),
            transformer_folder=transformer,
        )
    entries = [path] if isinstance(path, str) else list(path)
    return _from_files(entries, family, variant, option)


def _is_original(path: str) -> bool:
    place = Path(path)
    if place.is_dir():
        return not (place / "model_index.json").is_file()
    return place.suffix in (".safetensors", ".pth") or bool(_REPOSITORY_FILES.fullmatch(path)) or "*" in path


def _from_files(entries: list[str], family: Family, variant: Variant, option: str) -> ModelSource:
    if family.original_weights is None:
        raise UserError(
            f"{option}: {', '.join(entries)}: {family.name} is read in the diffusers layout only; give a folder with a "
            f"model_index.json, or the id of such a repository, for example {variant.hub_id}"
        )
    files = [file for entry in entries for file in _expand(entry, family, option)]
    parts: dict[str, Path] = {}
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        part = _part_of(file, family)
        if part is not None:
            parts[part] = file
        elif file.suffix == ".safetensors":
            for name, info in read_header(file).items():
                tensors[_ours(name, family)] = replace(info, stored=name)
        else:
            known = ", ".join(pattern for pattern in family.original_parts.values())
            raise UserError(
                f"{option}: {file} is no file that {family.name} has; it has {known} and .safetensors weights"
            )
    label = ", ".join(entries)
    if not tensors:
        raise UserError(f"{option}: {label} holds no weights of the transformer ({family.original_weights})")
    for part, pattern in family.original_parts.items():
        if part not in parts:
            place = _beside(pattern, [*parts.values(), *(info.file for info in tensors.values())])
            if place is None:
                raise UserError(f"{option}: {label} lacks the {part} ({pattern}); add it to the list")
            parts[part] = place
    first = next(iter(tensors.values())).file
    publishers = first.parent / "config.json"
    return ModelSource(
        label=label,
        folder=None,
        parts=parts,
        tensors=tensors,
        config=family.transformer_config(
            read_json(publishers) if publishers.is_file() else None, tensors, variant, where=f"{option}: {publishers}"
        ),
        scheduler=variant.scheduler,
    )


def _part_of(file: Path, family: Family) -> str | None:
    """The encoder or tokenizer that a file of the publisher is."""
    for part, pattern in family.original_parts.items():
        if fnmatch(file.name, Path(pattern).name) or (file.is_dir() and fnmatch(str(file), f"*{pattern}")):
            return part
    return None


def _beside(pattern: str, others: list[Path]) -> Path | None:
    """What matches a pattern in the folder of another file of the model."""
    for folder in dict.fromkeys(other.parent for other in others):
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    return None


def _ours(name: str, family: Family) -> str:
    """diffusers' name of a tensor in a publisher's or a single file."""
    for prefix in ("", *_WRAPPERS):
        if name.startswith(prefix):
            bare = name.removeprefix(prefix)
            translated = family.names.from_original(bare)
            if translated is not None:
                return translated
            if family.names.to_original(bare) is not None:
                return bare
    return name


def _expand(entry: str, family: Family, option: str) -> list[Path]:
    """The files that an entry of the list stands for."""
    repository = _REPOSITORY_FILES.fullmatch(entry)
    if repository is not None and not Path(entry).exists():
        return _repository_files(repository["id"], repository["pattern"], option)
    place = Path(entry)
    if place.is_dir() and _part_of(place, family) is None:
        assert family.original_weights is not None  # noqa: S101
        found = sorted(place.glob(family.original_weights))
        if not found:
            raise UserError(
                f"{option}: {place} is neither a diffusers pipeline, as it has no model_index.json, nor has it the "
                f"publisher's {family.original_weights}; give the right folder"
            )
        return found
    found = sorted(Path(file) for file in glob.glob(entry))  # noqa: PTH207 - absolute patterns too
    if not found:
        raise UserError(f"{option}: {entry} matches no file")
    return found


def _repository_files(repository: str, pattern: str, option: str) -> list[Path]:
    """Files of a repository: below `models/` or `$DIFFSYNTH_MODEL_BASE_PATH` if they are there, else from the hub."""
    bases = [Path("models")]
    if os.environ.get("DIFFSYNTH_MODEL_BASE_PATH"):
        bases.insert(0, Path(os.environ["DIFFSYNTH_MODEL_BASE_PATH"]))
    for base in bases:
        found = sorted((base / repository).glob(pattern))
        if found:
            return found
    folder = download(repository, option=option, allow_patterns=[pattern, "config.json"])
    found = sorted(folder.glob(pattern))
    if not found:
        raise UserError(f"{option}: {repository} has no file {pattern}")
    return found
