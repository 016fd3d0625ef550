"""What is measured at every step and known on all processes after it."""

from dataclasses import dataclass
from typing import Any

import torch

from flowshard.device import memory_peak_bytes, peak_flops, sum_dtype
from flowshard.families.base import Family
from flowshard.memory.flops import CPU, count_flops
from flowshard.parallel.processes import Processes
from flowshard.parallel.sequence import SequenceGroup
from flowshard.train.batches import MicroBatch
from flowshard.train.build import loss_function
from flowshard.train.inputs import RunInputs
from flowshard.train.metrics import finite

SIGMA_BINS = 4
"""Equal parts of [0, 1] by which losses are told apart."""


@dataclass(frozen=True)
class StepSums:
    """What all processes know about a step; see `StepMetrics`."""

    loss: float
    tokens: float
    stopping: bool
    """Whether any process was asked to stop."""
    loss_by_sigma: list[float | None]
    losses_per_rank: list[float | None] | None
    memory_peak_bytes: int
    memory_peak_rank: int


class SigmaBins:
    """Means of losses by sigma, added up on the device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(SIGMA_BINS, dtype=sum_dtype(device), device=device)
        self._counts = torch.zeros(SIGMA_BINS, dtype=sum_dtype(device))

    def add(self, losses: torch.Tensor, sigma: torch.Tensor, share: float = 1.0) -> None:
        """Add the losses of samples.

        Args:
            losses: (batch,), on the device.
            sigma: (batch,), on the CPU.
            share: as what part of a sample each counts.
        """
        bins = (sigma * SIGMA_BINS).long().clamp(max=SIGMA_BINS - 1)
        members = bins[:, None] == torch.arange(SIGMA_BINS)
        self._counts += share * members.sum(dim=0)
        own = members.to(losses.device, non_blocking=True)
        # Chosen rather than multiplied, so that a loss that is no number stays in its own bin.
        self._sums += share * torch.where(own, losses.detach().to(self._sums.dtype)[:, None], 0.0).sum(dim=0)

    def slots(self) -> torch.Tensor:
        """Sums and counts, for a sum over the processes: of shape (2 * SIGMA_BINS,)."""
        return torch.cat([self._sums, self._counts.to(self._sums.device)])

    @staticmethod
    def means(slots: list[float]) -> list[float | None]:
        """What `slots`, added up, say."""
        pairs = zip(slots[:SIGMA_BINS], slots[SIGMA_BINS:], strict=True)
        return [finite(total / count) if count > 0 else None for total, count in pairs]


class StepTotals:
    """Adds up on the device what all processes have to know about a step, and joins them with one sum over all."""

    def __init__(self, processes: Processes, *, per_rank: bool) -> None:
        """Begin a step; `per_rank` is `log.per_rank`."""
        self._processes = processes
        self._layout = processes.layout
        self._per_rank = per_rank
        self._loss = torch.zeros(1, dtype=sum_dtype(processes.device), device=processes.device)
        self._bins = SigmaBins(processes.device)
        self._tokens = 0.0

    def add(self, loss: torch.Tensor, losses: torch.Tensor, batch: MicroBatch, tokens: int) -> None:
        """Add a micro-batch.

        Args:
            loss: its part of the process's mean loss.
            losses: of its samples, without weights, (batch,).
            batch: the samples.
            tokens: of one of them.
        """
        # Processes that share a sample all have its whole loss, and a part of its tokens.
        self._loss += loss.detach()
        self._bins.add(losses, batch.sigma, 1 / self._layout.sequence)
        self._tokens += len(batch.rows) * tokens / self._layout.sequence

    def sum(self, *, stopping: bool) -> StepSums:
        """Join the processes. Collective, once a step.

        Args:
            stopping: whether this process was asked to stop.
        """
        layout, device = self._layout, self._processes.device
        dtype = sum_dtype(device)
        memory = torch.zeros(layout.world, dtype=dtype)
        memory[layout.rank] = memory_peak_bytes(device)
        ranks = torch.zeros(layout.data_parallel, dtype=dtype, device=device)
        ranks[layout.rank // layout.sequence] += self._loss[0] / layout.sequence
        own = torch.tensor([self._tokens, float(stopping)], dtype=dtype)
        parts = [self._loss / layout.world, ranks, self._bins.slots(), torch.cat([own, memory]).to(device)]
        values = self._processes.sum(torch.cat(parts)).tolist()
        sizes = [1, layout.data_parallel, 2 * SIGMA_BINS, 2, layout.world]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        loss, losses, bins, (tokens, stops), peaks = (values[at : at + n] for at, n in zip(starts, sizes, strict=True))
        return StepSums(
            loss=loss[0],
            tokens=tokens,
            stopping=stops > 0,
            loss_by_sigma=SigmaBins.means(bins),
            losses_per_rank=[finite(one) for one in losses] if self._per_rank else None,
            memory_peak_bytes=int(max(peaks)),
            memory_peak_rank=peaks.index(max(peaks)),
        )


def tokens_of(batch: MicroBatch, family: Family) -> int:
    """Image or video tokens of each sample of a micro-batch, those of reference pictures included."""
    return family.tokens(batch.latents.shape[1:]) + family.reference_tokens(batch.conditions)


class FlopMeter:
    """From tokens and seconds of a step to its operations and the share of the devices' peak."""

    def __init__(self, inputs: RunInputs, largest: MicroBatch, processes: Processes) -> None:
        """Begin.

        Args:
            inputs: of the run.
            largest: the micro-batch that is counted. Smaller samples count in proportion to their tokens.
            processes: of which the main one counts, and measures where it has to.
        """
        self._inputs = inputs
        self._largest = largest
        self._enabled = inputs.config.log.flops and processes.is_main
        self._per_token = 0.0
        dtype = getattr(torch, inputs.config.model.dtype)
        peak = peak_flops(processes.device, dtype) if self._enabled else None
        self._peak = None if peak is None else peak * processes.layout.world

    def count(self, model: torch.nn.Module) -> None:
        """Count on the meta model."""
        if not self._enabled:
            return
        family, batch = self._inputs.family, self._largest
        loss = loss_function(family, dtype=getattr(torch, self._inputs.config.model.dtype), device=CPU)
        flops = count_flops(model, loss, batch.tensors(), remembering=family.remembering)
        self._per_token = flops / (len(batch.rows) * tokens_of(batch, family))

    def read(self, *, tokens: float, seconds: float) -> dict[str, Any]:
        """What `StepMetrics` takes."""
        if not self._enabled:
            return {"flops": None, "mfu": None}
        flops = self._per_token * tokens
        return {"flops": flops, "mfu": None if self._peak is None else flops / (seconds * self._peak)}


class CommunicationMeter:
    """Splits the traffic of a group into steps."""

    def __init__(self, group: SequenceGroup | None) -> None:
        """Begin; without a group there is nothing to read."""
        self._group = group
        self._before = (0.0, 0) if group is None else (group.traffic.seconds, group.traffic.bytes)

    def read(self) -> dict[str, Any]:
        """What `StepMetrics` takes, since the last call."""
        if self._group is None:
            return {}
        now = self._group.traffic.seconds, self._group.traffic.bytes
        seconds, sent = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        return {"seconds_communication": seconds, "bytes_communication": sent}
