"""What each block keeps, counted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowshard.config import MemoryConfig
from flowshard.errors import UserError
from flowshard.memory import activations
from flowshard.memory.activations import InputOffload, block_policies
from flowshard.memory.storages import storage_id
from flowshard.train.build import loss_function
from flowshard.train.inputs import check_inputs
from tests import runs


def test_policies_follow_the_order_of_the_blocks() -> None:
    assert block_policies(MemoryConfig(activations="offload"), 2) == ["offload", "offload"]
    counted = MemoryConfig(activations={"recompute": 2, "offload": 1})
    assert block_policies(counted, 4) == ["recompute", "recompute", "offload", "keep"]
    with pytest.raises(UserError, match="names 3 blocks, the model has 2"):
        block_policies(counted, 2)


def test_storages_are_told_apart() -> None:
    """Fails when torch's private name changes."""
    tensor = torch.zeros(4)
    assert storage_id(tensor) == storage_id(tensor[1:]) != storage_id(torch.zeros(4))


@pytest.mark.parametrize(
    ("policy", "again"), [("keep", 0), ("recompute", 3), ("selective", 3), ("offload", 3), ("{recompute: 2}", 2)]
)
def test_blocks_run_again_as_often_as_the_policy_says_with_the_same_gradients(
    tiny: Path, clips: Path, tmp_path: Path, policy: str, again: int
) -> None:
    """Counted by hooks on the attention of every block: one call in forward, and one more where it is recomputed."""
    gradients = {}
    for name in ("keep", policy):
        inputs = check_inputs(runs.config(tiny, clips, tmp_path / str(len(name)), f"memory.activations={name}"))
        filled = runs.fill_model(inputs)
        calls: list[int] = []
        for block in filled.build.blocks:
            block.get_submodule("norm1").register_forward_hook(lambda *_, calls=calls: calls.append(1))
        batch = next(runs.batches(inputs).micro_batches(0))
        loss = loss_function(inputs.family, dtype=torch.float32, device=torch.device("cpu"))(
            filled.model, batch.tensors()
        )
        assert len(calls) == 3
        loss.backward()
        gradients[name] = {n: p.grad for n, p in filled.model.named_parameters() if p.grad is not None}
        if name == policy:
            assert len(calls) == 3 + again
    for name, expected in gradients["keep"].items():
        assert torch.equal(gradients[policy][name], expected), name


def test_only_the_hidden_states_are_offloaded(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 tokens of 192 channels in float32 for each of 3 blocks; the first block's shared inputs once."""
    made: list[InputOffload] = []

    class Noted(InputOffload):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(activations, "InputOffload", Noted)
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "memory.activations=offload"))
    filled = runs.fill_model(inputs)
    batch = next(runs.batches(inputs).micro_batches(0))
    loss_function(inputs.family, dtype=torch.float32, device=torch.device("cpu"))(filled.model, batch.tensors())
    hidden, shared = 8 * 192 * 4, (512 * 192 + 6 * 192) * 4
    parameters = sum(parameter.nbytes for parameter in filled.model.parameters())
    assert made[0].offloaded_bytes == 3 * hidden + shared
    assert made[0].offloaded_bytes < parameters
