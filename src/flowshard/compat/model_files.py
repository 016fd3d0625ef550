"""The models that DiffSynth-Studio's options name: files, downloads, tokenizers, and which variant they are.

`REPOSITORY:PATTERN` stands for files below `models/` or `$DIFFSYNTH_MODEL_BASE_PATH`; what is not there is downloaded
there, unless `$DIFFSYNTH_SKIP_DOWNLOAD` is true, from `$DIFFSYNTH_DOWNLOAD_SOURCE`. Needs no torch.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowshard.compat.arguments import Arguments
from flowshard.compat.options import FLUX, FLUX2, QWEN, SCRIPTS, WAN, Z_IMAGE, Script
from flowshard.errors import UserError
from flowshard.families import Family, Variant, all_families, find_variant
from flowshard.weights.original import is_transformer_file
from flowshard.weights.places import beside
from flowshard.weights.source import recognise_variant, short_name

_BASE, _SKIP, _SOURCE = "DIFFSYNTH_MODEL_BASE_PATH", "DIFFSYNTH_SKIP_DOWNLOAD", "DIFFSYNTH_DOWNLOAD_SOURCE"
_IDS, _PATHS = "--model_id_with_origin_paths", "--model_paths"

DEFAULT_PARTS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    WAN: {"tokenizer": ("tokenizer_path", "Wan-AI/Wan2.1-T2V-1.3B", "google/umt5-xxl")},
    QWEN: {
        "tokenizer": ("tokenizer_path", "Qwen/Qwen-Image", "tokenizer"),
        "processor": ("processor_path", "Qwen/Qwen-Image-Edit", "processor"),
    },
    FLUX: {
        "tokenizer": ("tokenizer_1_path", "black-forest-labs/FLUX.1-dev", "tokenizer"),
        "tokenizer_2": ("tokenizer_2_path", "black-forest-labs/FLUX.1-dev", "tokenizer_2"),
    },
    FLUX2: {"tokenizer": ("tokenizer_path", "black-forest-labs/FLUX.2-dev", "tokenizer")},
    Z_IMAGE: {"tokenizer": ("tokenizer_path", "Tongyi-MAI/Z-Image-Turbo", "tokenizer")},
}
"""By component: the option that says where it is, and the repository and folder where it is by default."""


@dataclass(frozen=True)
class Models:
    """The models of a command line."""

    family: Family
    variant: Variant
    path: list[str]
    """`model.path`."""
    parts: dict[str, str]
    """`model.parts`."""
    expert: str | None
    """`model.expert`."""


def find_models(script: Script, arguments: Arguments, *, encoders: bool, variant: str | None) -> Models:
    """Find, and if need be download, what a command line names.

    Args:
        script: whose options they are.
        arguments: the options.
        encoders: whether samples are to be encoded, which needs tokenizers.
        variant: what the files are, if the user says it.

    Raises:
        UserError: files are missing, or of another model than the script trains.
    """
    entries = [*_paths(arguments["model_paths"]), *arguments.listed("model_id_with_origin_paths")]
    if not entries:
        raise UserError(f"{_PATHS} or {_IDS} must be given: the files of the model")
    for option in ("fp8_models", "offload_models"):
        for name in arguments.listed(option):
            if name not in entries:
                raise UserError(f"--{option}: {name!r} is none of the models that are given: {', '.join(entries)}")
    files = [file for entry in entries for file in _files_of(entry)]
    name = variant or _recognise(script, arguments, entries, files)
    family, row = find_variant(name, option="--set model.variant")
    if family.name != script.series:
        raise UserError(
            f"{_IDS}: the files are of {row.name}, which {script.path} does not train; use "
            f"{SCRIPTS[family.name].path if family.name in SCRIPTS else 'flowshard train'}"
        )
    parts = _parts(script, arguments, family, files) if encoders else {}
    return Models(family, row, entries, parts, _expert(arguments, family, row, files))


def _paths(text: str | None) -> list[str]:
    """The files of `--model_paths`: JSON, a list of files and of lists of the parts of one."""
    if text is None:
        return []
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f'{_PATHS}: is not JSON ({error}); write for example \'["a.safetensors", "b.pth"]\'') from None
    found: list[str] = []
    for one in value if isinstance(value, list) else [value]:
        found += one if isinstance(one, list) else [one]
    wrong = next((one for one in found if not isinstance(one, str)), None)
    if wrong is not None:
        raise UserError(f"{_PATHS}: {wrong!r} is no path; give a list of paths")
    return found


def _files_of(entry: str) -> list[Path]:
    """The local files of an entry, after downloading them if they are not there."""
    place = split_repository(entry)
    if place is None:
        if not Path(entry).exists():
            raise UserError(
                f"{_PATHS} / {_IDS}: {entry} does not exist; give a path, or files of a repository as REPOSITORY:PATTERN"
            )
        return [Path(entry)]
    return fetch(*place, option=_IDS)


def split_repository(entry: str) -> tuple[str, str] | None:
    """Repository and pattern of `REPOSITORY:PATTERN`; None for a path."""
    repository, colon, pattern = entry.rpartition(":")
    if Path(entry).exists() or not colon or repository.count("/") != 1:
        return None
    return repository, pattern.rstrip("/") or "*"


def base_folder() -> Path:
    """The folder that has a folder for each repository."""
    return Path(os.environ.get(_BASE) or "models")


def fetch(repository: str, pattern: str, *, option: str) -> list[Path]:
    """The files of a repository that match a pattern, which are downloaded if none is there.

    Raises:
        UserError: they cannot be had; the message names `option`.
    """
    folder = base_folder() / repository
    found = _local(folder, pattern)
    if found and all(_is_complete(file) for file in found):
        return found
    skip = os.environ.get(_SKIP, "").lower() == "true"
    if skip and not found:
        raise UserError(
            f"{option}: {folder} has no {pattern}, and {_SKIP} is true; put the files there, or let them be downloaded"
        )
    if not found:
        with _one_process(folder):  # the others find them when it is their turn
            if not _local(folder, pattern):
                _download(repository, pattern, folder, option)
    elif not skip:
        _download_settings(repository, pattern, folder)
    found = _local(folder, pattern)
    if not found:
        raise UserError(f"{option}: {repository} has no file {pattern}; check the pattern")
    return found


def _local(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) if folder.is_dir() else []


def _is_complete(file: Path) -> bool:
    """Whether a file has beside it what it cannot be read without; DiffSynth-Studio does without configs."""
    return not file.parent.name.startswith("text_encoder") or (file.parent / "config.json").is_file()


@contextmanager
def _one_process(folder: Path) -> Iterator[None]:
    """Held by one process of the machine at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".flowshard.lock").open("w")
    except OSError as error:
        raise UserError(f"{_BASE}: cannot write to {folder}: {error.strerror}; set another folder") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(repository: str, pattern: str, folder: Path, option: str) -> None:
    """Download what matches a pattern, with the settings beside it."""
    settings = str(Path(pattern).parent / "*.json")
    try:
        _snapshot(repository, folder, [pattern, f"{pattern}/*", settings])
    except UserError:
        raise
    except Exception as error:  # of many kinds, all of which mean the same here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{option}: {folder} has no {pattern}, and {repository} cannot be downloaded ({reason}); put the files there, "
            f"or set {_SOURCE} to modelscope or huggingface"
        ) from None


def _download_settings(repository: str, pattern: str, folder: Path) -> None:
    """Add the settings that lie beside weights in a repository; what is then still missing is found later."""
    try:
        with _one_process(folder):
            if not all(_is_complete(file) for file in _local(folder, pattern)):
                _snapshot(repository, folder, [str(Path(pattern).parent / "*.json")])
    except Exception:  # as for `_download`
        return


def _snapshot(repository: str, folder: Path, patterns: Sequence[str]) -> None:
    source = os.environ.get(_SOURCE, "modelscope").lower()
    if source == "huggingface":
        from huggingface_hub import snapshot_download as from_huggingface

        from_huggingface(repository, local_dir=folder, allow_patterns=list(patterns))
    elif source == "modelscope":
        try:
            from modelscope import snapshot_download as from_modelscope
        except ImportError:
            raise UserError(
                f"{_SOURCE}: {folder} lacks {patterns[0]}, and modelscope, from which it would be downloaded, is not "
                f"installed; run `pip install modelscope`, set {_SOURCE}=huggingface, or put the files there"
            ) from None
        from_modelscope(repository, local_dir=str(folder), allow_file_pattern=list(patterns))
    else:
        raise UserError(f"{_SOURCE}: {source!r} is not modelscope or huggingface")


def _recognise(script: Script, arguments: Arguments, entries: list[str], files: list[Path]) -> str:
    """The variant: by the transformer's tensors, or, where only encoders are given, by the names of the repositories."""
    if any(is_transformer_file(file) or file.is_dir() for file in files):
        return recognise_variant(entries, option=_IDS, variant_option="--set model.variant", own_schedule=True)
    names = {short_name(part) for entry in entries for part in Path(entry.replace(":", "/")).parts}
    wanted = set(arguments.listed("extra_inputs"))
    candidates = [
        (family, variant)
        for family in all_families()
        if family.name == script.series and wanted <= {one.column for one in family.inputs}
        for variant in family.variants.values()
    ]
    named = [variant.name for _, variant in candidates if short_name(Path(variant.hub_id).name) in names]
    if len(set(named)) != 1:
        possible = ", ".join(named or [variant.name for _, variant in candidates]) or "the variants of the series"
        raise UserError(
            f"{_IDS}: no file of the transformer is given, so which model it is cannot be told; add the transformer's "
            f"files, or --set model.variant= one of {possible}"
        )
    return named[0]


def _parts(script: Script, arguments: Arguments, family: Family, files: Sequence[Path]) -> dict[str, str]:
    """Tokenizers and processors: those of the options, those beside the files, or the default ones."""
    folders = [folder for file in files for folder in (file.parent, file.parent.parent)]
    parts: dict[str, str] = {}
    for part, (option, repository, pattern) in DEFAULT_PARTS[script.series].items():
        if part not in family.original_parts:
            continue
        asked = arguments[option]
        if asked is not None:
            place = split_repository(asked)
            if place is None and not Path(asked).exists():
                raise UserError(f"--{option}: {asked} does not exist; give its folder, or REPOSITORY:FOLDER")
            parts[part] = asked if place is None else str(fetch(*place, option=f"--{option}")[0])
        elif beside(family, family.original_parts[part], folders) is None:
            parts[part] = str(fetch(repository, pattern, option=f"--{option}")[0])
    return parts


def _expert(arguments: Arguments, family: Family, variant: Variant, files: Sequence[Path]) -> str | None:
    """Which of two transformers is trained: by the folder of its files, or by the part of the noise levels."""
    if variant.experts is None:
        return None
    names = {file.parent.name for file in files}
    found = [name for name, folder in family.original_experts.items() if folder in names]
    if len(found) == 1:
        return found[0]
    if arguments["max_timestep_boundary"] < 1.0 and arguments["min_timestep_boundary"] == 0.0:
        return "high"
    if arguments["min_timestep_boundary"] > 0.0 and arguments["max_timestep_boundary"] == 1.0:
        return "low"
    folders = " or ".join(f"{folder}/" for folder in family.original_experts.values())
    raise UserError(f"{_IDS}: {variant.name} has two transformers; give the files in {folders} alone, one is trained")
