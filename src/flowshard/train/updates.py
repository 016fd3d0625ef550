"""Which updates are left out, and when a run gives up."""

import math
from collections import deque
from statistics import median
from typing import Any

from flowshard.config import TrainConfig

GIVE_UP_AFTER = 10
"""Updates left out in a row after which the run ends."""
_REMEMBERED, _NEEDED = 100, 10
"""Gradient norms whose median counts, and how many there have to be first."""


class UpdateGuard:
    """Decides from numbers that all processes know, so that all decide alike."""

    def __init__(self, train: TrainConfig) -> None:
        """Begin a run with its `on_nan` and `skip_spikes`."""
        self._skips_nan = train.on_nan == "skip"
        self._factor = train.skip_spikes
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)
        self.skipped = 0
        """Updates left out so far."""
        self.in_a_row = 0
        """Of them, since the last update."""

    def limit(self, loss: float) -> float:
        """The largest gradient norm with which an update is made; minus infinity after a loss that is no finite number."""
        if not math.isfinite(loss):
            return -math.inf
        if self._factor is None or len(self._norms) < _NEEDED:
            return math.inf
        return self._factor * median(self._norms)

    def made(self, norm: float) -> None:
        """An update was made."""
        self.in_a_row = 0
        if self._factor is not None:
            self._norms.append(norm)

    def leave_out(self, loss: float, norm: float) -> bool:
        """Note an update that was not made; whether the run may go on."""
        is_spike = math.isfinite(loss) and math.isfinite(norm)
        if not (is_spike or self._skips_nan):
            return False
        self.skipped += 1
        self.in_a_row += 1
        return self.in_a_row < GIVE_UP_AFTER

    @property
    def history(self) -> str:
        """For a message: that this is the last of several in a row, if it is."""
        return f", as in the {self.in_a_row - 1} steps before" if self.in_a_row > 1 else ""

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "norms": list(self._norms)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
        self._norms.extend(state["norms"])
