"""Loss scaling for float16, whose gradients would vanish below 6e-8 (https://arxiv.org/abs/1710.03740, section 3.2)."""

_INITIAL = 2.0**16
_FACTOR = 2.0
_GROWTH_INTERVAL = 2000
"""Updates in a row without an overflow after which the scale doubles; torch's and DeepSpeed's defaults are near this."""


class LossScale:
    """What the loss is multiplied by before the backward pass: 1 unless `dynamic`.

    The powers of two change no digit of a gradient, so the numbers of a run do not depend on the scale.
    """

    def __init__(self, *, dynamic: bool) -> None:
        self.dynamic = dynamic
        self.value = _INITIAL if dynamic else 1.0
        self.skipped = 0
        """Updates left out because a gradient overflowed."""
        self._since_change = 0

    def succeeded(self) -> None:
        """An update was made."""
        self._since_change += 1
        if self.dynamic and self._since_change == _GROWTH_INTERVAL:
            self.value *= _FACTOR
            self._since_change = 0

    def lower(self) -> bool:
        """A gradient overflowed: halve the scale. False if that cannot be the remedy."""
        if not self.dynamic or self.value <= 1.0:
            return False
        self.value /= _FACTOR
        self._since_change = 0
        self.skipped += 1
        return True

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"value": self.value, "since_change": self._since_change, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` returned."""
        self.value = float(state["value"])
        self._since_change, self.skipped = int(state["since_change"]), int(state["skipped"])
