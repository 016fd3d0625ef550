"""One run, any layout, one loss curve, for every family: several processes against one, through `flowshard parity`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flowshard.parity.command import ParityOptions, parity
from tests.test_families import BASES, IMAGES
from tests.test_layouts_agree import METHODS, POLICIES, STRATEGIES, options

TinyModels = Callable[[str], Path]
PICTURE = ["data.frames=1", "data.height=64", "data.width=48"]
"""12 tokens of image."""
OWN = {"lora": (*METHODS["lora"], "lora.targets=null", "lora.rank=4"), "full": METHODS["full"]}
"""Options of each method, with the family's own layers for adapters."""


def _options(
    tiny_models: TinyModels, variant: str, layouts: list[str], *overrides: str, **changes: object
) -> ParityOptions:
    return options(tiny_models(variant), layouts, f"model.variant={variant}", *PICTURE, *overrides, **changes)


def _subset(tmp_path: Path, half: int) -> list[str]:
    """Each strategy, policy, way to share a sample, and accumulation once; prompts of different length in a batch.

    In two halves, each with a ZeRO-3 that divides every parameter.
    """
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    halves = [
        [
            "single,micro_batch=4,activations=selective",
            f"zero3:2,activations=offload,deepspeed={file}",
            "sp:2,micro_batch=2",
            "fsdp2:2,sequence=2,ring=2,activations=recompute",
        ],
        [
            "zero2:2,activations=recompute",
            "fsdp2:2,activations=selective,micro_batch=2",
            f"zero3:2,sequence=2,activations=selective,deepspeed={file}",
        ],
    ]
    return ["single", *halves[half]]


@pytest.mark.parametrize(
    ("variant", "method"),
    [
        pytest.param(variant, method, marks=[] if (index + (method == "full")) % 2 == 0 else pytest.mark.slow)
        for index, variant in enumerate(IMAGES)
        for method in METHODS
    ],
)
def test_every_strategy_equals_one_process(
    tiny_models: TinyModels, tmp_path: Path, variant: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    half = IMAGES.index(variant) // 2 % 2
    parity(_options(tiny_models, variant, _subset(tmp_path, half), *OWN[method], steps=2))
    assert "all layouts agree" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", IMAGES)
def test_every_strategy_and_policy_equals_one_process(tiny_models: TinyModels, variant: str, method: str) -> None:
    cases = [
        f"{strategy}:2,activations={policy},micro_batch={micro},sequence={sequence}"
        for strategy in STRATEGIES
        for policy in POLICIES
        for micro, sequence in ((1, 1), (2, 2))
    ]
    parity(_options(tiny_models, variant, ["single", *cases], *OWN[method], steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("variant", IMAGES)
def test_four_processes_equal_one(tiny_models: TinyModels, variant: str) -> None:
    layouts = [
        "single",
        "sp:4",
        "sp:4,ring=4",
        "zero2:4,sequence=2",
        "zero3:4,sequence=2,activations=offload",
        "fsdp2:4",
    ]
    parity(_options(tiny_models, variant, layouts, *METHODS["full"], steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", BASES)
def test_zero3_follows_zero2(tiny_models: TinyModels, variant: str, method: str) -> None:
    """In bfloat16 within 0.001 over twenty steps; in float32 within 1e-6."""
    layouts = ["zero2:2", "zero3:2,activations=offload"]
    own = OWN[method]
    parity(_options(tiny_models, variant, layouts, *own, "model.dtype=bfloat16", steps=20, tolerance=1e-3))
    parity(_options(tiny_models, variant, layouts, *own, steps=5, tolerance=1e-6))
