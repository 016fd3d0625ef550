"""The list of samples, checked row by row. Needs no torch, so that mistakes are found at once."""

import glob
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowshard.data.media import is_image
from flowshard.data.problems import DataError, Note, stop
from flowshard.data.records import Records, natural_order, read_records
from flowshard.families.variant import Input

TEXT_COLUMN = "prompt"
MEDIA_COLUMNS = ("video", "image", "media")
TIME_COLUMNS = ("start", "end")
ALIASES = {
    "text": "prompt",
    "caption": "prompt",
    "video_path": "video",
    "video_file": "video",
    "image_path": "image",
    "image_file": "image",
    "file_name": "media",
    "file_path": "media",
}
"""What other trainers call our columns."""
_SHOWN_ROWS = 5
"""How many bad rows a message lists before it only counts them."""


@dataclass(frozen=True)
class CachedNames:
    """The entries of a row in a cache."""

    media: str
    texts: Mapping[str, str]
    """By caption."""


@dataclass(frozen=True)
class Row:
    """One sample of the metadata."""

    number: int
    """Place in the file, from 1, the header not counted."""
    source: Path
    """The metadata file."""
    media: Path
    """A clip, a picture, or the folder or pattern of a sequence of pictures."""
    prompts: tuple[str, ...]
    """Captions, of which each use of the sample takes one."""
    inputs: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Files of what the model gets besides the prompt, by column."""
    pictures: tuple[Path, ...] = ()
    """The files of a sequence of pictures."""
    start: float = 0.0
    """Where in the clip the sample begins, in seconds."""
    end: float | None = None
    """Where it ends; None is the end of the clip."""
    size: tuple[int, int] | None = None
    """Height and width at which it is encoded, where that is its own."""
    name: str = ""
    """The medium as it is called in its data folder."""
    cached: CachedNames | None = None
    """Its entries in a cache, where the row comes from there."""

    @property
    def prompt(self) -> str:
        """The first caption."""
        return self.prompts[0]

    @property
    def medium(self) -> tuple[Path, ...]:
        """The files of the medium: one, or the pictures of a sequence."""
        return self.pictures or (self.media,)

    @property
    def is_picture(self) -> bool:
        """Whether the medium is one still picture."""
        return not self.pictures and is_image(self.media)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the medium and of the inputs."""
        return *self.medium, *(file for files in self.inputs.values() for file in files)

    def describe(self) -> str:
        """How messages name it: file, row and medium."""
        return f"{self.source}, row {self.number} ({self.media})"


@dataclass(frozen=True)
class Metadata:
    """All samples."""

    label: str
    """The files, for messages."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """Lines about what was read otherwise than it is written, or not at all."""
    epoch: Sequence[int]
    """The samples of an epoch before `data.repeat`, as places in `rows`."""
    encoders: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the encoders that rows from a cache were encoded with."""
    left_out: tuple[str, ...] = ()
    """Why rows of the files are not among `rows`."""

    def describe(self, row: Row) -> str:
        """How messages name a row: file, row and medium."""
        return row.describe()


def without(metadata: Metadata, places: Collection[int]) -> Metadata:
    """The samples without the rows at these places."""
    if not places:
        return metadata
    kept = [place for place in range(len(metadata.rows)) if place not in places]
    if isinstance(metadata.epoch, range):
        epoch: Sequence[int] = range(len(kept))
    else:
        place_of = {place: number for number, place in enumerate(kept)}
        epoch = [place_of[place] for place in metadata.epoch if place in place_of]
    return replace(metadata, rows=tuple(metadata.rows[place] for place in kept), epoch=epoch)


def read_metadata(
    path: str | Path,
    root: str | Path | None = None,
    inputs: Sequence[Input] = (),
    *,
    prefix: str = "",
    only: Sequence[str] | None = None,
    note: Note = stop,
) -> Metadata:
    """Read and check a metadata file.

    Args:
        path: `.csv`, `.json` (a list of objects) or `.jsonl`, in UTF-8 with or without byte-order mark; or a folder of
            media with a caption in a `.txt` beside each.
        root: the folder that media paths start from and must stay in; the metadata's own folder if None.
        inputs: what the model gets besides the prompt.
        prefix: text that every caption begins with.
        only: columns that are read besides `prompt`; None is all that are known.
        note: is told of every problem; rows with one are left out if it returns.

    Raises:
        UserError: the file cannot be read, has no samples, lacks a column, or a row names no medium, a medium that does
            not exist or one outside `root`; unless `note` returns.
    """
    path = Path(path)
    if path.is_dir() and root is not None:
        raise DataError(
            "config", f"data.root: {path} is a folder, which its media are in; set data.root=null", source=path
        )
    folder = path if path.is_dir() else path.parent if root is None else Path(root)
    if not folder.is_dir():
        raise DataError("config", f"data.root: the folder {folder} does not exist", source=path)
    records = read_records(path, note)
    if not records.rows:
        message = f"{path}: holds no samples; each row needs {TEXT_COLUMN!r} and {_media_columns()}"
        note(DataError("metadata", message, source=path))
        return Metadata(str(path), (), (), ())
    left_aside: list[str] = []
    if only is not None and not path.is_dir():
        records, left_aside = _only_columns(path, records, only)
    records, notes = _with_our_columns(path, records, inputs)
    _check_columns(path, records.columns, inputs)
    reader = _RowReader(path, folder, inputs, prefix, records.several_captions)
    rows: list[Row] = []
    for number, record in records.rows:
        try:
            rows.append(reader.read(number, record))
        except DataError as problem:
            note(problem)
    rows = _with_files(path, folder, rows, note)
    known = (*MEDIA_COLUMNS, TEXT_COLUMN, *TIME_COLUMNS, *(one.column for one in inputs))
    unused = [column for column in records.columns if column not in known] + left_aside
    if unused:
        notes.append(f"{path}: unused columns: {', '.join(unused)}")
    if records.ignored:
        notes.append(f"{path}: {records.ignored} files that are neither media nor captions are ignored")
    return Metadata(str(path), tuple(rows), tuple(notes), range(len(rows)))


def _media_columns() -> str:
    return "'video' or 'image'"


def _only_columns(path: Path, records: Records, only: Sequence[str]) -> tuple[Records, list[str]]:
    """The records with these columns and `prompt` alone, and the names of the others."""
    missing = [column for column in only if column not in records.columns]
    if missing:
        found = ", ".join(repr(column) for column in records.columns)
        raise DataError(
            "metadata",
            f"data.columns: {path} has no column {missing[0]!r}; it has {found}",
            source=path,
        )
    kept = [column for column in records.columns if column in (TEXT_COLUMN, *only)]
    rows = [(number, {name: row[name] for name in kept if name in row}) for number, row in records.rows]
    others = [column for column in records.columns if column not in kept]
    return replace(records, columns=tuple(kept), rows=tuple(rows)), others


def _with_our_columns(path: Path, records: Records, inputs: Sequence[Input]) -> tuple[Records, list[str]]:
    """The records with the names of columns that this program uses, and lines about what was renamed."""
    ours = {one.column for one in inputs}
    renamed = {column: ALIASES[column] for column in records.columns if column in ALIASES and column not in ours}
    names = [renamed.get(column, column) for column in records.columns]
    for column, name in renamed.items():
        others = [other for other, its in zip(records.columns, names, strict=True) if its == name and other != column]
        if others:
            raise DataError(
                "metadata",
                f"{path}: the columns {others[0]!r} and {column!r} both mean {name!r}; remove one",
                source=path,
            )
    if not renamed:
        return records, []
    rows = [
        (number, {renamed.get(column, column): value for column, value in row.items()}) for number, row in records.rows
    ]
    notes = [f"{path}: column {column!r} is read as {name!r}" for column, name in renamed.items()]
    return replace(records, columns=tuple(names), rows=tuple(rows)), notes


def _check_columns(path: Path, columns: Sequence[str], inputs: Sequence[Input]) -> None:
    found = ", ".join(repr(column) for column in columns)
    if TEXT_COLUMN not in columns:
        raise DataError("metadata", f"{path}: the column {TEXT_COLUMN!r} is missing; found {found}", source=path)
    if not any(column in columns for column in MEDIA_COLUMNS):
        raise DataError("metadata", f"{path}: a column {_media_columns()} is missing; found {found}", source=path)
    for one in inputs:
        if one.required and one.from_clip is None and one.column not in columns:
            message = f"{path}: the column {one.column!r} is missing, which this model needs; found {found}"
            raise DataError("metadata", message, source=path)


def _with_files(path: Path, root: Path, rows: Sequence[Row], note: Note) -> list[Row]:
    """The rows whose files exist."""
    missing = {row.number: [file for file in row.files if not _is_file(file)] for row in rows}
    missing = {number: files for number, files in missing.items() if files}
    lines = [f"\n  row {number}: {file}" for number, files in missing.items() for file in files]
    more = f"\n  and {len(lines) - _SHOWN_ROWS} more" if len(lines) > _SHOWN_ROWS else ""
    for number, files in missing.items():
        note(
            DataError(
                "missing file",
                f"{path}: media of {len(missing)} of {len(rows)} rows do not exist; correct the paths or set data.root "
                f"(now {root}){''.join(lines[:_SHOWN_ROWS])}{more}",
                source=path,
                row=number,
                short=f"{path}, row {number}: {files[0]} does not exist",
            )
        )
    return [row for row in rows if row.number not in missing]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, or a folder without permission
        return False


@dataclass(frozen=True)
class _RowReader:
    """Turns the records of one file into rows."""

    path: Path
    root: Path
    inputs: Sequence[Input]
    prefix: str
    several_captions: bool

    def read(self, number: int, record: Mapping[str, Any]) -> Row:
        prompts = self._prompts(number, record.get(TEXT_COLUMN))
        names = [name for column in MEDIA_COLUMNS if (name := self._text(number, record, column))]
        if len(names) != 1:
            problem = "names several media" if len(names) > 1 else f"names no {_media_columns()}"
            if len(names) > 1 and record.get("video") and record.get("image"):
                problem = "names both a video and an image"
            raise self._wrong(number, f"{problem}; a row is one sample with one medium")
        media = self._inside(number, names[0])
        files = {one.column: self._input_files(number, record, one) for one in self.inputs}
        row = Row(
            number=number,
            source=self.path,
            media=media,
            prompts=tuple(self.prefix + prompt for prompt in prompts),
            inputs={column: found for column, found in files.items() if found},
            pictures=self._sequence(media),
            name=Path(os.path.relpath(media, self.root)).as_posix(),
        )
        return self._timed(row, record)

    def _wrong(self, number: int, what: str, *, kind: str = "row") -> DataError:
        return DataError(kind, f"{self.path}: row {number}: {what}", source=self.path, row=number)

    def _text(self, number: int, record: Mapping[str, Any], column: str) -> str:
        value = record.get(column)
        if value is not None and not isinstance(value, str):
            raise self._wrong(number, f"{column!r} must be text, not {value!r}")
        return value or ""

    def _prompts(self, number: int, value: Any) -> list[str]:
        if value is None:
            raise self._wrong(number, f"has no {TEXT_COLUMN!r}; an empty text is written as an empty text")
        prompts = value if isinstance(value, list) and self.several_captions else [value]
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise self._wrong(number, f"{TEXT_COLUMN!r} must be text or a list of texts, not {value!r}")
        return prompts

    def _timed(self, row: Row, record: Mapping[str, Any]) -> Row:
        """The row with the part of the clip that it is."""
        start, end = (self._seconds(row.number, column, record.get(column)) for column in TIME_COLUMNS)
        if start is None and end is None:
            return row
        if row.is_picture or row.pictures:
            raise self._wrong(row.number, "'start' and 'end' are for clips; leave them empty for pictures", kind="time")
        if end is not None and end <= (start or 0.0):
            raise self._wrong(row.number, f"'end' ({end:g}) must come after 'start' ({start or 0.0:g})", kind="time")
        return replace(row, start=start or 0.0, end=end)

    def _seconds(self, number: int, column: str, value: Any) -> float | None:
        if value is None or value == "":
            return None
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds >= 0):
            raise self._wrong(number, f"{column!r} must be seconds from 0 upwards, not {value!r}", kind="time")
        return seconds

    def _input_files(self, number: int, record: Mapping[str, Any], one: Input) -> tuple[Path, ...]:
        """The files of a cell: a name, a list of names, or text that holds such a list as JSON."""
        value = record.get(one.column)
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except ValueError:
                raise self._wrong(number, f"{one.column!r} is no list of files: {value!r}") from None
        names = [] if value in (None, "") else value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) and name for name in names):
            raise self._wrong(number, f"{one.column!r} must be a file or a list of files, not {value!r}")
        if len(names) > 1 and not one.several:
            raise self._wrong(number, f"{one.column!r} takes one file, not {len(names)}")
        if not names and one.required and one.from_clip is None:
            raise self._wrong(number, f"has no {one.column!r}, which this model needs")
        return tuple(self._inside(number, name) for name in names)

    def _inside(self, number: int, name: str) -> Path:
        # By the names alone: a link inside the data folder may lead elsewhere, as people lay out large sets that way.
        full = Path(os.path.abspath(self.root / name))  # noqa: PTH100
        if not full.is_relative_to(os.path.abspath(self.root)):  # noqa: PTH100
            raise self._wrong(
                number,
                f"{name!r} lies outside the data folder {self.root}; set data.root to a folder that holds it",
                kind="path",
            )
        return full

    def _sequence(self, media: Path) -> tuple[Path, ...]:
        """The pictures of a folder or pattern, in natural order; none for a file."""
        if _is_file(media):
            return ()
        try:
            if media.is_dir():
                found = list(media.iterdir())
            elif glob.has_magic(str(media.relative_to(os.path.abspath(self.root)))):  # noqa: PTH100
                root = os.path.abspath(self.root)  # noqa: PTH100
                found = [Path(root, name) for name in glob.glob(str(media.relative_to(root)), root_dir=root)]  # noqa: PTH207
            else:
                found = []
        except OSError:  # a name that is too long
            found = []
        pictures = [file for file in found if is_image(file) and not file.name.startswith(".")]
        return tuple(sorted(pictures, key=natural_order))
