"""`data.input_dropout`: which samples go without their pictures, and that they are those of a run without them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from flowshard.config import Config
from flowshard.errors import UserError
from flowshard.objective.sigmas import NoiseLevels
from flowshard.parity.command import parity
from flowshard.seeds import derive_seed
from flowshard.train.batches import StepBatches
from flowshard.train.build import loss_function
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.pictures import run_config, shrink_references
from tests.test_layouts_agree import options
from tests.wan_variants import FRAMES, HEIGHT, PROMPT, WIDTH, assert_same_calls, open_case, record, write_data

TinyModels = Callable[[str], Path]
KLEIN, TI2V = "flux.2-klein-base-4b", "wan2.2-ti2v-5b"
RATE, STEPS, BATCH = 0.4, 6, 4


def _dropped(step: int, position: int) -> bool:
    return derive_seed(0, "input dropout", step, position) / 2**63 < RATE


EXPECTED = [[_dropped(step, position) for position in range(BATCH)] for step in range(STEPS)]


def _klein(tiny_models: TinyModels, folder: Path, *overrides: str, pictures: bool = True) -> Config:
    rows: list[dict[str, Any]] = [{"edit_image": ["clip_1.mp4", "clip_2.mp4"]} if pictures else {}]
    return run_config(tiny_models(KLEIN), KLEIN, folder, rows, f"train.global_batch={BATCH}", *overrides)


def test_a_sample_without_its_pictures_is_one_that_never_had_them(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_references(monkeypatch)
    rate = f"data.input_dropout={RATE}"
    with_all, without = (
        runs.batches(check_inputs(_klein(tiny_models, tmp_path / name, pictures=pictures)))
        for name, pictures in (("all", True), ("none", False))
    )
    ours = runs.batches(check_inputs(_klein(tiny_models, tmp_path / "all", rate)))
    for step in range(STEPS):
        for position, found in enumerate(ours.micro_batches(step)):
            source = without if EXPECTED[step][position] else with_all
            expected = list(source.micro_batches(step))[position]
            assert ("reference.1" in found.conditions) is not EXPECTED[step][position]
            assert found.tensors().keys() == expected.tensors().keys()
            for name, value in expected.tensors().items():
                assert torch.equal(found.tensors()[name], value), name
    assert 0.2 < sum(map(sum, EXPECTED)) / (STEPS * BATCH) < 0.6
    assert "reference.1" in ours.largest_micro_batch().conditions


def test_the_choice_does_not_depend_on_the_layout(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_references(monkeypatch)
    config = _klein(tiny_models, tmp_path / "run", f"data.input_dropout={RATE}")
    single = check_inputs(config)
    dataset, levels = runs.batches(single)._dataset, NoiseLevels(config.objective, single.shift)
    for sequence, positions in ((1, [[0, 1], [2, 3]]), (2, [[0, 1, 2, 3]] * 2)):
        own = config.layout.model_copy(update={"strategy": "ddp", "sequence": sequence})
        inputs = check_inputs(config.model_copy(update={"layout": own}), {"WORLD_SIZE": "2"})
        for rank in range(2):
            layout = replace(inputs.layout, rank=rank)
            batches = StepBatches(dataset, inputs.family, inputs.config, layout, levels, guidance=None)
            found = {one.positions[0]: "reference.0" not in one.conditions for one in batches.micro_batches(1)}
            assert found == {position: EXPECTED[1][position] for position in positions[rank]}


def test_a_clip_without_its_first_frame_is_text_to_video(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `WanPipeline` has it, and with the first frame in the loss."""
    write_data(tmp_path, clips)
    case = open_case(TI2V, tiny_models, tmp_path)
    run = (f"train.global_batch={BATCH}", f"data.input_dropout={RATE}")
    batches = runs.batches(check_inputs(case.config(tmp_path / "run", *run)))
    found = list(batches.micro_batches(1))
    assert ["first_frame" not in batch.conditions for batch in found] == EXPECTED[1]
    batch = found[EXPECTED[1].index(True)]
    pipeline = DiffusionPipeline.from_pretrained(case.folder)
    calls = record(pipeline, monkeypatch)
    size = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "num_inference_steps": 2}
    pipeline(prompt=PROMPT, guidance_scale=1.0, output_type="latent", **size)
    assert_same_calls(case, calls, batch.conditions)
    loss = loss_function(case.family, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        value = loss(pipeline.transformer, batch.tensors())
        noisy = torch.lerp(batch.latents, batch.noise, batch.sigma.view(-1, 1, 1, 1, 1))
        prediction = case.family.denoise(pipeline.transformer, noisy, batch.sigma, batch.conditions)
    expected = torch.nn.functional.mse_loss(prediction, batch.noise - batch.latents)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            "flux.1-kontext-dev",
            "data.input_dropout: 0.5, but flux.1-kontext-dev needs its inputs; set data.input_dropout=0",
        ),
        ("qwen-image-edit", "data.input_dropout: 0.5, but qwen-image-edit needs its inputs"),
        ("z-image", "data.input_dropout: 0.5, but z-image has no inputs besides the prompt"),
    ],
)
def test_models_that_cannot_do_without_are_refused(
    tiny_models: TinyModels, tmp_path: Path, variant: str, message: str
) -> None:
    columns = {"flux.1-kontext-dev": "kontext_images", "qwen-image-edit": "edit_image"}
    rows = [{columns[variant]: "clip_1.mp4"}] if variant in columns else [{}]
    with pytest.raises(UserError, match=message):
        check_inputs(run_config(tiny_models(variant), variant, tmp_path, rows, "data.input_dropout=0.5"))


def test_a_rate_without_effect_or_out_of_range_is_refused(tiny_models: TinyModels, tmp_path: Path) -> None:
    half = "data.input_dropout=0.5"
    with pytest.raises(UserError, match=r"but no row of .*metadata.json has edit_image; add the column"):
        check_inputs(_klein(tiny_models, tmp_path, half, pictures=False))
    with pytest.raises(
        UserError, match=r"train.micro_batch: 2 samples .* data.input_dropout leaves out .*use train.mic"
    ):
        check_inputs(_klein(tiny_models, tmp_path, half, "train.micro_batch=2"))
    for rate in ("1", "-0.1", "true"):
        with pytest.raises(UserError, match=r"data\.input_dropout"):
            _klein(tiny_models, tmp_path, f"data.input_dropout={rate}")


@pytest.mark.slow
@pytest.mark.parametrize("variant", [KLEIN, TI2V])
def test_layouts_agree(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batches with pictures and without on different processes."""
    frames = FRAMES if variant == TI2V else 1
    file = "metadata.csv" if variant == TI2V else "metadata_edit.json"
    data = [f"data.metadata={clips / file}", f"data.frames={frames}", "data.height=64", "data.width=64"]
    own = [f"model.variant={variant}", *data, f"data.input_dropout={RATE}", "lora.targets=null", "train.global_batch=4"]
    layouts = ["single", "zero3:2,activations=offload", "fsdp2:2", "sp:2", "zero2:2,sequence=2,ring=2"]
    parity(options(tiny_models(variant), layouts, *own, steps=2))
    assert "all layouts agree" in capsys.readouterr().out
