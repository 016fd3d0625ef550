"""The loss on held-out samples: what it is, that training does not notice it, and that no layout changes it."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from flowshard.config import Config
from flowshard.config_file import dump_config
from flowshard.data.held_out import hold_out
from flowshard.data.metadata import Metadata, Row
from flowshard.errors import UserError
from flowshard.objective.randomness import generator
from flowshard.parallel.processes import Processes
from flowshard.train.batches import MicroBatch
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer
from tests import runs
from tests.launch import torchrun

Make = Callable[..., Config]
SHIFT = 3.0


def _rows(names: Sequence[str]) -> Metadata:
    file = Path("/data/metadata.csv")
    rows = [
        Row(number, file, Path("/data") / name, (f"prompt {number}",), name=name)
        for number, name in enumerate(names, start=1)
    ]
    return Metadata(str(file), tuple(rows), (), range(len(rows)))


def _media(metadata: Metadata) -> set[str]:
    return {str(row.media) for row in metadata.rows}


def test_a_row_stays_on_its_side_whatever_the_other_rows_are() -> None:
    names = [f"{number % 20}/clip_{number}.mp4" for number in range(1000)]
    training, held_out = hold_out(_rows(names), 0.1, seed=0)
    assert _media(training).isdisjoint(_media(held_out))
    assert len(training.rows) + len(held_out.rows) == 1000
    assert list(training.epoch) == [*range(len(training.rows))]
    assert 70 <= len(held_out.rows) <= 130
    fewer, fewer_out = hold_out(_rows(names[::-1][:500]), 0.1, seed=0)
    assert _media(fewer_out) == _media(held_out) & {f"/data/{name}" for name in names[500:]}
    assert _media(fewer) < _media(training)
    assert _media(hold_out(_rows(names), 0.1, seed=1)[1]) != _media(held_out)


def test_all_rows_of_a_medium_are_on_one_side() -> None:
    training, held_out = hold_out(_rows([f"clip_{number // 5}.mp4" for number in range(100)]), 0.5, seed=0)
    assert _media(training).isdisjoint(_media(held_out))
    assert len(held_out.rows) % 5 == 0


@pytest.fixture
def make(tiny: Path, clips: Path, tmp_path: Path) -> Make:
    """Three clips for training, two held out; the first argument names the output."""
    lines = (clips / "metadata.csv").read_text().splitlines(keepends=True)
    for name, rows in (("train", lines[1:4]), ("held", lines[4:])):
        (tmp_path / f"{name}.csv").write_text("".join([lines[0], *rows]))

    def config(name: str, *overrides: str) -> Config:
        data = [f"data.metadata={tmp_path / 'train.csv'}", f"data.root={clips}", "train.global_batch=3"]
        fixed = [f"objective.shift={SHIFT}", "train.steps=2", "train.learning_rate=1e-3", "lora.rank=2"]
        return runs.config(tiny, clips, tmp_path / name, *data, *fixed, *overrides)

    return config


def _held(tmp_path: Path, every: int = 2) -> list[str]:
    return [f"validation.metadata={tmp_path / 'held.csv'}", f"validation.every={every}"]


def _lines(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(config.output, "validation.jsonl").read_text().splitlines()]


def _numbers(config: Config) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in runs.metrics(config)]


def test_before_the_first_step_it_is_the_stock_transformers_loss(make: Make, tmp_path: Path, tiny: Path) -> None:
    """Every sample at four noise levels: together the middles of eight equal parts of the distribution."""
    weighted = ["objective.weighting=bell", "train.steps=1"]
    config = make("run", *_held(tmp_path), *weighted)
    runs.run(config)
    found = _lines(config)
    assert [line["step"] for line in found] == [0, 1]

    held = make(
        "as-training",
        f"data.metadata={tmp_path / 'held.csv'}",
        "train.global_batch=2",
        "train.micro_batch=2",
        *weighted,
    )
    batch = next(runs.batches(check_inputs(held)).micro_batches(0))
    samples = {row.number: index for index, row in enumerate(batch.rows)}
    latents = batch.latents if samples[1] == 0 else batch.latents.flip(0)
    embeds = batch.conditions["prompt_embeds"] if samples[1] == 0 else batch.conditions["prompt_embeds"].flip(0)
    transformer = WanTransformer3DModel.from_pretrained(tiny / "transformer")
    order = torch.randperm(2, generator=generator(0, "held-out strata"))
    total, bins = 0.0, [[] for _ in range(4)]  # type: ignore[var-annotated]
    points = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    points = SHIFT * points / (1 + (SHIFT - 1) * points)
    mean = float((torch.exp(-2 * (points - 0.5) ** 2) - torch.exp(torch.tensor(-0.5))).mean())
    for row in range(2):
        for draw in range(4):
            quantile = (2 * draw + float(order[row]) + 0.5) / 8
            sigma = SHIFT * quantile / (1 + (SHIFT - 1) * quantile)
            noise = torch.randn(latents[row].shape, generator=generator(0, "held-out noise", row, draw))
            noisy = (1 - sigma) * latents[row] + sigma * noise
            with torch.no_grad():
                prediction = transformer(
                    hidden_states=noisy[None],
                    timestep=torch.tensor([sigma * 1000]),
                    encoder_hidden_states=embeds[row : row + 1],
                    return_dict=False,
                )[0][0]
            loss = float((prediction - (noise - latents[row])).square().mean())
            weight = float(torch.exp(torch.tensor(-2 * (sigma - 0.5) ** 2)) - torch.exp(torch.tensor(-0.5))) / mean
            total += loss * weight / 8
            bins[int(sigma * 4)].append(loss)
    assert found[0]["loss"] == pytest.approx(total, rel=1e-5)
    assert [len(losses) for losses in bins] == [1, 1, 2, 4]
    assert found[0]["loss_by_sigma"] == pytest.approx([sum(losses) / len(losses) for losses in bins], rel=1e-5)
    assert found[1]["loss"] != found[0]["loss"]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_layout_finds_it_and_training_does_not_notice(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: int
) -> None:
    """Eight forward passes on three processes, so one process repeats one that does not count; fewer cases on two.

    ZeRO-3 divides every parameter here, also the small ones that it would keep whole.
    """
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    zero3 = ["layout.strategy=zero3", f"layout.deepspeed={tmp_path / 'ds.json'}"]
    own = "train.global_batch=6"
    held = [*_held(tmp_path), own]
    single, without = make("single", *held), make("without", own)
    runs.run(single)
    assert "2 rows held out" in capsys.readouterr().out
    runs.run(without)
    assert _numbers(single) == _numbers(without)
    last = Path("checkpoints", "step-00000002", "lora.safetensors")
    assert Path(single.output, last).read_bytes() == Path(without.output, last).read_bytes()
    assert not Path(without.output, "validation.jsonl").exists()
    cases = {
        "zero3": zero3,
        "shared": [*zero3, f"layout.sequence={processes}", "memory.activations=recompute"],
    }
    if processes > 2:
        cases |= {name: [f"layout.strategy={name}"] for name in ("ddp", "zero1", "zero2", "fsdp2")}
    configs = {name: make(name, *held, *options) for name, options in cases.items()}
    configs["zero3 without"] = make("zero3-without", *zero3, own)
    jobs = []
    for name, config in configs.items():
        (tmp_path / f"{name}.job.yaml").write_text(dump_config(config, {}))
        jobs.append({"config": str(tmp_path / f"{name}.job.yaml"), "stop_after": None})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(processes, ["tests.workers.runs", str(tmp_path / "jobs.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    assert _numbers(configs["zero3"]) == _numbers(configs.pop("zero3 without"))
    expected = _lines(single)
    assert [line["step"] for line in expected] == [0, 2]
    for name, config in configs.items():
        found = _lines(config)
        assert [line["step"] for line in found] == [0, 2], name
        for line, other in zip(found, expected, strict=True):
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-6), name
            assert line["loss_by_sigma"] == pytest.approx(other["loss_by_sigma"], rel=1e-6), name


@dataclass
class _Rows(Observer):
    """Notes which rows are trained on."""

    seen: set[int] = field(default_factory=set)

    def batch(self, step: int, batch: MicroBatch) -> MicroBatch:
        self.seen.update(row.number for row in batch.rows)
        return batch


def test_held_out_rows_are_never_trained_on(tiny: Path, clips: Path, tmp_path: Path) -> None:
    options = ["validation.fraction=0.4", "validation.every=9", "train.steps=3", "data.cache=off", "data.repeat=2"]
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", *options))
    assert inputs.data.held_out is not None
    held = {row.number for row in inputs.data.held_out.rows}
    rows = _Rows()
    train(inputs, Processes(inputs.layout, "cpu", timeout_minutes=1), rows)
    assert rows.seen == {1, 2, 3, 4, 5} - held
    assert 0 < len(held) < 5
    assert inputs.samples == 2 * len(rows.seen)
    assert [line["step"] for line in _lines(inputs.config)] == [0, 3]


def test_a_resumed_run_writes_later_lines_anew(make: Make, tmp_path: Path) -> None:
    held = [*_held(tmp_path, every=1), "train.steps=4", "save.every=2"]
    config = make("run", *held)
    runs.run(config)
    before = _lines(config)
    file = Path(config.output, "validation.jsonl")
    kept = [line for line in file.read_text().splitlines(keepends=True) if '"step": 2,' not in line]
    file.write_text("".join(kept))  # as if the run had been stopped at that step, which saves first
    shutil.rmtree(Path(config.output, "checkpoints", "step-00000004"))
    runs.run(make("run", *held, "resume=auto"))
    assert sorted(_lines(config), key=lambda line: int(line["step"])) == before
    assert [line["step"] for line in _lines(config)] == [0, 1, 2, 3, 4]
    runs.run(make("run"))
    assert not file.exists()
    assert Path(config.output, "previous", "1", "validation.jsonl").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["validation.every=5"], "validation.every: 5, but there is nothing to validate with; set validation.fraction"),
        (
            ["validation.metadata=a.csv", "validation.fraction=0.1"],
            "give one of validation.metadata and validation.frac",
        ),
        (["validation.fraction=1"], "validation.fraction: 1 is not less than 1"),
        (["validation.metadata=no.csv"], "validation.metadata: the file no.csv does not exist"),
        (["validation.fraction=0.000001"], "validation.fraction: 1e-06 holds out none of the 5 rows .*; raise it"),
        (["validation.fraction=0.999999"], "validation.fraction: 0.999999 holds out all of the 5 rows .*; lower it"),
    ],
)
def test_bad_options_are_refused(tiny: Path, clips: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", *overrides))
