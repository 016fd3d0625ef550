"""Stateless randomness: every draw has a seed of its own, so no layout and no order of work can change it.

Draws are made on the CPU in float32, which makes them the same for every device.
"""

import torch

from flowshard.seeds import derive_seed


def generator(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    """A CPU generator seeded by its arguments alone."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *keys))


def noise(seed: int, *, step: int, position: int, shape: torch.Size) -> torch.Tensor:
    """Standard normal noise of one sample: float32 of that shape.

    Args:
        seed: the run's seed.
        step: the optimizer update, from 0.
        position: the sample's place in the global batch.
        shape: shape of the latents without batch.
    """
    return torch.randn(shape, generator=generator(seed, "noise", step, position))


def is_dropped(seed: int, what: str, *, step: int, position: int, rate: float) -> bool:
    """Whether a sample goes without something that is left out at that rate.

    Args:
        seed: the run's seed.
        what: is left out; each has draws of its own.
        step: the optimizer update, from 0.
        position: the sample's place in the global batch.
        rate: in [0, 1).
    """
    return float(torch.rand((), dtype=torch.float64, generator=generator(seed, what, step, position))) < rate


def quantiles(seed: int, *, step: int, global_batch: int, stratified: bool) -> torch.Tensor:
    """Uniform draws that decide the noise levels of one global batch.

    Stratified draws fall one into each of `global_batch` equal parts of [0, 1), in shuffled order.

    Returns:
        float64 of shape (global_batch,) in [0, 1).
    """
    uniform = torch.stack(
        [
            torch.rand((), dtype=torch.float64, generator=generator(seed, "sigma", step, position))
            for position in range(global_batch)
        ]
    )
    if not stratified:
        return uniform
    strata = torch.randperm(global_batch, generator=generator(seed, "strata", step))
    return (strata + uniform) / global_batch
