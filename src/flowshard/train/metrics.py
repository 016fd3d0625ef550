"""What is written at every step: `metrics.jsonl`, and a progress bar or, without a terminal, plain lines."""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from flowshard.parallel.sequence import SequenceGroup

_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer update. Times are seconds of wall clock."""

    step: int
    """From 1: updates done."""
    loss: float
    """Mean over the global batch, weights included."""
    grad_norm: float | None
    """Before clipping; None if it overflowed in float16 and the update was left out."""
    learning_rate: float
    samples_per_second: float
    tokens_per_second: float
    seconds: float
    seconds_data: float
    """Waiting for samples."""
    seconds_forward: float
    seconds_backward: float
    seconds_optimizer: float
    """Gradient norm, clipping and update."""
    memory_peak_bytes: int
    """Allocated on an accelerator, resident in the process on the CPU; the highest so far."""
    loss_scale: float
    """Of the next step; 1 unless `model.dtype` is float16."""
    skipped_updates: int
    """Updates left out so far."""
    seconds_communication: float | None = None
    """Of sequence parallelism, on the main process; part of forward and backward. None unless `log.profile`."""
    bytes_communication: int | None = None
    """Sent by the main process for sequence parallelism. None unless `log.profile`."""


class CommunicationMeter:
    """Splits the traffic of a group into steps."""

    def __init__(self, group: SequenceGroup | None) -> None:
        """Begin; without a group there is nothing to read."""
        self._group = group
        self._before = (0.0, 0)

    def read(self) -> dict[str, Any]:
        """What `StepMetrics` takes, since the last call."""
        if self._group is None:
            return {}
        now = self._group.traffic.seconds, self._group.traffic.bytes
        seconds, sent = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        return {"seconds_communication": seconds, "bytes_communication": sent}


class MetricsLog:
    """Writes each step where it belongs."""

    def __init__(self, file: Path, *, steps: int, enabled: bool) -> None:
        """Open the file.

        Args:
            file: `metrics.jsonl`.
            steps: of the run.
            enabled: False on all processes but the main one, which alone writes.
        """
        self._file = file.open("a", encoding="utf-8", buffering=1) if enabled else None
        self._steps = steps
        self._bar = tqdm(total=steps, unit="step", disable=None if enabled else True, dynamic_ncols=True)
        self._last_line = -math.inf

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def write(self, metrics: StepMetrics) -> None:
        """Record one step."""
        if self._file is None:
            return
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        split = (
            f"{metrics.seconds:.2f} s/step (data {metrics.seconds_data:.2f}, forward {metrics.seconds_forward:.2f}, "
            f"backward {metrics.seconds_backward:.2f}, optimizer {metrics.seconds_optimizer:.2f})"
        )
        skipped = f", {metrics.skipped_updates} updates left out" if metrics.skipped_updates else ""
        text = f"loss {metrics.loss:.4f}, learning rate {metrics.learning_rate:.2e}, {split}{skipped}"
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES or metrics.step == self._steps:
            sys.stdout.write(f"step {metrics.step}/{self._steps}: {text}\n")
            sys.stdout.flush()
            self._last_line = time.monotonic()
