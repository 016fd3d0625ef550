"""What a step does beside computing: copies, waiting, and the update."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowshard.train.batches import stream
from flowshard.train.inputs import check_inputs
from flowshard.train.optimizer import optimizer_factory
from tests import runs


class _Calls(TorchDispatchMode):
    """Counts operators by name, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_a_micro_batch_reads_no_value_back(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """A value that is read from an accelerator makes the process wait for it; a step may, its micro-batches may not."""
    runs.run(runs.config(tiny, clips, tmp_path / "encoding", "train.steps=1"))
    read = []
    for micro in (4, 1):
        config = runs.config(tiny, clips, tmp_path / str(micro), f"train.micro_batch={micro}", "log.flops=false")
        with _Calls() as calls:
            runs.run(config)
        assert calls.number["aten::_scaled_dot_product_flash_attention_for_cpu"] > 0
        read.append(calls.number["aten::_local_scalar_dense"])
    assert read[0] == read[1]


def test_batches_for_an_accelerator_are_in_page_locked_memory(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of them: locking itself needs an accelerator."""
    locked: list[torch.Tensor] = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        locked.append(tensor.clone())
        return locked[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run"))
    batches = runs.batches(inputs)
    plain = next(stream(batches, range(1), ahead=False, pinned=False)).tensors()
    assert not locked
    pinned = next(stream(batches, range(1), ahead=True, pinned=True)).tensors()
    places = {id(tensor) for tensor in locked}
    assert plain.keys() == pinned.keys()
    assert all(id(pinned[name]) in places and torch.equal(pinned[name], plain[name]) for name in plain)


@pytest.mark.parametrize("optimizer", ["adamw", "torch.optim.Adam"])
def test_adam_updates_in_one_pass_as_it_would_in_several(
    tiny: Path, clips: Path, tmp_path: Path, optimizer: str
) -> None:
    weights = []
    for number, options in enumerate(({}, {"fused": False}, {"foreach": True})):
        config = runs.config(
            tiny, clips, tmp_path / str(number), f"train.optimizer={optimizer}", f"train.optimizer_options={options}"
        )
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
        made = optimizer_factory(config)([{"params": [parameter], "lr": 1e-3, "weight_decay": 0.1}])
        assert bool(made.param_groups[0]["fused"]) is (not options)
        for step in range(3):
            parameter.grad = torch.sin(torch.arange(1000.0) + step)
            made.step()
        weights.append(parameter.detach())
    assert all(runs.relative_error(other, weights[0]) < 1e-6 for other in weights[1:])


def test_adam_takes_several_passes_on_devices_that_are_not_known_to_do_otherwise(
    tiny: Path, clips: Path, tmp_path: Path
) -> None:
    make = optimizer_factory(runs.config(tiny, clips, tmp_path / "run"))
    parameter = torch.nn.Parameter(torch.empty(4, device="meta"))
    assert not make([{"params": [parameter], "lr": 1e-3, "weight_decay": 0.1}]).param_groups[0]["fused"]
