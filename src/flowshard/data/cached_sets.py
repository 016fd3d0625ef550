"""The sets of samples that a cache folder holds, so that it can be trained from without metadata and media.

Each is a JSON file in `sets/` of the folder: the rows, the names of their entries, and what these were made with. Needs no
torch.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowshard.config import Config, DataConfig
from flowshard.data.media import MEDIA_VERSION
from flowshard.data.metadata import CachedNames, Metadata, Row
from flowshard.errors import UserError
from flowshard.families import key_of
from flowshard.families.base import Family
from flowshard.weights.files import atomic_file, read_json

SETS = "sets"
_FORMAT = 1
_OPTIONS = (
    "height",
    "width",
    "max_pixels",
    "bucket_step",
    "frames",
    "fps",
    "sampling",
    "short",
    "tiles",
    "caption_prefix",
)
"""Options of `data` that decide what is in the entries. A run from a set takes those that it does not give from the set."""


@dataclass(frozen=True)
class CachedSet:
    """A set as it was written."""

    name: str
    label: str
    """Of the metadata."""
    kind: str
    """Of model."""
    encoding: list[int]
    """Versions of the code that decoded and encoded."""
    dtype: str
    """Of the text entries."""
    options: Mapping[str, Any]
    """What decided on the entries, by name in `data`."""
    encoders: Mapping[str, str]
    """Fingerprints by component."""
    rows: tuple[Row, ...]
    epoch: list[int] | None
    """None is every row once."""

    def metadata(self) -> Metadata:
        """The samples."""
        epoch = range(len(self.rows)) if self.epoch is None else self.epoch
        return Metadata(self.label, self.rows, (), epoch, encoders=self.encoders)


def write_set(
    folder: Path,
    config: Config,
    metadata: Metadata,
    family: Family,
    names: Callable[[Row], CachedNames],
    encoders: Mapping[str, str],
) -> None:
    """Write down a set whose entries are in a cache folder; one of the same metadata and options is replaced.

    Args:
        folder: of the cache.
        config: of the run.
        metadata: the samples.
        family: of the model.
        names: the entries of a row.
        encoders: fingerprints by component.
    """
    options = {name: getattr(config.data, name) for name in _OPTIONS}
    sources = sorted({str(row.source.absolute()) for row in metadata.rows})
    identity = json.dumps([sources, key_of(family), config.model.dtype, options])
    stem = re.sub(r"[^\w-]+", "_", Path(sources[0]).stem)
    name = f"{stem}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    content = {
        "format": _FORMAT,
        "label": metadata.label,
        "kind": key_of(family),
        "encoding": _versions(family),
        "dtype": config.model.dtype,
        "options": options,
        "encoders": dict(encoders),
        "rows": [_as_json(row, names(row)) for row in metadata.rows],
        "epoch": None if isinstance(metadata.epoch, range) else list(metadata.epoch),
    }
    file = folder / SETS / f"{name}.json"
    text = json.dumps(content, ensure_ascii=False)
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return
    file.parent.mkdir(exist_ok=True)
    with atomic_file(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def find_set(config: Config, family: Family) -> tuple[Config, CachedSet]:
    """The set that a run without metadata is trained on, and the config with the options that it was encoded with.

    Args:
        config: without `data.metadata` and `data.sources`; its variant is known.
        family: of the model.

    Raises:
        UserError: the folder holds no such set or several, or another version of the code has encoded it.
    """
    data, folder = config.data, Path(config.data.cache)
    files = sorted((folder / SETS).glob("*.json"))
    if not files:
        raise UserError(
            f"data.cache: {folder} holds no set of encoded samples; give data.metadata or data.sources, or fill the folder with "
            "`flowshard cache`"
        )
    sets = {file.stem: _read(file) for file in files if file.stem.startswith(data.cache_set or "")}
    if not sets:
        names = ", ".join(file.stem for file in files)
        raise UserError(f"data.cache_set: {data.cache_set!r} begins the name of no set in {folder}; found {names}")
    refused = {name: why for name, one in sets.items() if (why := _why_not(one, config, family))}
    fitting = [one for name, one in sets.items() if name not in refused]
    if not fitting:
        lines = "".join(f"\n  {name} (of {sets[name].label}): {why}" for name, why in refused.items())
        raise UserError(f"data.cache: {folder} holds no set that this run can use; change these, or encode one:{lines}")
    if len(fitting) > 1:
        lines = "".join(f"\n  {one.name} (of {one.label}): {_shown(one.options)}" for one in fitting)
        raise UserError(f"data.cache_set: {folder} holds {len(fitting)} sets that fit; name one of:{lines}")
    found = fitting[0]
    if found.encoding != _versions(family):
        raise UserError(
            f"data.cache: the set {found.name} in {folder} was encoded by another version of this program; encode it again "
            "with `flowshard cache`"
        )
    data = data.model_copy(update=dict(found.options))
    return config.model_copy(update={"data": data}), found


def _versions(family: Family) -> list[int]:
    """Of the code that encodes and decodes."""
    return [family.encoding_version, MEDIA_VERSION]


def _why_not(one: CachedSet, config: Config, family: Family) -> str:
    """What of the run differs from the set; nothing if it can be used."""
    asked = {name: getattr(config.data, name) for name in _OPTIONS if name in config.data.model_fields_set}
    different = [
        f"data.{name} is {value!r}, it has {one.options[name]!r}"
        for name, value in asked.items()
        if value != one.options[name] and not (value is None and name in ("height", "width", "max_pixels"))
    ]
    if key_of(family) != one.kind:
        different.append(f"model.variant is {config.model.variant!r}, it was encoded for {one.kind} models")
    if config.model.dtype != one.dtype:
        different.append(f"model.dtype is {config.model.dtype!r}, it has {one.dtype!r}")
    return "; ".join(different)


def _shown(options: Mapping[str, Any]) -> str:
    defaults = DataConfig()
    return ", ".join(f"{name}={value}" for name, value in options.items() if value != getattr(defaults, name))


def _read(file: Path) -> CachedSet:
    content = read_json(file)
    if content.get("format") != _FORMAT:
        raise UserError(f"{file}: is a set of format {content.get('format')!r}, this version reads {_FORMAT}")
    rows = tuple(_from_json(row) for row in content["rows"])
    kept = {name: content[name] for name in ("label", "kind", "encoding", "dtype", "options", "encoders", "epoch")}
    return CachedSet(name=file.stem, rows=rows, **kept)


def _as_json(row: Row, names: CachedNames) -> dict[str, Any]:
    return {
        "number": row.number,
        "source": str(row.source),
        "media": str(row.media),
        "name": row.name,
        "prompts": row.prompts,
        "inputs": {column: [str(file) for file in files] for column, files in row.inputs.items()},
        "pictures": [str(file) for file in row.pictures],
        "part": [row.start, row.end],
        "size": row.size,
        "entry": names.media,
        "texts": dict(names.texts),
    }


def _from_json(row: Mapping[str, Any]) -> Row:
    return Row(
        number=row["number"],
        source=Path(row["source"]),
        media=Path(row["media"]),
        name=row["name"],
        prompts=tuple(row["prompts"]),
        inputs={column: tuple(map(Path, files)) for column, files in row["inputs"].items()},
        pictures=tuple(map(Path, row["pictures"])),
        start=row["part"][0],
        end=row["part"][1],
        size=None if row["size"] is None else (row["size"][0], row["size"][1]),
        cached=CachedNames(row["entry"], row["texts"]),
    )
