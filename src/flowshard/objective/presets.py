"""The grids of noise levels that DiffSynth-Studio draws from. Needs no torch.

https://github.com/modelscope/DiffSynth-Studio, `diffsynth/diffusion/flow_match.py`: the schedules with which it trains.
"""

import math
from dataclasses import dataclass

PLACES = 1000
"""Levels of a grid."""


@dataclass(frozen=True)
class Grid:
    """The levels of a series: evenly spaced from 1 down, then shifted, then stretched to a last one."""

    shift: float
    """sigma becomes shift * sigma / (1 + (shift - 1) * sigma)."""
    last: float = 1 / PLACES
    """The last of the evenly spaced levels, before the shift."""
    terminal: float | None = None
    """The last level after everything; None leaves what the shift gives."""

    def levels(self) -> list[float]:
        """All of them, from 1 down."""
        even = [1 - (1 - self.last) * place / (PLACES - 1) for place in range(PLACES)]
        sigmas = [self.shift * sigma / (1 + (self.shift - 1) * sigma) for sigma in even]
        if self.terminal is None:
            return sigmas
        scale = (1 - self.terminal) / (1 - sigmas[-1])
        return [1 - (1 - sigma) * scale for sigma in sigmas]


DIFFSYNTH = {
    "wan": Grid(shift=5.0),
    "qwen-image": Grid(shift=math.exp(0.8), terminal=0.02),
    "flux": Grid(shift=3.0, last=0.003 / 1.002),
    "flux2": Grid(shift=math.exp(0.8)),
    "z-image": Grid(shift=3.0),
}
"""By the name of a series."""
