"""The memory estimate against the storages that are alive in a real step."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flowshard.memory.estimate import Engine, estimate_memory
from flowshard.plan.model import PlannedModel
from flowshard.train.build import build_on_meta, loss_function
from flowshard.train.inputs import RunInputs, check_inputs
from flowshard.train.optimizer import optimizer_factory
from tests import runs
from tests.workers.memory import Storages

CPU = torch.device("cpu")


def batch(size: int = 4) -> dict[str, torch.Tensor]:
    """Two samples of `2 * size * size / 4` tokens."""
    shape = (2, 16, 2, size, size)
    return {
        "latents": torch.randn(shape),
        "noise": torch.randn(shape),
        "sigma": torch.tensor([0.2, 0.8]),
        "weight": torch.ones(2),
        "prompt_embeds": torch.randn(2, 512, 64),
    }


def planned(inputs: RunInputs, tensors: dict[str, torch.Tensor]) -> PlannedModel:
    return PlannedModel(inputs, build_on_meta(inputs).model, tensors, accelerator=False)


@dataclass(frozen=True)
class Measured:
    """Bytes of a second step."""

    peak: int
    """Of the storages that are alive, with weights that stay in the mapping of their file."""
    gradients: int
    optimizer: int


def measured_step(inputs: RunInputs, filled: runs.Filled, tensors: dict[str, torch.Tensor]) -> Measured:
    loss_of = loss_function(inputs.family, dtype=getattr(torch, inputs.config.model.dtype), device=CPU)
    trained = [parameter for parameter in filled.model.parameters() if parameter.requires_grad]
    optimizer = optimizer_factory(inputs.config)([{"params": trained}])
    everything = [*filled.model.parameters(), *filled.model.buffers()]
    storages = Storages()
    for tensor in (*everything, *tensors.values()):
        storages.know(tensor)
    with storages:
        for _ in range(2):
            storages.peak = 0
            loss_of(filled.model, tensors).backward()
            optimizer.step()
            gradients = sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
            optimizer.zero_grad()
    state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values() if value.ndim)
    mapped = sum(one.nbytes for one in everything if one.untyped_storage().filename is not None)
    return Measured(storages.peak + mapped, gradients, state)


@pytest.mark.parametrize(
    ("method", "dtype", "policy"),
    [
        ("lora", "float32", "keep"),
        ("lora", "bfloat16", "recompute"),
        ("full", "bfloat16", "keep"),
        ("full", "float32", "recompute"),
        pytest.param("lora", "bfloat16", "selective", marks=pytest.mark.slow),
        pytest.param("full", "bfloat16", "recompute", marks=pytest.mark.slow),
    ],
)
def test_a_step_on_one_process(tiny: Path, clips: Path, tmp_path: Path, method: str, dtype: str, policy: str) -> None:
    options = (f"train.method={method}", f"model.dtype={dtype}", f"memory.activations={policy}", "lora.rank=8")
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", *options))
    tensors = batch(16)
    model = planned(inputs, tensors)
    timeline = model.timeline(ulysses=1, ring=1, policies=model.policies())
    estimate = estimate_memory(timeline, model.size, Engine("single"), model.optimizer)

    filled = runs.fill_model(inputs)
    measured = measured_step(inputs, filled, tensors)
    assert estimate.gradients == measured.gradients
    assert estimate.optimizer == measured.optimizer
    assert estimate.parameters == sum(t.nbytes for t in [*filled.model.parameters(), *filled.model.buffers()])
    assert estimate.peak == pytest.approx(measured.peak, rel=0.02)


def test_estimating_computes_nothing_and_leaves_the_model_alone(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Sizes that no machine could hold are answered, and no parameter is touched."""
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run"))
    meta = build_on_meta(inputs)
    before = dict(meta.model.named_parameters())
    huge = torch.zeros(1).expand(1, 16, 21, 400, 400)
    tensors = {
        "latents": huge,
        "noise": huge,
        "sigma": torch.zeros(1),
        "weight": torch.ones(1),
        "prompt_embeds": torch.zeros(1, 512, 64),
    }
    model = PlannedModel(inputs, meta.model, tensors, accelerator=False)
    assert model.timeline(ulysses=1, ring=1, policies=meta.policies).kept > 10 * 2**30
    assert all(
        before[name] is parameter and parameter.grad is None for name, parameter in meta.model.named_parameters()
    )


def test_selective_keeps_the_attention_outputs_on_top_of_recompute(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """By hand: for 2 samples of 8 tokens and 3 blocks, two attentions each give 12 heads x 16 channels and a log-sum-exp."""
    model = planned(check_inputs(runs.config(tiny, clips, tmp_path / "run")), batch())
    keep, recompute, selective = (
        model.timeline(ulysses=1, ring=1, policies=[policy] * 3).kept for policy in ("keep", "recompute", "selective")
    )
    assert selective - recompute == 3 * 2 * (2 * 8 * 12 * 16 * 4 + 2 * 8 * 12 * 4)
    assert recompute < selective < keep


def test_blocks_that_were_not_measured_are_like_the_others(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Seven blocks, of which three are measured, as if all were measured."""
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "model.dtype=bfloat16", "train.method=full"))
    object.__setattr__(inputs.source, "config", {**inputs.source.config, "num_layers": 7})
    object.__setattr__(inputs, "trained", [name for name, _ in build_on_meta(inputs).model.named_parameters()])
    tensors = batch(16)
    few, every = planned(inputs, tensors), planned(inputs, tensors)
    every._few = 7
    for policy in ("keep", "recompute"):
        short, whole = (model.timeline(ulysses=1, ring=1, policies=[policy] * 7) for model in (few, every))
        assert short.flops == whole.flops
        assert short.kept == pytest.approx(whole.kept, rel=0.01)
        peaks = [
            estimate_memory(timeline, few.size, Engine("single"), few.optimizer).peak for timeline in (short, whole)
        ]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
