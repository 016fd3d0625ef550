"""Parameter groups and the learning rate of each step."""

from pathlib import Path

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from flowshard.config import TrainConfig
from flowshard.train.build import build_on_meta
from flowshard.train.inputs import RunInputs, check_inputs
from flowshard.train.optimizer import schedule_factor
from tests import runs


def _settings(inputs: RunInputs) -> dict[str, tuple[float, float]]:
    """Parameter name to (learning rate, decay)."""
    return {name: (one.learning_rate, one.weight_decay) for name, one in build_on_meta(inputs).settings.items()}


RATES = ("train.learning_rate=1", "train.weight_decay=0.1")


def test_norms_biases_and_vectors_get_no_decay(tiny: Path, clips: Path, tmp_path: Path) -> None:
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "train.method=full", *RATES))
    found = _settings(inputs)
    assert found.keys() == inputs.tensors.keys()
    for name in ("blocks.0.attn1.to_q.weight", "patch_embedding.weight", "scale_shift_table"):
        assert found[name] == (1.0, 0.1)
    for name in ("blocks.0.attn1.to_q.bias", "blocks.0.attn1.norm_q.weight", "blocks.2.norm2.weight", "proj_out.bias"):
        assert found[name] == (1.0, 0.0)


def test_the_first_matching_group_decides_rate_and_decay(tiny: Path, clips: Path, tmp_path: Path) -> None:
    groups = (
        "{pattern: blocks.0.attn1.to_q.lora_B, learning_rate: 3}",
        "{pattern: lora_B, learning_rate: 2, weight_decay: 0}",
        "{pattern: proj_out, weight_decay: 0.5}",
    )
    options = (*RATES, "train.modules=[proj_out]", f"train.groups=[{', '.join(groups)}]")
    found = _settings(check_inputs(runs.config(tiny, clips, tmp_path / "run", *options)))
    assert found["blocks.0.attn1.to_q.lora_B.default.weight"] == (3.0, 0.1)
    assert found["blocks.1.attn1.to_q.lora_B.default.weight"] == (2.0, 0.0)
    assert found["blocks.1.attn1.to_q.lora_A.default.weight"] == (1.0, 0.1)
    assert found["proj_out.weight"] == (1.0, 0.5)
    assert found["proj_out.bias"] == (1.0, 0.5)
    assert len(found) == 2 * 30 + 2


def test_warm_up_rises_linearly_under_every_schedule() -> None:
    for schedule in ("constant", "linear", "cosine"):
        train = TrainConfig(steps=10, warmup_steps=4, schedule=schedule)
        factors = [schedule_factor(step, steps=10, train=train) for step in range(10)]
        assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_start_at_the_peak_and_end_at_zero_with_the_last_step(schedule: str, warmup: int) -> None:
    train = TrainConfig(steps=11, warmup_steps=warmup, schedule=schedule)
    factors = [schedule_factor(step, steps=11, train=train) for step in range(11)]
    assert factors[warmup] == 1.0
    assert factors[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(later < earlier for earlier, later in zip(factors[warmup:], factors[warmup + 1 :], strict=False))


def test_cosine_is_the_one_of_transformers() -> None:
    """Theirs reaches zero one update after the last one; so compare with one that is one update shorter."""
    train = TrainConfig(steps=9, schedule="cosine")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, 0, 8)
    for step in range(9):
        assert schedule_factor(step, steps=9, train=train) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_a_single_step_is_possible_with_every_schedule() -> None:
    for schedule in ("constant", "linear", "cosine"):
        assert schedule_factor(0, steps=1, train=TrainConfig(steps=1, schedule=schedule)) == 1.0
