"""From a step's number to its micro-batches."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from flowshard.config import Config
from flowshard.data.buckets import Bucket
from flowshard.data.captions import caption_of
from flowshard.data.dataset import CachedDataset, Dataset, Sample
from flowshard.data.metadata import Row
from flowshard.data.order import Order
from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.objective.grids import Levels
from flowshard.objective.randomness import noise, quantiles
from flowshard.parallel.layout import Layout
from flowshard.seeds import uniform


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

    def pinned(self) -> "MicroBatch":
        """The same in page-locked memory, from which an accelerator copies without making the process wait."""
        return replace(
            self,
            latents=self.latents.pin_memory(),
            noise=self.noise.pin_memory(),
            sigma=self.sigma.pin_memory(),
            weight=self.weight.pin_memory(),
            conditions={name: tensor.pin_memory() for name, tensor in self.conditions.items()},
        )


class StepBatches:
    """Makes the micro-batches of any step: a function of config, data and the step's number alone."""

    def __init__(
        self,
        dataset: Dataset,
        family: Family,
        config: Config,
        layout: Layout,
        levels: Levels,
        *,
        guidance: float | None,
    ) -> None:
        """Give guidance-distilled models the value `guidance`."""
        self._dataset = dataset
        self._buckets = _buckets(dataset, config)
        samples: list[Sequence[int]] = [bucket.samples for bucket in self._buckets] or [range(len(dataset))]
        self._order = Order(config.seed, samples, global_batch=config.train.global_batch)
        self._family = family
        self._seed = config.seed
        self._train = config.train
        self._caption_dropout = config.data.caption_dropout
        self._input_dropout = config.data.input_dropout
        self._stratified = config.objective.stratified
        self._positions = layout.positions(config.train.global_batch)
        self._levels = levels
        self._guidance = guidance

    def rows(self, step: int) -> list[Row]:
        """The samples of a step, over all processes."""
        return [self._dataset.row(index) for index in self._order.batch(step)]

    def describe_buckets(self, *, steps: int) -> list[str]:
        """A line for each bucket, the largest first; none without buckets."""
        lines = []
        for number, bucket in enumerate(self._buckets):
            first = self._order.first_step(number)
            unused = f"; warning: first used in step {first + 1}, after the end of this run" if first >= steps else ""
            lines.append(
                f"{'bucket':<11} latents {bucket.latents}, {self._family.tokens(torch.Size(bucket.latents)):,} tokens: "
                f"{len(bucket.samples)} samples{unused}"
            )
        return lines

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of this process in a step, in order."""
        size, micro = self._train.global_batch, self._train.micro_batch
        indices = self._order.batch(step)
        draws = quantiles(self._seed, step=step, global_batch=size, stratified=self._stratified)
        sigmas = self._levels.sigmas(draws)
        weights = self._levels.weights(sigmas)
        for start in self._positions[::micro]:
            positions = slice(start, start + micro)
            samples = [self._sample(index, step, start + offset) for offset, index in enumerate(indices[positions])]
            yield self._assemble(step, start, samples, sigmas[positions], weights[positions])

    def largest_micro_batch(self) -> MicroBatch:
        """A micro-batch of the largest samples that there are, to plan memory with."""
        micro = self._train.micro_batch
        return self._assemble(0, 0, [self._dataset.largest()] * micro, torch.full((micro,), 0.5), torch.ones(micro))

    def _sample(self, index: int, step: int, position: int) -> Sample:
        """A sample as a step sees it: with one of its captions or none, perhaps without its inputs."""
        row = self._dataset.row(index)
        caption = caption_of(row, seed=self._seed, step=step, position=position, dropout=self._caption_dropout)
        sample = self._dataset.sample(row, caption)
        if uniform(self._seed, "input dropout", step, position) < self._input_dropout:
            return replace(sample, conditions=self._family.without_inputs(sample.conditions))
        return sample

    def _assemble(
        self, step: int, start: int, samples: Sequence[Sample], sigma: torch.Tensor, weight: torch.Tensor
    ) -> MicroBatch:
        draws = [
            noise(self._seed, step=step, position=start + offset, shape=sample.latents.shape)
            for offset, sample in enumerate(samples)
        ]
        return assemble(
            self._family, samples, first=start, noise=draws, sigma=sigma, weight=weight, guidance=self._guidance
        )


def _buckets(dataset: Dataset, config: Config) -> list[Bucket]:
    """The buckets of a run; none if samples go together as they come.

    Raises:
        UserError: micro-batches of samples of several shapes would be needed.
    """
    if not isinstance(dataset, CachedDataset):  # `load_config` has seen to a cache
        return []
    if config.data.buckets == "auto":
        return dataset.buckets()
    if config.train.micro_batch > 1 and len(found := dataset.buckets()) > 1:
        raise UserError(
            f"train.micro_batch: {config.train.micro_batch} samples of one shape are needed, but there are {len(found)} shapes "
            f"in the cache, for example latents {found[0].latents} and {found[-1].latents}; use data.buckets=auto, with which "
            "every step has samples of one shape, or train.micro_batch=1"
        )
    return []


def assemble(
    family: Family,
    samples: Sequence[Sample],
    *,
    first: int,
    noise: Sequence[torch.Tensor],
    sigma: torch.Tensor,
    weight: torch.Tensor,
    guidance: float | None,
) -> MicroBatch:
    """Samples that lie next to each other, as a micro-batch.

    Args:
        family: joins their conditions.
        samples: of one shape.
        first: place of the first one.
        noise: of each.
        sigma: (batch,)
        weight: (batch,)
        guidance: for guidance-distilled models.
    """
    conditions = family.batch_conditions([sample.conditions for sample in samples])
    if guidance is not None:
        conditions["guidance"] = torch.full((len(samples),), guidance)
    return MicroBatch(
        rows=tuple(sample.row for sample in samples),
        positions=tuple(range(first, first + len(samples))),
        latents=torch.stack([sample.latents for sample in samples]),
        noise=torch.stack(list(noise)),
        sigma=sigma,
        weight=weight,
        conditions=conditions,
    )


def stream(batches: StepBatches, steps: range, *, ahead: bool, pinned: bool) -> Iterator[MicroBatch]:
    """The micro-batches of all steps in order.

    Args:
        batches: makes them.
        steps: the updates.
        ahead: make each in a thread while the one before it is in use. Not for datasets that run encoders, which
            would compete with the training for the device.
        pinned: whether they go to an accelerator; see `MicroBatch.pinned`.
    """
    made = (batch for step in steps for batch in batches.micro_batches(step))
    source = (batch.pinned() for batch in made) if pinned else made
    if not ahead:
        yield from source
        return
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        upcoming = thread.submit(next, source, None)
        while (batch := upcoming.result()) is not None:
            upcoming = thread.submit(next, source, None)
            yield batch
