"""Sequence parallelism: operators, plans, layouts, training and sampling, each against one process."""

from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from flowshard.config_file import dump_config
from flowshard.errors import RunError, UserError
from flowshard.families import find_variant
from flowshard.parallel.layout import generation_layout, resolve_layout
from flowshard.parity.command import parity
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.launch import torchrun
from tests.test_families import BASES
from tests.test_layouts_agree import METHODS, POLICIES, STRATEGIES, options
from tests.workers.family_sequence import OWN_TIMESTEPS, PROMPTS, SHAPES

ODD = ["data.height=48", "data.width=48", "data.frames=5"]
"""18 tokens on two processes, and with `data.frames=1` 9; 15 come from 80x48."""


def _splits(world: int) -> list[str]:
    return [f"ulysses {number} x ring {world // number}" for number in range(1, world + 1) if world % number == 0]


@pytest.mark.parametrize("world", [2, 4, *(pytest.param(number, marks=pytest.mark.slow) for number in (3, 8))])
def test_distributed_attention_equals_torch(world: int) -> None:
    done = torchrun(world, ["tests.workers.sequence"])
    assert done.returncode == 0, done.stderr[-3000:]
    # The twelve heads of the test cannot be shared by eight.
    assert done.stdout.splitlines() == [line for line in _splits(world) if not line.startswith("ulysses 8")]


@pytest.mark.parametrize("world", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (3, 4, 8))])
def test_the_divided_transformer_equals_the_stock_one(tiny_models: Callable[[str], Path], world: int) -> None:
    """Of every family, by heads and round the ring, with prompts of different length."""
    models = [f"{variant}={tiny_models(variant) / 'transformer'}" for variant in BASES]
    done = torchrun(world, ["tests.workers.family_sequence", *models])
    assert done.returncode == 0, done.stderr[-3000:]
    expected = []
    for variant in BASES:
        family, row = find_variant(variant, option="VARIANT")
        splits = [split for split in _splits(world) if row.heads % int(split.split()[1]) == 0]
        own = [f"{shape}, {prompts}" for shape in SHAPES[family.name] for prompts in PROMPTS]
        own += [OWN_TIMESTEPS] if family.name == "wan" else []
        expected += [f"{variant}, {split}: {case}" for split in splits for case in own]
    assert done.stdout.splitlines() == expected


def test_private_kernels_take_what_they_took() -> None:
    """Those that `parallel/kernels.py` calls; the ones for CUDA are known to this build, but do not run."""
    expected = {
        "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal attn_mask scale",
        "_scaled_dot_product_flash_attention_for_cpu_backward": (
            "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"
        ),
        "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
        "_scaled_dot_product_flash_attention_backward": (
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
            "philox_offset scale"
        ),
        "_scaled_dot_product_efficient_attention": (
            "query key value attn_bias compute_log_sumexp dropout_p is_causal scale"
        ),
        "_scaled_dot_product_efficient_attention_backward": (
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
            "is_causal scale"
        ),
    }
    for name, arguments in expected.items():
        schema = getattr(torch.ops.aten, name).default._schema
        assert " ".join(argument.name for argument in schema.arguments) == arguments, name


@pytest.mark.parametrize(
    ("world", "overrides", "degrees"),
    [
        (8, ["layout.sequence=8"], (8, 4, 2)),  # twelve heads
        (6, ["layout.sequence=3"], (3, 3, 1)),
        (4, ["layout.sequence=4", "layout.ring=2"], (4, 2, 2)),
        (4, ["layout.sequence=4", "layout.ulysses=1"], (4, 1, 4)),
        (4, ["layout.sequence=2"], (2, 2, 1)),
        (5, ["layout.sequence=5"], (5, 1, 5)),
    ],
)
def test_degrees_follow_from_the_heads(
    tmp_path: Path, world: int, overrides: list[str], degrees: tuple[int, int, int]
) -> None:
    config = runs.config(Path("model"), Path("data"), tmp_path / "run", *overrides, "train.global_batch=4")
    layout = resolve_layout(config, {"WORLD_SIZE": str(world), "RANK": str(world - 1)})
    assert (layout.sequence, layout.ulysses, layout.ring) == degrees
    assert layout.data_parallel == world // degrees[0]
    assert list(layout.positions(4)) == list(range(4 - 4 // layout.data_parallel, 4)), (
        "the last group has the last part"
    )


@pytest.mark.parametrize(
    ("world", "overrides", "message"),
    [
        (4, ["layout.sequence=3"], "layout.sequence: 3 does not divide the 4 processes .* use 1 or 2 or 4"),
        (8, ["layout.sequence=8", "layout.ulysses=8"], "12 heads; use ulysses x ring = 1 x 8, 2 x 4, 4 x 2, or auto"),
        (4, ["layout.sequence=4", "layout.ulysses=2", "layout.ring=4"], "layout.ulysses=2 and layout.ring=4 cannot"),
        (1, ["layout.ring=2"], "layout.ulysses=auto and layout.ring=2 cannot share a sample among 1 processes"),
        (8, ["layout.sequence=4", "train.global_batch=3"], "3 samples cannot be divided among 2 groups of processes"),
    ],
)
def test_impossible_degrees_are_refused(tmp_path: Path, world: int, overrides: list[str], message: str) -> None:
    config = runs.config(Path("model"), Path("data"), tmp_path / "run", *overrides)
    with pytest.raises(UserError, match=message):
        resolve_layout(config, {"WORLD_SIZE": str(world)})


def test_fewer_tokens_than_processes_are_refused(tiny: Path, clips: Path, tmp_path: Path) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", "layout.sequence=16", "train.global_batch=1")
    with pytest.raises(UserError, match=r"16 processes cannot share a sample of 8 tokens \(32x32\); use at most 8"):
        check_inputs(config, {"WORLD_SIZE": "16"})


def test_ulysses_between_machines_is_noticed(tmp_path: Path) -> None:
    config = runs.config(Path("model"), Path("data"), tmp_path / "run", "layout.sequence=4", "train.global_batch=2")
    crossing = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    assert resolve_layout(config, crossing).ulysses_crosses_machines
    assert not resolve_layout(config, {**crossing, "LOCAL_WORLD_SIZE": "4"}).ulysses_crosses_machines


def test_generation_takes_all_processes() -> None:
    assert generation_layout(4, 12, {"WORLD_SIZE": "4", "RANK": "3"}).ulysses == 4
    with pytest.raises(
        UserError, match="--sequence: 1 processes share the work, but 2 were started; give --sequence 2"
    ):
        generation_layout(1, 12, {"WORLD_SIZE": "2"})


def test_every_strategy_divides_samples_on_two_processes(tiny: Path) -> None:
    """LoRA; each strategy and policy once, by heads and round the ring, accumulation 2 and 4."""
    layouts = [
        f"{strategy}:2,sequence=2,activations={policy},ring={1 + index % 2},micro_batch={1 + index // 2 % 2}"
        for index, (strategy, policy) in enumerate(
            zip((*STRATEGIES, "zero1"), ("selective", "recompute", "offload", "keep", "selective"), strict=True)
        )
    ]
    parity(options(tiny, ["single", "sp:2", *layouts], *METHODS["lora"], *ODD))


@pytest.mark.slow
def test_samples_are_divided_beside_data_parallelism(tiny: Path) -> None:
    """Full training of an odd number of tokens on four processes."""
    layouts = ["zero2:4,sequence=2", "zero3:4,sequence=2,activations=offload", "fsdp2:4,sequence=2", "sp:4,ring=2"]
    size = ["data.height=80", "data.width=48", "data.frames=1"]
    parity(options(tiny, ["single", *layouts], *METHODS["full"], *size))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("micro", [1, 2])
def test_sequence_grid(tiny: Path, method: str, data: int, micro: int) -> None:
    """All strategies and policies with two processes a sample, against one process with none."""
    cases = [
        f"{strategy}:{2 * data},sequence=2,activations={policy},micro_batch={micro}"
        for strategy in STRATEGIES
        for policy in POLICIES
    ]
    parity(options(tiny, ["single", *cases], *METHODS[method], *ODD, "train.global_batch=4"))


@pytest.mark.slow
def test_sequence_of_three_and_more(tiny: Path) -> None:
    """Degrees that do not divide the tokens, and more than the heads can share."""
    parity(options(tiny, ["single", "sp:3", "sp:5", "sp:8", "zero3:6,sequence=3"], *METHODS["full"], *ODD))


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("output:blocks.1.attn1.to_v@1", "the first module whose output differs is blocks.1.attn1.to_v "),
        pytest.param(
            "gradient:blocks.1.ffn@0",
            "all outputs agree; going back, the first module .* differs is blocks.1.ffn ",
            marks=pytest.mark.slow,
        ),
        pytest.param("noise@1", "processes disagree on noise", marks=pytest.mark.slow),
    ],
)
def test_parity_walks_to_the_module_that_differs(tiny: Path, fault: str, found: str) -> None:
    with pytest.raises(RunError, match=found):
        parity(options(tiny, ["single", "sp:2"], *METHODS["lora"], *ODD, steps=1, fault=fault))


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_losses_with_two_processes_a_sample_are_those_with_one(
    tiny: Path, clips: Path, tmp_path: Path, data: int
) -> None:
    """Started as a user does; with the communication measured."""
    losses = []
    for sequence in (2, 1):
        overrides = ["layout.strategy=zero3", f"layout.sequence={sequence}", "log.profile=true"]
        config = runs.config(tiny, clips, tmp_path / str(sequence), *overrides, *ODD)
        file = tmp_path / f"{sequence}.yaml"
        file.write_text(dump_config(config, {}), encoding="utf-8")
        done = torchrun(data * sequence, ["flowshard", "train", str(file)])
        assert done.returncode == 0, done.stderr[-3000:]
        lines = runs.metrics(config)
        losses.append([line["loss"] for line in lines])
        if sequence == 1:
            assert lines[0]["bytes_communication"] is None
            continue
        assert f"{2 * data} processes = {data} x 2 that share a sample (ulysses 2 x ring 1)" in done.stdout
        # Of 9 of the 18 tokens, with 192 channels, three tensors and one go out by half, forward and backward, in each of
        # 3 blocks; then 9 tokens of 64 channels are gathered. In as many micro-batches as a process has samples.
        sent = 4 * (3 * 8 * 9 * 192 // 2 + 9 * 64)
        assert [line["bytes_communication"] for line in lines] == [4 // data * sent] * 3
        assert all(0 < line["seconds_communication"] < line["seconds"] for line in lines)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", BASES)
def test_two_processes_make_the_same_as_one(tiny_models: Callable[[str], Path], tmp_path: Path, variant: str) -> None:
    """With classifier-free guidance where the model has it."""
    clip = variant == BASES[0]
    size = ["--frames", "9" if clip else "1", "--height", "48", "--width", "32", "--steps", "2", "--guidance", "3"]
    model = ["--model", str(tiny_models(variant)), "--dtype", "float32"]
    results = []
    for world in (1, 2):
        file = tmp_path / f"{world}.{'mp4' if clip else 'png'}"
        fixed = ["generate", *model, "--prompt", "a rabbit", *size]
        done = torchrun(world, ["flowshard", *fixed, "--sequence", str(world), "--output", str(file)])
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("wrote") == 1
        with av.open(str(file)) as container:
            results.append(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]))
    assert results[0].shape == (9 if clip else 1, 48, 32, 3)
    assert np.abs(results[0].astype(int) - results[1]).max() <= 1, "rounding to bytes apart"
