"""What `flowshard parity` makes of two traces. The traces are written by hand; runs are in test_layouts_agree.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flowshard.parity.compare import Bounds, compare, gradient_warnings
from flowshard.parity.trace import GRADIENTS, WEIGHTS
from flowshard.parity.walk import GRADIENTS as OUTPUT_GRADIENTS
from flowshard.parity.walk import OUTPUTS, first_module

BOUNDS = Bounds(1e-6, 1e-5)


def _trace(folder: Path, gradients: dict[str, list[float]], **changes: Any) -> Path:
    """One step of two samples on two processes."""
    folder.mkdir()
    step = {"loss": 2.0, "grad_norm": 1.0, "missing": [], **changes}
    for rank in range(2):
        sample = {"row": rank + 1, "latents": "a", "noise": step.pop(f"noise{rank}", "b"), "sigma": 0.5}
        (folder / f"rank-{rank}.json").write_text(json.dumps([{**step, "samples": {rank: sample}}]))
    save_file({name: torch.tensor(values) for name, values in gradients.items()}, folder / GRADIENTS)
    save_file({"q": torch.tensor(step.pop("weights", [3.0, 4.0]))}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("gradients", "changes", "excessive"),
    [
        ({"q": [1.0, 0.0], "b": [0.0, 1e-9]}, {}, []),
        ({"q": [1.0, 1e-4], "b": [0.0, 1e-9]}, {}, ["gradient at step 1, q"]),
        ({"q": [1.0, 2.3e-7], "b": [0.0, 1e-9]}, {}, []),  # twice the eps of float32 is 2.4e-7
        ({"q": [1.0, 0.0], "b": [0.0, 9e-6]}, {}, []),  # a tensor of next to no gradient counts by the whole norm
        ({"q": [1.0, 0.0]}, {}, ["gradient at step 1, b is missing"]),
        ({"q": [1.0, 0.0], "b": [0.0, float("nan")]}, {}, ["gradient at step 1, b"]),
        ({"q": [1.0, 0.0], "b": [0.0, 1e-9]}, {"noise1": "c"}, ["noise at step 1, position 1"]),
        ({"q": [1.0, 0.0], "b": [0.0, 1e-9]}, {"loss": 2.00001}, ["loss at step 1"]),
        ({"q": [1.0, 0.0], "b": [0.0, 1e-9]}, {"grad_norm": 1.1}, ["gradient norm at step 1"]),
        ({"q": [1.0, 0.0], "b": [0.0, 1e-9]}, {"weights": [3.0, 4.1]}, ["weights at step 1"]),
    ],
)
def test_differences_are_named(
    tmp_path: Path, gradients: dict[str, list[float]], changes: dict[str, Any], excessive: list[str]
) -> None:
    reference = _trace(tmp_path / "one", {"q": [1.0, 0.0], "b": [0.0, 1e-9]})
    differences = compare(reference, _trace(tmp_path / "two", gradients, **changes), BOUNDS)
    assert [f"{one.quantity} at {one.place}" for one in differences if one.excessive] == excessive


def test_gradients_that_are_suspect_everywhere_are_named(tmp_path: Path) -> None:
    gradients = {"q": [1.0, 0.0], "k": [0.0, 0.0], "v": [0.0, 0.0], "o": [float("inf"), 1.0]}
    trace = _trace(tmp_path / "one", gradients, missing=["v"])
    assert gradient_warnings(trace) == [
        "step 1: the gradient is missing for v",
        "step 1: the gradient is zero for k",
        "step 1: the gradient is NaN or infinite for o",
    ]


@pytest.mark.parametrize(
    ("output", "found"), [([1.0, float("nan")], "differs is up"), ([1.0, 2.0], "no module's output")]
)
def test_an_output_that_is_no_number_differs(tmp_path: Path, output: list[float], found: str) -> None:
    for name, values in (("one", [1.0, 2.0]), ("two", output)):
        (tmp_path / name).mkdir()
        for kind, tensors in ((OUTPUTS, {"000000/up/1/0": torch.tensor(values)}), (OUTPUT_GRADIENTS, {})):
            save_file(tensors, tmp_path / name / f"{kind}-0.safetensors")
    assert found in first_module(tmp_path / "one", tmp_path / "two", 1e-5)


@pytest.mark.parametrize(("shift", "found"), [(0.0, "no module's output"), (1.0, "differs is up")])
def test_tokens_of_text_and_image_are_put_in_order(tmp_path: Path, shift: float, found: str) -> None:
    """Five tokens of text and eight of image on three processes; each has its text before its image."""
    whole = torch.randn(1, 13, 4)
    text, image = whole[:, :5].tensor_split(3, dim=1), whole[:, 5:].tensor_split(3, dim=1)
    parts = [torch.cat(pair, dim=1) for pair in zip(text, image, strict=True)]
    parts[2][0, 1] += shift
    for name, tensors in (("one", [whole]), ("two", parts)):
        (tmp_path / name).mkdir()
        for rank, tensor in enumerate(tensors):
            save_file({"000000/up/1/0": tensor}, tmp_path / name / f"{OUTPUTS}-{rank}.safetensors")
    assert found in first_module(tmp_path / "one", tmp_path / "two", 1e-5)
