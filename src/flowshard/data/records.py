"""The forms of a list of samples as records: csv, json, jsonl, and a folder of media with captions beside them."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowshard.data.media import is_medium
from flowshard.data.problems import DataError, Note

CAPTION_SUFFIX = ".txt"
_SHOWN = 5
"""How many files a message lists before it only counts them."""


@dataclass(frozen=True)
class Records:
    """What a list of samples says, before anybody has asked whether it makes sense."""

    columns: tuple[str, ...]
    rows: tuple[tuple[int, dict[str, Any]], ...]
    """Number of the row, from 1, and its cells by column."""
    several_captions: bool
    """Whether a cell can hold a list of captions."""
    ignored: int = 0
    """Files of a folder that are neither media nor captions."""


Numbered = list[tuple[int, dict[str, Any]]]


def read_records(path: Path, note: Note) -> Records:
    """Read the records of a file or folder.

    Args:
        path: `.csv`, `.json` or `.jsonl` in UTF-8, with or without byte-order mark, or a folder.
        note: is told of what is wrong.

    Raises:
        DataError: nothing can be read.
    """
    if path.is_dir():
        return _read_folder(path, note)
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            "metadata", f"data.metadata: {path} must end in {', '.join(readers)}, or be a folder of media", source=path
        )
    rows = reader(path, _read_text(path), note)
    columns = dict.fromkeys(column for _, record in rows for column in record)
    return Records(tuple(columns), tuple(rows), several_captions=reader is not _read_csv)


def natural_order(path: Path) -> tuple[list[str | int], str]:
    """Sorts names as people do: `x2` before `x10`."""
    parts: list[str | int] = list(re.split(r"([0-9]+)", str(path).lower()))
    parts[1::2] = map(int, parts[1::2])
    return parts, str(path)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError("metadata", f"data.metadata: the file {path} does not exist", source=path) from None
    except OSError as error:
        raise DataError("metadata", f"data.metadata: the file {path} cannot be read: {error}", source=path) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise DataError(
            "encoding",
            f"{path}: line {line}, byte {byte} (0x{raw[error.start]:02x}) is not UTF-8; save the file as UTF-8",
            source=path,
        ) from None


def _read_folder(path: Path, note: Note) -> Records:
    files = [file for file in sorted(path.rglob("*"), key=natural_order) if not _is_hidden(file.relative_to(path))]
    media = [file for file in files if is_medium(file) and not file.is_dir()]
    if not media:
        raise DataError("metadata", f"data.metadata: the folder {path} holds no clip or picture", source=path)
    missing = [file for file in media if not file.with_suffix(CAPTION_SUFFIX).is_file()]
    by_caption: dict[Path, list[Path]] = {}
    for file in media:
        by_caption.setdefault(file.with_suffix(CAPTION_SUFFIX), []).append(file)
    captions = [file for file in files if file in by_caption]
    if missing:
        lists = [file.name for file in files if file.name.startswith("metadata.")]
        hint = f"; if {lists[0]} lists them, set data.metadata={path / lists[0]}" if lists else ""
        note(_names_files(path, missing, f"have no caption file beside them; add a {CAPTION_SUFFIX} for each{hint}"))
    shared = [file for caption, sharing in by_caption.items() if len(sharing) > 1 for file in sharing]
    if shared:
        note(_names_files(path, shared, f"share a {CAPTION_SUFFIX} with another medium; rename them"))
    bad = {*missing, *shared}
    rows: Numbered = []
    for number, file in enumerate(media, start=1):
        if file in bad:
            continue
        try:
            caption = _read_text(file.with_suffix(CAPTION_SUFFIX)).strip()
        except DataError as problem:
            note(problem)
            continue
        rows.append((number, {"media": str(file.relative_to(path)), "prompt": caption}))
    ignored = sum(not file.is_dir() for file in files) - len(media) - len(captions)
    return Records(("media", "prompt"), tuple(rows), several_captions=False, ignored=ignored)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _names_files(path: Path, files: list[Path], what: str) -> DataError:
    shown = "".join(f"\n  {file}" for file in files[:_SHOWN])
    more = f"\n  and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return DataError("caption file", f"{path}: {len(files)} media {what}{shown}{more}", source=path)


def _read_csv(path: Path, text: str, note: Note) -> Numbered:
    csv.field_size_limit(2**31 - 1)  # captions may be longer than the default of 128 KiB
    # strict: unbalanced quotes are an error instead of a silent shift of columns. Line breaks inside quotes survive,
    # as the text is split by the csv reader alone.
    reader = csv.reader(_lines(text), strict=True)
    header: list[str] = []
    start = 1
    number = 0
    rows: Numbered = []
    try:
        header = next((values for values in reader if values), [])
        start = reader.line_num + 1
        for column in header:
            if header.count(column) > 1:
                raise DataError("metadata", f"{path}: the column {column!r} is there twice", source=path)
        for values in reader:
            line, start = start, reader.line_num + 1
            if not values:
                continue
            number += 1
            if len(values) == len(header):
                rows.append((number, dict(zip(header, values, strict=True))))
                continue
            message = (
                f"{path}: row {number} (line {line}) has {len(values)} cells, the header has {len(header)}; put text that "
                "holds commas, quotes or line breaks in double quotes"
            )
            note(DataError("row", message, source=path, row=number))
    except csv.Error as error:
        row = f"row {number + 1} (line {start})" if header else f"line {start}"
        note(DataError("row", f"{path}: {row}: {error}; check the quotes", source=path, row=number + 1))
    return rows


def _lines(text: str) -> Iterator[str]:
    """Lines with their ends, split at line feeds only, as csv wants them."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield text[start:end]
        start = end


def _read_json(path: Path, text: str, note: Note) -> Numbered:
    try:
        records = json.loads(text, object_pairs_hook=_without_duplicates)
    except _DuplicateKeyError as error:
        raise DataError("metadata", f"{path}: the key {error} is there twice in one object", source=path) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DataError("metadata", f"{path}: {place}: {error.msg}", source=path) from None
    if not isinstance(records, list):
        raise DataError(
            "metadata",
            f"{path}: a .json metadata file is a list of objects; one object a line belongs in a .jsonl",
            source=path,
        )
    return [
        (number, record)
        for number, record in enumerate(records, start=1)
        if _is_object(path, number, f"row {number}", record, note)
    ]


def _read_jsonl(path: Path, text: str, note: Note) -> Numbered:
    rows: Numbered = []
    number = 0
    for count, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        number += 1
        try:
            record = json.loads(line, object_pairs_hook=_without_duplicates)
        except _DuplicateKeyError as error:
            note(DataError("row", f"{path}: line {count}: the key {error} is there twice", source=path, row=number))
        except json.JSONDecodeError as error:
            message = f"{path}: line {count}, column {error.colno}: {error.msg}"
            note(DataError("row", message, source=path, row=number))
        else:
            if _is_object(path, number, f"line {count}", record, note):
                rows.append((number, record))
    return rows


class _DuplicateKeyError(Exception):
    """A key is given twice in an object."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(repr(next(key for key in keys if keys.count(key) > 1)))
    return record


def _is_object(path: Path, number: int, place: str, record: Any, note: Note) -> bool:
    if not isinstance(record, dict):
        message = f"{path}: {place} is not an object with 'prompt' and 'video' or 'image'"
        note(DataError("row", message, source=path, row=number))
        return False
    return True
