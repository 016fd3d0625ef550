"""The memory estimate against what autograd and the optimizer really keep."""

from pathlib import Path

import pytest
import torch

from flowshard.memory.estimate import estimate_memory
from flowshard.train.build import build_transformer, loss_function
from flowshard.train.inputs import check_inputs
from flowshard.train.optimizer import optimizer_factory, parameter_groups
from tests import runs


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_gradients_and_state_are_exact(
    tiny: Path, clips: Path, tmp_path: Path, method: str, dtype: str
) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", f"train.method={method}", f"model.dtype={dtype}")
    inputs = check_inputs(config)
    device = torch.device("cpu")
    model, _ = build_transformer(inputs, device=device)
    loss_of = loss_function(inputs.family, dtype=getattr(torch, dtype), device=device)
    shape = (2, 16, 2, 4, 4)
    tensors = {
        "latents": torch.randn(shape),
        "noise": torch.randn(shape),
        "sigma": torch.tensor([0.2, 0.8]),
        "weight": torch.ones(2),
        "prompt_embeds": torch.randn(2, 512, 64),
    }
    estimate = estimate_memory(model, loss_of, tensors, optimizer_factory(config))

    weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.UntypedStorage] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # holding it keeps its address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = loss_of(model, tensors)
    assert estimate.activations == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=1e-3)

    loss.backward()
    optimizer = optimizer_factory(config)(parameter_groups(model, config.train))
    optimizer.step()
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    state = sum(
        value.numel() * value.element_size()
        for entry in optimizer.state.values()
        for value in entry.values()
        if value.ndim
    )
    assert estimate.gradients == gradients
    assert estimate.optimizer == state
    assert estimate.parameters == sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    assert estimate.total == estimate.parameters + gradients + state + estimate.activations


def test_estimating_computes_nothing_and_leaves_the_model_alone(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Sizes that no machine could hold are answered, and no parameter is touched."""
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run"))
    model, _ = build_transformer(inputs, device=torch.device("cpu"))
    before = dict(model.named_parameters())
    shape = torch.Size([1, 16, 21, 400, 400])
    huge = torch.zeros(1).expand(shape)
    tensors = {
        "latents": huge,
        "noise": huge,
        "sigma": torch.zeros(1),
        "weight": torch.ones(1),
        "prompt_embeds": torch.zeros(1, 512, 64),
    }
    loss_of = loss_function(inputs.family, dtype=torch.float32, device=torch.device("cpu"))
    estimate = estimate_memory(model, loss_of, tensors, optimizer_factory(inputs.config))
    assert estimate.activations > 10 * 2**30
    assert all(before[name] is parameter and parameter.grad is None for name, parameter in model.named_parameters())
