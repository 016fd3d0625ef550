"""Requests to stop that the loop grants between two steps: Ctrl-C, SIGTERM, and a limit of time."""

import re
import signal
import time
from types import FrameType, TracebackType


class StopRequest:
    """While active, the first SIGINT or SIGTERM only sets `reason`; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._earlier: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name


class Deadline:
    """A limit of wall-clock time."""

    def __init__(self, duration: str | None) -> None:
        """Begin to count; `duration` is like `2h50m`, None for no limit."""
        self._duration = duration
        self._end = None if duration is None else time.monotonic() + seconds(duration)

    @property
    def reason(self) -> str | None:
        """Why to stop, once the time is over."""
        over = self._end is not None and time.monotonic() >= self._end
        return f"save.before={self._duration}" if over else None


def seconds(duration: str) -> int:
    """Of a duration such as `2h50m`, `90m` or `45s`."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))
