"""Where a model's parts are: a diffusers folder, or the publisher's own files. Needs no torch."""

import glob
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
from flowshard.weights.names import Part
from flowshard.weights.report import some

Headers = Callable[[Path], dict[str, TensorInfo]]
"""Reads the header of a safetensors file, or remembers it."""
_REPOSITORY_FILES = re.compile(r"(?P<id>[\w.-]+/[\w.-]+):(?P<pattern>.+)")
_WRAPPERS = ("model.diffusion_model.", "diffusion_model.", "pipe.dit.")
"""Prefixes of single files that hold the transformer as a part of something."""
_ENCODER_TENSORS = {
    "text_model.embeddings.token_embedding.weight",  # CLIP
    "encoder.block.0.layer.0.SelfAttention.q.weight",  # T5
    "model.embed_tokens.weight",  # Qwen, Mistral
}
"""Tensors by which text encoders are known that other programs keep in one file."""


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
    candidates: list[tuple[Family, Variant, Mapping[str, Any]]] = []
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
        candidates = [
            (family, variant, settings)
            for family in families
            for variant in family.variants.values()
            if (variant.experts is not None) == _has_low_expert(folder)
        ]
    else:
        places = _all_of(path, option)
        headers = cache(read_header)
        for family in _recognise_families(places, headers, option):
            for variant in family.variants.values():
                source = _from_files(places, _label(path), family, variant, headers, option)
                candidates.append((family, variant, source.config))
    found = [one for family, one, config in candidates if _fits(family, one, config)]
    named = [one for one in found if isinstance(path, str) and Path(path).name.lower() == Path(one.hub_id).name.lower()]
    if named or (found and all(_is_alike(one, found[0]) for one in found)):
        return (named or found)[0].name
    possible = [one.name for one in found or [one for _, one, _ in candidates]]
    possible = possible or [name for family in all_families() for name in family.variants]
    raise UserError(f"{variant_option}: cannot tell what {path} is; set one of {', '.join(possible)}")


def _recognise_families(places: list[Path], headers: Headers, option: str) -> list[Family]:
    """The families that the publisher's files may be of, by the names of tensors in the first file that says it."""
    known = [one for one in all_families() if one.original_weights is not None]
    for family in known:
        try:
            files = [file for place in places for file in _opened(place, family, option)]
        except UserError:  # a folder of another family
            continue
        for file in files:
            if _is_transformer(file) and _has_landmark(headers(file), family):
                return [one for one in known if one.landmark == family.landmark]
    return []


def _is_transformer(file: Path) -> bool:
    """Whether a file may hold a transformer: it is an encoder of no family."""
    return file.suffix == ".safetensors" and all(_part_of(file, family) is None for family in all_families())


def _has_landmark(names: Iterable[str], family: Family) -> bool:
    return any(part.name == family.landmark for name in names for part in _ours(name, family))


def _fits(family: Family, variant: Variant, settings: Mapping[str, Any]) -> bool:
    """Whether a model with these settings can be the variant."""
    known = all(settings.get(key, False) == value for key, value in variant.known_by.items())
    heads = bool(settings.get(family.heads_setting, variant.heads) == variant.heads)
    return known and heads and family.foreign_mark(settings) is None


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
        config = read_json(folder / transformer / "config.json")
        mark = family.foreign_mark(config)
        if mark is not None:
            raise UserError(
                f"{option}: {folder / transformer} has {mark} {config.get(mark)}, which {variant.name} has not; give the "
                "right folder or change model.variant"
            )
        if _has_low_expert(folder) != (variant.experts is not None):
            found, wanted = ("two transformers", "one") if variant.experts is None else ("one transformer", "two")
            raise UserError(
                f"{option}: {folder} has {found}, {variant.name} has {wanted}; give the right folder or change model.variant"
            )
        components = dict.fromkeys((*family.media_components, *family.text_components))
        return ModelSource(
            label=str(folder),
            folder=folder,
            parts={name: folder / name for name in components},
            tensors=read_headers(folder / transformer),
            config=config,
            scheduler=scheduler_settings(folder, variant.scheduler),
            transformer_folder=transformer,
        )
    return _from_files(_all_of(path, option), _label(path), family, variant, read_header, option)


def _has_low_expert(folder: Path) -> bool:
    return (folder / LOW_EXPERT_FOLDER / "config.json").is_file()


def _is_original(path: str) -> bool:
    place = Path(path)
    if place.is_dir():
        return not (place / "model_index.json").is_file()
    return place.suffix in (".safetensors", ".pth") or bool(_REPOSITORY_FILES.fullmatch(path)) or "*" in path


def _label(path: str | Sequence[str]) -> str:
    return path if isinstance(path, str) else ", ".join(path)


def _all_of(path: str | Sequence[str], option: str) -> list[Path]:
    entries = [path] if isinstance(path, str) else path
    return [place for entry in entries for place in _expand(entry, option)]


def _from_files(
    places: list[Path], label: str, family: Family, variant: Variant, headers: Headers, option: str
) -> ModelSource:
    if family.original_weights is None:
        raise UserError(
            f"{option}: {label}: {variant.name} is read in the diffusers layout only; give a folder with a "
            f"model_index.json, or the id of such a repository, for example {variant.hub_id}"
        )
    assert family.landmark is not None  # noqa: S101
    files = [file for place in places for file in _opened(place, family, option)]
    parts: dict[str, Path] = {}
    tensors: dict[str, TensorInfo] = {}
    for file in dict.fromkeys(files):
        found = _part_of(file, family)
        if found is not None:
            part, place = found
            parts[part] = place
        elif file.suffix == ".safetensors":
            header = headers(file)
            if not _ENCODER_TENSORS.isdisjoint(header):
                raise UserError(
                    f"{option}: {file} is a text encoder in one file; {family.name} takes "
                    f"{' or '.join(family.original_parts['text_encoder'])} of its publisher"
                )
            for name, info in _translated(header, family).items():
                if name in tensors:
                    raise UserError(
                        f"{option}: {tensors[name].file} and {file} both hold the transformer's {name}; give one of them"
                    )
                tensors[name] = info
        else:
            known = ", ".join(pattern for patterns in family.original_parts.values() for pattern in patterns)
            raise UserError(
                f"{option}: {file} is no file that {family.name} has; it has {known} and .safetensors weights"
            )
    if not tensors:
        raise UserError(f"{option}: {label} holds no weights of the transformer ({family.original_weights})")
    if family.landmark not in tensors:
        _refuse_other_model(tensors, family, family.landmark, option)
    for part, patterns in family.original_parts.items():
        if part not in parts:
            beside = _beside(patterns, [*parts.values(), *(info.file for info in tensors.values())])
            if beside is None:
                raise UserError(f"{option}: {label} lacks the {part} ({' or '.join(patterns)}); add it to the list")
            parts[part] = beside
        if part.startswith("text_encoder") and parts[part].is_dir():
            _check_encoder(parts[part], variant, option)
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


def _translated(header: Mapping[str, TensorInfo], family: Family) -> dict[str, TensorInfo]:
    """The tensors of a publisher's or a single file, in diffusers' names; what is not known keeps its own.

    Raises:
        UserError: one that holds several cannot be cut into them.
    """
    tensors = {}
    for name, info in header.items():
        for part in _ours(name, family):
            if part.is_whole:
                tensors[part.name] = replace(info, stored=name)
                continue
            try:
                rows = part.rows(info.shape[0] if info.shape else 1)
            except ValueError:
                raise UserError(
                    f"{info.file}: {name} of shape {info.shape} is not {part.of} pieces of one size, as it is in "
                    f"{family.name}; it is another model, or one in a type with fewer values"
                ) from None
            shape = (sum(end - start for start, end in rows), *info.shape[1:])
            tensors[part.name] = replace(info, stored=name, rows=rows, shape=shape)
    return tensors


def _refuse_other_model(tensors: Mapping[str, TensorInfo], family: Family, landmark: str, option: str) -> None:
    """Say what weights without the family's landmark are.

    Raises:
        UserError: always.
    """
    file = next(iter(tensors.values())).file
    for other in all_families():  # one without a landmark is not recognised
        if _has_landmark((info.stored or name for name, info in tensors.items()), other):
            raise UserError(
                f"{option}: {file} holds a transformer of {other.name}, and the variant is one of {family.name}; give "
                f"other files, or set the variant to {' or '.join(other.variants)}"
            )
    if any(".lora_" in name for name in tensors):
        raise UserError(f"{option}: {file} is a LoRA, not weights; give it as lora.init_from or lora.preset")
    stored = family.names.to_original(landmark)
    raise UserError(
        f"{option}: {file} is no transformer of {family.name}, as it lacks {stored}; it has {some(list(tensors))}"
    )


def _check_encoder(folder: Path, variant: Variant, option: str) -> None:
    """Refuse an encoder's folder without a file that its weights are of no use without.

    Raises:
        UserError: naming the file.
    """
    needed = [] if (folder / "config.json").is_file() else ["config.json"]
    if len(list(folder.glob("*.safetensors"))) > 1 and not list(folder.glob("*.safetensors.index.json")):
        needed.append("the .safetensors.index.json of its shards")
    if needed:
        raise UserError(
            f"{option}: {folder} lacks {' and '.join(needed)}; copy it as well, from {variant.hub_id} if it was not changed"
        )


def _part_of(file: Path, family: Family) -> tuple[str, Path] | None:
    """The encoder or tokenizer that a file or folder of the publisher is, and where that is."""
    for part, patterns in family.original_parts.items():
        if any(file.match(pattern) or file.match(Path(pattern).name) for pattern in patterns):
            return part, file
        if not file.is_dir() and any(file.parent.match(pattern) for pattern in patterns):  # weights in a part's folder
            alone = part == "vae" and not (file.parent / "config.json").is_file()
            return part, file if alone else file.parent
    return None


def _beside(patterns: Sequence[str], others: list[Path]) -> Path | None:
    """What matches a pattern in the folder of another file of the model, or in the one above it."""
    folders = dict.fromkeys(other.parent for other in others)
    for folder in (*folders, *(folder.parent for folder in folders if folder.name == TRANSFORMER_FOLDER)):
        for pattern in patterns:
            found = sorted(folder.glob(pattern))
            if found:
                return found[0]
    return None


def _ours(name: str, family: Family) -> tuple[Part, ...]:
    """What of diffusers' a tensor in a publisher's or a single file holds."""
    for prefix in ("", *_WRAPPERS):
        if name.startswith(prefix):
            bare = name.removeprefix(prefix)
            parts = family.names.parts(bare)
            if parts is not None:
                return parts
            if family.names.to_original(bare) is not None:
                return (Part(bare),)
    return (Part(name),)


def _expand(entry: str, option: str) -> list[Path]:
    """The files and folders that an entry of the list stands for."""
    repository = _REPOSITORY_FILES.fullmatch(entry)
    if repository is not None and not Path(entry).exists():
        return _repository_files(repository["id"], repository["pattern"], option)
    found = sorted(Path(file) for file in glob.glob(entry))  # noqa: PTH207 - absolute patterns too
    if not found:
        raise UserError(f"{option}: {entry} matches no file")
    return found


def _opened(place: Path, family: Family, option: str) -> list[Path]:
    """The transformer's files in a folder of a model; anything else is itself."""
    if not place.is_dir() or _part_of(place, family) is not None:
        return [place]
    assert family.original_weights is not None  # noqa: S101
    folder, _, own = family.original_weights.rpartition("/")
    found = sorted(place.glob(own if place.name == folder else family.original_weights))
    if not found:
        raise UserError(
            f"{option}: {place} is neither a diffusers pipeline, as it has no model_index.json, nor has it the "
            f"publisher's {family.original_weights}; give the right folder"
        )
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
    # With what is needed beside weights: configs and indices, and tokenizers, which are small.
    settings = str(Path(pattern).parent / "*.json")
    folder = download(repository, option=option, allow_patterns=[pattern, settings, "tokenizer*/*"])
    found = sorted(folder.glob(pattern))
    if not found:
        raise UserError(f"{option}: {repository} has no file {pattern}")
    return found
