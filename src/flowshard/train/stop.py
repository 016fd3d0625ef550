"""Ctrl-C and SIGTERM as a request that the loop grants between two steps."""

import signal
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
