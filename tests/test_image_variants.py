"""Variants of the image families, those with reference pictures above all, against the stock pipelines."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from flowshard.cli import main
from flowshard.families import find_variant
from flowshard.parallel.processes import Processes
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.weights.source import find_any_source
from tests import runs, test_families
from tests.launch import torchrun
from tests.pictures import (
    MUCH_LIKE_OTHERS,
    OTHERS,
    PICTURES,
    TEXT_ONLY,
    TinyModels,
    pictures,
    run_config,
    shrink_references,
)
from tests.runs import relative_error
from tests.test_families import GUIDANCE, HEIGHT, PROMPTS, WIDTH, Case


@pytest.fixture(autouse=True)
def _small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_references(monkeypatch)


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
    inputs = {family.inputs[0].column: pictures()[: PICTURES[request.param]]}
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


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_what_was_trained_loads_into_the_stock_pipeline(case: EditCase, tmp_path: Path, method: str) -> None:
    more = ["clip_1.mp4", "clip_2.mp4"][: PICTURES[case.variant]]
    rows: list[dict[str, Any]] = [{case.column: more}, {case.column: more[0]}]
    learning = ("train.learning_rate=1e-2", "train.steps=2", "train.global_batch=2", f"train.method={method}")
    inputs = check_inputs(run_config(case.folder, case.variant, tmp_path, rows, *learning))
    keeper = test_families._Keeper()
    checkpoint = train(inputs, Processes(inputs.layout, "cpu", timeout_minutes=1), keeper)
    assert checkpoint is not None

    def predict(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return case.family.denoise(model, case.noise(1), torch.tensor([0.6]), case.conditions(PROMPTS[0]))

    trained = predict(keeper.model.eval())
    assert relative_error(trained, predict(case.pipeline.transformer)) > 1e-3
    if method == "full":
        loaded = type(case.pipeline.transformer).from_pretrained(checkpoint / "transformer")
        whole = type(case.pipeline).from_pretrained(case.folder, transformer=loaded)
        assert relative_error(predict(whole.transformer), trained) <= 1e-6
        return
    exported = tmp_path / "exported.safetensors"
    assert main(["export", str(checkpoint), "--format", "diffusers", "--output", str(exported)]) == 0
    pipeline = DiffusionPipeline.from_pretrained(case.folder)
    pipeline.load_lora_weights(str(tmp_path), weight_name=exported.name)
    assert relative_error(predict(pipeline.transformer), trained) <= 1e-5


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
    given = {"edit_image": pictures()}
    encoders = family.load_encoders(source, dtype=torch.float32, device=torch.device("cpu"))
    assert not hasattr(encoders.processor.tokenizer, "image_token")
    found = family.encode_prompt(encoders, PROMPTS[1], given)["prompt_embeds"]
    assert relative_error(found, family.encode_prompt(stock, PROMPTS[1], given)["prompt_embeds"]) <= 1e-6
    prefix = stock.prompt_template_encode.split("{}")[0]
    assert len(stock.tokenizer(prefix).input_ids) == stock.prompt_template_encode_start_idx


@pytest.mark.parametrize(
    "variant", ["z-image", *(pytest.param(name, marks=pytest.mark.slow) for name in (*TEXT_ONLY[:2], *OTHERS))]
)
def test_a_variant_without_pictures_trains_and_generates(tiny_models: TinyModels, tmp_path: Path, variant: str) -> None:
    output = tmp_path / "x.png"
    size = ["--height", "32", "--width", "32", "--steps", "2", "--device", "cpu"]
    for method, trained in (("lora", "--lora"), ("full", "--weights")):
        own = ("train.steps=1", f"train.method={method}")
        checkpoint = runs.run(run_config(tiny_models(variant), variant, tmp_path / method, [{}], *own))
        model = ["--model", str(tiny_models(variant)), trained, str(checkpoint), "--prompt", "x"]
        assert main(["generate", *model, *size, "--output", str(output)]) == 0
        assert Image.open(output).size == (32, 32)
        output.unlink()


def test_pictures_and_sample_are_divided_together(tiny_models: TinyModels) -> None:
    """Stock models against themselves on two processes, with references; see `tests/workers/family_sequence.py`."""
    variants = ("qwen-image-edit-2511", "flux.1-kontext-dev", "flux.2-klein-base-4b")
    models = [f"{variant}={tiny_models(variant) / 'transformer'}" for variant in variants]
    done = torchrun(2, ["tests.workers.family_sequence", "--pictures", *models])
    assert done.returncode == 0, done.stderr[-3000:]
    for variant in variants:
        assert f"{variant}, ulysses 2 x ring 1: with pictures, " in done.stdout
        assert f"{variant}, ulysses 1 x ring 2: with pictures, " in done.stdout
