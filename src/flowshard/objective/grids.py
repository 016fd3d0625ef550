"""Noise levels as DiffSynth-Studio draws and weighs them: places of a grid of 1000 levels that each series has.

https://github.com/modelscope/DiffSynth-Studio, `diffsynth/diffusion/{flow_match,loss}.py`. Levels are not rounded to
bfloat16, as they are there.
"""

from typing import Protocol

import torch

from flowshard.config import ObjectiveConfig
from flowshard.objective.presets import DIFFSYNTH, PLACES, Grid
from flowshard.objective.sigmas import NoiseLevels, bell


class Levels(Protocol):
    """How sigma is drawn and weighted in a run."""

    def sigmas(self, draws: torch.Tensor) -> torch.Tensor:
        """Noise levels, float32, for uniform draws, float64 in [0, 1), of the same shape."""

    def weights(self, sigmas: torch.Tensor) -> torch.Tensor:
        """Loss weights, float32, of noise levels that were drawn."""


class GridLevels:
    """The levels at a part of a grid's places, each as likely as any other."""

    def __init__(self, objective: ObjectiveConfig, grid: Grid) -> None:
        """Take the places of `objective.index_range`; weights are of mean 1 over the whole grid."""
        self._levels = torch.tensor(grid.levels(), dtype=torch.float64)
        low, high = objective.index_range
        self._first, self._end = int(low * PLACES), int(high * PLACES)
        weights = bell(self._levels)
        weights = weights - weights.min()
        self._weights = (weights / weights.mean()).float()

    def sigmas(self, draws: torch.Tensor) -> torch.Tensor:
        """Noise levels for uniform draws, float32 of their shape."""
        count = self._end - self._first
        # Falling levels for rising draws; turned round, so that they rise as those of other distributions do.
        place = self._end - 1 - (draws * count).long().clamp(max=count - 1)
        return self._levels[place].float()

    def weights(self, sigmas: torch.Tensor) -> torch.Tensor:
        """Loss weights of levels of the grid, float32 of their shape."""
        place = (sigmas.double().unsqueeze(-1) - self._levels).abs().argmin(dim=-1)
        return self._weights[place]


def noise_levels(objective: ObjectiveConfig, shift: float, series: str) -> Levels:
    """How a run draws and weighs sigma.

    Args:
        objective: of the config.
        shift: the resolved one.
        series: name of the model's.
    """
    if objective.preset is None:
        return NoiseLevels(objective, shift)
    return GridLevels(objective, DIFFSYNTH[series])
