"""Copies beside the computation: what is computed, in which order copies are waited for, and what is on the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from flowshard.config import ActivationPolicy
from flowshard.device import CopyStream, check_memory_options
from flowshard.errors import UserError
from flowshard.families.tiny import write_tiny_pipeline
from flowshard.memory.activations import apply_activation_policies
from flowshard.memory.live import LiveBytes
from flowshard.train.build import loss_function
from flowshard.train.inputs import RunInputs, check_inputs
from tests import runs
from tests.copies import DeferredCopies, HastyCopies

CPU = torch.device("cpu")
BLOCKS = 6
INPUT = 8 * 192 * 4
"""Bytes of a block's input: tokens, channels, float32."""
MIXED: list[ActivationPolicy] = ["offload", "keep", "offload", "recompute", "offload", "selective"]


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the tiny one, with six blocks."""
    folder = tmp_path_factory.mktemp("wan") / "model"
    write_tiny_pipeline("wan2.1-t2v-1.3b", folder, seed=0)
    stock: Any = diffusers.WanTransformer3DModel
    torch.manual_seed(0)
    stock.from_config({**stock.load_config(folder / "transformer"), "num_layers": BLOCKS}).save_pretrained(
        folder / "transformer"
    )
    return folder


class Step:
    """A model and a micro-batch."""

    def __init__(self, inputs: RunInputs, policies: list[ActivationPolicy], overlap: CopyStream | None = None) -> None:
        self.model = runs.fill_model(inputs).model
        blocks = inputs.family.blocks(self.model)
        apply_activation_policies(self.model, blocks, policies, partitioned=False, overlap=overlap)
        self._loss = loss_function(inputs.family, dtype=torch.float32, device=CPU)
        self._tensors = next(runs.batches(inputs).micro_batches(0)).tensors()

    def forward(self) -> torch.Tensor:
        return self._loss(self.model, self._tensors)

    def gradients(self, passes: int = 1) -> dict[str, torch.Tensor]:
        """Added up over so many forward and backward passes."""
        for _ in range(passes):
            self.forward().backward()
        return {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def inputs(wan: Path, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    return check_inputs(runs.config(wan, clips, tmp_path_factory.mktemp("runs") / "run", "lora.init=gaussian"))


@pytest.fixture(scope="module")
def expected(inputs: RunInputs) -> dict[str, torch.Tensor]:
    return Step(inputs, ["keep"] * BLOCKS).gradients(passes=2)


@pytest.mark.parametrize("policies", [["offload"] * BLOCKS, MIXED])
def test_gradients_do_not_depend_on_when_copies_are_made(
    inputs: RunInputs, expected: dict[str, torch.Tensor], policies: list[ActivationPolicy]
) -> None:
    """Copies are made as late as they may be, of memory that has to be there still, and all of them are."""
    copies = DeferredCopies()
    assert equal(Step(inputs, policies, copies).gradients(passes=2), expected)
    assert copies.started > copies.most > 1
    # On the CPU itself, where they are made at once.
    assert equal(Step(inputs, policies, CopyStream(CPU)).gradients(passes=2), expected)


def test_a_copy_that_is_not_waited_for_is_noticed(inputs: RunInputs, expected: dict[str, torch.Tensor]) -> None:
    assert not equal(Step(inputs, ["offload"] * BLOCKS, HastyCopies()).gradients(passes=2), expected)


def test_each_input_is_copied_out_once_and_back_once(inputs: RunInputs) -> None:
    """Those of the last two blocks are still there. The first block's inputs are four: the shared ones come with it."""
    copies = DeferredCopies()
    step = Step(inputs, ["offload"] * BLOCKS, copies)
    loss = step.forward()
    out = copies.started
    assert out == BLOCKS + 2
    loss.backward()
    assert copies.started == out + out - 2


def test_a_graph_that_is_gone_or_kept_does_no_harm(inputs: RunInputs) -> None:
    once = Step(inputs, ["keep"] * BLOCKS).gradients()
    step = Step(inputs, ["offload"] * BLOCKS, DeferredCopies())
    step.forward()
    step.forward().backward(retain_graph=True)
    step.model.zero_grad()
    loss = step.forward()
    loss.backward(retain_graph=True)
    first = {name: one.grad.clone() for name, one in step.model.named_parameters() if one.grad is not None}
    assert equal(first, once)
    step.model.zero_grad()
    loss.backward()
    assert equal({name: one.grad for name, one in step.model.named_parameters() if one.grad is not None}, once)


def test_no_more_than_two_inputs_stay_on_the_device(inputs: RunInputs) -> None:
    """After the forward pass; each block of `recompute` keeps its own."""
    kept = {}
    for policy in ("recompute", "offload"):
        policies: list[ActivationPolicy] = [policy] * BLOCKS
        step = Step(inputs, policies, CopyStream(CPU))
        live = LiveBytes()
        apply_activation_policies(
            step.model,
            inputs.family.blocks(step.model),
            policies,
            partitioned=False,
            host_memory=live.elsewhere,
            overlap=CopyStream(CPU),
        )
        with live:
            loss = step.forward()
        kept[policy] = live.now
        if policy == "offload":
            assert live.outside >= BLOCKS * INPUT
        del loss
    assert kept["recompute"] - kept["offload"] >= (BLOCKS - 2) * INPUT


def test_two_streams_of_tokens(tiny_models: Callable[[str], Path], clips: Path, tmp_path: Path) -> None:
    """Blocks that change text as well as picture have several inputs of their own."""
    options = ("model.variant=flux.1-dev", "data.frames=1")
    inputs = check_inputs(runs.config(tiny_models("flux.1-dev"), clips, tmp_path / "run", *options))
    blocks = 4
    expected = Step(inputs, ["keep"] * blocks).gradients()
    assert equal(Step(inputs, ["offload"] * blocks, DeferredCopies()).gradients(), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), r"memory.offload_overlap: true, but memory.activations is keep, which offloads no block; set"),
        (("memory.activations={recompute: 2}",), r"is {'recompute': 2}, which offloads no block"),
        (("memory.activations=auto",), r"measures one block at a time, where nothing overlaps; set"),
    ],
)
def test_overlap_without_offload_is_refused(
    wan: Path, clips: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        runs.config(wan, clips, tmp_path / "run", "memory.offload_overlap=true", *options)


def test_overlap_on_the_cpu_is_refused(wan: Path, clips: Path, tmp_path: Path) -> None:
    asked = "memory.offload_overlap=true", "memory.activations=offload"
    config = runs.config(wan, clips, tmp_path / "run", *asked)
    with pytest.raises(UserError, match=r"memory.offload_overlap: true, but the run is on the CPU, .* set"):
        runs.run(config)
    check_memory_options(torch.device("cuda"), config.memory)
