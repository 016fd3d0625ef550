"""The layout that config and launcher lead to, and the settings that engines get. Nothing here starts a process."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowshard.config import Config
from flowshard.errors import UserError
from flowshard.parallel.deepspeed_config import deepspeed_config
from flowshard.parallel.layout import resolve_layout
from flowshard.parity.cases import Case, parse_case
from tests import runs


def _config(tmp_path: Path, *overrides: str) -> Config:
    return runs.config(Path("model"), Path("data"), tmp_path / "run", *overrides)


def _ranks(count: int, rank: int = 0, /, **more: str) -> dict[str, str]:
    return {"WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": str(rank), **more}


ZERO3: dict[str, str] = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
FSDP2: dict[str, str] = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("asked", "environment", "strategy"),
    [
        ("auto", {}, "single"),
        ("auto", _ranks(2), "ddp"),
        ("ddp", {}, "single"),
        ("zero2", _ranks(2), "zero2"),
        ("zero3", {}, "zero3"),
        ("auto", _ranks(2, **ZERO3), "zero3"),
        ("zero3", _ranks(2, **ZERO3), "zero3"),
        ("auto", _ranks(2, **FSDP2), "fsdp2"),
    ],
)
def test_strategy_comes_from_the_config_or_the_launcher(
    tmp_path: Path, asked: str, environment: dict[str, str], strategy: str
) -> None:
    assert resolve_layout(_config(tmp_path, f"layout.strategy={asked}"), environment).strategy == strategy


@pytest.mark.parametrize(
    ("overrides", "environment", "message"),
    [
        (["layout.strategy=zero2"], _ranks(2, **ZERO3), "the config says 'zero2', the launcher's config 'zero3'"),
        (["layout.strategy=single"], _ranks(2), "'single' is one process, but 2 were started"),
        (["train.global_batch=3"], _ranks(2), "3 samples cannot be divided among 2 processes"),
        ([], _ranks(2, ACCELERATE_USE_FSDP="true", FSDP_VERSION="1"), "asks for FSDP 1; set fsdp_version: 2"),
        ([], _ranks(2, ACCELERATE_MIXED_PRECISION="bf16"), "says 'float32', the launcher's mixed_precision 'bfloat16'"),
        ([], _ranks(2, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4"), "the launcher's config says 4"),
        (
            [],
            _ranks(2, **FSDP2, FSDP_OFFLOAD_PARAMS="true"),
            "fsdp_offload_params: .* set layout.offload_parameters=true",
        ),
        ([], _ranks(2, **FSDP2, FSDP_ACTIVATION_CHECKPOINTING="true"), "set memory.activations=recompute"),
        ([], _ranks(2, **ZERO3, ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu"), "offload_optimizer_device"),
        ([], _ranks(2, **ZERO3, ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu"), "offload_param_device"),
        ([], _ranks(2, **ZERO3, ACCELERATE_GRADIENT_CLIPPING="0.5"), "says 0.5, train.clip_norm is 1.0"),
        (["layout.strategy=fsdp2", "layout.shard=2"], _ranks(1), "layout.shard: 2 does not divide 1 processes"),
        (["layout.strategy=ddp", "layout.shard=2"], _ranks(2), "layout.shard: belongs to fsdp2"),
        (["layout.strategy=ddp", "layout.offload_optimizer=true"], _ranks(2), "needs the strategy zero1 or zero2 or"),
        (
            ["layout.strategy=zero3", "layout.gather_dtype=bfloat16"],
            _ranks(2),
            "gather_dtype=bfloat16: needs the strat",
        ),
        (
            ["layout.strategy=fsdp2", "layout.gather_dtype=bfloat16"],
            _ranks(2),
            "needs model.dtype=bfloat16, not 'float",
        ),
        (["layout.strategy=zero2", "train.optimizer=torch.optim.Adafactor"], _ranks(2), "element by element"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(
    tmp_path: Path, overrides: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve_layout(_config(tmp_path, *overrides), environment)


def test_parameters_in_host_memory_mean_nothing_under_zero2(tmp_path: Path) -> None:
    """DeepSpeed divides them under stage 3 alone; launcher files of others ask for it under stage 2."""
    asked = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    environment = _ranks(2, **asked, ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu")
    assert resolve_layout(_config(tmp_path), environment).strategy == "zero2"


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_processes_take_slices_that_make_up_the_global_batch(tmp_path: Path, world: int) -> None:
    config = _config(tmp_path, "train.global_batch=6")
    layouts = [resolve_layout(config, _ranks(world, rank)) for rank in range(world)]
    assert [position for layout in layouts for position in layout.positions(6)] == list(range(6))
    assert {layout.accumulation for layout in layouts} == {6 // world}


def _engine(tmp_path: Path, users: dict[str, Any] | None, *overrides: str) -> dict[str, Any]:
    file = tmp_path / "users.json"
    if users is not None:
        file.write_text(json.dumps(users))
        overrides = (*overrides, f"layout.deepspeed={file}")
    config = _config(tmp_path, "layout.strategy=zero2", *overrides)
    return deepspeed_config(config, resolve_layout(config, _ranks(2)))


def test_the_engine_gets_the_runs_numbers(tmp_path: Path) -> None:
    engine = _engine(tmp_path, None, "train.clip_norm=null", "layout.offload_optimizer=true")
    assert engine["train_batch_size"] == 4
    assert engine["gradient_accumulation_steps"] == 2
    assert engine["gradient_clipping"] == 0.0, "the engine's own default would clip at 1"
    assert engine["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert "bf16" not in engine


def test_a_users_file_adds_and_auto_follows_the_run(tmp_path: Path) -> None:
    users = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "activation_checkpointing": {"partition_activations": False},
    }
    engine = _engine(tmp_path, users)
    assert engine["train_batch_size"] == 4
    assert engine["gradient_clipping"] == 1.0
    assert engine["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert "bf16" not in engine


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3, the run has 2"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, the run has 1.0"),
        ({"bf16": {"enabled": True}}, "bf16 casts other things"),
        ({"optimizer": {"type": "Adam"}}, "optimizer has two owners"),
        ({"scheduler": {}}, "scheduler has two owners"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "set memory.activations=offload"),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 2}},
            "zero_hpz_partition_size is 2, which rounds parameters or",
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights is True, which rounds"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "nvme, which cannot be loaded into; use cpu"),
    ],
)
def test_a_users_file_that_contradicts_the_run_is_refused(tmp_path: Path, users: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _engine(tmp_path, users)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("single", Case("single", 1, ("layout.strategy=single",))),
        ("zero3:4", Case("zero3:4", 4, ("layout.strategy=zero3",))),
        (
            "ddp:2,activations={recompute: 1, offload: 2},micro_batch=2",
            Case(
                "ddp:2,activations={recompute: 1, offload: 2},micro_batch=2",
                2,
                ("layout.strategy=ddp", "memory.activations={recompute: 1, offload: 2}", "train.micro_batch=2"),
            ),
        ),
        ("sp:2", Case("sp:2", 2, ("layout.strategy=ddp", "layout.sequence=2"))),
    ],
)
def test_a_layout_is_read_as_written(label: str, expected: Case) -> None:
    assert parse_case(label) == expected


@pytest.mark.parametrize("label", ["ddp:x", "ddp:0", "ddp:2,foo=1", "ddp:2,activations"])
def test_a_layout_of_another_form_is_refused(label: str) -> None:
    with pytest.raises(UserError, match=f"--layout {label}: "):
        parse_case(label)
