"""The numbers of a step against those worked out by hand, and what happens when one is no number."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowshard.cli import main
from flowshard.config import Config, TrainConfig
from flowshard.config_file import dump_config
from flowshard.data.order import Order
from flowshard.device import known_peak, peak_flops
from flowshard.memory.flops import count_flops
from flowshard.train.build import sample_loss_function
from flowshard.train.inputs import check_inputs
from flowshard.train.meters import tokens_of
from flowshard.train.updates import GIVE_UP_AFTER, UpdateGuard
from tests import runs
from tests.launch import torchrun

CPU = torch.device("cpu")
Make = Callable[..., Config]


@pytest.fixture
def make(tiny: Path, clips: Path, tmp_path: Path) -> Make:
    """A config; the first argument names its output."""

    def config(name: str, *overrides: str) -> Config:
        return runs.config(tiny, clips, tmp_path / name, *overrides)

    return config


def _launch(tmp_path: Path, configs: dict[str, Config]) -> str:
    """Run them on two processes; what was printed."""
    jobs = []
    for name, config in configs.items():
        (tmp_path / f"{name}.job.yaml").write_text(dump_config(config, {}))
        jobs.append({"config": str(tmp_path / f"{name}.job.yaml"), "stop_after": None})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(2, ["tests.workers.runs", str(tmp_path / "jobs.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class _Block(torch.nn.Module):
    """A frozen and a trained layer, self-attention of 3 heads, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(8, 12).requires_grad_(False)
        self.trained = torch.nn.Linear(8, 12, bias=False)
        self.conv = torch.nn.Conv1d(12, 5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (layer(x).unflatten(2, (3, 4)).transpose(1, 2) for layer in (self.frozen, self.trained))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, key)
        result: torch.Tensor = self.conv(mixed.transpose(1, 2).flatten(2).transpose(1, 2))
        return result


def test_flops_are_those_of_products_attention_and_convolution() -> None:
    """By hand, for 2 samples of 7 tokens: two operations for each multiplication."""
    with torch.device("meta"):
        model = _Block()
    found = count_flops(model, lambda model, inputs: model(inputs["x"]).sum(), {"x": torch.zeros(2, 7, 8)})
    linear = 2 * (2 * 7) * 8 * 12
    attention = 2 * 2 * (2 * 3) * 7 * 7 * 4  # queries times keys, weights times values
    convolution = 2 * (2 * 6) * (12 * 2) * 5
    forward = 2 * linear + attention + convolution
    backward = linear + 2 * attention + 2 * convolution  # the input needs no gradient, nor does the frozen weight
    assert found == forward + backward


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Ascend910B3", 313e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_are_known_by_the_devices_name(name: str, peak: float | None) -> None:
    assert known_peak(name) == (None if peak is None else pytest.approx(peak))


def test_the_peak_of_the_cpu_is_that_of_a_large_product() -> None:
    """At least that of a small one, and no more than any processor has."""
    peak = peak_flops(CPU, torch.float32)
    assert peak is not None
    assert 1e8 < peak < 1e14
    assert peak_flops(CPU, torch.float32) == peak, "measured once"


def test_numbers_of_a_step_are_the_same_in_every_layout_and_as_by_hand(make: Make, tmp_path: Path) -> None:
    """With a learning rate of zero all steps see the initial weights."""
    fixed = [
        "train.steps=2",
        "train.learning_rate=0",
        "objective.weighting=bell",
        "log.per_rank=true",
        "log.flops=true",
    ]
    single = make("single", *fixed)
    runs.run(single)
    configs = {
        "ddp": make("ddp", *fixed, "layout.strategy=ddp"),
        "shared": make("shared", *fixed, "layout.strategy=zero3", "layout.sequence=2", "memory.activations=recompute"),
        "plain": make("plain", *fixed, "layout.strategy=ddp", "log.per_rank=false", "log.flops=false"),
    }
    _launch(tmp_path, configs)

    inputs = check_inputs(single)
    batches, model = runs.batches(inputs), runs.fill_model(inputs).model
    losses_of = sample_loss_function(inputs.family, dtype=torch.float32, device=CPU)
    for step in range(2):
        losses, weighted, sigmas = [], [], []
        for batch in batches.micro_batches(step):
            with torch.no_grad():
                losses += losses_of(model, batch.tensors()).tolist()
            weighted.append(losses[-1] * float(batch.weight))
            sigmas.append(float(batch.sigma))
        bins = [
            [loss for loss, s in zip(losses, sigmas, strict=True) if low <= s < low + 0.25]
            for low in (0, 0.25, 0.5, 0.75)
        ]
        by_sigma = [pytest.approx(sum(each) / len(each), rel=1e-5) if each else None for each in bins]
        halves = [sum(weighted[:2]) / 2, sum(weighted[2:]) / 2]
        lines = {name: runs.metrics(config)[step] for name, config in {"single": single, **configs}.items()}
        for name, line in lines.items():
            assert line["loss"] == pytest.approx(sum(weighted) / 4, rel=1e-5), name
            assert line["loss_by_sigma"] == by_sigma, name
            assert line["tokens_per_second"] * line["seconds"] == pytest.approx(4 * 8), name
            assert line["memory_peak_rank"] in range(1 if name == "single" else 2)
        assert lines["single"]["losses_per_rank"] == [pytest.approx(sum(weighted) / 4, rel=1e-5)]
        assert lines["shared"]["losses_per_rank"] == [pytest.approx(sum(weighted) / 4, rel=1e-5)]
        assert lines["ddp"]["losses_per_rank"] == pytest.approx(halves, rel=1e-5)
        assert lines["plain"]["losses_per_rank"] is lines["plain"]["flops"] is lines["plain"]["mfu"] is None
        flops = lines["single"]["flops"]
        assert flops == lines["ddp"]["flops"] == lines["shared"]["flops"]
        assert flops == pytest.approx(_flops_by_hand(inputs.source.config, inputs.config.lora.rank), rel=0.02)
        assert lines["single"]["mfu"] * lines["single"]["seconds"] == pytest.approx(
            flops / (peak_flops(CPU, torch.float32) or 0)
        )
        assert 0 < lines["ddp"]["mfu"] < 1


def _flops_by_hand(config: Mapping[str, Any], rank: int) -> float:
    """Of 4 samples of 8 tokens and 512 of text: products of the blocks' layers and attention, with LoRA on all of them.

    A frozen layer costs as much in its backward pass as in its forward pass, an adapter twice that. Before the first
    adapter nothing needs a gradient: the first block's layers that see only the sample or the text are cheaper.
    """
    width = config["num_attention_heads"] * config["attention_head_dim"]
    blocks, hidden, text, own = config["num_layers"], config["ffn_dim"], 512, 8
    layers = [(own, width, width)] * 6 + [(text, width, width)] * 2 + [(own, width, hidden), (own, hidden, width)]
    frozen = sum(2 * tokens * a * b for tokens, a, b in layers)
    adapters = sum(2 * tokens * rank * (a + b) for tokens, a, b in layers)
    to_text = sum(
        2 * text * width * width for _ in range(2)
    )  # the text itself needs no gradient: nothing in front of it is trained
    attention = 4 * width * (own * own + own * text)
    embedding = 2 * text * (config["text_dim"] * width + width * width)
    return 4 * (blocks * (2 * frozen - to_text + 3 * adapters + 3 * attention) + embedding)


def test_reference_pictures_count_as_tokens(tiny_models: Callable[[str], Path], tmp_path: Path) -> None:
    from PIL import Image

    data = tmp_path / "data"
    data.mkdir()
    for name, size in (("target", 32), ("reference", 64)):
        Image.new("RGB", (size, size), (200, 10, 10)).save(data / f"{name}.png")
    (data / "metadata.csv").write_text("image,prompt,edit_image\ntarget.png,red,reference.png\n")
    config = runs.config(
        tiny_models("flux.2-dev"),
        data,
        tmp_path / "run",
        "model.variant=flux.2-dev",
        "data.frames=1",
        "train.global_batch=1",
    )
    inputs = check_inputs(config)
    batch = next(runs.batches(inputs).micro_batches(0))
    grids = [tensor for name, tensor in batch.conditions.items() if name.startswith("reference")]
    assert len(grids) == 1
    assert tokens_of(batch, inputs.family) == 2 * 2 + grids[0].shape[2] * grids[0].shape[3]
    assert tokens_of(batch, inputs.family) > 2 * 2


def _spoil(make: Make, tmp_path: Path, rows: int, factor: float) -> set[int]:
    """Multiply the encoded latents of so many samples; their places in the metadata."""
    config = make("all", "train.steps=1", "train.global_batch=5")
    runs.run(config)
    files = sorted((tmp_path / "cache" / "media").iterdir())[:rows]
    spoilt = [load_file(file)["latents"] for file in files]
    samples = list(runs.batches(check_inputs(config)).micro_batches(0))
    for file, latents in zip(files, spoilt, strict=True):
        save_file({"latents": latents * factor}, file)
    places = {
        batch.rows[0].number - 1 for batch in samples if any(torch.equal(batch.latents[0], one) for one in spoilt)
    }
    assert len(places) == rows
    return places


@pytest.mark.parametrize(
    "strategies",
    [[], pytest.param(["ddp", "zero2", "zero3", "fsdp2"], marks=pytest.mark.slow)],
    ids=["single", "divided"],
)
def test_updates_with_no_number_are_left_out_alike_in_every_layout(
    make: Make, tmp_path: Path, strategies: list[str]
) -> None:
    """One clip of five is spoilt; every update whose samples include it is left out, and only these."""
    spoilt, steps = _spoil(make, tmp_path, 1, float("inf")), 8
    affected = [step for step in range(steps) if spoilt & set(Order(0, [range(5)], global_batch=2).batch(step))]
    options = [f"train.steps={steps}", "train.global_batch=2", "train.on_nan=skip", "save.every=1", "save.keep=9"]
    single = make("single", *options)
    last = runs.run(single)
    configs = {name: make(name, *options, f"layout.strategy={name}") for name in strategies}
    if configs:
        assert f"{len(affected)} updates left out" in _launch(tmp_path, configs)
    for name, config in {"single": single, **configs}.items():
        lines = runs.metrics(config)
        assert [line["step"] - 1 for line in lines if line["loss"] is None] == affected, name
        assert [line["step"] - 1 for line in lines if line["grad_norm"] is None] == affected, name
        assert lines[-1]["skipped_updates"] == len(affected)
        state = runs.training_state(Path(config.output, "checkpoints", last.name))
        assert runs.distance(state, runs.training_state(last)) < 1e-5, name
        counts = {float(value) for key, value in state.items() if key.endswith("/step")}
        assert counts == {steps - len(affected)}, name
    # Going on after an update that was left out is as if nothing had happened.
    for later in range(affected[-1] + 2, steps + 1):
        shutil.rmtree(last.parent / f"step-{later:08d}")
    before = [line["loss"] for line in runs.metrics(single)]
    assert runs.distance(runs.training_state(runs.run(make("single", *options, "resume=auto"))), state) < 1e-5
    assert [line["loss"] for line in runs.metrics(single)] == before
    assert runs.metrics(single)[-1]["skipped_updates"] == len(affected)


def test_a_run_gives_up_after_ten_updates_without_a_number(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first update as well: that checkpoint has no optimizer state, and is resumed from."""
    _spoil(make, tmp_path, 5, float("nan"))
    config = make("run", "train.steps=20", "train.on_nan=skip", "save.every=5", "train.global_batch=1")
    (tmp_path / "job.yaml").write_text(dump_config(config, {}))
    assert main(["train", str(tmp_path / "job.yaml")]) == 1
    message = capsys.readouterr().err
    assert "step 10: the loss is nan" in message
    assert "the weights were not updated, as in the 9 steps before" in message
    assert len(runs.metrics(config)) == 9
    assert not (Path(config.output, "checkpoints", "step-00000009") / "optimizer").exists()
    assert main(["train", str(tmp_path / "job.yaml"), "resume=auto"]) == 1
    assert "step 10: the loss is nan" in capsys.readouterr().err, "they still count after a resumption"


def test_updates_with_a_spike_are_left_out_once_ten_norms_are_known(make: Make, tmp_path: Path) -> None:
    spoilt, steps = _spoil(make, tmp_path, 1, 100.0), 20
    affected = [step for step in range(10, steps) if spoilt & set(Order(0, [range(5)], global_batch=1).batch(step))]
    options = [f"train.steps={steps}", "train.global_batch=1", "train.modules=[proj_out]"]
    config = make("run", *options, "train.skip_spikes=3")
    last = runs.run(config)
    lines = runs.metrics(config)
    skipped = [line["skipped_updates"] for line in lines]
    assert [step for step in range(1, steps) if skipped[step] > skipped[step - 1]] == affected
    assert skipped[9] == 0
    assert all(line["grad_norm"] is not None for line in lines)
    counts = {float(value) for key, value in runs.training_state(last).items() if key.endswith("/step")}
    assert counts == {steps - len(affected)}


def test_the_guard_goes_by_the_last_hundred_norms_and_outlives_a_restart() -> None:
    guard = UpdateGuard(TrainConfig(skip_spikes=2.0))
    for norm in [1000.0] * 50 + [float(number) for number in range(100)]:
        guard.made(norm)
    assert guard.limit(0.5) == 2 * 49.5
    assert guard.limit(float("nan")) == -float("inf")
    assert all(guard.leave_out(0.5, 1e6) for _ in range(GIVE_UP_AFTER - 1))
    again = UpdateGuard(TrainConfig(skip_spikes=2.0))
    again.restore(json.loads(json.dumps(guard.state())))
    assert again.limit(0.5) == 2 * 49.5
    assert not again.leave_out(0.5, 1e6), "ten in a row"
    assert not again.leave_out(float("nan"), float("nan")), "train.on_nan is stop"
