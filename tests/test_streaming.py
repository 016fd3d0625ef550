"""`memory.parameters: host`: what is computed, what is copied, what is on the device, and what is refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flowshard.cli import main
from flowshard.device import CopyStream, HostMemory
from flowshard.errors import UserError
from flowshard.memory.live import LiveBytes
from flowshard.memory.streaming import hosted_parameters
from flowshard.plan.model import PlannedModel
from flowshard.train import build
from flowshard.train.build import build_on_meta, loss_function
from flowshard.train.inputs import RunInputs, check_inputs
from tests import runs
from tests.copies import DeferredCopies, HastyCopies
from tests.test_estimate import batch
from tests.workers.memory import Storages

TinyModels = Callable[[str], Path]
CPU = torch.device("cpu")
HOST = "memory.parameters=host"
BLOCKS = 3
FAMILIES = ("qwen-image", "flux.1-dev", "flux.2-dev", "z-image-turbo")


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeferredCopies]]:
    """Those of the models that are built."""
    made: list[DeferredCopies] = []

    def make(_: torch.device) -> CopyStream:
        made.append(DeferredCopies())
        return made[-1]

    monkeypatch.setattr(build, "CopyStream", make)
    yield made


class Step:
    """A filled model and a micro-batch."""

    def __init__(self, inputs: RunInputs, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.filled = runs.fill_model(inputs)
        for parameter in self.filled.model.parameters():
            parameter.data = parameter.data.clone()  # products are rounded otherwise where a weight is a part of a file
        dtype = getattr(torch, inputs.config.model.dtype)
        self._loss = loss_function(inputs.family, dtype=dtype, device=CPU)
        self.tensors = tensors or next(runs.batches(inputs).micro_batches(0)).tensors()

    def forward(self, model: torch.nn.Module | None = None) -> torch.Tensor:
        return self._loss(model or self.filled.model, self.tensors)

    def gradients(self, passes: int = 2) -> dict[str, torch.Tensor]:
        """Added up over so many passes."""
        for _ in range(passes):
            self.forward().backward()
        return {name: one.grad for name, one in self.filled.model.named_parameters() if one.grad is not None}


def assert_same(check: Callable[..., RunInputs], *policies: str) -> None:
    """As the gradients with all weights on the device, and kept activations, to the bit."""
    step = Step(check())
    expected = step.gradients()
    for policy in policies:
        found = Step(check(HOST, f"memory.activations={policy}"), step.tensors).gradients()
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), (policy, name)


@pytest.fixture
def inputs_of(tiny: Path, clips: Path, tmp_path: Path) -> Callable[..., RunInputs]:
    def check(*overrides: str) -> RunInputs:
        return check_inputs(runs.config(tiny, clips, tmp_path / "run", "lora.init=gaussian", *overrides))

    return check


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_weights_on_the_device(
    inputs_of: Callable[..., RunInputs], deferred: list[DeferredCopies], dtype: str
) -> None:
    """To the bit, under every policy; some weights of the blocks are trained in full and stay."""
    more = (f"model.dtype={dtype}", "train.modules=[blocks.*.norm2, blocks.1.attn2.norm_k]")
    policies = ("keep", "recompute", "offload", "selective", "{offload: 1, recompute: 1}")
    assert_same(lambda *options: inputs_of(*more, *options), *policies)
    assert len(deferred) == len(policies) and all(copies.most > 0 for copies in deferred)


@pytest.mark.parametrize(
    "variant",
    ["flux.1-dev", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "flux.1-dev")],
)
def test_families(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, deferred: list[DeferredCopies], variant: str
) -> None:
    def check(*overrides: str) -> RunInputs:
        options = (f"model.variant={variant}", "data.frames=1", *overrides)
        return check_inputs(runs.config(tiny_models(variant), clips, tmp_path / "run", *options))

    assert_same(check, "keep", "recompute")
    assert len(deferred) == 2


def test_a_copy_that_is_not_waited_for_is_noticed(
    inputs_of: Callable[..., RunInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CopyStream", lambda _: HastyCopies())
    assert not torch.isfinite(Step(inputs_of(HOST)).forward())


def test_each_block_is_copied_once_in_each_pass(
    inputs_of: Callable[..., RunInputs], deferred: list[DeferredCopies]
) -> None:
    """But for the two at which the passes turn round, which are still there. A forward pass alone is right as well."""
    step = Step(inputs_of(HOST))
    copies = deferred[0]
    step.gradients(passes=1)
    before = copies.started
    step.gradients(passes=1)
    weights = len(hosted_parameters(step.filled.model, step.filled.build.blocks)[0])
    assert copies.started - before == 2 * (BLOCKS - 1) * weights
    with torch.no_grad(), step.filled.strategy.evaluation() as model:
        alone = [step.forward(model) for _ in range(2)]
        expected = Step(inputs_of()).forward()
    assert all(torch.equal(one, expected) for one in alone)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_two_blocks_are_on_the_device(inputs_of: Callable[..., RunInputs], policy: str) -> None:
    """Beside what is there when all weights are. Autograd keeps none of them."""
    kept, highest, block = [], [], 0
    for place in ("device", "host"):
        step = Step(inputs_of(f"memory.parameters={place}", f"memory.activations={policy}"))
        model = step.filled.model
        step.gradients(passes=1)
        block = sum(one.nbytes for one in hosted_parameters(model, step.filled.build.blocks)[0].values())
        live = LiveBytes()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        for tensor in [*model.parameters(), *model.buffers(), *gradients, *step.tensors.values()]:
            live.leave_out(tensor)
        live.highest = live.now
        with live:
            loss = step.forward()
            kept.append(live.now)
            loss.backward()
        highest.append(live.highest)
        del loss
    assert kept[1] - kept[0] == 2 * block
    assert block < highest[1] - highest[0] <= 2 * block


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_the_estimate(inputs_of: Callable[..., RunInputs], policy: str) -> None:
    """Against the storages that are alive in a step: what is saved of the peak, and the peak itself."""
    found, measured, sizes = [], [], [0]
    for place in ("device", "host"):
        options = ("model.dtype=bfloat16", "lora.rank=8", f"memory.activations={policy}")
        inputs = inputs_of(f"memory.parameters={place}", *options)
        step = Step(inputs, batch(16))
        model = step.filled.model
        planned = PlannedModel(inputs, build_on_meta(inputs).model, step.tensors, accelerator=False)
        found.append(planned.estimate(inputs.layout))
        hosted = hosted_parameters(model, step.filled.build.blocks)
        sizes = [sum(one.nbytes for one in parameters.values()) for parameters in hosted]
        away = {id(one) for parameters in hosted for one in parameters.values() if place == "host"}
        storages = Storages()
        for tensor in [*model.parameters(), *model.buffers(), *step.tensors.values()]:
            if id(tensor) not in away:
                storages.know(tensor)
        with storages:
            for _ in range(2):
                storages.peak = 0
                step.filled.strategy.backward(step.forward())
                step.filled.strategy.step(1.0)
        measured.append(storages.peak)
    assert found[1].host == sum(sizes) and not found[0].host
    assert found[0].parameters - found[1].parameters == sum(sizes) - 2 * sizes[0]
    assert found[0].peak - found[1].peak == pytest.approx(measured[0] - measured[1], rel=0.02)
    assert found[1].peak == pytest.approx(measured[1], rel=0.05)


def test_weights_share_pieces_of_host_memory() -> None:
    memory = HostMemory(CPU, piece=1024)
    made = [memory.empty(shape, dtype) for shape, dtype in (((3, 5), torch.float32), ((7,), torch.bfloat16))]
    made += [memory.empty((300,), torch.float32), memory.empty((), torch.float32), memory.empty((0, 2), torch.float32)]
    places = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in made]
    assert all(
        end <= start or other_end <= begin for begin, end in places for start, other_end in places if start > begin
    )
    assert made[0].untyped_storage().data_ptr() == made[1].untyped_storage().data_ptr()
    assert [tuple(one.shape) for one in made] == [(3, 5), (7,), (300,), (), (0, 2)]
    for number, one in enumerate(made):
        one.fill_(number)
    assert all((one == number).all() for number, one in enumerate(made))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("train.method=full",), r"memory.parameters: host, but with train.method=full .*; use train.method=lora"),
        (("memory.compile=true",), r"memory.parameters: host, but memory.compile is true, .*; set memory.compile=auto"),
        (
            ("model.frozen_dtype=int8",),
            r"memory.parameters: host, but with model.frozen_dtype=int8 .*; set one of the two",
        ),
        (("layout.strategy=zero2",), r"memory.parameters: host is for one process, and zero2 holds .* set memory.para"),
        (
            ("layout.strategy=fsdp2",),
            r"and fsdp2 holds and gathers the parameters itself; .* layout.offload_parameters",
        ),
        ((), r"memory.parameters: host, but the run is on the CPU, .*; set memory.parameters=device"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny: Path, clips: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        runs.run(runs.config(tiny, clips, tmp_path / "run", HOST, *options))


def test_several_processes_are_refused(tiny: Path, clips: Path, tmp_path: Path) -> None:
    two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(UserError, match=r"one process, and DistributedDataParallel takes .*; set memory.parameters"):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", HOST), two)


def test_plan_shows_it(tiny: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one device: beside the same with the weights there, and what makes a config take either."""
    runs.config(tiny, clips, tmp_path / "run", HOST)
    given = [f"model.path={tiny}", f"data.metadata={clips / 'metadata.csv'}", f"output={tmp_path / 'run'}", HOST]
    assert main(["plan", str(tmp_path / "run.yaml"), *given, "--devices", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    single = {
        one["host_parameters"]: one
        for one in found["layouts"]
        if one["strategy"] == "single" and one["activations"] == "keep"
    }
    assert single[True]["configured"] and not single[False]["configured"]
    assert "memory.parameters=host" in single[True]["options"]
    assert "memory.parameters=device" in single[False]["options"]
    saved = single[False]["memory"]["parameters"] - single[True]["memory"]["parameters"]
    assert saved == single[True]["memory"]["host"] / 3, "one of three blocks"
    assert single[True]["sent"]["host"] == 2 * found["layouts"][0]["accumulation"] * single[True]["memory"]["host"]
    assert not any(one["host_parameters"] for one in found["layouts"] if one["strategy"] != "single")
