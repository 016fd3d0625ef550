"""The rules that every strategy keeps, on a model small enough to work out by hand."""

from pathlib import Path

import pytest
import torch

from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.strategies import GroupSettings, LossScale, Single, make_strategy
from flowshard.train.build import build_on_meta, fill, loss_function
from flowshard.train.inputs import check_inputs
from tests import runs

CPU = torch.device("cpu")


class _TwoLayers(torch.nn.Module):
    """One layer that the loss reaches and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        self.unused = torch.nn.Parameter(torch.tensor([2.0]))
        self.frozen = torch.nn.Parameter(torch.tensor([1.0]), requires_grad=False)


def _strategy(model: torch.nn.Module, *, clip_norm: float | None, decay: float = 0.0) -> Single:
    strategy = Single(CPU, clip_norm=clip_norm, loss_scale=LossScale(dynamic=False))
    settings = {name: GroupSettings(0.1, decay) for name in ("used", "unused")}
    strategy.start(model, settings, torch.optim.SGD)
    return strategy


@pytest.mark.parametrize(("clip_norm", "moved"), [(None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (2.5, [1.5, 2.0])])
def test_norm_is_taken_before_clipping_and_the_update_after(clip_norm: float | None, moved: list[float]) -> None:
    model = _TwoLayers()
    strategy = _strategy(model, clip_norm=clip_norm)
    for share in (0.25, 0.75):  # two micro-batches add up: the gradient of used is (3, 4), its norm 5
        strategy.backward(share * (model.used**2).sum() / 2)
    assert dict(strategy.gradients())["used"].tolist() == [3.0, 4.0]
    assert strategy.step(0.5) == pytest.approx(5.0)
    expected = torch.tensor([3.0, 4.0]) - 0.1 * 0.5 * torch.tensor(moved)
    torch.testing.assert_close(model.used.detach(), expected)
    strategy.backward((model.used * 0).sum())
    assert strategy.step(1.0) == 0.0, "gradients start anew after a step"


def test_a_missing_gradient_counts_as_zero_and_is_named() -> None:
    """So weight decay applies to it, as it does under engines that always have a gradient."""
    model = _TwoLayers()
    strategy = _strategy(model, clip_norm=None, decay=0.5)
    strategy.backward((model.used**2).sum() / 2)
    strategy.step(1.0)
    assert strategy.without_gradient() == ["unused"]
    torch.testing.assert_close(model.unused.detach(), torch.tensor([2.0 - 0.1 * 0.5 * 2.0]))
    assert model.frozen.item() == 1.0


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_nothing_is_updated_when_the_gradient_is_no_number(broken: float) -> None:
    model = _TwoLayers()
    strategy = _strategy(model, clip_norm=1.0)
    strategy.backward((model.used * torch.tensor([broken, 1.0])).sum())
    assert not torch.isfinite(torch.tensor(strategy.step(1.0)))
    assert model.used.tolist() == [3.0, 4.0]
    strategy.backward((model.used**2).sum() / 2)
    assert strategy.step(1.0) == pytest.approx(5.0)


@pytest.mark.parametrize(("chosen", "seen"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_blocks_are_gathered_in_the_chosen_type(
    tiny: Path, clips: Path, tmp_path: Path, chosen: str, seen: torch.dtype
) -> None:
    """What a trained block computes with; the rest of the model, and what is stored, stay float32."""
    overrides = ["layout.strategy=fsdp2", f"layout.gather_dtype={chosen}", "train.method=full", "model.dtype=bfloat16"]
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", *overrides))
    batch = next(runs.batches(check_inputs(runs.config(tiny, clips, tmp_path / "one"))).micro_batches(0))
    used: dict[str, torch.dtype] = {}

    def work(processes: Processes) -> None:
        build = build_on_meta(inputs)
        strategy = make_strategy(inputs.config, processes)
        fill(build, inputs, strategy)
        strategy.start(build.model, build.settings, torch.optim.SGD)
        for name in ("blocks.1.attn1.to_q", "proj_out"):
            layer = build.model.get_submodule(name)
            layer.register_forward_hook(lambda layer, *_, name=name: used.update({name: layer.weight.dtype}))
        loss_function(inputs.family, dtype=torch.bfloat16, device=CPU)(strategy.model, batch.tensors())
        stored = dict(strategy.parameters(strategy.trained_names()))
        assert stored["blocks.1.attn1.to_q.weight"].dtype == torch.float32

    run_together(inputs.layout, work, device_name="cpu")
    assert used == {"blocks.1.attn1.to_q": seen, "proj_out": torch.float32}


def test_names_and_values_are_those_of_the_plain_model() -> None:
    strategy = _strategy(_TwoLayers(), clip_norm=None)
    assert strategy.trained_names() == ["used", "unused"]
    assert {name: value.tolist() for name, value in strategy.parameters(["unused", "frozen"])} == {
        "unused": [2.0],
        "frozen": [1.0],
    }
