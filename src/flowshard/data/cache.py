"""Encoded samples on disk, one safetensors file for a medium and one for a distinct prompt.

A file's name is a hash of everything that its content depends on, so an entry is found exactly when it is right: a
changed clip, size, encoder or version of our code leads to another name. Media are identified by the hash of their bytes;
size and modification time only spare hashing a file again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from flowshard.config import Config
from flowshard.data.captions import captions_of
from flowshard.data.metadata import Row
from flowshard.data.problems import DataError
from flowshard.data.samples import cut_of
from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.parallel.processes import Processes
from flowshard.weights.files import atomic_file, fingerprint
from flowshard.weights.source import ModelSource

_MEDIA_VERSION = 1
"""Raised whenever `media.read_frames` gives other pixels."""

Tensors = dict[str, torch.Tensor]


class EncodedCache:
    """The cache folder as one run sees it."""

    def __init__(self, folder: Path, config: Config, family: Family, source: ModelSource, dtype: torch.dtype) -> None:
        self._folder = folder
        common = {"variant": config.model.variant, "encoding": family.encoding_version}
        self._config, self._family = config, family
        size = {"height": config.data.height, "width": config.data.width, "frames": config.data.frames}
        self._media_basis = {
            **common,
            **size,
            "media": _MEDIA_VERSION,
            "encoders": [fingerprint(source.parts[name]) for name in family.media_components],
        }
        self._text_basis = {
            **common,
            "dtype": str(dtype),
            "encoders": [fingerprint(source.parts[name]) for name in family.text_components],
        }
        self._text_inputs = family.text_inputs
        self._hashes = _MediaHashes(folder / "media.json")
        self._files: dict[tuple[str, Any], Path] = {}

    def fill(
        self,
        rows: Sequence[Row],
        *,
        encode_media: Callable[[Row], Tensors],
        encode_text: Callable[[Row, str], Tensors],
        processes: Processes,
    ) -> dict[int, str]:
        """Encode what is missing for these rows; nothing that is there is touched.

        The processes share the work, each writing its own entries, and wait for one another outside of collectives.

        Returns:
            With `data.on_error=skip`, why rows have no entry, by their place in `rows`; the same in all processes.

        Raises:
            UserError: a medium cannot be encoded, and is not to be skipped; or the folder cannot be used.
        """
        for name in ("media", "text"):
            try:
                (self._folder / name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"data.cache: cannot write to {self._folder} ({error.strerror}); give another folder or use data.cache=off"
                ) from None
        entries: dict[Path, tuple[Row, Callable[[], Tensors]]] = {}
        for row in rows:
            entries.setdefault(self._media_file(row), (row, partial(encode_media, row)))
            for caption in captions_of(row, dropout=self._config.data.caption_dropout):
                entries.setdefault(self._text_file(row, caption), (row, partial(encode_text, row, caption)))
        if processes.is_main:
            self._hashes.save()
        work = [(file, *task) for file, task in entries.items() if not file.is_file()]
        processes.wait_for_all("cache listed")  # all have looked before the first writes, so all divide the same work
        if not work:
            processes.say(f"cache {self._folder}: all {len(rows)} samples are there")
            return {}
        processes.say(f"cache {self._folder}: encoding {len(work)} of {len(entries)} entries")
        own = work[processes.layout.rank :: processes.layout.world]
        for file, _, encode in tqdm(own, desc="encode", unit="entry", disable=None if processes.is_main else True):
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
        unseen = [row for file, (row, _) in entries.items() if not file.is_file() and file not in theirs]
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
        if self._config.data.on_error == "stop":
            return failed, theirs
        for place, row in enumerate(rows):
            file = self._media_file(row)
            if not file.is_file() and _failure(file).is_file():
                failed[place] = _failure(file).read_text(encoding="utf-8")
                captions = captions_of(row, dropout=self._config.data.caption_dropout)
                theirs |= {file, *(self._text_file(row, caption) for caption in captions)}
        return failed, theirs

    def read_media(self, row: Row) -> Tensors:
        """The tensors of the row's medium, `latents` among them."""
        return load_file(self._media_file(row))

    def latents_shape(self, row: Row) -> list[int]:
        """The shape of the latents of the row's medium, which are not read."""
        with safe_open(self._media_file(row), framework="pt") as file:
            shape: list[int] = file.get_slice("latents").get_shape()
        return shape

    def read_text(self, row: Row, caption: str) -> Tensors:
        """The tensors of a caption of the row."""
        return load_file(self._text_file(row, caption))

    def _media_file(self, row: Row) -> Path:
        key = ("media", (row.media, row.start, row.end, *row.inputs.items()))
        if key not in self._files:
            hashes = [self._hashes.of(file) for file in row.medium]
            own = {"sha256": hashes if row.pictures else hashes[0], **self._hashed(row, list(row.inputs))}
            cut = cut_of(row, self._config.data, self._family, seed=self._config.seed).key()
            self._files[key] = self._entry("media", {**self._media_basis, **own, **({"cut": cut} if cut else {})})
        return self._files[key]

    def _text_file(self, row: Row, caption: str) -> Path:
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
