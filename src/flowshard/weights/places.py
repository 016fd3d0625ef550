"""From an entry of `model.path` to files, and which part of a model each is by its place. Needs no torch."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.weights.files import TRANSFORMER_FOLDER, download

_REPOSITORY_FILES = re.compile(r"(?P<id>[\w.-]+/[\w.-]+):(?P<pattern>.+)")


def is_original(path: str) -> bool:
    """Whether a path is of the publisher's files, not of a pipeline in the diffusers layout."""
    place = Path(path)
    if place.is_dir():
        return not (place / "model_index.json").is_file()
    return place.suffix in (".safetensors", ".pth") or bool(_REPOSITORY_FILES.fullmatch(path)) or "*" in path


def label(path: str | Sequence[str]) -> str:
    """A path or a list of them, for messages."""
    return path if isinstance(path, str) else ", ".join(path)


def all_of(path: str | Sequence[str], option: str) -> list[Path]:
    """The files and folders that a path or a list of them stands for.

    Raises:
        UserError: an entry matches none.
    """
    entries = [path] if isinstance(path, str) else path
    return [place for entry in entries for place in _expand(entry, option)]


def _expand(entry: str, option: str) -> list[Path]:
    """The files and folders that an entry of the list stands for."""
    repository = _REPOSITORY_FILES.fullmatch(entry)
    if repository is not None and not Path(entry).exists():
        return _repository_files(repository["id"], repository["pattern"], option)
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
    # With what is needed beside weights: configs and indices, tokenizers and processors, which are small.
    settings = str(Path(pattern).parent / "*.json")
    folder = download(repository, option=option, allow_patterns=[pattern, settings, "tokenizer*/*", "processor/*"])
    found = sorted(folder.glob(pattern))
    if not found:
        raise UserError(f"{option}: {repository} has no file {pattern}")
    return found


def opened_at(place: Path, family: Family, option: str) -> list[Path]:
    """The transformer's files in a folder of a model, or of both its transformers; anything else is itself.

    Raises:
        UserError: the folder is none of the family's.
    """
    if not place.is_dir() or part_of(place, family) is not None:
        return [place]
    assert family.original_weights is not None  # noqa: S101
    folder, _, own = family.original_weights.rpartition("/")
    found = sorted(place.glob(own if place.name == folder else family.original_weights))
    for expert in family.original_experts.values():
        found += sorted((place / expert).glob(own))
    if not found:
        raise UserError(
            f"{option}: {place} is neither a diffusers pipeline, as it has no model_index.json, nor has it the "
            f"publisher's {family.original_weights}; give the right folder"
        )
    return found


def part_of(file: Path, family: Family) -> tuple[str, Path] | None:
    """The encoder or tokenizer that a file or folder of the publisher is, and where that is."""
    for part, patterns in family.original_parts.items():
        if any(file.match(pattern) or file.match(Path(pattern).name) for pattern in patterns):
            return part, file
        if not file.is_dir() and any(file.parent.match(pattern) for pattern in patterns):  # weights in a part's folder
            alone = part == "vae" and not (file.parent / "config.json").is_file()
            return part, file if alone else file.parent
    return None


def beside(family: Family, patterns: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """What matches a pattern in one of the folders, or in the one above a transformer's."""
    inner = (TRANSFORMER_FOLDER, *family.original_experts.values())
    for folder in dict.fromkeys((*folders, *(folder.parent for folder in folders if folder.name in inner))):
        for pattern in patterns:
            found = sorted(folder.glob(pattern))
            if found:
                return found[0]
    return None


def expert_of(file: Path, family: Family) -> str | None:
    """Of which of two transformers a file is, by its folder."""
    return next((name for name, folder in family.original_experts.items() if file.parent.name == folder), None)
