"""Samples as the transformer takes them, encoded at every access or read from the cache."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowshard.config import Config, DataConfig
from flowshard.data.buckets import Bucket, elements, group
from flowshard.data.cache import EncodedCache
from flowshard.data.metadata import Metadata, Row
from flowshard.data.samples import decode, decode_inputs
from flowshard.data.sources import RunData
from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.parallel.processes import Processes
from flowshard.seeds import isolated_rng
from flowshard.weights.source import ModelSource


@dataclass(frozen=True)
class Sample:
    """One encoded sample on the CPU."""

    row: Row
    latents: torch.Tensor
    """float32, without batch."""
    conditions: dict[str, torch.Tensor]


class Encoder:
    """Encodes rows of a metadata file at the size of the run; loads the encoders when first used."""

    def __init__(
        self,
        config: Config,
        family: Family,
        source: ModelSource,
        metadata: Metadata,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.family = family
        self.source = source
        self.metadata = metadata
        self.dtype = dtype
        self.device = device
        self._encoders: dict[str, Any] = {}
        """The loaded ones, shared with what `of` returns."""

    def of(self, metadata: Metadata) -> "Encoder":
        """For rows of another file, with the same encoders in memory."""
        other = copy.copy(self)
        other.metadata = metadata
        return other

    def media(self, row: Row) -> dict[str, torch.Tensor]:
        """Latents and other tensors of the row's medium."""
        data, seed, where = self.config.data, self.config.seed, row.describe()
        frames = decode(row, data, self.family, seed=seed)
        columns = [one.column for one in self.family.inputs]
        inputs = decode_inputs(row, data, self.family, columns, frames, seed=seed)
        encoders = self._load()
        own = self.family.encode_media(encoders, frames)
        try:
            more = self.family.encode_inputs(encoders, frames, inputs)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return self._checked({**own, **more}, where)

    def text(self, row: Row, caption: str) -> dict[str, torch.Tensor]:
        """Tensors of a caption of the row."""
        inputs = decode_inputs(row, self.config.data, self.family, self.family.text_inputs, None, seed=self.config.seed)
        return self._checked(self.family.encode_prompt(self._load(), caption, inputs), row.describe())

    def check(self, reason: str) -> None:
        """Refuse a model that lacks an encoder; `reason` says what it is needed for.

        Raises:
            UserError: naming what is missing.
        """
        components = [*self.family.media_components, *self.family.text_components]
        self.source.check_parts(components, option="model.path", wanted=f", and {reason}")

    def release(self) -> None:
        """Free the encoders."""
        self._encoders.clear()

    def _load(self) -> Any:
        if not self._encoders:
            with isolated_rng(self.config.seed, "constructor"):
                loaded = self.family.load_encoders(self.source, dtype=self.dtype, device=self.device)
            if self.config.data.tiles is not None:
                loaded.vae.enable_tiling(*self.config.data.tiles)
            self._encoders["pipeline"] = loaded
        return self._encoders["pipeline"]

    @staticmethod
    def _checked(tensors: dict[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(
                    f"{where}: its {name} are not finite after encoding; check the medium, and use "
                    "model.dtype=bfloat16 or float32"
                )
        return tensors


class Dataset(ABC):
    """The samples of an epoch."""

    def __init__(self, metadata: Metadata, data: DataConfig, skipped: Collection[int] = ()) -> None:
        """Of the rows, those at the `skipped` places are not used: each next one that is takes their place."""
        count = len(metadata.rows)
        self._instead = {
            place: next(other % count for other in range(place, place + count) if other % count not in skipped)
            for place in skipped
        }
        self.rows = metadata.rows
        self._epoch = metadata.epoch
        self._repeat = data.repeat

    def __len__(self) -> int:
        return len(self._epoch) * self._repeat

    def row(self, index: int) -> Row:
        """The row that a sample of the epoch comes from."""
        place = self._epoch[index % len(self._epoch)]
        return self.rows[self._instead.get(place, place)]

    def __getitem__(self, index: int) -> Sample:
        """A sample with its first caption."""
        row = self.row(index)
        return self.sample(row, row.prompt)

    def sample(self, row: Row, caption: str) -> Sample:
        """A row with one of its captions."""
        tensors = self._tensors(row, caption)
        return Sample(row, tensors.pop("latents"), tensors)

    @abstractmethod
    def largest(self) -> Sample:
        """A sample of the most tensor elements that there are."""

    def _used(self) -> list[Row]:
        return [row for place, row in enumerate(self.rows) if place not in self._instead]

    @abstractmethod
    def _tensors(self, row: Row, caption: str) -> dict[str, torch.Tensor]:
        """All tensors of a row, `latents` among them."""


class OnlineDataset(Dataset):
    """Decodes and encodes at every access."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder.metadata, encoder.config.data)
        self._encoder = encoder

    def largest(self) -> Sample:
        # Clips have as many frames as the run, since shorter ones are trimmed with a cache only.
        row = max(self.rows, key=lambda row: (not row.is_picture, math.prod(row.size or ())))
        return self.sample(row, row.prompt)

    def _tensors(self, row: Row, caption: str) -> dict[str, torch.Tensor]:
        return {**self._encoder.media(row), **self._encoder.text(row, caption)}


class CachedDataset(Dataset):
    """Reads what `fill` has encoded, by memory map."""

    def __init__(
        self, cache: EncodedCache, metadata: Metadata, data: DataConfig, skipped: Collection[int] = ()
    ) -> None:
        super().__init__(metadata, data, skipped)
        self._cache = cache
        self.skipped = len(skipped) + len(metadata.left_out)
        """Rows that cannot be used."""
        # To know the shapes otherwise means to open every entry.
        kinds = {(row.is_picture, bool(row.inputs)) for row in self.rows}
        self._alike = data.max_pixels is None and data.short != "trim" and kinds in ({(True, False)}, {(False, False)})

    def buckets(self) -> list[Bucket]:
        """The samples of an epoch by shape, the largest first."""
        if self._alike:
            return [Bucket(self._cache.shapes(self.row(0)), list(range(len(self))))]
        return group(self._cache.shapes(self.row(index)) for index in range(len(self)))

    def largest(self) -> Sample:
        used = self._used()
        row = used[0] if self._alike else max(used, key=lambda row: elements(self._cache.shapes(row)))
        return self.sample(row, row.prompt)

    def _tensors(self, row: Row, caption: str) -> dict[str, torch.Tensor]:
        return {**self._cache.read_media(row), **self._cache.read_text(row, caption)}


def open_datasets(
    encoder: Encoder, samples: RunData, cache_folder: Path | None, *, processes: Processes, apart: bool = False
) -> tuple[Dataset, Dataset | None]:
    """The datasets of a run: of the samples that are trained on, and of those that are held out.

    With a cache folder, everything that is not in it yet is encoded now.

    Args:
        encoder: for what has to be encoded; may be released afterwards if there is a cache.
        samples: of the run.
        cache_folder: where encoded samples are kept; None encodes at every access.
        processes: share the work.
        apart: see `EncodedCache.fill`.

    Raises:
        UserError: a medium cannot be decoded; the message names file and row.
    """
    if cache_folder is None:
        return OnlineDataset(encoder), None if samples.held_out is None else OnlineDataset(encoder.of(samples.held_out))
    config = encoder.config

    def opened(metadata: Metadata) -> EncodedCache:
        known = metadata.encoders
        return EncodedCache(cache_folder, config, encoder.family, encoder.source, encoder.dtype, known)

    def filled(cache: EncodedCache, metadata: Metadata) -> Dataset:
        failed = cache.fill(metadata.rows, encoder.of(metadata), processes, apart=apart)
        _check_skipped(failed, metadata, config.data, processes)
        return CachedDataset(cache, metadata, config.data, failed)

    cache = opened(samples.all)
    dataset, held_out = filled(cache, samples.training), None
    if samples.held_out is not None:
        # What is held out from a file of its own does not come from the set that the others may come from.
        same = samples.held_out.encoders == samples.all.encoders
        held_out = filled(cache if same else opened(samples.held_out), samples.held_out)
    if processes.is_main:
        cache.write_set(samples.all)
    return dataset, held_out


def _check_skipped(failed: Mapping[int, str], metadata: Metadata, data: DataConfig, processes: Processes) -> None:
    """Say which rows are skipped, and refuse to skip too many."""
    reasons = [*metadata.left_out, *failed.values()]
    for reason in reasons:
        processes.say(f"skipped: {reason}")
    rows = len(metadata.rows) + len(metadata.left_out)
    most = min(data.max_skipped, rows - 1)
    if len(reasons) > most:
        raise UserError(
            f"data.max_skipped: {len(reasons)} of {rows} rows cannot be used, and at most {most} may be skipped; the first: "
            f"{reasons[0]}. Run `flowshard check` to see all"
        )
