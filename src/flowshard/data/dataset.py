"""Samples as the transformer takes them, encoded at every access or read from the cache."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowshard.config import Config
from flowshard.data.cache import EncodedCache
from flowshard.data.media import read_frames, read_inputs
from flowshard.data.metadata import Metadata, Row
from flowshard.errors import UserError
from flowshard.families.base import Family, Inputs
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
        data, where = self.config.data, self.metadata.describe(row)
        frames = read_frames(row.media, height=data.height, width=data.width, frames=data.frames, where=where)
        inputs = self._inputs(row, [one.column for one in self.family.inputs], frames)
        encoders = self._load()
        own = self.family.encode_media(encoders, frames)
        try:
            more = self.family.encode_inputs(encoders, frames, inputs)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return self._checked({**own, **more}, where)

    def text(self, row: Row) -> dict[str, torch.Tensor]:
        """Tensors of the row's prompt."""
        inputs = self._inputs(row, self.family.text_inputs, None)
        return self._checked(self.family.encode_prompt(self._load(), row.prompt, inputs), self.metadata.describe(row))

    def _inputs(self, row: Row, columns: Sequence[str], frames: np.ndarray | None) -> Inputs:
        """What the model gets besides the prompt, decoded; see `families.base.Inputs`."""
        data = self.config.data
        return read_inputs(
            [one for one in self.family.inputs if one.column in columns],
            row.inputs,
            own=frames,
            height=data.height,
            width=data.width,
            frames=data.frames,
            where=self.metadata.describe(row),
        )

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
    """The samples of an epoch, `data.repeat` times the rows."""

    def __init__(self, metadata: Metadata, repeat: int) -> None:
        self.rows = metadata.rows
        self._repeat = repeat

    def __len__(self) -> int:
        return len(self.rows) * self._repeat

    def row(self, index: int) -> Row:
        """The row that a sample of the epoch comes from."""
        return self.rows[index % len(self.rows)]

    def __getitem__(self, index: int) -> Sample:
        row = self.row(index)
        tensors = self._tensors(row)
        return Sample(row, tensors.pop("latents"), tensors)

    @abstractmethod
    def _tensors(self, row: Row) -> dict[str, torch.Tensor]:
        """All tensors of a row, `latents` among them."""


class OnlineDataset(Dataset):
    """Decodes and encodes at every access."""

    def __init__(self, encoder: Encoder, repeat: int) -> None:
        super().__init__(encoder.metadata, repeat)
        self._encoder = encoder

    def _tensors(self, row: Row) -> dict[str, torch.Tensor]:
        return {**self._encoder.media(row), **self._encoder.text(row)}


class CachedDataset(Dataset):
    """Reads what `fill` has encoded, by memory map."""

    def __init__(self, cache: EncodedCache, metadata: Metadata, repeat: int) -> None:
        super().__init__(metadata, repeat)
        self._cache = cache

    def _tensors(self, row: Row) -> dict[str, torch.Tensor]:
        return {**self._cache.read_media(row), **self._cache.read_text(row)}


def open_dataset(encoder: Encoder, cache_folder: Path | None, *, processes: Processes) -> Dataset:
    """The dataset of a run; with a cache folder, everything that is not in it yet is encoded now.

    Args:
        encoder: for what has to be encoded; may be released afterwards if there is a cache.
        cache_folder: where encoded samples are kept; None encodes at every access.
        processes: share the work.

    Raises:
        UserError: a medium cannot be decoded; the message names file and row.
    """
    repeat = encoder.config.data.repeat
    if cache_folder is None:
        return OnlineDataset(encoder, repeat)
    cache = EncodedCache(cache_folder, encoder.config, encoder.family, encoder.source, encoder.dtype)
    cache.fill(encoder.metadata.rows, encoder, processes)
    return CachedDataset(cache, encoder.metadata, repeat)
