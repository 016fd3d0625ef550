"""Walks through a model to the first module whose output differs between layouts, then to the first whose gradient does.

This is what people do by hand when the losses of two layouts differ: print intermediate tensors layer by layer, forward,
then backward from the output to the input.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flowshard.parallel.plan import part_sizes

OUTPUTS, GRADIENTS = "outputs", "output-gradients"
_CHANNELS = 8
SMALL = 1e-6
"""Gradients below this part of the largest one are not compared."""


class ModuleProbe:
    """Records, for one sample, every module's outputs in the order in which they were computed, and their gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._outputs: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._place: int | None = None
        self._batch = 1
        self._handles = [
            module.register_forward_hook(self._recorder(name)) for name, module in model.named_modules() if name
        ]
        self._handles.append(model.register_forward_hook(lambda *_: self.pause()))

    def record(self, place: int, batch: int) -> None:
        """Record the next forward pass: of a micro-batch of `batch` samples the one at `place`."""
        self._place, self._batch = place, batch

    def pause(self) -> None:
        """Record no more outputs: blocks that run again in the backward pass are known already."""
        self._place = None

    def _recorder(self, name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self._place is None or any(output is value for value in inputs):  # an identity has nothing of its own
                return
            call = self._calls[name] = self._calls.get(name, 0) + 1
            for number, tensor in enumerate(output if isinstance(output, tuple) else (output,)):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim:
                    self._keep(f"{name}/{call}/{number}", tensor, self._place)

        return hook

    def _keep(self, key: str, tensor: torch.Tensor, place: int) -> None:
        self._outputs[key] = self._sample(tensor, place)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._gradients.__setitem__(key, self._sample(gradient, place)))

    def _sample(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        own = tensor[place : place + 1] if self._batch > 1 and tensor.shape[0] == self._batch else tensor
        return own.detach().to("cpu", torch.float32, copy=True).contiguous()

    def write(self, folder: Path, rank: int, factor: float) -> None:
        """Write what was recorded, and end.

        Args:
            folder: of the trace.
            rank: of the process.
            factor: what turns gradients into those of the one sample's own loss.
        """
        for handle in self._handles:
            handle.remove()
        order = {key: f"{number:06d}/{key}" for number, key in enumerate(self._outputs)}
        save_file({order[key]: value for key, value in self._outputs.items()}, folder / f"{OUTPUTS}-{rank}.safetensors")
        gradients = {order[key]: value * factor for key, value in self._gradients.items()}
        save_file(gradients, folder / f"{GRADIENTS}-{rank}.safetensors")


def as_error(value: float) -> float:
    """NaN is as far off as can be; as itself it would lose every comparison."""
    return math.inf if math.isnan(value) else value


def first_module(reference: Path, other: Path, bound: float) -> str:
    """A sentence about where two traces part.

    Args:
        reference: trace with what `ModuleProbe` wrote.
        other: the same of another layout.
        bound: largest difference that counts as equal, norm over norm.
    """
    for name, error in _differences(_read(reference, OUTPUTS), _read(other, OUTPUTS), summed=False):
        if error > bound:
            return f"the first module whose output differs is {name} (error {error:.1e})"
    ours, theirs = _read(reference, GRADIENTS), _read(other, GRADIENTS)
    for name, error in _differences(dict(reversed(ours.items())), theirs, summed=True):
        if error > bound:
            return f"all outputs agree; going back, the first module whose output's gradient differs is {name} ({error:.1e})"
    return "no module's output, nor its gradient, differs by more than rounding; compare the gradients of the weights"


def _read(trace: Path, kind: str) -> dict[str, list[torch.Tensor]]:
    """By key, in order, the tensors of all processes that had the sample."""
    files = sorted(trace.glob(f"{kind}-*.safetensors"), key=lambda file: int(file.stem.rpartition("-")[2]))
    parts: dict[str, list[torch.Tensor]] = {}
    for file in files:
        for key, tensor in load_file(file).items():
            parts.setdefault(key, []).append(tensor)
    # Layouts may compute in another order, for example all projections before all norms.
    return {key.partition("/")[2]: tensors for key, tensors in sorted(parts.items())}


def _differences(
    reference: Mapping[str, Sequence[torch.Tensor]], other: Mapping[str, Sequence[torch.Tensor]], *, summed: bool
) -> Iterator[tuple[str, float]]:
    largest = max((float(parts[0].norm()) for parts in reference.values()), default=0.0)
    for key, parts in reference.items():
        expected, candidates = parts[0], _joined(parts[0], other.get(key, ()), summed=summed)
        scale = float(expected.norm())
        if not candidates or (summed and scale < SMALL * largest):
            continue
        name, call, number = key.split("/")
        suffix = "".join(
            f", {what} {value}" for what, value in (("call", call), ("output", number)) if value not in "01"
        )
        error = min(as_error(float((found - expected).norm())) for found in candidates)
        yield name + suffix, error / scale if scale else error


def _joined(expected: torch.Tensor, parts: Sequence[torch.Tensor], *, summed: bool) -> list[torch.Tensor]:
    """What the processes of a group have of a tensor, as one; empty if they do not have the same thing.

    Tokens may be divided, along the dimension that differs. What all have whole is the same on all; its gradient is a
    part of a sum on each before the tokens are split, and whole on each after they are gathered.
    """
    if all(part.shape == expected.shape for part in parts):
        return [*parts, torch.stack(list(parts)).sum(0)] if summed and parts else list(parts)
    for dim in reversed(range(parts[0].ndim)):
        alike = len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) == 1
        if alike and parts[0].shape[:dim] == expected.shape[:dim]:
            whole = torch.cat(list(parts), dim=dim)
            if whole.shape == expected.shape:
                return [whole, *_of_two_streams(expected, parts, dim)]
            if whole.numel() == expected.numel():  # a grid of tokens may have been flattened to be divided
                return [whole.reshape(expected.shape)]
    return []


def _of_two_streams(expected: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """The whole of tokens of text and image, of which each process has some of both, one after the other.

    Where the first stream ends is not known here; taken is the place that fits best, by the first few channels.
    """
    sizes = [part.shape[dim] for part in parts]

    def join(tensors: Sequence[torch.Tensor], first: int) -> torch.Tensor:
        ends = part_sizes(first, len(parts))
        heads = [tensor[:end] for tensor, end in zip(tensors, ends, strict=True)]
        return torch.cat([*heads, *(tensor[end:] for tensor, end in zip(tensors, ends, strict=True))])

    def divided(first: int) -> bool:
        both = zip(part_sizes(first, len(parts)), part_sizes(sum(sizes) - first, len(parts)), strict=True)
        return [one + other for one, other in both] == sizes

    rows = [part.movedim(dim, 0) for part in parts]
    few = [row.flatten(1)[:, :_CHANNELS] for row in rows]
    wanted = expected.movedim(dim, 0).flatten(1)[:, :_CHANNELS]
    places = [first for first in range(1, sum(sizes)) if divided(first)]
    if not places:
        return []
    best = min(places, key=lambda first: as_error(float((join(few, first) - wanted).norm())))
    return [join(rows, best).movedim(0, dim)]
