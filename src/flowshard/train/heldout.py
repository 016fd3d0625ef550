"""The loss on samples that are never trained on, with noise and noise levels that are the same every time."""

import torch

from flowshard.data.dataset import Dataset
from flowshard.device import sum_dtype
from flowshard.objective.grids import Levels
from flowshard.objective.randomness import generator
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import Strategy
from flowshard.train.batches import MicroBatch, assemble
from flowshard.train.build import LossFunction
from flowshard.train.inputs import RunInputs
from flowshard.train.meters import SigmaBins
from flowshard.train.metrics import HeldOutLoss, finite

DRAWS = 4
"""Noise levels of each sample, one in each quarter of the distribution that training draws from."""


class HeldOut:
    """The held-out samples of a run."""

    def __init__(
        self, dataset: Dataset, inputs: RunInputs, levels: Levels, losses_of: LossFunction, processes: Processes
    ) -> None:
        """Draw the noise levels: the middles of equal parts of the distribution, as many as there are losses.

        Args:
            dataset: the samples.
            inputs: of the run.
            levels: of the run.
            losses_of: maps a model and a micro-batch to the losses of its samples.
            processes: share the work.
        """
        self._dataset = dataset
        self._inputs = inputs
        self._losses_of = losses_of
        self._processes = processes
        rows = len(dataset.rows)
        order = torch.randperm(rows, generator=generator(inputs.config.seed, "held-out strata"))
        parts = torch.arange(DRAWS)[None] * rows + order[:, None]
        self._sigmas = levels.sigmas((parts.double() + 0.5) / (rows * DRAWS))
        self._weights = levels.weights(self._sigmas)

    def due(self, step: int) -> bool:
        """Whether the loss is to be found after that many updates."""
        every = self._inputs.config.validation.every
        return every > 0 and (step % every == 0 or step == self._inputs.steps)

    def evaluate(self, step: int, strategy: Strategy) -> HeldOutLoss:
        """The losses of all samples at all their noise levels. Collective; leaves no trace in the training.

        Every process makes as many forward passes: where the samples run out, the last one again, which does not count.

        Args:
            step: updates done.
            strategy: that holds the weights.
        """
        layout, device = self._processes.layout, self._processes.device
        total = torch.zeros(1, dtype=sum_dtype(device), device=device)
        bins = SigmaBins(device)
        count = self._sigmas.numel()
        with strategy.evaluation() as model, torch.no_grad():
            for place in range(
                layout.rank // layout.sequence, _next_multiple(count, layout.data_parallel), layout.data_parallel
            ):
                batch = self._batch(*divmod(min(place, count - 1), DRAWS))
                losses = self._losses_of(model, batch.tensors())
                if place < count:
                    total += (losses.to(total.dtype) * batch.weight.to(device)).sum() / layout.sequence
                    bins.add(losses, batch.sigma, 1 / layout.sequence)
        values = self._processes.sum(torch.cat([total, bins.slots()])).tolist()
        return HeldOutLoss(step, finite(values[0] / count), SigmaBins.means(values[1:]))

    def _batch(self, row: int, draw: int) -> MicroBatch:
        sample, seed = self._dataset[row], self._inputs.config.seed
        noise = torch.randn(sample.latents.shape, generator=generator(seed, "held-out noise", row, draw))
        return assemble(
            self._inputs.family,
            [sample],
            first=row,
            noise=[noise],
            sigma=self._sigmas[row, draw : draw + 1],
            weight=self._weights[row, draw : draw + 1],
            guidance=self._inputs.guidance,
        )


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
