"""The rules that every strategy keeps, on a model small enough to work out by hand."""

import pytest
import torch

from flowshard.parallel.strategies import Single


class _TwoLayers(torch.nn.Module):
    """One layer that the loss reaches and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        self.unused = torch.nn.Parameter(torch.tensor([2.0]))
        self.frozen = torch.nn.Parameter(torch.tensor([1.0]), requires_grad=False)


def _strategy(model: torch.nn.Module, *, clip_norm: float | None, decay: float = 0.0) -> Single:
    groups: list[dict[str, object]] = [
        {"params": [p for p in model.parameters() if p.requires_grad], "lr": 0.1, "weight_decay": decay}
    ]
    return Single(model, groups, torch.optim.SGD, clip_norm=clip_norm)


@pytest.mark.parametrize(("clip_norm", "moved"), [(None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (2.5, [1.5, 2.0])])
def test_norm_is_taken_before_clipping_and_the_update_after(clip_norm: float | None, moved: list[float]) -> None:
    model = _TwoLayers()
    strategy = _strategy(model, clip_norm=clip_norm)
    for share in (0.25, 0.75):  # two micro-batches add up: the gradient of used is (3, 4), its norm 5
        strategy.backward(share * (model.used**2).sum() / 2)
    norm = strategy.gradient_norm()
    assert norm.item() == pytest.approx(5.0)
    strategy.step(0.5, norm)
    expected = torch.tensor([3.0, 4.0]) - 0.1 * 0.5 * torch.tensor(moved)
    torch.testing.assert_close(model.used.detach(), expected)
    strategy.backward((model.used * 0).sum())
    assert strategy.gradient_norm().item() == 0.0, "gradients start anew after a step"


def test_a_missing_gradient_counts_as_zero_and_is_named() -> None:
    """So weight decay applies to it, as it does under engines that always have a gradient."""
    model = _TwoLayers()
    strategy = _strategy(model, clip_norm=None, decay=0.5)
    strategy.backward((model.used**2).sum() / 2)
    strategy.step(1.0, strategy.gradient_norm())
    assert list(strategy.without_gradient()) == ["unused"]
    torch.testing.assert_close(model.unused.detach(), torch.tensor([2.0 - 0.1 * 0.5 * 2.0]))
    assert model.frozen.item() == 1.0


def test_trained_parameters_are_those_that_train() -> None:
    model = _TwoLayers()
    assert _strategy(model, clip_norm=None).trained_parameters().keys() == {"used", "unused"}
