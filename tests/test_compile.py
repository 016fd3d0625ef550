"""Compiled blocks: how often they are compiled, and that they compute what they compute as they are."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowshard.config import Config
from flowshard.errors import UserError
from flowshard.memory import compiled
from flowshard.memory.compiled import CompileChoice, choose_compile
from flowshard.parallel.layout import Layout, resolve_layout
from flowshard.parallel.processes import Processes
from flowshard.parity.command import parity
from flowshard.train.build import loss_function
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.launch import torchrun
from tests.test_families import BASES
from tests.test_family_layouts import OWN, PICTURE
from tests.test_layouts_agree import options

TinyModels = Callable[[str], Path]
ON = CompileChoice(True, "a test")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Graphs:
    """Stands in for the compiler: counts what it is given, and how often the result runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        self.number = 0
        self.calls = 0
        self._backend: Any = torch._dynamo.lookup_backend(backend)
        original = torch.compile
        monkeypatch.setattr(torch, "compile", lambda function: original(function, backend=self._count))

    def _count(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.number += 1
        compiled = self._backend(graph, inputs)

        def run(*given: Any) -> Any:
            self.calls += 1
            return compiled(*given)

        return run


def _settings() -> Any:
    """The private names that `memory/compiled.py` sets; reading one that is gone raises."""
    config = torch._dynamo.config
    return config.suppress_errors, config.recompile_limit, config.optimize_ddp


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = _settings()
    yield
    config: Any = torch._dynamo.config
    config.suppress_errors, config.recompile_limit, config.optimize_ddp = before
    torch.compiler.reset()


def _gradients(filled: runs.Filled, config: Config, *, steps: int = 1) -> dict[str, torch.Tensor]:
    """Of the first micro-batch, after as many passes; the second factors of adapters are made other than zero."""
    inputs = check_inputs(config)
    for name, parameter in filled.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))
    batch = next(runs.batches(inputs).micro_batches(0))
    loss_of = loss_function(inputs.family, dtype=torch.float32, device=torch.device("cpu"))
    for _ in range(steps):
        filled.model.zero_grad()
        loss_of(filled.model, batch.tensors()).backward()
    return {name: one.grad for name, one in filled.model.named_parameters() if one.grad is not None}


def test_a_run_compiles_a_kind_of_block_once_and_its_first_block_apart(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 blocks, 3 steps, 2 micro-batches each, and a validation: with LoRA the first block's input has no gradient."""
    graphs = Graphs(monkeypatch, "eager")
    held_out = ["validation.every=3", "validation.fraction=0.4", "train.micro_batch=2"]
    config = runs.config(tiny, clips, tmp_path / "run", "memory.compile=true", *held_out)
    runs.run(config)
    assert graphs.number == 1 + 2  # what is tried first, and the two
    plain = runs.config(tiny, clips, tmp_path / "plain", "memory.compile=false", *held_out)
    runs.run(plain)
    assert graphs.number == 3
    ours, theirs = ([line["loss"] for line in runs.metrics(one)] for one in (config, plain))
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.slow
def test_attention_outputs_are_kept_by_compiled_code(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`selective` in full training: one kind, no attention in the backward pass, while other work is done again."""
    config = runs.config(tiny, clips, tmp_path / "run", "memory.activations=selective", "train.method=full")
    expected = _gradients(runs.fill_model(check_inputs(config)), config)
    graphs = Graphs(monkeypatch, "aot_eager")
    filled = runs.fill_model(check_inputs(config), ON)
    found = _gradients(filled, config)
    assert graphs.number == 1
    assert "context_fn is passed" not in caplog.text
    assert max(runs.relative_error(found[name], expected[name]) for name in expected) < 1e-5
    batch = next(runs.batches(check_inputs(config)).micro_batches(0))
    loss = loss_function(check_inputs(config).family, dtype=torch.float32, device=torch.device("cpu"))(
        filled.model, batch.tensors()
    )
    with torch.profiler.profile() as profile:
        loss.backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get(ATTENTION, 0) == 0
    assert calls["aten::native_layer_norm"] >= 3 * 2


@pytest.mark.slow
def test_other_lengths_are_compiled_once_more_and_never_again(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs(monkeypatch, "eager")
    filled = None
    numbers = []
    for frames, side in ((5, 32), (9, 32), (13, 48)):
        size = (f"data.frames={frames}", f"data.height={side}", f"data.width={side}")
        config = runs.config(tiny, clips, tmp_path / f"{frames}-{side}", *size, "train.method=full", "model.layers=1")
        filled = filled or runs.fill_model(check_inputs(config), ON)
        _gradients(filled, config)
        numbers.append(graphs.number)
    assert numbers == [1, 2, 2]


class Elsewhere(Processes):
    """One process on another kind of device, as far as one can tell without it."""

    def __init__(self, layout: Layout, kind: str) -> None:
        super().__init__(layout, "cpu", timeout_minutes=1)
        self.device = torch.device(kind)


def test_auto_compiles_where_it_pays_and_works_and_says_why_not(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = resolve_layout(runs.config(tiny, clips, tmp_path / "run"), {})
    here, cuda = Processes(layout, "cpu", timeout_minutes=1), Elsewhere(layout, "cuda")
    assert "memory.compile=true does it all the same" in choose_compile("auto", layout, here).reason
    assert not choose_compile(False, layout, here).enabled
    hosted = choose_compile("auto", layout, cuda, host_parameters=True)
    assert not hosted.enabled and "memory.parameters=host" in hosted.reason
    monkeypatch.setattr(compiled, "_failure", lambda _: None)
    assert choose_compile("auto", layout, cuda) == CompileChoice(True, "auto on cuda", fall_back=True)
    assert choose_compile(True, layout, here) == CompileChoice(True, "memory.compile=true")
    monkeypatch.setattr(compiled, "_failure", lambda _: "no compiler")
    assert choose_compile("auto", layout, cuda).reason == "torch.compile does not work here (no compiler)"
    with pytest.raises(UserError, match=r"does not work on cpu here \(no compiler\); install what it needs"):
        choose_compile(True, layout, here)


def test_a_compiler_that_fails_is_found_before_the_first_step(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: object, inputs: object) -> None:
        del graph, inputs
        raise RuntimeError("\n  g++: not found\nand more")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: original(function, backend=broken))
    with pytest.raises(UserError, match=r"does not work on cpu here \(.*g\+\+: not found\); install what it needs"):
        runs.run(runs.config(tiny, clips, tmp_path / "run", "memory.compile=true"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_block_that_cannot_be_compiled_runs_as_it_is_if_nobody_asked(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: object, inputs: object) -> None:
        del graph, inputs
        raise RuntimeError("cannot")

    config = runs.config(tiny, clips, tmp_path / "run", "lora.targets=[q]")
    expected = _gradients(runs.fill_model(check_inputs(config)), config)
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: original(function, backend=broken))
    found = _gradients(
        runs.fill_model(check_inputs(config), CompileChoice(True, "auto on cuda", fall_back=True)), config
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    filled = runs.fill_model(check_inputs(config), ON)
    with pytest.raises(Exception, match="cannot"):
        _gradients(filled, config)


def test_zero3_is_refused_with_the_reason(tiny: Path, clips: Path, tmp_path: Path) -> None:
    zero3 = ("layout.strategy=zero3", "memory.compile=true")
    with pytest.raises(UserError, match=r"memory.compile: true, but zero3 gathers .*layout.strategy=fsdp2"):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", *zero3), {"WORLD_SIZE": "2"})
    layout = resolve_layout(runs.config(tiny, clips, tmp_path / "run", "layout.strategy=zero3"), {"WORLD_SIZE": "1"})
    here = Processes(layout, "cpu", timeout_minutes=1)
    assert "zero3 gathers" in choose_compile("auto", layout, here).reason


@pytest.mark.slow
def test_every_strategy_compiles_each_kind_once(tiny: Path, clips: Path, tmp_path: Path) -> None:
    done = torchrun(2, ["tests.workers.compiled", str(tiny), str(clips), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled: ") == 8


LAYOUTS = [
    "single,compile=true,activations=selective,micro_batch=2",
    "ddp:2,compile=true,activations=selective",
    "zero1:2,compile=true,activations=offload",
    "zero2:2,compile=true,activations=recompute",
    "fsdp2:2,compile=true,activations=selective",
    "sp:2,compile=true,micro_batch=2",
    "fsdp2:2,compile=true,sequence=2,ring=2,activations=selective",
    "sp:2,compile=true,activations=auto",
]


@pytest.mark.slow
@pytest.mark.parametrize("method", OWN)
@pytest.mark.parametrize("variant", BASES)
def test_compiled_layouts_equal_one_process_that_is_not(tiny_models: TinyModels, variant: str, method: str) -> None:
    """Gradients within 1e-5, norm over norm."""
    chosen = LAYOUTS if method == "lora" else LAYOUTS[::3]
    own = (*PICTURE, *OWN[method], f"model.variant={variant}")
    parity(options(tiny_models(variant), ["single", *chosen], *own, steps=2))
