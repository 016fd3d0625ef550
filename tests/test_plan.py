"""`flowshard plan`: sizes, shapes, layouts, advice and refusals; how exact its memory is, is in `test_plan_accuracy`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowshard.cli import main
from flowshard.config_file import load_config
from flowshard.device import known_peak
from flowshard.errors import UserError
from flowshard.families import all_families, find_variant
from flowshard.families.variant import Size
from flowshard.plan.candidates import candidates
from flowshard.plan.command import Plan, make_plan, transformer_settings
from flowshard.plan.hardware import HARDWARE, USABLE, parse_bytes
from flowshard.plan.inputs import PlanOptions, check_plan
from flowshard.train import plan as train_plan
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import run_training
from flowshard.weights.load import build_model
from tests import runs

PUBLISHED = {
    # In billions, from the model cards and the headers of the published files.
    "wan2.1-t2v-1.3b": 1.419,
    "wan2.1-t2v-14b": 14.288,
    "wan2.1-i2v-14b-720p": 16.396,
    "wan2.2-ti2v-5b": 5.000,
    "qwen-image": 20.430,
    "flux.1-dev": 11.901,
    "flux.2-dev": 32.2,
    "flux.2-klein-4b": 3.88,
    "flux.2-klein-9b": 9.08,
    "z-image-turbo": 6.155,
}
BASES = ("wan2.1-t2v-1.3b", "qwen-image", "flux.1-dev", "flux.2-dev", "z-image-turbo")


def config(folder: Path, *, variant: str = "wan2.1-t2v-1.3b", path: str = "nowhere", more: str = "") -> Path:
    file = folder / "config.yaml"
    file.write_text(
        f"""
output: {folder / "run"}
model: {{variant: {variant}, path: {path}}}
data: {{metadata: nothing.csv, height: 480, width: 832, frames: 81}}
train: {{steps: 1, global_batch: 8}}
{more}""",
        encoding="utf-8",
    )
    return file


def plan(file: Path, *overrides: str, devices: int = 8, nodes: int = 1, memory: str | None = None) -> Plan:
    return make_plan(check_plan(PlanOptions(file, overrides, devices, nodes, None, memory, None, None)))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("wan2.1-t2v-14b", "flux.2-klein-4b") else pytest.param(name, marks=pytest.mark.slow)
        for name in PUBLISHED
    ],
)
def test_the_table_of_sizes_gives_the_published_number_of_parameters(name: str) -> None:
    family, variant = find_variant(name, option="variant")
    model = build_model(family.transformer_class, transformer_settings(family, variant.transformer))
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(1e9 * PUBLISHED[name], rel=0.005)


def test_every_variant_has_the_heads_of_its_table() -> None:
    for family in all_families():
        for variant in family.variants.values():
            settings = transformer_settings(family, variant.transformer)
            assert settings[family.heads_setting] == variant.heads, variant.name
            assert family.foreign_mark(settings) is None, variant.name


@pytest.mark.parametrize(
    "name", ["wan2.1-t2v-1.3b", *(pytest.param(name, marks=pytest.mark.slow) for name in BASES[1:])]
)
def test_stand_ins_have_the_shapes_of_encoded_samples(
    name: str, tiny_models: Callable[[str], Path], clips: Path, tmp_path: Path
) -> None:
    frames = 5 if name.startswith("wan") else 1
    options = (f"model.variant={name}", f"data.frames={frames}", "data.height=64", "data.width=96")
    inputs = check_inputs(runs.config(tiny_models(name), clips, tmp_path / "run", *options))
    batch = runs.batches(inputs).largest_micro_batch()
    text = next(value for key, value in batch.conditions.items() if key.startswith("prompt_embeds"))
    family = inputs.family
    tokens = text.shape[-2]
    found = family.stand_in(
        transformer_settings(family, inputs.source.config), Size(64, 96, frames), text_tokens=tokens, pictures=0
    )
    latents = found.pop("latents")
    assert latents.shape == batch.latents.shape[1:]
    conditions = family.batch_conditions([found])
    assert {key: value.shape for key, value in conditions.items()} == {
        key: value.shape for key, value in batch.conditions.items() if key != "guidance"
    }


def test_a_plan_without_weights_or_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LoRA of the 1.3B model: by hand, frozen weights in bfloat16 and adapters in float32 with two moments."""
    file = config(tmp_path)
    assert main(["plan", str(file), "lora.targets=[q]", "--devices", "2", "--device", "a100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    trained = 30 * 2 * 2 * 32 * 1536  # blocks, attentions, factors
    assert found["trained"] == trained
    assert found["tokens"] == 21 * 30 * 52
    layouts = {
        (one["strategy"], one["sequence"], one["activations"]): one
        for one in found["layouts"]
        if not one["offload_optimizer"] and not one["offload_parameters"]
    }
    assert {strategy for strategy, _, _ in layouts} == {"ddp", "zero1", "zero2", "zero3", "fsdp2"}
    assert {sequence for _, sequence, _ in layouts} == {1, 2}
    ddp, fsdp2 = layouts["ddp", 1, "recompute"], layouts["fsdp2", 1, "recompute"]
    assert ddp["memory"]["gradients"] == 4 * trained and ddp["memory"]["optimizer"] == 8 * trained
    assert fsdp2["memory"]["optimizer"] == 4 * trained
    assert ddp["sent"]["gradients"] == 2 * 4 * trained // 2
    assert fsdp2["memory"]["parameters"] == pytest.approx(ddp["memory"]["parameters"] / 2, rel=1e-6)
    assert (
        layouts["ddp", 2, "keep"]["memory"]["activations"] < 0.55 * layouts["ddp", 1, "keep"]["memory"]["activations"]
    )
    assert layouts["ddp", 2, "keep"]["flops"] == pytest.approx(layouts["ddp", 1, "keep"]["flops"], rel=0.02)
    assert ddp["flops"] > 1.25 * layouts["ddp", 1, "keep"]["flops"]
    assert found["recommended"]["fits"] and found["recommended"]["memory"]["peak"] <= USABLE * found["device_memory"]
    for one in found["layouts"]:
        assert one["fits"] == (one["memory"]["peak"] <= found["usable_memory"])
    best = found["recommended"]["seconds"]["total"]
    assert best <= 1.03 * min(one["seconds"]["total"] for one in found["layouts"] if one["fits"])


def test_the_table_says_what_to_take_and_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config(tmp_path)
    command = ["plan", str(file), "model.layers=3", "train.method=full", "--devices", "1", "--device-memory"]
    assert main([*command, "8GiB"]) == 0
    text = capsys.readouterr().out
    assert "recommended: layout.strategy=" in text
    assert "as configured; does not fit" in text
    assert main([*command, "100MB"]) == 0
    assert "nothing fits" in capsys.readouterr().out


def test_layouts_in_place_of_chosen_policies_are_whole_configs(tmp_path: Path) -> None:
    """With `auto` none is as configured, and the options of each go with the file as it is, its budget left out."""
    file = config(tmp_path, more="memory: {activations: auto, budget: 20GB}")
    own = check_plan(PlanOptions(file, (), 2, 1, None, None, None, None)).config
    found = list(candidates(own, devices=2, nodes=1, tokens=8, blocks=3))
    assert {one.policies[0] for one in found} == {"keep", "selective", "recompute", "offload"}
    for one in found:
        assert not one.configured
        memory = load_config(file, one.options).memory
        assert memory.activations == one.policies[0] and memory.budget is None


def test_degrees_between_others_are_as_if_measured(tmp_path: Path) -> None:
    found = plan(config(tmp_path), "model.layers=3", "train.global_batch=12", devices=12)
    model = found.model
    degrees = (4, 1)
    assert degrees in model._ends
    for policy in ("keep", "recompute"):
        between = model.timeline(ulysses=4, ring=1, policies=[policy] * 3)
        ends = model._ends.pop(degrees)
        model._timelines.clear()
        exact = model.timeline(ulysses=4, ring=1, policies=[policy] * 3)
        model._ends[degrees] = ends
        assert between.kept == pytest.approx(exact.kept, rel=0.01)
        assert max(live + segment.peak for segment, live in between.walk()) == pytest.approx(
            max(live + segment.peak for segment, live in exact.walk()), rel=0.02
        )
        assert between.flops == pytest.approx(exact.flops, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "--devices: 0 is not at least 1"),
        (
            ["--devices", "8", "--nodes", "3"],
            "--nodes: 8 devices cannot be divided among 3 machines; use one of 1, 2, 4, 8",
        ),
        (["--devices", "8", "--device", "h1000"], "--device: unknown device 'h1000'; use one of"),
        (
            ["--devices", "8", "--device-memory", "80"],
            "--device-memory: '80' is no amount of memory; use for example 80GB",
        ),
        (["--devices", "8", "--text-tokens", "77"], "--text-tokens: wan pads every prompt to 512 tokens"),
        (["--devices", "8", "--references", "1"], "--references: 1, but wan takes no reference pictures"),
        (["data.frames=80", "--devices", "8"], "data.frames: 80 is not 4k+1"),
        (["--devices", "8", "data.frames=80", "--nodes", "1"], "data.frames: 80 is not 4k+1"),
        (
            ["model.variant=null", "--devices", "8"],
            "model.variant: nowhere is not here to be recognised; set model.variant",
        ),
        (
            ["data.frames=1", "data.height=16", "data.width=16", "train.global_batch=1", "--devices", "8"],
            "train.global_batch: 1 samples cannot be divided among 8 processes",
        ),
        (
            ["model.frozen_dtype=float8", "--devices", "8", "--device", "910b2"],
            "model.frozen_dtype: 'float8' is not for NPUs",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_fix(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["model.layers=1"]
    assert main(["plan", str(config(tmp_path)), *more, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_amounts_of_memory() -> None:
    assert parse_bytes("80GB", option="") == 80 * 10**9
    assert parse_bytes("64GiB", option="") == parse_bytes("64gib", option="") == 64 * 2**30
    assert parse_bytes("1.5T", option="") == 15 * 10**11
    with pytest.raises(UserError):
        parse_bytes("0GB", option="--device-memory")


def test_every_device_of_the_table_has_a_peak() -> None:
    assert all(known_peak(one.product) for one in HARDWARE.values())


def test_training_refuses_what_cannot_fit_before_weights_load(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.config(tiny, clips, tmp_path / "run", "train.method=full")
    inputs = check_inputs(run)
    runs.batches(inputs)  # fills the cache
    monkeypatch.setattr(train_plan, "memory_total_bytes", lambda _: 29 * 2**20)
    monkeypatch.setattr("flowshard.train.loop.fill", None)
    with pytest.raises(
        UserError, match=r"memory: this run needs 3\d\.\d MiB .* have 29\.0 MiB; use .*recompute"
    ) as error:
        run_training(inputs)
    assert "memory.activations=keep" not in str(error.value)
    assert not Path(run.output).exists()


def test_zeros_in_the_shapes_of_references() -> None:
    family, variant = find_variant("flux.2-dev", option="variant")
    settings = transformer_settings(family, variant.transformer)
    found = family.stand_in(settings, Size(512, 768, 1), text_tokens=512, pictures=2)
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "latents": (128, 32, 48),
        "reference.0": (128, 32, 48),
        "reference.1": (128, 32, 48),
        "prompt_embeds": (512, 15360),
    }
    assert family.reference_tokens(family.batch_conditions([found])) == 2 * 32 * 48
    assert not any(bool(torch.any(value)) for value in found.values())
