"""The memory estimate against what autograd and the optimizer really keep."""

from pathlib import Path

import pytest
import torch

from flowshard.memory.estimate import estimate_memory
from flowshard.train.build import build_on_meta, loss_function
from flowshard.train.inputs import check_inputs
from flowshard.train.optimizer import optimizer_factory
from tests import runs


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_activations_gradients_and_state_are_exact(
    tiny: Path, clips: Path, tmp_path: Path, method: str, dtype: str, policy: str
) -> None:
    options = (f"train.method={method}", f"model.dtype={dtype}", f"memory.activations={policy}")
    config = runs.config(tiny, clips, tmp_path / "run", *options)
    inputs = check_inputs(config)
    device = torch.device("cpu")
    meta = build_on_meta(inputs)
    filled = runs.fill_model(inputs)
    model = filled.model
    loss_of = loss_function(inputs.family, dtype=getattr(torch, dtype), device=device)
    shape = (2, 16, 2, 4, 4)
    tensors = {
        "latents": torch.randn(shape),
        "noise": torch.randn(shape),
        "sigma": torch.tensor([0.2, 0.8]),
        "weight": torch.ones(2),
        "prompt_embeds": torch.randn(2, 512, 64),
    }
    estimate = estimate_memory(meta.model, loss_of, tensors, optimizer_factory(config), meta.policies, device)

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
    optimizer = optimizer_factory(config)([{"params": [p for p in model.parameters() if p.requires_grad]}])
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
    meta = build_on_meta(inputs)
    before = dict(meta.model.named_parameters())
    shape = torch.Size([1, 16, 21, 400, 400])
    huge = torch.zeros(1).expand(shape)
    tensors = {
        "latents": huge,
        "noise": huge,
        "sigma": torch.zeros(1),
        "weight": torch.ones(1),
        "prompt_embeds": torch.zeros(1, 512, 64),
    }
    device = torch.device("cpu")
    loss_of = loss_function(inputs.family, dtype=torch.float32, device=device)
    make_optimizer = optimizer_factory(inputs.config)
    estimate = estimate_memory(meta.model, loss_of, tensors, make_optimizer, meta.policies, device)
    assert estimate.activations > 10 * 2**30
    assert all(
        before[name] is parameter and parameter.grad is None for name, parameter in meta.model.named_parameters()
    )


def test_selective_keeps_the_attention_outputs_on_top_of_recompute(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """By hand: for 2 samples of 8 tokens and 3 blocks, two attentions each give 12 heads x 16 channels and a log-sum-exp."""
    found = {}
    device = torch.device("cpu")
    for policy in ("keep", "recompute", "selective"):
        inputs = check_inputs(runs.config(tiny, clips, tmp_path / policy, f"memory.activations={policy}"))
        meta = build_on_meta(inputs)
        tensors = {
            "latents": torch.zeros(2, 16, 2, 4, 4),
            "noise": torch.zeros(2, 16, 2, 4, 4),
            "sigma": torch.zeros(2),
            "weight": torch.ones(2),
            "prompt_embeds": torch.zeros(2, 512, 64),
        }
        loss_of = loss_function(inputs.family, dtype=torch.float32, device=device)
        make_optimizer = optimizer_factory(inputs.config)
        found[policy] = estimate_memory(meta.model, loss_of, tensors, make_optimizer, meta.policies, device).activations
    assert found["selective"] - found["recompute"] == 3 * 2 * (2 * 8 * 12 * 16 * 4 + 2 * 8 * 12 * 4)
    assert found["recompute"] < found["selective"] < found["keep"]
