"""Which updates are left out, and when a run gives up."""

from typing import Any, Literal

GIVE_UP_AFTER = 10
"""Updates left out in a row after which the run ends."""


class UpdateGuard:
    """Decides from numbers that all processes know, so that all decide alike."""

    def __init__(self, on_nan: Literal["stop", "skip"]) -> None:
        """Begin a run; `on_nan` is `train.on_nan`."""
        self._skips = on_nan == "skip"
        self.skipped = 0
        """Updates left out so far."""
        self.in_a_row = 0
        """Of them, since the last update."""

    def made(self) -> None:
        """An update was made."""
        self.in_a_row = 0

    def leave_out(self) -> bool:
        """Note an update that could not be made; whether the run may go on."""
        if not self._skips:
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
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
