"""Encoded samples on disk, one safetensors file for a medium and one for a distinct prompt.

A file's name is a hash of everything that its content depends on, so an entry is found exactly when it is right: a
changed clip, size, encoder or version of our code leads to another name. Media are identified by the hash of their bytes;
size and modification time only spare hashing a file again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from flowshard.config import Config
from flowshard.data.buckets import Shapes
from flowshard.data.cached_sets import write_set
from flowshard.data.captions import captions_of
from flowshard.data.media import MEDIA_VERSION
from flowshard.data.metadata import CachedNames, Metadata, Row
from flowshard.data.problems import DataError
from flowshard.data.samples import cut_of
from flowshard.data.sizes import row_size
from flowshard.errors import UserError
from flowshard.families import key_of
from flowshard.families.base import Family
from flowshard.parallel.processes import Processes
from flowshard.weights.files import atomic_file, fingerprint, read_json
from flowshard.weights.source import ModelSource

_ABANDONED_SECONDS = 3600.0
"""Age from which a temporary file is of a process that was killed."""

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")


class RowEncoder(Protocol):
    """What turns rows into tensors."""

    def media(self, row: Row) -> Tensors:
        """Latents and other tensors of the row's medium."""

    def text(self, row: Row, caption: str) -> Tensors:
        """Tensors of a caption of the row."""

    def check(self, reason: str) -> None:
        """Refuse to encode if the model lacks its encoders; `reason` says what for."""


class EncodedCache:
    """The cache folder as one run sees it."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        family: Family,
        source: ModelSource,
        dtype: torch.dtype,
        known: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Open it.

        Args:
            folder: may not exist yet.
            config: of the run.
            family: of the model.
            source: the model's files, of which the encoders may be missing.
            dtype: of text entries.
            known: fingerprints of the encoders that a set was encoded with, if its rows are read.

        Raises:
            UserError: the model lacks an encoder and the entries do not say which it was, or has another one than the set.
        """
        self._folder = folder
        # How a sample is encoded depends on the kind of model alone: variants that have the same encoders share entries.
        kind = key_of(family)
        common = {"family": kind, "encoding": family.encoding_version}
        self._config, self._family = config, family
        self._encoders = _EncoderFingerprints(folder / "encoders.json", kind, source, known)
        tiles = {} if config.data.tiles is None else {"tiles": config.data.tiles}
        self._media_basis = {
            **common,
            **tiles,
            "frames": config.data.frames,
            "media": MEDIA_VERSION,
            "encoders": [self._encoders.of(name) for name in family.media_components],
        }
        self._text_basis = {
            **common,
            "dtype": str(dtype),
            "encoders": [self._encoders.of(name) for name in family.text_components],
        }
        self._text_inputs = family.text_inputs
        self._hashes = _MediaHashes(folder / "media.json")
        self._files: dict[tuple[str, Any], Path] = {}
        self._shapes: dict[Path, Shapes] = {}

    def fill(
        self, rows: Sequence[Row], encoder: RowEncoder, processes: Processes, *, apart: bool = False
    ) -> dict[int, str]:
        """Encode what is missing for these rows; nothing that is there is touched.

        The processes share the work, each writing its own entries, and wait for one another outside of collectives. Other
        commands may fill the same folder meanwhile: what they have written is not encoded again.

        Args:
            rows: of the metadata.
            encoder: makes the entries.
            processes: this one and its peers.
            apart: begin at a place of this process's own, so that several commands meet at the end only.

        Returns:
            With `data.on_error=skip`, why rows have no entry, by their place in `rows`; the same in all processes.

        Raises:
            UserError: the folder cannot be written, a medium cannot be encoded and is not to be skipped, or the model
                lacks an encoder that is needed.
        """
        for name in ("media", "text"):
            try:
                (self._folder / name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"data.cache: cannot write to {self._folder} ({error.strerror}); give another folder or use data.cache=off"
                ) from None
        media: dict[Path, Row] = {}
        texts: dict[Path, tuple[Row, str]] = {}
        for row in rows:
            media.setdefault(self._media_file(row), row)
            for caption in captions_of(row, dropout=self._config.data.caption_dropout):
                texts.setdefault(self._text_file(row, caption), (row, caption))
        if processes.is_main:
            self._hashes.save()
            self._encoders.save()
            self._remove_abandoned()
        tasks: list[tuple[Path, Row, Callable[[], Tensors]]] = [
            *((file, row, partial(encoder.media, row)) for file, row in media.items()),
            *((file, row, partial(encoder.text, row, caption)) for file, (row, caption) in texts.items()),
        ]
        work = [task for task in tasks if not (task[0].is_file() or (task[1].cached and _failure(task[0]).is_file()))]
        processes.wait_for_all("cache listed")  # all have looked before the first writes, so all divide the same work
        processes.say(
            f"cache {self._folder}: {len(rows)} samples of {len(media)} media and {len(texts)} prompts; "
            f"{len(tasks) - len(work)} entries are there, {len(work)} are encoded now"
        )
        gone = next((row for _, row, _ in work if row.cached is not None), None)
        if gone is not None:
            raise UserError(
                f"data.cache: {len(work)} entries are not in {self._folder} any more, for example of {gone.describe()}; encode "
                "the set again with `flowshard cache`"
            )
        if not work:
            return self._failed(rows)[0]
        encoder.check(f"{len(work)} entries are not in {self._folder} yet")
        own = _rotated(work) if apart else work[processes.layout.rank :: processes.layout.world]
        for file, _, encode in tqdm(own, desc="encode", unit="entry", disable=None if processes.is_main else True):
            if file.is_file():  # by another command
                continue
            try:
                tensors = encode()
            except DataError as error:
                if self._config.data.on_error == "stop":
                    raise
                with atomic_file(_failure(file)) as temporary:
                    temporary.write_text(str(error), encoding="utf-8")
                continue
            with atomic_file(file) as temporary:
                save_file(tensors, temporary)
            _failure(file).unlink(missing_ok=True)
        processes.wait_for_all("cache filled")
        failed, theirs = self._failed(rows)
        unseen = [row for file, row, _ in work if not file.is_file() and file not in theirs]
        if unseen:
            raise UserError(
                f"data.cache: this machine does not see {len(unseen)} entries that others wrote to {self._folder}, for "
                f"example of {unseen[0].media}; give a folder that all machines share"
            )
        return failed

    def _failed(self, rows: Sequence[Row]) -> tuple[dict[int, str], set[Path]]:
        """Why rows are skipped, by their place, and the entries that are missing for that."""
        failed: dict[int, str] = {}
        theirs: set[Path] = set()
        for place, row in enumerate(rows):
            file = self._media_file(row)
            if not file.is_file() and _failure(file).is_file():
                failed[place] = _failure(file).read_text(encoding="utf-8")
                if self._config.data.on_error == "stop":
                    raise UserError(f"{failed[place]}. Or set data.on_error=skip")
                captions = captions_of(row, dropout=self._config.data.caption_dropout)
                theirs |= {file, *(self._text_file(row, caption) for caption in captions)}
        return failed, theirs

    def _remove_abandoned(self) -> None:
        """Delete what killed processes had begun to write."""
        for left in self._folder.glob("*/.*.partial"):
            try:
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    left.unlink()
            except OSError:  # finished or deleted meanwhile
                continue

    def read_media(self, row: Row) -> Tensors:
        """The tensors of the row's medium, `latents` among them."""
        return load_file(self._media_file(row))

    def shapes(self, row: Row) -> Shapes:
        """The shapes of the tensors of the row's medium, by name; the tensors are not read."""
        path = self._media_file(row)
        if path not in self._shapes:
            with safe_open(path, framework="pt") as file:
                names = sorted(file.keys())
                self._shapes[path] = tuple((name, tuple(file.get_slice(name).get_shape())) for name in names)
        return self._shapes[path]

    def write_set(self, metadata: Metadata) -> None:
        """Note in the folder that it holds these samples. Rows that come from a set are noted already."""
        dropout = self._config.data.caption_dropout

        def names(row: Row) -> CachedNames:
            texts = {caption: self._text_file(row, caption).name for caption in captions_of(row, dropout=dropout)}
            return CachedNames(self._media_file(row).name, texts)

        if not any(row.cached for row in metadata.rows):
            write_set(self._folder, self._config, metadata, self._family, names, self._encoders.used)

    def read_text(self, row: Row, caption: str) -> Tensors:
        """The tensors of a caption of the row."""
        return load_file(self._text_file(row, caption))

    def _media_file(self, row: Row) -> Path:
        if row.cached is not None:
            return self._folder / "media" / row.cached.media
        key = ("media", (row.media, row.start, row.end, *row.inputs.items()))
        if key not in self._files:
            hashes = [self._hashes.of(file) for file in row.medium]
            own = {"sha256": hashes if row.pictures else hashes[0], **self._hashed(row, list(row.inputs))}
            cut = cut_of(row, self._config.data, self._family, seed=self._config.seed).key()
            size = dict(zip(("height", "width"), self._size(row), strict=True))
            self._files[key] = self._entry(
                "media", {**self._media_basis, **size, **own, **({"cut": cut} if cut else {})}
            )
        return self._files[key]

    def _size(self, row: Row) -> tuple[int, int]:
        """Height and width of the row, nothing for one that cannot be decoded: it fails when it is encoded."""
        try:
            return row_size(row, self._config.data, self._family)
        except DataError:
            return 0, 0

    def _text_file(self, row: Row, caption: str) -> Path:
        if row.cached is not None:
            if caption not in row.cached.texts:
                raise UserError(
                    f"data.caption_dropout: the set in {self._folder} has no entry of the empty caption; encode it again with "
                    "`flowshard cache` and this option, or set data.caption_dropout=0"
                )
            return self._folder / "text" / row.cached.texts[caption]
        columns = [column for column in self._text_inputs if column in row.inputs]
        key = ("text", (caption, *((column, row.inputs[column]) for column in columns)))
        if key not in self._files:
            own = {"prompt": caption, **self._hashed(row, columns)}
            self._files[key] = self._entry("text", {**self._text_basis, **own})
        return self._files[key]

    def _hashed(self, row: Row, columns: Sequence[str]) -> dict[str, Any]:
        """The contents of the files of these inputs."""
        if not columns:
            return {}
        return {"inputs": {column: [self._hashes.of(file) for file in row.inputs[column]] for column in columns}}

    def _entry(self, kind: str, ingredients: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
        return self._folder / kind / f"{digest[:40]}.safetensors"


def _failure(file: Path) -> Path:
    """Where it is said why an entry could not be made. It is tried again by the next run."""
    return file.with_suffix(".failed.txt")


class _MediaHashes:
    """Hashes of media files, remembered by path, size and modification time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = False
        self._known: dict[str, list[Any]] = {}
        if file.is_file():
            try:
                self._known = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:  # only a memory of work done: it is made anew
                self._known = {}

    def of(self, path: Path) -> str:
        status = path.stat()
        mark = [status.st_size, status.st_mtime_ns]
        entry = self._known.get(str(path))
        if entry is not None and entry[:2] == mark:
            return str(entry[2])
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(2**20):
                digest.update(block)
        self._known[str(path)] = [*mark, digest.hexdigest()]
        self._changed = True
        return digest.hexdigest()

    def save(self) -> None:
        if self._changed:
            with atomic_file(self._file) as temporary:
                temporary.write_text(json.dumps(self._known), encoding="utf-8")
            self._changed = False


def _rotated(work: Sequence[T]) -> Sequence[T]:
    """All of it, from a place on that differs from process to process."""
    process = str((os.uname().nodename, os.getpid()))
    start = int.from_bytes(hashlib.sha256(process.encode()).digest()[:4], "big") % len(work)
    return [*work[start:], *work[:start]]


class _EncoderFingerprints:
    """What identifies encoders, remembered with the entries, so that these are found when the encoders are gone."""

    def __init__(self, file: Path, kind: str, source: ModelSource, of_set: Mapping[str, str]) -> None:
        """Open it; a set that is read says by itself what it was made with."""
        self._file = file
        self._kind = kind
        self._source = source
        self._of_set = of_set
        self.used: dict[str, str] = {}
        """What was asked for, by component."""
        self._known: dict[str, list[str]] = {}
        if file.is_file():
            self._known = read_json(file)
        self._changed = False

    def of(self, component: str) -> str:
        """The fingerprint of a component: of what the model has now, else of the one that the entries were made with.

        Raises:
            UserError: the model lacks it, and the entries do not say which it was; or it has another than the set.
        """
        self.used[component] = self._find(component)
        return self.used[component]

    def _find(self, component: str) -> str:
        name = f"{self._kind}/{component}"
        known = self._known.get(name, [])
        place = self._source.parts.get(component)
        if place is not None and place.exists():
            found = fingerprint(place)
            if self._of_set.get(component, found) != found:
                raise UserError(
                    f"model.path: the {component} of {self._source.label} is not the one that the samples in "
                    f"{self._file.parent} were encoded with; encode them again with `flowshard cache`"
                )
            if found not in known:
                self._known[name] = [*known, found]
                self._changed = True
            return found
        if component in self._of_set:
            return self._of_set[component]
        if len(known) == 1:
            return known[0]
        why = f"holds entries of {len(known)} of them" if known else f"has no entries of {self._kind} models"
        raise UserError(
            f"model.path: {self._source.label} lacks {component}, and the cache {self._file.parent} {why}; add the "
            f"{component}, or set data.cache to the folder that was filled with it"
        )

    def save(self) -> None:
        if self._changed:
            with atomic_file(self._file) as temporary:
                temporary.write_text(json.dumps(self._known, indent=2), encoding="utf-8")
            self._changed = False
