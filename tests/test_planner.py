"""`memory.activations: auto` on a tiny model."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml

from flowshard.config import ActivationPolicy, parse_budget
from flowshard.errors import UserError
from flowshard.memory.choose import Cost, most_alive
from flowshard.memory.compiled import CompileChoice
from flowshard.memory.live import LiveBytes
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import LossScale, Single
from flowshard.train.build import Build, build_on_meta, fill, loss_function
from flowshard.train.inputs import RunInputs, check_inputs
from flowshard.train.optimizer import optimizer_factory
from flowshard.train.planner import ActivationPlanner, Measured
from tests import runs
from tests.test_compile import ON, Graphs

CPU = torch.device("cpu")
OFF = CompileChoice(False, "a test")
SIZE = ("data.height=64", "data.width=64")


def _planner(inputs: RunInputs, compiling: CompileChoice = OFF) -> ActivationPlanner:
    loss = loss_function(inputs.family, dtype=getattr(torch, inputs.config.model.dtype), device=CPU)
    largest = runs.batches(inputs).largest_micro_batch()
    processes = Processes(inputs.layout, "cpu", timeout_minutes=1)
    return ActivationPlanner(inputs, largest, loss, processes, compiling)


def _measure(inputs: RunInputs) -> Measured:
    build = build_on_meta(inputs)
    return _planner(inputs).measure(build.model, build.blocks)


def _needs(measured: Measured, policy: ActivationPolicy) -> int:
    return measured.fixed + most_alive(measured.costs, [policy] * len(measured.costs), tail=measured.tail)


def _peak(inputs: RunInputs, build: Build) -> int:
    """The most bytes of tensors that are alive in the passes of a step's second micro-batch, with optimizer state."""
    config = inputs.config
    strategy = Single(CPU, clip_norm=None, loss_scale=LossScale(dynamic=False))
    fill(build, inputs, strategy)
    strategy.start(build.model, build.settings, optimizer_factory(config))
    tensors = runs.batches(inputs).largest_micro_batch().tensors()
    loss_of = loss_function(inputs.family, dtype=getattr(torch, config.model.dtype), device=CPU)
    strategy.backward(loss_of(strategy.model, tensors))
    strategy.step(1.0)
    strategy.backward(loss_of(strategy.model, tensors))
    live = LiveBytes()
    gradients = [parameter.grad for parameter in build.model.parameters() if parameter.grad is not None]
    state = [value for _, kept in strategy.optimizer_state() for value in kept.values()]
    for tensor in [*build.model.parameters(), *build.model.buffers(), *tensors.values(), *gradients, *state]:
        live.add(tensor)
    with live:
        strategy.backward(loss_of(strategy.model, tensors))
    return live.highest


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("wan2.1-t2v-1.3b", ("train.method=lora",)),
        ("wan2.1-t2v-1.3b", ("train.method=full", "train.micro_batch=2", "model.dtype=bfloat16")),
        ("flux.1-dev", ("data.frames=1",)),
    ],
)
def test_the_chosen_mix_stays_below_the_budget(
    tiny_models: object, clips: Path, tmp_path: Path, variant: str, options: tuple[str, ...]
) -> None:
    """Between what all blocks need with `recompute` and with `keep`; measured on the run's own model and step."""
    folder: Path = tiny_models(variant)  # type: ignore[operator]
    name = f"model.variant={variant}"
    free = check_inputs(runs.config(folder, clips, tmp_path / "free", name, *SIZE, *options))
    measured = _measure(free)
    high, low = _needs(measured, "keep"), _needs(measured, "recompute")
    assert low < high
    budget = f"{(low + (high - low) // 2) / 1e6:.4f}MB"
    planned = ("memory.activations=auto", f"memory.budget={budget}")
    inputs = check_inputs(runs.config(folder, clips, tmp_path / "planned", name, *SIZE, *options, *planned))
    build = build_on_meta(inputs, choose=_planner(inputs).choose)
    kept = build.policies.count("keep")
    assert 0 < kept < len(build.policies)
    most = parse_budget(budget)
    assert _peak(inputs, build) <= most
    assert _peak(free, build_on_meta(free)) > most, "with all kept it does not fit, so something was measured"


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_compiled_blocks_are_timed_where_the_run_compiles_them(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Each kind is compiled twice, with attention outputs kept and without, and every measurement but the first runs that."""
    graphs = Graphs(monkeypatch, "aot_eager")
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", f"train.method={method}"))
    plain = _measure(inputs)
    assert graphs.number == 0
    build = build_on_meta(inputs)
    measured = _planner(inputs, ON).measure(build.model, build.blocks)
    assert graphs.number == 2
    assert graphs.calls >= 5 * 6 and graphs.calls % 6 == 0  # policies that recompute run it twice
    assert [_bytes(costs) for costs in measured.costs] == [_bytes(costs) for costs in plain.costs]
    assert not any("forward" in vars(block) for block in build.blocks)


def _bytes(costs: Mapping[ActivationPolicy, Cost]) -> dict[ActivationPolicy, tuple[int, int]]:
    return {policy: (cost.kept, cost.peak) for policy, cost in costs.items()}


def test_what_cannot_fit_is_refused_with_the_least_that_is_needed(tiny: Path, clips: Path, tmp_path: Path) -> None:
    planned = ("memory.activations=auto", "memory.budget=1MiB")
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", *planned))
    with pytest.raises(UserError, match=r"memory\.budget: 1\.00 MiB a process .* least .* needs is [0-9.]+ MiB, with"):
        build_on_meta(inputs, choose=_planner(inputs).choose)


def test_the_choice_is_recorded_and_used_again(
    tiny: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing changed that it depends on; else it is made anew. Losses are those of a run without."""
    config = runs.config(tiny, clips, tmp_path / "plain", "train.steps=2")
    runs.run(config)
    auto = ("memory.activations=auto", "train.global_batch=4")
    runs.run(runs.config(tiny, clips, tmp_path / "auto", "train.steps=1", *auto))
    said = capsys.readouterr().out
    assert "measured    3 x WanTransformerBlock: keep" in said and "chosen      3 x keep" in said
    assert yaml.safe_load((tmp_path / "auto/config.yaml").read_text())["record"]["activations"] == "3 x keep"
    again = runs.config(tiny, clips, tmp_path / "auto", "train.steps=2", "resume=auto", *auto)
    runs.run(again)
    said = capsys.readouterr().out
    assert "as planned before: 3 x keep" in said and "measured" not in said
    assert [line["loss"] for line in runs.metrics(again)] == [line["loss"] for line in runs.metrics(config)]
    more = runs.config(tiny, clips, tmp_path / "auto", "train.steps=3", "resume=auto", *auto, "train.micro_batch=2")
    runs.run(more)
    assert "chosen      3 x keep" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24 * 10**9), ("22.5GiB", 22.5 * 2**30), ("500 MB", 5 * 10**8), ("0.9", 0.9), ("1", 1.0), (".5", 0.5)],
)
def test_a_budget_is_an_amount_or_a_share(text: str, expected: float) -> None:
    assert parse_budget(text) == expected
    assert isinstance(parse_budget(text), float) == (expected <= 1)
