"""From a step's number to its micro-batches."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from flowshard.config import Config
from flowshard.data.dataset import Dataset, Sample
from flowshard.data.media import is_image
from flowshard.data.metadata import Row
from flowshard.data.order import global_batch
from flowshard.families.base import Family
from flowshard.objective.randomness import is_dropped, noise, quantiles
from flowshard.objective.sigmas import NoiseLevels
from flowshard.parallel.layout import Layout


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model at once, with their draws, on the CPU in float32."""

    rows: tuple[Row, ...]
    positions: tuple[int, ...]
    """Places in the global batch."""
    latents: torch.Tensor
    """(batch, ...)"""
    noise: torch.Tensor
    """Shaped like `latents`."""
    sigma: torch.Tensor
    """(batch,)"""
    weight: torch.Tensor
    """(batch,)"""
    conditions: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors in one flat mapping: the conditions and, under their own names, the rest."""
        own = {"latents": self.latents, "noise": self.noise, "sigma": self.sigma, "weight": self.weight}
        return {**self.conditions, **own}


class StepBatches:
    """Makes the micro-batches of any step: a function of config, data and the step's number alone."""

    def __init__(
        self,
        dataset: Dataset,
        family: Family,
        config: Config,
        layout: Layout,
        levels: NoiseLevels,
        *,
        guidance: float | None,
    ) -> None:
        """Give guidance-distilled models the value `guidance`."""
        self._dataset = dataset
        self._family = family
        self._seed = config.seed
        self._train = config.train
        self._input_dropout = config.data.input_dropout
        self._stratified = config.objective.stratified
        self._positions = layout.positions(config.train.global_batch)
        self._levels = levels
        self._guidance = guidance

    def rows(self, step: int) -> list[Row]:
        """The samples of a step, over all processes."""
        indices = global_batch(self._seed, step, size=len(self._dataset), global_batch=self._train.global_batch)
        return [self._dataset.row(index) for index in indices]

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of this process in a step, in order."""
        size, micro = self._train.global_batch, self._train.micro_batch
        indices = global_batch(self._seed, step, size=len(self._dataset), global_batch=size)
        draws = quantiles(self._seed, step=step, global_batch=size, stratified=self._stratified)
        sigmas = self._levels.sigmas(draws)
        weights = self._levels.weights(sigmas)
        for start in self._positions[::micro]:
            positions = slice(start, start + micro)
            samples = [
                self._with_dropout(step, start + offset, self._dataset[index])
                for offset, index in enumerate(indices[positions])
            ]
            yield self._assemble(step, start, samples, sigmas[positions], weights[positions])

    def _with_dropout(self, step: int, position: int, sample: Sample) -> Sample:
        """The sample, or the sample without inputs."""
        rate = self._input_dropout
        if rate and is_dropped(self._seed, "input dropout", step=step, position=position, rate=rate):
            return replace(sample, conditions=self._family.without_inputs(sample.conditions))
        return sample

    def largest_micro_batch(self) -> MicroBatch:
        """A micro-batch of the largest samples that there are, to plan memory with."""
        row = next((index for index, row in enumerate(self._dataset.rows) if not is_image(row.media)), 0)
        micro = self._train.micro_batch
        return self._assemble(0, 0, [self._dataset[row]] * micro, torch.full((micro,), 0.5), torch.ones(micro))

    def _assemble(
        self, step: int, start: int, samples: Sequence[Sample], sigma: torch.Tensor, weight: torch.Tensor
    ) -> MicroBatch:
        draws = [
            noise(self._seed, step=step, position=start + offset, shape=sample.latents.shape)
            for offset, sample in enumerate(samples)
        ]
        conditions = self._family.batch_conditions([sample.conditions for sample in samples])
        if self._guidance is not None:
            conditions["guidance"] = torch.full((len(samples),), self._guidance)
        return MicroBatch(
            rows=tuple(sample.row for sample in samples),
            positions=tuple(range(start, start + len(samples))),
            latents=torch.stack([sample.latents for sample in samples]),
            noise=torch.stack(draws),
            sigma=sigma,
            weight=weight,
            conditions=conditions,
        )


def stream(batches: StepBatches, steps: range, *, ahead: bool) -> Iterator[MicroBatch]:
    """The micro-batches of all steps in order.

    Args:
        batches: makes them.
        steps: the updates.
        ahead: make each in a thread while the one before it is in use. Not for datasets that run encoders, which
            would compete with the training for the device.
    """
    source = (batch for step in steps for batch in batches.micro_batches(step))
    if not ahead:
        yield from source
        return
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        upcoming = thread.submit(next, source, None)
        while (batch := upcoming.result()) is not None:
            upcoming = thread.submit(next, source, None)
            yield batch
