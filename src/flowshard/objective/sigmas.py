"""The distribution of noise levels and the weight of each, as functions of a uniform draw.

All densities are given by their quantile function, the inverse of the cumulative distribution. So draws can be
stratified, and restricted to a range, in the same way for each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from flowshard.config import ObjectiveConfig

_NORMALISING_POINTS = 10_000
_BISECTIONS = 60


@dataclass(frozen=True)
class NoiseLevels:
    """How sigma is drawn and weighted in a run."""

    objective: ObjectiveConfig
    shift: float
    """The resolved shift."""
    _range: tuple[float, float] = field(init=False, default=(0.0, 1.0))
    _weight_mean: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        low, high = self.objective.sigma_range
        bounds = tuple(self._cumulative(sigma) for sigma in (low, high))
        object.__setattr__(self, "_range", bounds)
        if self.objective.weighting == "bell":
            points = (torch.arange(_NORMALISING_POINTS, dtype=torch.float64) + 0.5) / _NORMALISING_POINTS
            object.__setattr__(self, "_weight_mean", float(bell(self._sigma_of(points)).mean()))

    def sigmas(self, draws: torch.Tensor) -> torch.Tensor:
        """Noise levels for uniform draws.

        Args:
            draws: float64 in [0, 1).

        Returns:
            float32 of the same shape, inside `sigma_range`.
        """
        low, high = self.objective.sigma_range
        return self._sigma_of(draws).clamp(low, high).float()

    def weights(self, sigmas: torch.Tensor) -> torch.Tensor:
        """Loss weights, float32, of mean 1 over the distribution that is drawn from."""
        if self.objective.weighting == "none":
            return torch.ones_like(sigmas)
        return (bell(sigmas.double()) / self._weight_mean).float()

    def _sigma_of(self, draws: torch.Tensor) -> torch.Tensor:
        low, high = self._range
        return self._quantile(low + (high - low) * draws)

    def _quantile(self, probability: torch.Tensor) -> torch.Tensor:
        """The whole distribution's quantile function, shift included; increasing from 0 to 1."""
        sigma = _QUANTILES[self.objective.sampling](probability, self.objective)
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)

    def _cumulative(self, sigma: float) -> float:
        """The probability of a smaller noise level, by bisection of the quantile function."""
        if sigma <= 0.0 or sigma >= 1.0:
            return float(sigma >= 1.0)
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if float(self._quantile(torch.tensor(middle, dtype=torch.float64))) < sigma:
                low = middle
            else:
                high = middle
        return (low + high) / 2


def _uniform(probability: torch.Tensor, _: ObjectiveConfig) -> torch.Tensor:
    return probability


def _logit_normal(probability: torch.Tensor, objective: ObjectiveConfig) -> torch.Tensor:
    """sigmoid(mean + std * z), z standard normal: https://arxiv.org/abs/2403.03206, equation 19."""
    return torch.sigmoid(objective.logit_mean + objective.logit_std * torch.special.ndtri(probability))


def _mode(probability: torch.Tensor, objective: ObjectiveConfig) -> torch.Tensor:
    """https://arxiv.org/abs/2403.03206, equation 20, which falls from 1 to 0; run backwards, so that it rises."""
    u = 1 - probability
    return 1 - u - objective.mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)


_QUANTILES: dict[str, Callable[[torch.Tensor, ObjectiveConfig], torch.Tensor]] = {
    "uniform": _uniform,
    "logit_normal": _logit_normal,
    "mode": _mode,
}


def bell(sigma: torch.Tensor) -> torch.Tensor:
    """exp(-2 (sigma - 1/2)^2) lowered so that it is 0 at the ends, as DiffSynth-Studio weighs its 1000 timesteps."""
    return torch.exp(-2 * (sigma - 0.5) ** 2) - math.exp(-0.5)
