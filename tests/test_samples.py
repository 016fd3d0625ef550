"""Samples during training: what they show, and that the run does not notice them."""

import gc
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from flowshard import generate as generate_module
from flowshard.cli import main
from flowshard.config import Config
from flowshard.config_file import dump_config, load_config
from flowshard.data.media import write_video
from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.families.pixels import as_bytes
from flowshard.families.wan import Wan
from flowshard.parallel.processes import Processes
from flowshard.train import samples as samples_module
from flowshard.train.inputs import check_inputs
from flowshard.train.sample_files import find_samples, spread, write_grid
from flowshard.train.samples import Samples
from flowshard.train.state import RunFolder
from tests import runs
from tests.launch import torchrun
from tests.pictures import pictures as reference_pictures
from tests.pictures import run_config, shrink_references

PROMPTS = "validation.prompts=[a fox, {prompt: a tree, negative_prompt: leaves, seed: 3}]"
SAMPLES = (PROMPTS, "validation.every=1", "validation.steps=2")
PICTURES = ("data.frames=1", "train.learning_rate=1e-2", "train.steps=2", "train.modules=[proj_out]")
LAYOUTS = {
    "zero3": ("layout.strategy=zero3", "memory.activations=recompute"),
    "fsdp2": ("layout.strategy=fsdp2", "memory.activations=offload"),
    "sp": ("layout.strategy=ddp", "layout.sequence=2"),
    "zero2": ("layout.strategy=zero2",),
    "zero1": ("layout.strategy=zero1",),
}
WITH_AND_WITHOUT = ("zero3", "fsdp2", "sp")


def _frames(file: Path) -> np.ndarray:
    if file.suffix == ".png":
        return np.asarray(Image.open(file))[None].astype(int)
    with av.open(str(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(int)


def _samples(config: Config) -> dict[tuple[int, int], np.ndarray]:
    """Step and index of the prompt to frames."""
    found = find_samples(Path(config.output) / "samples")
    return {(step, index): _frames(file) for step, files in found.items() for index, file in files.items()}


def _same_training(one: Config, other: Config) -> None:
    losses = [[line["loss"] for line in runs.metrics(config)] for config in (one, other)]
    assert losses[0] == losses[1]
    saved = [runs.weights(next(Path(config.output, "checkpoints").iterdir())) for config in (one, other)]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())


@pytest.mark.parametrize(
    "layouts", [("zero3", "sp"), pytest.param(("fsdp2", "zero2", "zero1"), marks=pytest.mark.slow)]
)
def test_training_does_not_notice_and_every_layout_shows_the_same(
    tiny: Path, clips: Path, tmp_path: Path, layouts: tuple[str, ...]
) -> None:
    """To the bit the same losses and weights with samples and without; every process takes part in as many collectives."""

    def config(name: str, *more: str) -> Config:
        return runs.config(tiny, clips, tmp_path / name, *PICTURES, *more)

    single, plain = config("single", *SAMPLES), config("plain")
    for one in (single, plain):
        runs.run(one)
    _same_training(single, plain)
    assert not (Path(plain.output) / "samples").exists()
    expected = _samples(single)
    assert set(expected) == {(step, index) for step in (0, 1, 2) for index in (0, 1)}
    assert all(np.abs(expected[2, index] - expected[0, index]).mean() > 2 for index in (0, 1))

    with_samples = {name: config(f"{name}-samples", *LAYOUTS[name], *SAMPLES) for name in layouts}
    without = {name: config(name, *LAYOUTS[name]) for name in layouts if name in WITH_AND_WITHOUT}
    job = []
    for one in (*with_samples.values(), *without.values()):
        file = Path(one.output).with_suffix(".yaml")
        file.write_text(dump_config(one, {}), encoding="utf-8")
        job.append({"config": str(file), "stop_after": None})
    (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
    done = torchrun(2, ["tests.workers.runs", str(tmp_path / "job.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    for name, one in without.items():
        _same_training(with_samples[name], one)
    for name, one in with_samples.items():
        found = _samples(one)
        assert found.keys() == expected.keys(), name
        for key, picture in expected.items():
            assert np.abs(found[key] - picture).mean() < 2, (name, key)


def _generate(config: Config, file: Path, *more: str) -> np.ndarray:
    """What `flowshard generate` makes of the base model with the texts of the run's second prompt."""
    inputs = check_inputs(config)
    assert inputs.sampling is not None
    one, sampling = inputs.sampling.samples[-1], inputs.sampling.sampling
    arguments = [
        "generate",
        "--model",
        str(config.model.path),
        "--variant",
        inputs.variant.name,
        "--prompt",
        one.prompt,
    ]
    for option in ("height", "width", "frames", "steps", "guidance"):
        arguments += [f"--{option}", str(getattr(sampling, option))]
    for column, files in one.inputs.items():
        arguments += [f"--input={column}={given}" for given in files]
    if inputs.family.takes_negative_prompt:
        arguments += ["--negative-prompt", one.negative_prompt]
    arguments += ["--seed", str(one.seed), "--device", "cpu", "--dtype", config.model.dtype, *more]
    assert main([*arguments, "--output", str(file)]) == 0
    return _frames(file)


@pytest.mark.parametrize(
    "variant",
    [
        "wan2.1-i2v-14b-480p",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "wan2.1-t2v-1.3b",
                "wan2.2-ti2v-5b",
                "wan2.1-vace-1.3b",
                "qwen-image",
                "qwen-image-edit",
                "qwen-image-edit-2509",
                "flux.1-dev",
                "flux.1-kontext-dev",
                "flux.2-dev",
                "flux.2-klein-base-4b",
                "z-image-turbo",
                "z-image",
            )
        ),
    ],
)
def test_the_first_samples_are_those_of_generate(
    tiny_models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    shrink_references(monkeypatch)
    family, _ = find_variant(variant, option="")
    for index, picture in enumerate(reference_pictures()):
        picture.save(tmp_path / f"{index}.png")
    columns = [one.column for one in family.inputs if one.kind != "video" and "mask" not in one.column]
    given = {column: str(tmp_path / "0.png") for column in columns}
    one: dict[str, Any] = {"prompt": "a rabbit in the grass", "seed": 3, "inputs": given}
    if family.takes_negative_prompt:
        one["negative_prompt"] = "a dog"
    frames, side = (5 if family.name == "wan" else 1), 64
    size = (f"data.frames={frames}", f"data.height={side}", f"data.width={side}", "train.steps=1")
    asked = (
        "validation.every=1",
        "validation.steps=2",
        "validation.guidance=3",
        f"validation.prompts={json.dumps([one])}",
    )
    rows = [dict.fromkeys(columns, "clip_1.mp4")]
    config = run_config(
        tiny_models(variant),
        variant,
        tmp_path / "data",
        rows,
        *size,
        *asked,
        "train.global_batch=1",
        "train.learning_rate=0.1",
    )
    clips: list[np.ndarray] = []
    for module in (samples_module, generate_module):
        monkeypatch.setattr(module, "write_video", _keeper(clips))
    runs.run(config)
    found = _samples(config)
    first, last = found[0, 0], found[1, 0]
    expected = _generate(config, tmp_path / f"x.{'mp4' if frames > 1 else 'png'}")
    assert first.shape == last.shape == expected.shape == (frames, side, side, 3)
    if frames > 1:  # before the codec, which loses some
        first, last, expected = clips
    assert np.abs(first - expected).max() <= 1
    assert np.abs(last - expected).mean() > 0.05


def _keeper(clips: list[np.ndarray]) -> Callable[..., None]:
    """`write_video` that also notes what it writes."""

    def write(file: Path, frames: np.ndarray, *, fps: int) -> None:
        clips.append(frames.astype(int))
        write_video(file, frames, fps=fps)

    return write


def test_nothing_is_left_of_a_sample(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """No text encoder before or after, no gradient, no evaluation mode, no draw from torch's generator."""
    from transformers import UMT5EncoderModel

    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "data.frames=1", *SAMPLES))
    samples = Samples(inputs, Processes(inputs.layout, "cpu", timeout_minutes=1), dtype=torch.float32)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is UMT5EncoderModel]
    filled = runs.fill_model(inputs)
    before, weights = torch.get_rng_state(), {key: t.clone() for key, t in filled.model.state_dict().items()}
    samples.make(0, filled.strategy)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in filled.model.modules())
    assert all(parameter.grad is None for parameter in filled.model.parameters())
    assert all(torch.equal(tensor, weights[key]) for key, tensor in filled.model.state_dict().items())
    assert [samples.due(step) for step in range(4)] == [True] * 4


def test_autocast_makes_what_the_pipeline_in_that_type_makes(tiny: Path, clips: Path, tmp_path: Path) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", *PICTURES, *SAMPLES, "model.dtype=bfloat16", "train.steps=1")
    runs.run(config)
    expected = _generate(config, tmp_path / "x.png")
    assert np.abs(_samples(config)[0, 1] - expected).mean() < 2


def test_samples_come_every_so_many_steps_and_at_the_end_and_again_after_a_resume(
    tiny: Path, clips: Path, tmp_path: Path
) -> None:
    own = ("train.steps=5", "save.every=2", "save.keep=9", *SAMPLES, "validation.every=2")
    config = runs.config(tiny, clips, tmp_path / "run", *PICTURES, *own)
    runs.run(config)
    first = _samples(config)
    assert sorted({step for step, _ in first}) == [0, 2, 4, 5]
    folder = Path(config.output)
    assert (folder / "samples" / "grid.png").is_file()
    for step in (4, 5):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    (folder / "samples" / "step-00000002").rename(tmp_path / "gone")
    (folder / "samples" / "step-00000000" / "00.png").write_bytes((tmp_path / "gone" / "01.png").read_bytes())
    again = runs.config(tiny, clips, tmp_path / "run", *PICTURES, *own, "resume=auto")
    runs.run(again)
    second = _samples(again)
    assert second.keys() == first.keys()
    assert all(np.array_equal(second[key], first[key]) for key in first if key != (0, 0))
    assert np.array_equal(second[0, 0], first[2, 1]), "what was there before the checkpoint stays"


def test_a_sample_that_cannot_be_made_or_written_does_not_end_the_run(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = Wan.generate

    def broken(self: Wan, pipeline: Any, **arguments: Any) -> np.ndarray:
        frames = generate(self, pipeline, **arguments)
        return as_bytes(np.array([math.nan])) if arguments["generator"].initial_seed() == 3 else frames

    def full(folder: Path, prompts: Any) -> None:
        write_grid(folder, prompts)
        if len(find_samples(folder)) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Wan, "generate", broken)
    monkeypatch.setattr(samples_module, "write_grid", full)
    config = runs.config(tiny, clips, tmp_path / "run", *PICTURES, *SAMPLES)
    runs.run(config)
    assert set(_samples(config)) == {(0, 0), (1, 0), (2, 0)}
    said = capsys.readouterr().out
    assert "warning: no sample of prompt 1 at step 0: the pipeline made pixels that are no numbers" in said
    assert said.count("warning: cannot write the samples of step 1 in") == 1 and "No space left" in said


def test_samples_of_later_steps_than_the_checkpoint_are_removed(tmp_path: Path) -> None:
    for step in (0, 10, 20):
        (tmp_path / "samples" / f"step-{step:08d}").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "samples" / f"step-{step:08d}" / "00.png")
    write_grid(tmp_path / "samples", ["a"])
    checkpoint = tmp_path / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    RunFolder(tmp_path).prepare("", resumed=checkpoint, step=10)
    assert sorted(find_samples(tmp_path / "samples")) == [0, 10]
    assert not (tmp_path / "samples" / "grid.png").exists()
    RunFolder(tmp_path).prepare("", resumed=None, step=0)
    assert sorted(find_samples(tmp_path / "previous" / "1" / "samples")) == [0, 10]


def test_the_grid_has_a_row_for_each_prompt_and_a_column_for_each_step(tmp_path: Path) -> None:
    for step in range(40):
        (tmp_path / f"step-{step:08d}").mkdir()
        for index, value in enumerate((step, 255 - step)):
            Image.new("RGB", (512, 256), (value, 0, 0)).save(tmp_path / f"step-{step:08d}" / f"0{index}.png")
    write_grid(tmp_path, ["a fox", "a long prompt " * 30])
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    steps = spread(range(40), 16)
    assert steps[0] == 0 and steps[-1] == 39 and len(steps) == 16
    shown = [grid[28 + 10, 200 + 264 * place + 10].tolist() for place in range(16)]
    assert shown == [[step, 0, 0] for step in steps]
    assert grid[-20, 210].tolist() == [255, 0, 0]
    assert (grid[28:, :190] < 128).any() and (grid[:28, 200:] < 128).any()


def test_the_grid_shows_beginning_and_end_of_clips(tmp_path: Path) -> None:
    for step in range(2):
        (tmp_path / f"step-{step:08d}").mkdir()
        frames = np.stack([np.full((32, 64, 3), value + step, np.uint8) for value in (40, 80, 120, 160, 200)])
        write_video(tmp_path / f"step-{step:08d}" / "00.mp4", frames, fps=4)
    write_grid(tmp_path, ["a fox"])
    grid = np.asarray(Image.open(tmp_path / "grid.png")).astype(int)
    shown = [grid[28 + 40, 200 + (3 * 160 + 8) * step + 160 * place + 80, 0] for step in range(2) for place in range(3)]
    assert np.abs(np.array(shown) - [40, 120, 200, 41, 121, 201]).max() <= 3


IMAGE = "wan2.1-i2v-14b-480p"


@pytest.mark.parametrize(
    ("variant", "overrides", "message"),
    [
        (
            "flux.1-dev",
            ["validation.prompts=[{prompt: a, negative_prompt: b}]"],
            r"0\.negative_prompt: flux.1-dev takes none",
        ),
        (
            "flux.1-dev",
            ["validation.prompts=[a]", "validation.height=20"],
            r"validation\.height: 20 is not a multiple of 16",
        ),
        (
            IMAGE,
            ["validation.prompts=[a, b]"],
            rf"validation\.prompts\.0\.inputs\.input_image: {IMAGE} needs it; give a file",
        ),
        (
            IMAGE,
            ["validation.prompts=[{prompt: a, inputs: {image: x.png}}]"],
            rf"validation\.prompts\.0\.inputs\.image: no input of {IMAGE}; it takes input_image",
        ),
        (
            IMAGE,
            ["validation.prompts=[{prompt: a, inputs: {input_image: x.png}}]"],
            r"validation\.prompts\.0\.inputs\.input_image: the file x\.png does not exist",
        ),
        (
            IMAGE,
            ["validation.prompts=[{prompt: a, inputs: {input_image: [pyproject.toml, pyproject.toml]}}]"],
            r"input_image: wan2.1-i2v-14b-480p takes one file",
        ),
        (
            "wan2.2-t2v-a14b",
            ["validation.prompts=[a]", "model.expert=high"],
            r"validation\.prompts: wan2.2-t2v-a14b has two transformers, .* `flowshard generate`",
        ),
    ],
)
def test_prompts_that_cannot_be_made_are_refused(
    tiny_models: Callable[[str], Path], clips: Path, tmp_path: Path, variant: str, overrides: list[str], message: str
) -> None:
    frames = "data.frames=1" if variant.startswith("flux") else "data.frames=5"
    own = (f"model.variant={variant}", frames, "validation.every=1")
    config = runs.config(tiny_models(variant), clips, tmp_path / "run", *own, *overrides)
    with pytest.raises(UserError, match=message):
        check_inputs(config)


def test_the_config_takes_texts_and_objects(tiny: Path, clips: Path, tmp_path: Path) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", *SAMPLES)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(config, {}), encoding="utf-8")
    for one in (config, load_config(file)):
        assert [prompt.model_dump() for prompt in one.validation.prompts] == [
            {"prompt": "a fox", "negative_prompt": "", "seed": 0, "inputs": {}},
            {"prompt": "a tree", "negative_prompt": "leaves", "seed": 3, "inputs": {}},
        ]
    with pytest.raises(
        UserError, match=r"validation\.prompts\.0\.sed: unknown option; did you mean .*prompts\.0\.seed\?"
    ):
        runs.config(tiny, clips, tmp_path / "run", "validation.prompts=[{prompt: a, sed: 1}]")
    with pytest.raises(UserError, match=r"as in validation\.prompts=\[a fox, "):
        runs.config(tiny, clips, tmp_path / "run", "validation.prompts.0=a fox")
    with pytest.raises(UserError, match=r"validation\.every: 5, but there is nothing to validate with; set validation"):
        runs.config(tiny, clips, tmp_path / "run", "validation.every=5")


def test_pixels_that_are_no_numbers_are_refused() -> None:
    from flowshard.errors import RunError

    with pytest.raises(RunError, match="take more denoising steps"):
        as_bytes(np.array([0.5, math.nan]))
