"""What is written at every step: `metrics.jsonl`, trackers, and a progress bar or, without a terminal, plain lines."""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from flowshard.train.trackers import Tracker, flat

_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer update. Times are seconds of wall clock."""

    step: int
    """From 1: updates done."""
    loss: float | None
    """Mean over the global batch, weights included; None if it is no finite number."""
    grad_norm: float | None
    """Before clipping; None if it is no finite number."""
    learning_rate: float
    samples_per_second: float
    tokens_per_second: float
    seconds: float
    seconds_data: float
    """Waiting for samples."""
    seconds_forward: float
    seconds_backward: float
    seconds_optimizer: float
    """Gradient norm, clipping and update, and waiting for the slowest process."""
    loss_by_sigma: list[float | None]
    """Mean of the samples' losses, without weights, for sigma in [0, .25), [.25, .5), [.5, .75), [.75, 1]; None where no
    sample fell."""
    losses_per_rank: list[float | None] | None
    """Mean of `loss` over the samples of each data-parallel rank. None unless `log.per_rank`."""
    memory_peak_bytes: int
    """Allocated on an accelerator, resident in the process on the CPU; the highest of any process so far, without this
    step's update."""
    memory_peak_rank: int
    """The process with that peak."""
    flops: float | None
    """Of forward and backward pass of the global batch, nothing counted twice. None unless `log.flops`."""
    mfu: float | None
    """Share of the devices' peak: flops / (seconds * peak * devices). None where the peak is not known."""
    loss_scale: float
    """Of the next step; 1 unless `model.dtype` is float16."""
    skipped_updates: int
    """Updates left out so far, because a number was not finite or the gradient too large."""
    seconds_communication: float | None = None
    """Of sequence parallelism, on the main process; part of forward and backward. None unless `log.profile`."""
    bytes_communication: int | None = None
    """Sent by the main process for sequence parallelism. None unless `log.profile`."""


@dataclass(frozen=True)
class HeldOutLoss:
    """A line of `validation.jsonl`."""

    step: int
    """Updates done."""
    loss: float | None
    """Mean over the held-out samples and their noise levels, weights included; None if it is no finite number."""
    loss_by_sigma: list[float | None]
    """As in `StepMetrics`."""


def finite(number: float) -> float | None:
    """The number, or None, as JSON has no others."""
    return number if math.isfinite(number) else None


class MetricsLog:
    """Writes each step where it belongs."""

    def __init__(self, file: Path, validation: Path, tracker: Tracker, *, steps: int, enabled: bool) -> None:
        """Open the file.

        Args:
            file: `metrics.jsonl`.
            validation: `validation.jsonl`, which is there only once there is a line.
            tracker: gets the same numbers; is closed with the file.
            steps: of the run.
            enabled: False on all processes but the main one, which alone writes.
        """
        self._file = file.open("a", encoding="utf-8", buffering=1) if enabled else None
        self._validation = validation
        self._tracker = tracker
        self._steps = steps
        self._bar = tqdm(total=steps, unit="step", disable=None if enabled else True, dynamic_ncols=True)
        self._last_line = -math.inf

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._tracker.close(failed=kind is not None)
        if self._file is not None:
            self._file.close()

    def write(self, metrics: StepMetrics) -> None:
        """Record one step."""
        if self._file is None:
            return
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._tracker.log(flat({**asdict(metrics), "step": None}, "train"), metrics.step)
        split = (
            f"{metrics.seconds:.2f} s/step (data {metrics.seconds_data:.2f}, forward {metrics.seconds_forward:.2f}, "
            f"backward {metrics.seconds_backward:.2f}, optimizer {metrics.seconds_optimizer:.2f})"
        )
        skipped = f", {metrics.skipped_updates} updates left out" if metrics.skipped_updates else ""
        loss = "no finite number" if metrics.loss is None else f"{metrics.loss:.4f}"
        text = f"loss {loss}, learning rate {metrics.learning_rate:.2e}, {split}{skipped}"
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES or metrics.step == self._steps:
            sys.stdout.write(f"step {metrics.step}/{self._steps}: {text}\n")
            sys.stdout.flush()
            self._last_line = time.monotonic()

    def write_held_out(self, loss: HeldOutLoss) -> None:
        """Record one validation."""
        if self._file is None:
            return
        with self._validation.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(loss)) + "\n")
        self._tracker.log(flat({**asdict(loss), "step": None}, "validation"), loss.step)
        shown = "no finite number" if loss.loss is None else f"{loss.loss:.4f}"
        tqdm.write(f"step {loss.step}/{self._steps}: held-out loss {shown}", file=sys.stdout)
        sys.stdout.flush()
