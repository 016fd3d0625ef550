"""Variants of the image families, those with reference pictures above all, against the stock pipelines."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from flowshard.cli import main
from flowshard.config import Config
from flowshard.config_file import load_config
from flowshard.data.cache import EncodedCache
from flowshard.errors import UserError
from flowshard.families import find_variant, flux_kontext
from flowshard.families.joint import stack_references
from flowshard.families.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from flowshard.parallel.processes import Processes
from flowshard.parity.command import parity
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.weights.source import find_any_source, recognise_variant
from tests import runs, test_families
from tests.conftest import REPOSITORY
from tests.launch import torchrun
from tests.runs import relative_error
from tests.test_families import GUIDANCE, HEIGHT, PROMPTS, WIDTH, Case
from tests.test_layouts_agree import options

TinyModels = Callable[[str], Path]
PICTURES = {
    "qwen-image-edit": 1,
    "qwen-image-edit-2509": 2,
    "qwen-image-edit-2511": 2,
    "flux.1-kontext-dev": 1,
    "flux.2-dev": 2,
    "flux.2-klein-9b": 1,
    "flux.2-klein-base-4b": 2,
}
"""Variants with reference pictures: how many of them the tests give."""
MUCH_LIKE_OTHERS = ("qwen-image-edit-2509", "flux.2-klein-base-4b")
REQUIRED = ("qwen-image-edit", "qwen-image-edit-2511", "flux.1-kontext-dev")
TEXT_ONLY = ("qwen-image-2512", "flux.1-krea-dev", "z-image")
OTHERS = ("flux.2-klein-4b", "flux.2-klein-base-9b")
NEW = (*TEXT_ONLY, *(name for name in PICTURES if name != "flux.2-dev"), *OTHERS)


@pytest.fixture(autouse=True)
def _small_references(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """References of a few tokens in place of some thousands, in our code and in the pipelines alike."""
    if "published_sizes" in request.fixturenames:
        return
    whole = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: whole(area // 128, ratio))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 96 * 96)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", 64 * 64)
    monkeypatch.setattr(QwenImageEdit, "reference_area", 1024 * 1024 // 128)
    monkeypatch.setattr(QwenImageEdit, "seen_area", 1024 * 1024 // 128)
    monkeypatch.setattr(QwenImageEditPlus, "reference_area", 96 * 96, raising=False)
    monkeypatch.setattr(QwenImageEditPlus, "seen_area", 64 * 64)
    sizes = [(48, 112), (80, 64), (64, 80)]
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    monkeypatch.setattr(flux_kontext, "SIZES", tuple(sizes))


@pytest.fixture
def published_sizes() -> None:
    """Leaves the areas of references as they are."""


def _pictures() -> list[Image.Image]:
    """Two, of different size."""
    found = []
    for width, height in ((96, 72), (80, 130)):
        x = torch.linspace(0, 4, width)[None, :] + torch.linspace(0, 3, height)[:, None]
        channels = torch.stack([x.sin(), (x * 1.7).cos(), (x + width).sin()], dim=-1)
        found.append(Image.fromarray(((channels + 1) * 127).to(torch.uint8).numpy()))
    return found


@dataclass
class EditCase(Case):
    """A case with the pictures that its pipeline gets."""

    inputs: dict[str, list[Image.Image]] = field(default_factory=dict)

    @property
    def column(self) -> str:
        return self.family.inputs[0].column

    def encoded(self, prompt: str) -> dict[str, torch.Tensor]:
        """Conditions of one sample, as the cache has them."""
        frames = np.zeros((1, HEIGHT, WIDTH, 3), dtype=np.uint8)
        own = self.family.encode_inputs(self.pipeline, frames, self.inputs)
        return {**own, **self.family.encode_prompt(self.pipeline, prompt, self.inputs)}

    def conditions(self, *prompts: str) -> dict[str, torch.Tensor]:
        joined = self.family.batch_conditions([self.encoded(prompt) for prompt in prompts])
        if self.family.takes_guidance(self.pipeline.transformer.config):
            joined["guidance"] = torch.full((len(prompts),), GUIDANCE)
        return joined

    def stock(self, **more: Any) -> Any:
        """Call the stock pipeline with the pictures."""
        pictures = self.inputs[self.column]
        one = {"image": pictures[0]}
        own: dict[str, Any] = {
            "QwenImageEditPipeline": {"true_cfg_scale": 1.0, **one},
            "QwenImageEditPlusPipeline": {"true_cfg_scale": 1.0, "image": pictures},
            "FluxKontextPipeline": {
                "guidance_scale": GUIDANCE,
                "max_sequence_length": 48,
                "max_area": HEIGHT * WIDTH,
                **one,
            },
            "Flux2Pipeline": {"guidance_scale": GUIDANCE, "max_sequence_length": 128, "image": pictures},
            "Flux2KleinPipeline": {"guidance_scale": 1.0, "max_sequence_length": 48, "image": pictures},
        }[type(self.pipeline).__name__]
        return self.pipeline(height=HEIGHT, width=WIDTH, num_inference_steps=2, **{**own, **more})

    def files(self, folder: Path) -> list[Path]:
        """The pictures as files."""
        paths = [folder / f"{place}.png" for place in range(len(self.inputs[self.column]))]
        for path, picture in zip(paths, self.inputs[self.column], strict=True):
            picture.save(path)
        return paths


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in MUCH_LIKE_OTHERS else []) for name in PICTURES],
)
def case(request: pytest.FixtureRequest, tiny_models: TinyModels) -> EditCase:
    family, _ = find_variant(request.param, option="VARIANT")
    folder = tiny_models(request.param)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    inputs = {family.inputs[0].column: _pictures()[: PICTURES[request.param]]}
    return EditCase(request.param, family, pipeline, folder, inputs)


class _Recorder(torch.nn.Module):
    """A transformer that keeps what it is called with."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.calls: list[dict[str, Any]] = []
        self.handle = transformer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        assert not args
        self.calls.append({name: value for name, value in kwargs.items() if value is not None and value != {}})


def _assert_equal_calls(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].shape == value.shape, name
            torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-6, atol=1e-6, msg=name)
        else:
            assert found[name] == value, name


def test_denoise_and_all_conditions_are_those_of_the_stock_pipeline(
    case: EditCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference tokens and their places, prompts that have seen the pictures, and the part of the prediction that counts."""
    predictions = []
    step = case.pipeline.scheduler.step

    def record(prediction: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        predictions.append(prediction.clone())
        return step(prediction, *arguments, **more)

    monkeypatch.setattr(case.pipeline.scheduler, "step", record)
    recorder = _Recorder(case.pipeline.transformer)
    try:
        case.stock(prompt=PROMPTS[1], output_type="latent")
        expected = recorder.calls[1]
        own = HEIGHT * WIDTH // 256
        shape = case.noise(1).shape
        noisy = expected["hidden_states"][:, :own].transpose(1, 2).reshape(shape)
        conditions = case.conditions(PROMPTS[1])
        with torch.no_grad():
            found = case.family.denoise(case.pipeline.transformer, noisy, expected["timestep"], conditions)
    finally:
        recorder.handle.remove()
    references = [conditions[f"reference.{place}"] for place in range(PICTURES[case.variant])]
    prepared = torch.cat([one.flatten(2).transpose(1, 2) for one in references], dim=1)
    assert relative_error(prepared, expected["hidden_states"][:, own:]) <= 1e-6
    _assert_equal_calls(recorder.calls[2], expected)
    assert relative_error(found, predictions[1].transpose(1, 2).reshape(shape)) <= 1e-6


def test_our_processors_equal_the_stock_ones_on_one_process(case: EditCase) -> None:
    test_families.test_our_processors_equal_the_stock_ones_on_one_process(case)


def test_a_sample_of_a_batch_is_predicted_as_alone(case: EditCase) -> None:
    test_families.test_padding_of_a_shorter_prompt_changes_nothing(case)


def test_generate_with_pictures_equals_the_stock_pipeline(
    case: EditCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "picture.png"
    given = [argument for path in case.files(tmp_path) for argument in ("--input", f"{case.column}={path}")]
    size = ["--height", str(HEIGHT), "--width", str(WIDTH), "--steps", "2", "--guidance", "3"]
    own = ["--prompt", PROMPTS[0], "--dtype", "float32", "--device", "cpu", "--output", str(file)]
    assert main(["generate", "--model", str(case.folder), *size, *own, *given]) == 0
    qwen = case.variant.startswith("qwen")
    guidance = {"true_cfg_scale": 3.0, "negative_prompt": ""} if qwen else {"guidance_scale": 3.0}
    generator = torch.Generator().manual_seed(0)
    stock = case.stock(prompt=PROMPTS[0], generator=generator, output_type="np", **guidance).images[0]
    assert np.array_equal(np.asarray(Image.open(file)), (stock * 255).round().astype(np.uint8))
    size[1] = size[3] = "32"
    own[3] = "bfloat16"
    assert main(["generate", "--model", str(case.folder), *size, *own, *given]) == 0
    assert Image.open(file).size == (32, 32)


def _config(model: Path, variant: str, folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Config:
    """A run on rows whose media are the repository's clips."""
    folder.mkdir(exist_ok=True)
    metadata = folder / "metadata.json"
    clips = REPOSITORY / "examples" / "data" / "bunny"
    metadata.write_text(json.dumps([{"video": "clip_0.mp4", "prompt": "a rabbit", **row} for row in rows]))
    own = (f"model.variant={variant}", f"data.metadata={metadata}", f"data.root={clips}", "data.frames=1")
    return runs.config(model, clips, folder / "run", *own, *overrides)


def test_a_trained_lora_loads_into_the_stock_pipeline(case: EditCase, tmp_path: Path) -> None:
    more = ["clip_1.mp4", "clip_2.mp4"][: PICTURES[case.variant]]
    rows: list[dict[str, Any]] = [{case.column: more}, {case.column: more[0]}]
    learning = ("train.learning_rate=1e-2", "train.steps=2", "train.global_batch=2")
    inputs = check_inputs(_config(case.folder, case.variant, tmp_path, rows, *learning))
    keeper = test_families._Keeper()
    checkpoint = train(inputs, Processes(inputs.layout, "cpu", timeout_minutes=1), keeper)
    assert checkpoint is not None

    def predict(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return case.family.denoise(model, case.noise(1), torch.tensor([0.6]), case.conditions(PROMPTS[0]))

    exported = tmp_path / "exported.safetensors"
    assert main(["export", str(checkpoint), "--format", "diffusers", "--output", str(exported)]) == 0
    pipeline = DiffusionPipeline.from_pretrained(case.folder)
    pipeline.load_lora_weights(str(tmp_path), weight_name=exported.name)
    trained = predict(keeper.model.eval())
    assert relative_error(predict(pipeline.transformer), trained) <= 1e-5
    assert relative_error(trained, predict(case.pipeline.transformer)) > 1e-3


def test_prompts_are_cached_with_the_pictures_that_they_were_read_with(tiny_models: TinyModels, tmp_path: Path) -> None:
    for variant, texts in (("qwen-image-edit", 2), ("flux.2-klein-9b", 1)):
        rows = [{"edit_image": "clip_1.mp4"}, {"edit_image": "clip_2.mp4"}, {"edit_image": "clip_2.mp4"}]
        config = _config(tiny_models(variant), variant, tmp_path / variant, rows)
        runs.batches(check_inputs(config))
        cache = config.cache_folder
        assert cache is not None
        assert len(list((cache / "text").iterdir())) == texts
        assert len(list((cache / "media").iterdir())) == 2


def test_the_cache_tells_columns_apart(tiny_models: TinyModels, tmp_path: Path) -> None:
    variant = "flux.2-klein-9b"
    inputs = check_inputs(_config(tiny_models(variant), variant, tmp_path, [{}]))
    cache = EncodedCache(tmp_path, inputs.config, inputs.family, inputs.source, torch.float32)
    row = inputs.metadata.rows[0]
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
    assert all(bool(row.inputs) == bool(inputs.family.inputs) for row in inputs.metadata.rows)


def test_published_processors_are_read_without_torchvision(tiny_models: TinyModels, tmp_path: Path) -> None:
    """As their folders are: the names of classes that need it, and a tokenizer that knows of no image token."""
    variant = "qwen-image-edit-2509"
    folder = tmp_path / "model"
    shutil.copytree(tiny_models(variant), folder)
    processor = folder / "processor"
    stock = DiffusionPipeline.from_pretrained(folder)
    (processor / "processor_config.json").unlink()
    own = json.loads((processor / "tokenizer_config.json").read_text())
    assert own.pop("image_token") == "<|image_pad|>"
    own.pop("model_specific_special_tokens", None)
    (processor / "tokenizer_config.json").write_text(json.dumps(own))
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 28 * 28,
        "max_pixels": 16 * 28 * 28,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (processor / "preprocessor_config.json").write_text(json.dumps(settings))
    (processor / "video_preprocessor_config.json").write_text('{"video_processor_type": "Qwen2VLVideoProcessor"}')
    index = json.loads((folder / "model_index.json").read_text())
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    family, _, source = find_any_source(str(folder), variant, option="")
    pictures = {"edit_image": _pictures()}
    encoders = family.load_encoders(source, dtype=torch.float32, device=torch.device("cpu"))
    assert not hasattr(encoders.processor.tokenizer, "image_token")
    found = family.encode_prompt(encoders, PROMPTS[1], pictures)["prompt_embeds"]
    assert relative_error(found, family.encode_prompt(stock, PROMPTS[1], pictures)["prompt_embeds"]) <= 1e-6
    prefix = stock.prompt_template_encode.split("{}")[0]
    assert len(stock.tokenizer(prefix).input_ids) == stock.prompt_template_encode_start_idx


@pytest.mark.parametrize("variant", REQUIRED)
def test_a_sample_without_its_picture_is_refused_by_the_columns_name(
    tiny_models: TinyModels, tmp_path: Path, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, family = tiny_models(variant), find_variant(variant, option="")[0]
    column = family.inputs[0].column
    with pytest.raises(UserError, match=f"the column '{column}' is missing, which this model needs"):
        check_inputs(_config(folder, variant, tmp_path, [{}]))
    rows: list[dict[str, Any]] = [{column: "clip_1.mp4"}, {column: ""}]
    with pytest.raises(UserError, match=f"row 2: has no '{column}', which this model needs"):
        check_inputs(_config(folder, variant, tmp_path, rows))
    rows[1][column] = ["clip_1.mp4", "clip_2.mp4"]
    if family.inputs[0].several:
        check_inputs(_config(folder, variant, tmp_path, rows))
    else:
        with pytest.raises(UserError, match=f"row 2: '{column}' takes one file, not 2"):
            check_inputs(_config(folder, variant, tmp_path, rows))
    generate = ["generate", "--model", str(folder), "--prompt", "x", "--output", str(tmp_path / "x.png")]
    assert main(generate) == 2
    assert f"--input {column}=FILE: {variant} needs it" in capsys.readouterr().err


def test_pictures_are_no_must_for_flux2(tiny_models: TinyModels, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{}, {"edit_image": ["clip_1.mp4"]}]
    inputs = check_inputs(_config(tiny_models("flux.2-klein-9b"), "flux.2-klein-9b", tmp_path, rows))
    conditions = [runs.batches(inputs)._dataset[index].conditions for index in range(2)]
    assert ["reference.0" in one for one in conditions] == [False, True]


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
        check_inputs(_config(folder, variant, tmp_path / variant, rows * 2, *more))
        rows += [{**rows[0], column: str(tmp_path / "turned.jpg")}]
        with pytest.raises(UserError, match=r"row 1 has .*, row 2 .*; use train.micro_batch=1") as error:
            check_inputs(_config(folder, variant, tmp_path / variant, rows, *more))
        assert column in str(error.value)
        alike = [{**rows[1], column: str(tmp_path / name)} for name in ("turned.jpg", "turned.jpg")]
        check_inputs(_config(folder, variant, tmp_path / variant, alike, *more))
        check_inputs(_config(folder, variant, tmp_path / variant, rows, "data.root=/"))
    one, other = {"reference.0": torch.zeros(4, 2, 3)}, {"reference.0": torch.zeros(4, 3, 2)}
    for pair in ([one, other], [one, {}], [{}, one]):
        with pytest.raises(UserError, match=r"use train\.micro_batch=1"):
            stack_references(pair)


def test_flux2_refuses_pictures_that_its_pipeline_does(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.png"
    Image.new("RGB", (48, 96)).save(small)
    clip = str(REPOSITORY / "examples" / "data" / "bunny" / "clip_0.mp4")
    folder = tiny_models("flux.2-klein-9b")
    rows = [{"video": clip, "edit_image": str(small)}]
    inputs = check_inputs(_config(folder, "flux.2-klein-9b", tmp_path / "run", rows, "data.root=/"))
    with pytest.raises(UserError, match=r"row 1 .*48x96; flux2 takes sides of at least 64 pixels"):
        runs.batches(inputs)
    generate = ["generate", "--model", str(folder), "--prompt", "x", "--output", str(tmp_path / "x.png")]
    assert main([*generate, "--input", f"edit_image={small}"]) == 2
    assert "at least 64 pixels" in capsys.readouterr().err


@pytest.mark.usefixtures("published_sizes")
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


@pytest.mark.parametrize(
    "variant", ["z-image", *(pytest.param(name, marks=pytest.mark.slow) for name in (*TEXT_ONLY[:2], *OTHERS))]
)
def test_a_variant_without_pictures_trains_and_generates(tiny_models: TinyModels, tmp_path: Path, variant: str) -> None:
    checkpoint = runs.run(_config(tiny_models(variant), variant, tmp_path, [{}], "train.steps=1"))
    output = tmp_path / "x.png"
    size = ["--height", "32", "--width", "32", "--steps", "2", "--device", "cpu"]
    own = ["--model", str(tiny_models(variant)), "--lora", str(checkpoint), "--prompt", "x", "--output", str(output)]
    assert main(["generate", *own, *size]) == 0
    assert Image.open(output).size == (32, 32)


def test_pictures_and_sample_are_divided_together(tiny_models: TinyModels) -> None:
    """Stock models against themselves on two processes, with references; see `tests/workers/family_sequence.py`."""
    variants = ("qwen-image-edit-2511", "flux.1-kontext-dev", "flux.2-klein-base-4b")
    models = [f"{variant}={tiny_models(variant) / 'transformer'}" for variant in variants]
    done = torchrun(2, ["tests.workers.family_sequence", *models])
    assert done.returncode == 0, done.stderr[-3000:]
    for variant in variants:
        assert f"{variant}, ulysses 2 x ring 1: with pictures, " in done.stdout
        assert f"{variant}, ulysses 1 x ring 2: with pictures, " in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("published_sizes")
@pytest.mark.parametrize(
    "variant", ["qwen-image-edit", "qwen-image-edit-2511", "flux.1-kontext-dev", "flux.2-klein-9b"]
)
def test_layouts_agree(tiny_models: TinyModels, variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At the published sizes of references, so with thousands of tokens."""
    layouts = ["single", "zero3:2,activations=offload", "sp:2"]
    data = [f"data.metadata={REPOSITORY / 'examples/data/bunny/metadata_edit.json'}", "data.frames=1"]
    small = ["data.height=64", "data.width=48", "model.layers=1", "lora.targets=null", "train.global_batch=2"]
    own = [f"model.variant={variant}", *data, *small]
    parity(options(tiny_models(variant), layouts, *own, steps=2))
    assert "all layouts agree" in capsys.readouterr().out
