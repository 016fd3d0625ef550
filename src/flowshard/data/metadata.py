"""Reading the list of samples: csv, json and jsonl. Needs no torch, so that mistakes are found at once."""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowshard.errors import UserError
from flowshard.families.base import Input

MEDIA_COLUMNS = ("video", "image")
TEXT_COLUMN = "prompt"
_SHOWN_ROWS = 5
"""How many bad rows a message lists before it only counts them."""


@dataclass(frozen=True)
class Row:
    """One sample of the metadata."""

    number: int
    """Place in the file, from 1, the header not counted."""
    media: Path
    prompt: str
    inputs: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Files of what the model gets besides the prompt, by column."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The medium and the files of the inputs."""
        return self.media, *(file for files in self.inputs.values() for file in files)


@dataclass(frozen=True)
class Metadata:
    """All samples of a metadata file."""

    path: Path
    rows: tuple[Row, ...]
    unused_columns: tuple[str, ...]

    def describe(self, row: Row) -> str:
        """How messages name a row: file, row and medium."""
        return f"{self.path}, row {row.number} ({row.media})"


def read_metadata(
    path: str | Path,
    root: str | Path | None = None,
    inputs: Sequence[Input] = (),
    *,
    option: str = "data.metadata",
) -> Metadata:
    """Read and check a metadata file.

    Args:
        path: `.csv`, `.json` (a list of objects) or `.jsonl`, in UTF-8 with or without byte-order mark.
        root: the folder that media paths start from and must stay in; the metadata's own folder if None.
        inputs: what the model gets besides the prompt.
        option: names the file in messages.

    Raises:
        UserError: the file cannot be read, has no samples, lacks a column, or a row names no medium, a medium that does
            not exist or one outside `root`.
    """
    path = Path(path)
    folder = Path(root) if root is not None else path.parent
    if not folder.is_dir():
        raise UserError(f"data.root: the folder {folder} does not exist")
    columns, records = _read_records(path, option)
    if not records:
        raise UserError(f"{path}: holds no samples; each row needs {TEXT_COLUMN!r} and {_media_columns()}")
    _check_columns(path, columns, inputs)
    rows = [_read_row(path, number, record, folder, inputs) for number, record in enumerate(records, start=1)]
    missing = [(row.number, file) for row in rows for file in row.files if not _is_file(file)]
    if missing:
        shown = "\n".join(f"  row {number}: {file}" for number, file in missing[:_SHOWN_ROWS])
        more = f"\n  and {len(missing) - _SHOWN_ROWS} more" if len(missing) > _SHOWN_ROWS else ""
        affected = len({number for number, _ in missing})
        raise UserError(
            f"{path}: media of {affected} of {len(rows)} rows do not exist; correct the paths or set data.root "
            f"(now {folder})\n{shown}{more}"
        )
    known = (*MEDIA_COLUMNS, TEXT_COLUMN, *(one.column for one in inputs))
    unused = tuple(column for column in columns if column not in known)
    return Metadata(path, tuple(rows), unused)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, or a folder without permission
        return False


def _media_columns() -> str:
    return " or ".join(repr(column) for column in MEDIA_COLUMNS)


def _read_records(path: Path, option: str) -> tuple[list[str], list[dict[str, Any]]]:
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{option}: {path} must end in {', '.join(readers)}")
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{option}: the file {path} does not exist") from None
    except OSError as error:
        raise UserError(f"{option}: the file {path} cannot be read: {error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise UserError(
            f"{path}: line {line}, byte {byte} (0x{raw[error.start]:02x}) is not UTF-8; save the file as UTF-8"
        ) from None
    records = reader(path, text)
    columns = list(dict.fromkeys(column for record in records for column in record))
    return columns, records


def _read_csv(path: Path, text: str) -> list[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # captions may be longer than the default of 128 KiB
    # strict: unbalanced quotes are an error instead of a silent shift of columns. Line breaks inside quotes survive,
    # as the text is split by the csv reader alone.
    reader = csv.reader(_lines(text), strict=True)
    header: list[str] = []
    start = 1
    records: list[dict[str, Any]] = []
    try:
        header = next((values for values in reader if values), [])
        start = reader.line_num + 1
        for column in header:
            if header.count(column) > 1:
                raise UserError(f"{path}: the column {column!r} is there twice")
        for values in reader:
            line, start = start, reader.line_num + 1
            if not values:
                continue
            if len(values) != len(header):
                raise UserError(
                    f"{path}: row {len(records) + 1} (line {line}) has {len(values)} cells, the header has "
                    f"{len(header)}; put text that holds commas, quotes or line breaks in double quotes"
                )
            records.append(dict(zip(header, values, strict=True)))
    except csv.Error as error:
        row = f"row {len(records) + 1} (line {start})" if header else f"line {start}"
        raise UserError(f"{path}: {row}: {error}; check the quotes") from None
    return records


def _lines(text: str) -> Iterator[str]:
    """Lines with their ends, split at line feeds only, as csv wants them."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield text[start:end]
        start = end


def _read_json(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        records = json.loads(text, object_pairs_hook=_without_duplicates)
    except _DuplicateKeyError as error:
        raise UserError(f"{path}: the key {error} is there twice in one object") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from None
    if not isinstance(records, list):
        raise UserError(f"{path}: a .json metadata file is a list of objects; one object a line belongs in a .jsonl")
    return [_require_object(path, f"row {number}", record) for number, record in enumerate(records, start=1)]


def _read_jsonl(path: Path, text: str) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_without_duplicates)
        except _DuplicateKeyError as error:
            raise UserError(f"{path}: line {number}: the key {error} is there twice") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number}, column {error.colno}: {error.msg}") from None
        records.append(_require_object(path, f"line {number}", record))
    return records


class _DuplicateKeyError(Exception):
    """A key is given twice in an object."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(repr(next(key for key in keys if keys.count(key) > 1)))
    return record


def _require_object(path: Path, place: str, record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f"{path}: {place} is not an object with {TEXT_COLUMN!r} and {_media_columns()}")
    return record


def _check_columns(path: Path, columns: list[str], inputs: Sequence[Input]) -> None:
    found = ", ".join(repr(column) for column in columns)
    if TEXT_COLUMN not in columns:
        raise UserError(f"{path}: the column {TEXT_COLUMN!r} is missing; found {found}")
    if not any(column in columns for column in MEDIA_COLUMNS):
        raise UserError(f"{path}: a column {_media_columns()} is missing; found {found}")
    for one in inputs:
        if one.required and one.from_clip is None and one.column not in columns:
            raise UserError(f"{path}: the column {one.column!r} is missing, which this model needs; found {found}")


def _read_row(path: Path, number: int, record: dict[str, Any], root: Path, inputs: Sequence[Input]) -> Row:
    cells: dict[str, str] = {}
    for column in (TEXT_COLUMN, *MEDIA_COLUMNS):
        value = record.get(column)
        if value is None:
            continue
        if not isinstance(value, str):
            raise UserError(f"{path}: row {number}: {column!r} must be text, not {value!r}")
        cells[column] = value
    if TEXT_COLUMN not in cells:
        raise UserError(f"{path}: row {number}: has no {TEXT_COLUMN!r}; an empty text is written as an empty text")
    media = [column for column in MEDIA_COLUMNS if cells.get(column)]
    if len(media) != 1:
        problem = "names both a video and an image" if media else f"names no {_media_columns()}"
        raise UserError(f"{path}: row {number}: {problem}; a row is one sample with one medium")
    medium = _inside(path, number, cells[media[0]], root)
    files = {one.column: _input_files(path, number, record, root, one) for one in inputs}
    return Row(number, medium, cells[TEXT_COLUMN], {column: found for column, found in files.items() if found})


def _input_files(path: Path, number: int, record: dict[str, Any], root: Path, one: Input) -> tuple[Path, ...]:
    """The files of a cell: a name, a list of names, or text that holds such a list as JSON."""
    value = record.get(one.column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            raise UserError(f"{path}: row {number}: {one.column!r} is no list of files: {value!r}") from None
    names = [] if value in (None, "") else value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{path}: row {number}: {one.column!r} must be a file or a list of files, not {value!r}")
    if len(names) > 1 and not one.several:
        raise UserError(f"{path}: row {number}: {one.column!r} takes one file, not {len(names)}")
    if not names and one.required and one.from_clip is None:
        raise UserError(f"{path}: row {number}: has no {one.column!r}, which this model needs")
    return tuple(_inside(path, number, name, root) for name in names)


def _inside(path: Path, number: int, name: str, root: Path) -> Path:
    # By the names alone: a link inside the data folder may lead elsewhere, as people lay out large sets that way.
    full = Path(os.path.abspath(root / name))  # noqa: PTH100
    if not full.is_relative_to(os.path.abspath(root)):  # noqa: PTH100
        raise UserError(
            f"{path}: row {number}: {name!r} lies outside the data folder {root}; set data.root to a folder that holds it"
        )
    return full
