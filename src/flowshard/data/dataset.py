"""Samples as the transformer takes them, encoded at every access or read from the cache."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowshard.config import Config, DataConfig
from flowshard.data.cache import EncodedCache
from flowshard.data.metadata import Metadata, Row
from flowshard.data.samples import decode, decode_inputs
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

    def largest(self) -> Sample:
        """A sample of the largest latents that there are."""
        used = self._used()
        row = next((row for row in used if not row.is_picture), used[0])
        return self.sample(row, row.prompt)

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

    def _tensors(self, row: Row, caption: str) -> dict[str, torch.Tensor]:
        return {**self._encoder.media(row), **self._encoder.text(row, caption)}


class CachedDataset(Dataset):
    """Reads what `fill` has encoded, by memory map."""

    def __init__(
        self, cache: EncodedCache, metadata: Metadata, data: DataConfig, skipped: Collection[int] = ()
    ) -> None:
        super().__init__(metadata, data, skipped)
        self._cache = cache
        self._trimmed = data.short == "trim"

    def largest(self) -> Sample:
        """A sample of the largest latents that there are; trimmed clips differ in length."""
        clips = [row for row in self._used() if not row.is_picture]
        if not (self._trimmed and clips):
            return super().largest()
        row = max(clips, key=lambda clip: math.prod(self._cache.latents_shape(clip)))
        return self.sample(row, row.prompt)

    def _tensors(self, row: Row, caption: str) -> dict[str, torch.Tensor]:
        return {**self._cache.read_media(row), **self._cache.read_text(row, caption)}


def open_dataset(encoder: Encoder, cache_folder: Path | None, *, processes: Processes, apart: bool = False) -> Dataset:
    """The dataset of a run; with a cache folder, everything that is not in it yet is encoded now.

    Args:
        encoder: for what has to be encoded; may be released afterwards if there is a cache.
        cache_folder: where encoded samples are kept; None encodes at every access.
        processes: share the work.
        apart: see `EncodedCache.fill`.

    Raises:
        UserError: a medium cannot be decoded; the message names file and row.
    """
    if cache_folder is None:
        return OnlineDataset(encoder)
    cache = EncodedCache(cache_folder, encoder.config, encoder.family, encoder.source, encoder.dtype)
    rows, data = encoder.metadata.rows, encoder.config.data
    failed = cache.fill(rows, encoder, processes, apart=apart)
    for reason in failed.values():
        processes.say(f"skipped: {reason}")
    most = min(data.max_skipped, len(rows) - 1)
    if len(failed) > most:
        raise UserError(
            f"data.max_skipped: {len(failed)} of {len(rows)} rows cannot be used, and at most {most} may be skipped; the "
            f"first: {next(iter(failed.values()))}. Run `flowshard check` to see all"
        )
    return CachedDataset(cache, encoder.metadata, data, failed)
