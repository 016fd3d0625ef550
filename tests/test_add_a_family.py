"""The family that docs/add-a-family.md adds, in the words of the page, against the stock diffusers pipeline."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AuraFlowPipeline, DiffusionPipeline
from PIL import Image

from flowshard import families
from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.families import Family, find_variant
from flowshard.parallel.plan import install_plan
from flowshard.weights.source import find_source, recognise_variant
from tests import runs
from tests.conftest import REPOSITORY
from tests.runs import relative_error
from tests.test_families import Undivided

VARIANT = "auraflow"
PROMPTS = ("a rabbit", "two rabbits yawn in the morning sun")
HEIGHT, WIDTH = 48, 32


def _page() -> str:
    return (REPOSITORY / "docs" / "add-a-family.md").read_text(encoding="utf-8")


def _code() -> str:
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", _page(), re.DOTALL | re.MULTILINE))


def _registration() -> tuple[str, str]:
    """Key and value of the line that the page adds to the registry."""
    found = re.search(r'^\+ +"([\w-]+)": "([\w.]+:\w+)",$', _page(), re.MULTILINE)
    assert found is not None
    return found[1], found[2]


@dataclass
class Added:
    """The family of the page and the stock pipeline of its tiny model."""

    family: Family
    folder: Path
    pipeline: Any

    def predict(self, model: Any, *prompts: str) -> torch.Tensor:
        """For one picture a prompt, with noise levels 0.7 and 0.2."""
        family = self.family
        conditions = family.batch_conditions([family.encode_text(self.pipeline, prompt) for prompt in prompts])
        noisy = torch.randn(2, 4, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(0))
        places = slice(len(prompts))
        return family.denoise(model, noisy[places], torch.tensor([0.7, 0.2])[places], conditions)

    def model(self) -> Any:
        """A fresh copy of the stock transformer."""
        return type(self.pipeline.transformer).from_pretrained(self.folder / "transformer")


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Added]:
    folder = tmp_path_factory.mktemp("added")
    name, target = _registration()
    module = target.partition(":")[0]
    package, _, file = module.rpartition(".")
    assert package == families.__name__
    (folder / f"{file}.py").write_text(_code(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        # As if the file lay in the package.
        patch.setattr(families, "__path__", [*families.__path__, str(folder)])
        patch.setitem(families._FAMILIES, name, target)
        family, _ = find_variant(VARIANT, option="VARIANT")
        assert family.name == name
        assert main(["tiny", VARIANT, str(folder / "tiny")]) == 0
        pipeline = DiffusionPipeline.from_pretrained(folder / "tiny")
        pipeline.set_progress_bar_config(disable=True)
        yield Added(family, folder / "tiny", pipeline)
    del sys.modules[module]
    delattr(families, file)


def _stock(added: Added, **more: Any) -> Any:
    """Call the stock pipeline. Its default length of a prompt is beyond the tiny tokenizer."""
    return added.pipeline(height=HEIGHT, width=WIDTH, num_inference_steps=2, max_sequence_length=48, **more)


def test_the_code_is_short() -> None:
    assert len(_code().splitlines()) < 150


def test_the_stock_class_loads_the_tiny_pipeline(added: Added) -> None:
    assert type(added.pipeline) is AuraFlowPipeline
    assert recognise_variant(str(added.folder), option="", variant_option="") == VARIANT
    assert added.family.heads_setting in added.pipeline.transformer.config
    assert len(added.family.blocks(added.pipeline.transformer)) == 3


def test_denoise_is_what_the_stock_pipeline_does_in_a_step(added: Added, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[torch.Tensor, ...]] = []
    step = added.pipeline.scheduler.step

    def record(prediction: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, **more: Any) -> Any:
        steps.append((prediction.clone(), timestep.clone(), sample.clone()))
        return step(prediction, timestep, sample, **more)

    monkeypatch.setattr(added.pipeline.scheduler, "step", record)
    _stock(added, prompt=PROMPTS[1], guidance_scale=1.0, output_type="latent")
    prediction, timestep, sample = steps[1]
    assert 0 < float(timestep) < 990
    conditions = added.family.batch_conditions([added.family.encode_text(added.pipeline, PROMPTS[1])])
    with torch.no_grad():
        found = added.family.denoise(added.pipeline.transformer, sample, timestep.reshape(1) / 1000, conditions)
    assert relative_error(found, prediction) <= 1e-6


def test_a_picture_is_encoded_to_what_the_stock_pipeline_decodes(added: Added, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline hands the same latents to its VAE that the VAE had encoded."""
    frames = np.random.default_rng(0).integers(0, 256, (1, HEIGHT, WIDTH, 3), dtype=np.uint8)
    latents = added.family.encode_media(added.pipeline, frames)["latents"]
    assert added.family.tokens(latents.shape) == added.family.token_count(HEIGHT, WIDTH, 1) == 6
    decoded = []
    vae, decode = added.pipeline.vae, added.pipeline.vae.decode

    def keep(given: torch.Tensor, **more: Any) -> Any:
        decoded.append(given)
        return decode(given, **more)

    monkeypatch.setattr(vae, "decode", keep)
    # Steps that end with the clean latents whatever there was before.
    monkeypatch.setattr(added.pipeline.scheduler, "step", lambda *_, **__: (latents[None],))
    _stock(added, prompt="x", output_type="np")
    with torch.no_grad():
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 127.5 - 1
        expected = vae.encode(pixels).latent_dist.mode()
    assert relative_error(decoded[0], expected) <= 1e-5


def test_its_plan_equals_the_stock_model_on_one_process(added: Added) -> None:
    """Prediction and every gradient."""
    model, divided = added.model(), added.model()
    attention = {name for name, module in divided.named_modules() if hasattr(module, "processor")}
    tokens = Undivided()
    plan = added.family.sequence_plan(divided, tokens)
    assert set(plan.processors) == attention
    install_plan(divided, plan, tokens)
    expected, found = added.predict(model, *PROMPTS), added.predict(divided, *PROMPTS)
    assert relative_error(found.detach(), expected.detach()) <= 1e-6
    assert tokens.length("image") == 6
    assert tokens.length("text") == 48 + len(model.register_tokens[0])
    for output in (expected, found):
        output.square().sum().backward()
    largest = max(float(one.grad.norm()) for one in model.parameters() if one.grad is not None)
    for (name, one), other in zip(model.named_parameters(), divided.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and float(one.grad.norm()) > 1e-6 * largest:
            assert relative_error(other.grad, one.grad) <= 1e-5, name


def test_a_lora_trains_and_loads_into_the_stock_pipeline(added: Added, clips: Path, tmp_path: Path) -> None:
    options = (f"model.variant={VARIANT}", "data.frames=1", "train.steps=2", "train.learning_rate=1e-2")
    texts = {"prompt": PROMPTS[0], "negative_prompt": "a dog"}
    samples = (
        f"validation.prompts=[{json.dumps(texts)}]",
        f"validation.height={HEIGHT}",
        f"validation.width={WIDTH}",
        "validation.every=2",
        "validation.steps=2",
        "validation.guidance=3",
    )
    config = runs.config(added.folder, clips, tmp_path / "run", *options, *samples, "memory.activations=recompute")
    checkpoint = runs.run(config)
    assert [line["step"] for line in runs.metrics(config)] == [1, 2]
    pipeline = DiffusionPipeline.from_pretrained(added.folder)
    pipeline.load_lora_weights(str(checkpoint), weight_name="lora.safetensors")
    with torch.no_grad():
        trained, base = (added.predict(model, PROMPTS[0]) for model in (pipeline.transformer, added.model()))
    assert relative_error(trained, base) > 1e-3
    generator = torch.Generator().manual_seed(0)
    stock = _stock(added, **texts, guidance_scale=3.0, generator=generator, output_type="np").images[0]
    first = np.asarray(Image.open(tmp_path / "run" / "samples" / "step-00000000" / "00.png"))
    assert np.array_equal(first, (stock * 255).round().astype(np.uint8))


def test_generate_equals_the_stock_pipeline(added: Added, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    size = ["--height", str(HEIGHT), "--width", str(WIDTH), "--steps", "2", "--guidance", "3", "--dtype", "float32"]
    texts = ["--prompt", PROMPTS[0], "--negative-prompt", "a dog"]
    assert main(["generate", "--model", str(added.folder), *size, *texts, "--output", str(file)]) == 0
    generator = torch.Generator().manual_seed(0)
    output = _stock(
        added,
        prompt=PROMPTS[0],
        negative_prompt="a dog",
        guidance_scale=3.0,
        generator=generator,
        output_type="np",
    )
    assert np.array_equal(np.asarray(Image.open(file)), (output.images[0] * 255).round().astype(np.uint8))


def test_a_picture_beyond_the_models_places_is_refused(added: Added) -> None:
    added.family.check_size(1024, 1024, 1, where="data.")
    with pytest.raises(UserError, match=r"data\.height, data\.width: 1040 x 512 is too large; use at most 1024"):
        added.family.check_size(1040, 512, 1, where="data.")


def test_other_files_than_the_diffusers_layout_are_refused(
    added: Added, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next((added.folder / "transformer").glob("*.safetensors"))
    with pytest.raises(UserError, match=r"auraflow is read in the diffusers layout only; .* for example fal/AuraFlow"):
        find_source(str(file), added.family, added.family.variants[VARIANT], option="model.path")
    with pytest.raises(UserError, match=r"model.variant: cannot tell what .* is; set one of"):
        recognise_variant([str(file)], option="model.path", variant_option="model.variant")
    assert main(["tiny", VARIANT, str(tmp_path / "tiny"), "--format", "original"]) == 2
    assert "aura-flow is read in the diffusers layout only" in capsys.readouterr().err
