"""Reference pictures from metadata to cache: found, refused, told apart; and the examples and names of the variants."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from flowshard.cli import main
from flowshard.config_file import load_config
from flowshard.data.cache import EncodedCache
from flowshard.errors import UserError
from flowshard.families import find_variant, flux_kontext
from flowshard.families.joint import stack_references
from flowshard.parity.command import parity
from flowshard.train.inputs import check_inputs
from flowshard.weights.source import recognise_variant
from tests import runs
from tests.conftest import REPOSITORY
from tests.pictures import NEW, OTHERS, REQUIRED, TEXT_ONLY, TinyModels, run_config, shrink_references
from tests.test_layouts_agree import METHODS, options


def test_prompts_are_cached_with_the_pictures_that_they_were_read_with(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_references(monkeypatch)
    for variant, texts in (("qwen-image-edit", 2), ("flux.2-klein-9b", 1)):
        rows = [{"edit_image": "clip_1.mp4"}, {"edit_image": "clip_2.mp4"}, {"edit_image": "clip_2.mp4"}]
        config = run_config(tiny_models(variant), variant, tmp_path / variant, rows)
        runs.batches(check_inputs(config))
        cache = config.cache_folder
        assert cache is not None
        assert len(list((cache / "text").iterdir())) == texts
        assert len(list((cache / "media").iterdir())) == 2


def test_the_cache_tells_columns_apart(tiny_models: TinyModels, tmp_path: Path) -> None:
    variant = "flux.2-klein-9b"
    inputs = check_inputs(run_config(tiny_models(variant), variant, tmp_path, [{}]))
    cache = EncodedCache(tmp_path, inputs.config, inputs.family, inputs.source, torch.float32)
    row = inputs.data.training.rows[0]
    one, other = (replace(row, inputs={column: (row.media,)}) for column in ("edit_image", "end_image"))
    assert cache._media_file(one) != cache._media_file(other)


@pytest.mark.parametrize("variant", NEW)
def test_the_example_names_the_published_model_and_is_right(
    tiny_models: TinyModels, tmp_path: Path, variant: str
) -> None:
    file = REPOSITORY / "examples" / f"{variant}_lora.yaml"
    published = load_config(file, [])
    assert published.model.path == find_variant(variant, option="")[1].hub_id
    assert published.train.global_batch % 8 == 0
    inputs = check_inputs(load_config(file, [f"model.path={tiny_models(variant)}", f"output={tmp_path}"]))
    assert inputs.variant.name == variant
    assert all(bool(row.inputs) == bool(inputs.family.inputs) for row in inputs.data.training.rows)


@pytest.mark.parametrize("variant", REQUIRED)
def test_a_sample_without_its_picture_is_refused_by_the_columns_name(
    tiny_models: TinyModels, tmp_path: Path, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, family = tiny_models(variant), find_variant(variant, option="")[0]
    column = family.inputs[0].column
    with pytest.raises(UserError, match=f"the column '{column}' is missing, which this model needs"):
        check_inputs(run_config(folder, variant, tmp_path, [{}]))
    rows: list[dict[str, Any]] = [{column: "clip_1.mp4"}, {column: ""}]
    with pytest.raises(UserError, match=f"row 2: has no '{column}', which this model needs"):
        check_inputs(run_config(folder, variant, tmp_path, rows))
    rows[1][column] = ["clip_1.mp4", "clip_2.mp4"]
    if family.inputs[0].several:
        check_inputs(run_config(folder, variant, tmp_path, rows))
    else:
        with pytest.raises(UserError, match=f"row 2: '{column}' takes one file, not 2"):
            check_inputs(run_config(folder, variant, tmp_path, rows))
    generate = ["generate", "--model", str(folder), "--prompt", "x", "--output", str(tmp_path / "x.png")]
    assert main(generate) == 2
    assert f"--input {column}=FILE: {variant} needs it" in capsys.readouterr().err


def test_pictures_are_no_must_for_flux2(tiny_models: TinyModels, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{}, {"edit_image": ["clip_1.mp4"]}]
    variant = "flux.2-klein-9b"
    inputs = check_inputs(run_config(tiny_models(variant), variant, tmp_path, rows))
    conditions = [runs.batches(inputs)._dataset[index].conditions for index in range(2)]
    assert ["reference.0" in one for one in conditions] == [False, True]
    with pytest.raises(UserError, match=r"row 1 has none, row 2 edit_image 320x176; use data\.buckets=auto"):
        check_inputs(run_config(tiny_models(variant), variant, tmp_path, rows, "train.micro_batch=2"))


def test_pictures_that_do_not_fit_in_one_micro_batch_are_refused(tiny_models: TinyModels, tmp_path: Path) -> None:
    wide = Image.new("RGB", (200, 100))
    wide.getexif()[0x0112] = 6  # stored on its side
    clips = REPOSITORY / "examples" / "data" / "bunny"
    for name, picture in (("turned.jpg", wide), ("tall.png", wide.rotate(90, expand=True))):
        picture.save(tmp_path / name, exif=wide.getexif())
    for variant in ("qwen-image-edit-2509", "flux.1-kontext-dev", "flux.2-klein-9b"):
        column = find_variant(variant, option="")[0].inputs[0].column
        rows = [{"video": str(clips / "clip_0.mp4"), column: str(clips / "clip_1.mp4")}]
        more = ("data.root=/", "train.micro_batch=2")
        folder = tiny_models(variant)
        check_inputs(run_config(folder, variant, tmp_path / variant, rows * 2, *more))
        rows += [{**rows[0], column: str(tmp_path / "turned.jpg")}]
        with pytest.raises(UserError, match=r"row 1 has .*, row 2 .*; use data.buckets=auto") as error:
            check_inputs(run_config(folder, variant, tmp_path / variant, rows, *more))
        assert column in str(error.value)
        alike = [{**rows[1], column: str(tmp_path / name)} for name in ("turned.jpg", "turned.jpg")]
        check_inputs(run_config(folder, variant, tmp_path / variant, alike, *more))
        check_inputs(run_config(folder, variant, tmp_path / variant, rows, "data.root=/"))
    one, other = {"reference.0": torch.zeros(4, 2, 3)}, {"reference.0": torch.zeros(4, 3, 2)}
    for pair in ([one, other], [one, {}], [{}, one]):
        with pytest.raises(UserError, match=r"use data\.buckets=auto"):
            stack_references(pair)


def test_flux2_refuses_pictures_that_its_pipeline_does(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.png"
    Image.new("RGB", (48, 96)).save(small)
    clip = str(REPOSITORY / "examples" / "data" / "bunny" / "clip_0.mp4")
    folder = tiny_models("flux.2-klein-9b")
    rows = [{"video": clip, "edit_image": str(small)}]
    inputs = check_inputs(run_config(folder, "flux.2-klein-9b", tmp_path / "run", rows, "data.root=/"))
    with pytest.raises(UserError, match=r"row 1 .*48x96; flux2 takes sides of at least 64 pixels"):
        runs.batches(inputs)
    generate = ["generate", "--model", str(folder), "--prompt", "x", "--output", str(tmp_path / "x.png")]
    assert main([*generate, "--input", f"edit_image={small}"]) == 2
    assert "at least 64 pixels" in capsys.readouterr().err


@pytest.mark.parametrize("variant", NEW)
def test_a_variant_is_listed_recognised_and_small(
    tiny_models: TinyModels, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (family, row) = tiny_models(variant), find_variant(variant, option="")
    assert main(["tiny", "--list"]) == 0
    assert [variant, family.name, row.hub_id] in [line.split() for line in capsys.readouterr().out.splitlines()]
    pipeline = DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline).__name__ == family.pipeline_class
    assert pipeline.transformer.config[family.heads_setting] == row.heads
    assert recognise_variant(str(folder), option="", variant_option="") == variant
    elsewhere = folder.parent / "renamed"
    folder.rename(elsewhere)
    alike = {"qwen-image-2512": "qwen-image", "flux.1-krea-dev": "flux.1-dev"}
    found = recognise_variant(str(elsewhere), option="", variant_option="")
    elsewhere.rename(folder)
    assert found == alike.get(variant, variant)
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 30 * 2**20


def test_references_have_the_published_sizes() -> None:
    pictures = [(640, 480), (1920, 1080), (300, 900), (1024, 1024), (2000, 333)]
    edit, plus, kontext, klein = (
        find_variant(name, option="")[0]
        for name in ("qwen-image-edit", "qwen-image-edit-2509", "flux.1-kontext-dev", "flux.2-klein-4b")
    )
    assert list(flux_kontext.SIZES) == pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    assert plus.reference_area == pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE  # type: ignore[attr-defined]
    assert plus.seen_area == pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE  # type: ignore[attr-defined]
    for size in pictures:
        width, height, _ = pipeline_qwenimage_edit.calculate_dimensions(1024 * 1024, size[0] / size[1])
        assert edit.input_shape(size) == plus.input_shape(size) == (height, width)
        assert kontext.input_shape(size)[::-1] in flux_kontext.SIZES
        resized = Flux2ImageProcessor._resize_if_exceeds_area(Image.new("L", size), 1024 * 1024)
        assert klein.input_shape(size) == (resized.height // 16 * 16, resized.width // 16 * 16)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", [name for name in NEW if name not in OTHERS])
def test_layouts_agree(tiny_models: TinyModels, variant: str, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At the published sizes of references, so with thousands of tokens."""
    layouts = ["single", "zero3:2,activations=offload", "fsdp2:2", "sp:2"]
    file = "metadata.csv" if variant in TEXT_ONLY else "metadata_edit.json"
    data = [f"data.metadata={REPOSITORY / 'examples/data/bunny' / file}", "data.frames=1"]
    small = ["data.height=64", "data.width=48", "model.layers=1", "lora.targets=null", "train.global_batch=2"]
    own = [f"model.variant={variant}", *data, *small, *(METHODS["full"] if method == "full" else ())]
    parity(options(tiny_models(variant), layouts, *own, steps=1 if method == "full" else 2))
    assert "all layouts agree" in capsys.readouterr().out
