"""Deliberate faults, with which a user can see that parity finds them. Needs no torch before one is installed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError

if TYPE_CHECKING:
    import torch

    from flowshard.train.batches import MicroBatch

FORMS = "noise@RANK, output:MODULE@RANK or gradient:MODULE@RANK"
_SIZE = 1e-2


@dataclass(frozen=True)
class Fault:
    """A disturbance of one process."""

    kind: str
    """`noise`, `output` or `gradient`."""
    module: str | None
    """Whose output, or whose output's gradient, is disturbed."""
    rank: int

    def disturb(self, batch: MicroBatch) -> MicroBatch:
        """The batch, with other noise if that is the fault."""
        return replace(batch, noise=batch.noise + _SIZE) if self.kind == "noise" else batch

    def install(self, model: torch.nn.Module) -> None:
        """Disturb a module, if that is the fault.

        Raises:
            UserError: the model has no such module.
        """
        if self.module is None:
            return
        try:
            module = model.get_submodule(self.module)
        except AttributeError:
            raise UserError(f"--fault: the model has no module {self.module!r}") from None

        def disturbed(tensor: torch.Tensor) -> torch.Tensor:
            if self.kind == "output":
                return tensor * (1 + _SIZE)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient * (1 + _SIZE))
            return tensor

        def hook(_: torch.nn.Module, __: object, output: Any) -> Any:
            if isinstance(output, tuple):
                return disturbed(output[0]), *output[1:]
            return disturbed(output)

        module.register_forward_hook(hook)


def parse_fault(text: str) -> Fault:
    """Read `--fault`.

    Raises:
        UserError: it is of none of the forms.
    """
    found = re.fullmatch(r"(noise|output:(?P<output>[\w.]+)|gradient:(?P<gradient>[\w.]+))@(?P<rank>\d+)", text)
    if found is None:
        raise UserError(f"--fault: {text!r} is not {FORMS}")
    return Fault(text.partition("@")[0].partition(":")[0], found["output"] or found["gradient"], int(found["rank"]))
