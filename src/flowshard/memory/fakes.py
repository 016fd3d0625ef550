"""Running a model on fake tensors, which have shapes and types and no values: nothing is computed."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

Tensors = dict[str, torch.Tensor]
Forward = Callable[[torch.nn.Module, Tensors], torch.Tensor]


@contextmanager
def forgetting(model: torch.nn.Module, remembering: Sequence[str]) -> Iterator[None]:
    """While active, nothing that the model is given stays with it.

    Args:
        model: any.
        remembering: attributes of the model that keep tensors from one call to the next, which must not keep those of
            a call that computes nothing; copies take their place meanwhile.
    """
    kept = {name: getattr(model, name) for name in remembering}
    try:
        for name, value in kept.items():
            setattr(model, name, copy.copy(value))
        yield
    finally:
        for name, value in kept.items():
            setattr(model, name, value)


def fake_call(
    model: torch.nn.Module, forward: Forward, inputs: Tensors, device: torch.device
) -> tuple[FakeTensorMode, Callable[[], torch.Tensor], Tensors]:
    """A call of `forward` with fake parameters and inputs.

    Args:
        model: on the meta device, with the types that its parameters will have.
        forward: maps model and inputs to the loss.
        inputs: of one micro-batch.
        device: where the fake parameters are.

    Returns:
        The mode in which the call is to be made, the call, and the fake parameters and buffers.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # some models hold tables that are no buffers
    with mode:
        fakes: Tensors = {
            f"model.{name}": torch.empty(tensor.shape, dtype=tensor.dtype, device=device).requires_grad_(
                tensor.requires_grad
            )
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
    fake_inputs = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}

    def call() -> torch.Tensor:
        # torch would note of compiled functions that they are not to be compiled, as modes that count are active here.
        with torch.compiler.set_stance("force_eager"):
            loss: torch.Tensor = torch.func.functional_call(_Call(model, forward), fakes, (fake_inputs,))
        return loss

    return mode, call, fakes


class _Call(torch.nn.Module):
    """`forward(model, inputs)` as a module, which is what `functional_call` puts other parameters into."""

    def __init__(self, model: torch.nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, inputs: Tensors) -> torch.Tensor:
        return self._forward(self.model, inputs)
