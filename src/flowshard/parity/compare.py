"""Compares traces with the first one and names the first thing that differs."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flowshard.parity.trace import GRADIENTS, WEIGHTS
from flowshard.parity.walk import as_error
from flowshard.weights.report import some

SMALL_GRADIENT = 1e-6
"""A gradient tensor below this part of the global norm is compared with the global norm instead of with its own."""

DRAWS = {"samples": "row", "latents": "latents", "noise": "noise", "sigma": "sigma"}
"""What goes into the model: quantity to its name in a trace."""


@dataclass(frozen=True)
class Bounds:
    """Largest differences that count as equal. Tensors: norm of the difference over the norm."""

    loss: float
    tensors: float | None
    """None: not compared."""


@dataclass(frozen=True)
class Difference:
    """One quantity of one case against the reference."""

    quantity: str
    """`samples`, `latents`, `noise`, `sigma`, `loss`, `gradient`, `gradient norm` or `weights`."""
    place: str
    """Step, position, tensor."""
    error: float
    bound: float

    @property
    def excessive(self) -> bool:
        """Whether it is more than rounding."""
        return self.error > self.bound


def read_steps(trace: Path) -> list[dict[str, Any]]:
    """The steps of a trace, with the samples of all its processes.

    Raises:
        ValueError: two processes disagree about a sample that both had.
    """
    steps: list[dict[str, Any]] = []
    for file in sorted(trace.glob("rank-*.json")):
        for number, step in enumerate(json.loads(file.read_text(encoding="utf-8"))):
            if number == len(steps):
                steps.append({**step, "samples": {}})
            for position, sample in step["samples"].items():
                earlier = steps[number]["samples"].setdefault(int(position), sample)
                if earlier != sample:
                    what = next(key for key in sample if sample[key] != earlier[key])
                    raise ValueError(f"step {number + 1}, position {position}: processes disagree on {what}")
    return steps


def compare(reference: Path, other: Path, bounds: Bounds) -> list[Difference]:
    """All quantities in the order in which a run produces them; each with its largest difference.

    Args:
        reference: trace of the first layout.
        other: trace of another.
        bounds: what counts as equal.
    """
    differences: list[Difference] = []
    ours, theirs = read_steps(reference), read_steps(other)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        place = f"step {number + 1}"
        for quantity, key in DRAWS.items():
            differences.append(_draws(a["samples"], b["samples"], key, quantity, place))
        differences.append(Difference("loss", place, _relative(b["loss"], a["loss"]), bounds.loss))
        if bounds.tensors is None:
            continue
        if number == 0:
            gradients = load_file(reference / GRADIENTS), load_file(other / GRADIENTS)
            differences.append(_gradients(*gradients, place, bounds.tensors))
        norm_error = _relative(b["grad_norm"], a["grad_norm"])
        differences.append(Difference("gradient norm", place, norm_error, bounds.tensors))
    if bounds.tensors is not None:
        a, b = load_file(reference / WEIGHTS), load_file(other / WEIGHTS)
        differences.append(Difference("weights", f"step {len(ours)}", _distance(b, a), bounds.tensors))
    return differences


def _draws(a: Mapping[int, Any], b: Mapping[int, Any], key: str, quantity: str, place: str) -> Difference:
    if a.keys() != b.keys():
        return Difference(quantity, f"{place}, {len(b)} samples instead of {len(a)}", math.inf, 0.0)
    wrong = [position for position in sorted(a) if a[position][key] != b[position][key]]
    where = f"{place}, position {wrong[0]}" if wrong else place
    return Difference(quantity, where, math.inf if wrong else 0.0, 0.0)


def _gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], place: str, bound: float) -> Difference:
    """The tensor with the largest error, and its error."""
    if a.keys() != b.keys():
        missing = sorted(a.keys() ^ b.keys())
        return Difference("gradient", f"{place}, {missing[0]} is missing", math.inf, bound)
    whole = _norm(a)
    worst, where = 0.0, ""
    for name, expected in a.items():
        own = float(expected.double().norm())
        scale = own if own >= SMALL_GRADIENT * whole else whole
        difference = float((b[name].double() - expected.double()).norm())
        error = as_error(difference / scale if scale else difference)
        if error > worst:
            worst, where = error, name
    return Difference("gradient", f"{place}, {where}" if where else place, worst, bound)


def gradient_warnings(trace: Path) -> list[str]:
    """First gradients that are missing, zero, NaN or infinite, whether or not the layouts agree on them."""
    gradients = load_file(trace / GRADIENTS)
    missing = read_steps(trace)[0]["missing"]
    zero = [name for name, value in gradients.items() if name not in missing and not value.any()]
    broken = [name for name, value in gradients.items() if not bool(torch.isfinite(value).all())]
    kinds = (("missing", missing), ("zero", zero), ("NaN or infinite", broken))
    return [f"step 1: the gradient is {kind} for {some(names, 5)}" for kind, names in kinds if names]


def _relative(found: float, expected: float) -> float:
    return as_error(abs(found - expected) / abs(expected) if expected else abs(found))


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in tensors.values()))


def _distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if found.keys() != expected.keys():
        return math.inf
    difference = {name: found[name].double() - expected[name].double() for name in expected}
    return as_error(_norm(difference) / (_norm(expected) or 1.0))


def worst_by_quantity(differences: list[Difference]) -> dict[str, Difference]:
    """Of each quantity the largest difference relative to its bound."""
    worst: dict[str, Difference] = {}
    for one in differences:
        held = worst.get(one.quantity)
        if held is None or one.error > held.error:
            worst[one.quantity] = one
    return worst


def to_json(differences: list[Difference]) -> list[dict[str, Any]]:
    """For `--json`; infinite errors become null."""
    rows = [{**asdict(one), "excessive": one.excessive} for one in differences]
    return [{**row, "error": row["error"] if math.isfinite(row["error"]) else None} for row in rows]
