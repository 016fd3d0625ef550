"""Noise levels, their weights, the draws and the loss."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling

from flowshard.config import ObjectiveConfig
from flowshard.objective.flow import add_noise, sample_losses
from flowshard.objective.grids import noise_levels
from flowshard.objective.presets import DIFFSYNTH
from flowshard.objective.randomness import noise, quantiles
from flowshard.objective.sigmas import NoiseLevels

EVEN = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
def test_density_before_the_shift_is_the_one_of_diffusers(sampling: str) -> None:
    """The largest distance of the two cumulative distributions (Kolmogorov-Smirnov) is within sampling error."""
    objective = ObjectiveConfig(sampling=sampling, logit_mean=0.3, logit_std=1.2, mode_scale=0.8)
    ours = NoiseLevels(objective, shift=1.0).sigmas(EVEN).double()
    theirs = compute_density_for_timestep_sampling(
        sampling, 20_000, 0.3, 1.2, 0.8, generator=torch.Generator().manual_seed(0)
    )
    ranks = torch.searchsorted(ours, theirs.double().sort().values).double() / len(ours)
    steps = (torch.arange(len(theirs), dtype=torch.float64) + 0.5) / len(theirs)
    assert (ranks - steps).abs().max() < 1.95 / math.sqrt(20_000)  # exceeded by chance once in a thousand


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_shift_is_the_one_of_the_schedulers(shift: float) -> None:
    levels = NoiseLevels(ObjectiveConfig(), shift=shift)
    euler = FlowMatchEulerDiscreteScheduler(shift=shift)
    plain = torch.linspace(1, 1000, 1000, dtype=torch.float64).flip(0) / 1000
    torch.testing.assert_close(levels.sigmas(plain), euler.sigmas[:1000], rtol=1e-5, atol=1e-6)
    unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    unipc.set_timesteps(4)
    assert float(levels.sigmas(torch.tensor([0.5], dtype=torch.float64))) == pytest.approx(
        shift * 0.5 / (1 + (shift - 1) * 0.5)
    )


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
@pytest.mark.parametrize("bounds", [(0.875, 1.0), (0.0, 0.358), (0.4, 0.6)])
def test_range_keeps_the_density_and_only_cuts_it(sampling: str, bounds: tuple[float, float]) -> None:
    objective = ObjectiveConfig(sampling=sampling, sigma_range=bounds)
    whole = NoiseLevels(ObjectiveConfig(sampling=sampling), shift=3.0).sigmas(EVEN)
    cut = NoiseLevels(objective, shift=3.0).sigmas(EVEN)
    inside = whole[(whole >= bounds[0]) & (whole <= bounds[1])]
    assert cut.min() >= bounds[0]
    assert cut.max() <= bounds[1]
    for level in (0.1, 0.5, 0.9):
        assert cut.quantile(level) == pytest.approx(inside.quantile(level).item(), abs=2e-3)


def test_bell_weights_are_those_of_a_schedule_of_a_thousand_timesteps() -> None:
    """Computed as DiffSynth-Studio documents it: a Gaussian over the shifted timesteps, minimum 0, mean 1."""
    shift = 5.0
    plain = torch.linspace(1.0, 1.0 / 1000, 1000, dtype=torch.float64)
    timesteps = 1000 * shift * plain / (1 + (shift - 1) * plain)
    bell = torch.exp(-2 * ((timesteps - 500) / 1000) ** 2)
    bell = bell - bell.min()
    expected = bell * (1000 / bell.sum())
    levels = NoiseLevels(ObjectiveConfig(weighting="bell"), shift=shift)
    found = levels.weights((timesteps / 1000).float())
    torch.testing.assert_close(found, expected.float(), rtol=5e-3, atol=5e-3)
    assert levels.weights(levels.sigmas(EVEN)).mean() == pytest.approx(1.0, abs=1e-4)
    assert torch.equal(NoiseLevels(ObjectiveConfig(), shift=shift).weights(torch.rand(4)), torch.ones(4))


@pytest.mark.parametrize("size", [1, 5, 16])
def test_stratified_draws_fall_one_into_each_part(size: int) -> None:
    for step in range(5):
        draws = quantiles(3, step=step, global_batch=size, stratified=True)
        assert sorted((draws * size).floor().int().tolist()) == list(range(size))
    free = [quantiles(3, step=step, global_batch=size, stratified=False) for step in range(200)]
    assert torch.cat(free).mean() == pytest.approx(0.5, abs=0.06)


def test_draws_depend_on_seed_step_and_position_alone() -> None:
    torch.manual_seed(1)
    first = noise(5, step=2, position=3, shape=torch.Size([4, 8]))
    torch.manual_seed(2)
    noise(5, step=9, position=9, shape=torch.Size([100]))
    assert torch.equal(first, noise(5, step=2, position=3, shape=torch.Size([4, 8])))
    others = [
        noise(6, step=2, position=3, shape=torch.Size([4, 8])),
        noise(5, step=3, position=2, shape=torch.Size([4, 8])),
    ]
    assert all(not torch.equal(first, other) for other in others)
    many = torch.stack([noise(0, step=step, position=0, shape=torch.Size([256])) for step in range(256)])
    assert abs(float(many.mean())) < 4 / 256
    assert float(many.std()) == pytest.approx(1.0, abs=0.01)
    assert float((many @ many.T / 256).fill_diagonal_(0).abs().max()) < 6 / 16, "streams of two steps are independent"


def test_noisy_input_and_loss_equal_the_formulas() -> None:
    clean, drawn = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[0.0, 4.0], [2.0, 1.0]])
    noisy = add_noise(clean, drawn, torch.tensor([0.25, 1.0]))
    assert torch.equal(noisy, torch.tensor([[0.75, 2.5], [2.0, 1.0]]))
    losses = sample_losses(torch.tensor([[0.0, 0.0], [2.0, 3.0]]), clean, drawn)
    assert torch.equal(losses, torch.tensor([2.5, 0.5]))  # targets [-1, 2] and [2, 2]
    assert sample_losses(torch.zeros(1, 2, dtype=torch.bfloat16), clean[:1], drawn[:1]).dtype == torch.float32


def _diffsynth(series: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and weights as `FlowMatchScheduler` of DiffSynth-Studio documents them, `set_timesteps(1000, training=True)`."""
    if series == "flux":
        even = torch.linspace(1.0, 0.003 / 1.002, 1000)
    elif series == "flux2":
        even = torch.linspace(1.0, 1 / 1000, 1000)
    else:
        even = torch.linspace(1.0, 0.0, 1001)[:-1]
    if series in ("qwen-image", "flux2"):
        sigmas = math.exp(0.8) / (math.exp(0.8) + (1 / even - 1))
    else:
        shift = {"wan": 5, "flux": 3, "z-image": 3}[series]
        sigmas = shift * even / (1 + (shift - 1) * even)
    if series == "qwen-image":
        sigmas = 1 - (1 - sigmas) / ((1 - sigmas[-1]) / (1 - 0.02))
    bell = torch.exp(-2 * ((sigmas * 1000 - 500) / 1000) ** 2)
    bell = bell - bell.min()
    return sigmas, bell * (1000 / bell.sum())


@pytest.mark.parametrize("series", ["wan", "qwen-image", "flux", "flux2", "z-image"])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, 0.358), (0.417, 1.0)])
def test_preset_diffsynth_draws_from_its_grid(series: str, bounds: tuple[float, float]) -> None:
    levels, weights = _diffsynth(series)
    first, end = (int(bound * 1000) for bound in bounds)
    objective = ObjectiveConfig(preset="diffsynth", index_range=bounds)
    ours = noise_levels(objective, 1.0, series)
    count = end - first
    drawn = ours.sigmas((torch.arange(count, dtype=torch.float64) + 0.5) / count)  # each place once
    torch.testing.assert_close(drawn.flip(0), levels[first:end], rtol=0, atol=5e-7)
    torch.testing.assert_close(ours.weights(drawn).flip(0), weights[first:end], rtol=1e-5, atol=1e-5)
    often = ours.sigmas(EVEN)
    assert len(often.unique()) == count
    assert set(often.tolist()) == set(drawn.tolist())


def test_preset_diffsynth_has_these_levels() -> None:
    """A few of them by hand."""
    grids = {name: grid.levels() for name, grid in DIFFSYNTH.items()}
    assert all(levels[0] == 1.0 and len(levels) == 1000 for levels in grids.values())
    assert grids["wan"][500] == pytest.approx(5 * 0.5 / 3)
    assert grids["wan"][358] == pytest.approx(0.9, abs=1e-3)  # the boundary of Wan 2.2 image to video
    assert grids["wan"][417] == pytest.approx(0.875, abs=1e-3)  # and of text to video
    assert grids["z-image"][750] == pytest.approx(3 * 0.25 / 1.5)
    assert grids["qwen-image"][-1] == pytest.approx(0.02)
    assert grids["flux2"][500] == pytest.approx(math.exp(0.8) / (math.exp(0.8) + 1))
    last = 0.003 / 1.002
    assert grids["flux"][-1] == pytest.approx(3 * last / (1 + 2 * last))
