"""Every family's adapter against the stock diffusers pipeline of the same tiny model."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from PIL import Image

from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.families import Family, all_families, find_variant
from flowshard.families.sequence import Tokens
from flowshard.parallel.plan import install_plan
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import Strategy
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer
from flowshard.weights.source import recognise_variant
from tests import runs
from tests.runs import relative_error

BASES = ("wan2.1-t2v-1.3b", "qwen-image", "flux.1-dev", "flux.2-dev", "z-image-turbo")
"""A variant of every family."""
IMAGES = BASES[1:]
HEIGHT, WIDTH = 48, 32
PROMPTS = ("a rabbit", "two rabbits yawn in the morning sun, in a meadow of flowers")
GUIDANCE = 2.5
TinyModels = Callable[[str], Path]


@dataclass
class Case:
    """A family and the stock pipeline of its tiny model."""

    variant: str
    family: Family
    pipeline: Any
    folder: Path

    def conditions(self, *prompts: str) -> dict[str, torch.Tensor]:
        """Of a batch."""
        joined = self.family.batch_conditions([self.family.encode_text(self.pipeline, prompt) for prompt in prompts])
        if self.family.takes_guidance(self.pipeline.transformer.config):
            joined["guidance"] = torch.full((len(prompts),), GUIDANCE)
        return joined

    def noise(self, batch: int) -> torch.Tensor:
        """In the shape of latents of a picture of HEIGHT x WIDTH."""
        frames = np.zeros((1, HEIGHT, WIDTH, 3), dtype=np.uint8)
        shape = self.family.encode_media(self.pipeline, frames)["latents"].shape
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))

    def stock(self, **more: Any) -> Any:
        """Call the stock pipeline without classifier-free guidance, or with what is given."""
        own: dict[str, Any] = {
            "WanPipeline": {"guidance_scale": 1.0, "num_frames": 1, "max_sequence_length": 512},
            "QwenImagePipeline": {"true_cfg_scale": 1.0, "max_sequence_length": 1024},
            "FluxPipeline": {"guidance_scale": GUIDANCE, "max_sequence_length": 48},
            "Flux2Pipeline": {"guidance_scale": GUIDANCE, "max_sequence_length": 128},
            "ZImagePipeline": {"guidance_scale": 0.0},
        }[type(self.pipeline).__name__]
        return self.pipeline(height=HEIGHT, width=WIDTH, num_inference_steps=2, **{**own, **more})

    def grid(self, states: torch.Tensor) -> torch.Tensor:
        """What the stock pipeline denoises, in the form in which the family keeps latents; unpacked by the pipeline."""
        name = type(self.pipeline).__name__
        if name in ("WanPipeline", "ZImagePipeline"):
            return states
        if name == "Flux2Pipeline":
            ids = self.pipeline._prepare_latent_ids(torch.zeros(1, 1, HEIGHT // 16, WIDTH // 16))
            unpacked: torch.Tensor = self.pipeline._unpack_latents_with_ids(states, ids)
            return unpacked
        unpacked = self.pipeline._unpack_latents(states, HEIGHT, WIDTH, 8)
        return torch.pixel_unshuffle(unpacked[:, :, 0] if unpacked.ndim == 5 else unpacked, 2)


@pytest.fixture(scope="module", params=BASES)
def case(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Case:
    family, _ = find_variant(request.param, option="VARIANT")
    folder = tiny_models(request.param)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return Case(request.param, family, pipeline, folder)


def test_the_base_variants_are_of_all_families() -> None:
    names = dict.fromkeys(family.name for family in all_families())
    assert [find_variant(name, option="")[0].name for name in BASES] == list(names)


def test_a_folder_is_recognised(case: Case) -> None:
    assert recognise_variant(str(case.folder), option="model.path", variant_option="model.variant") == case.variant


def test_denoise_is_what_the_stock_pipeline_does_in_a_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing, places, masks, guidance, and the scale and sign of timestep and prediction."""
    steps: list[tuple[torch.Tensor, ...]] = []
    step = case.pipeline.scheduler.step

    def record(prediction: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, **more: Any) -> Any:
        steps.append((prediction.clone(), timestep.clone(), sample.clone()))
        return step(prediction, timestep, sample, **more)

    monkeypatch.setattr(case.pipeline.scheduler, "step", record)
    case.stock(prompt=PROMPTS[1], output_type="latent")
    prediction, timestep, sample = steps[1]
    assert 0 < float(timestep) < 990
    with torch.no_grad():
        found = case.family.denoise(
            case.pipeline.transformer, case.grid(sample), timestep.reshape(1) / 1000, case.conditions(PROMPTS[1])
        )
    assert relative_error(found, case.grid(prediction)) <= 1e-6


def test_a_picture_is_encoded_to_what_the_stock_pipeline_decodes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline hands the same latents to its VAE that the VAE had encoded."""
    x = torch.linspace(0, 3, WIDTH)[None, :] + torch.linspace(0, 2, HEIGHT)[:, None]
    frames = ((torch.stack([x.sin(), x.cos(), (2 * x).sin()], dim=-1) + 1) * 127).to(torch.uint8).numpy()[None]
    expected, decoded = [], []
    vae, encode, decode = case.pipeline.vae, case.pipeline.vae.encode, case.pipeline.vae.decode

    def keep_encoded(pixels: torch.Tensor) -> Any:
        output = encode(pixels)
        expected.append(output.latent_dist.mode())
        return output

    def keep_decoded(latents: torch.Tensor, **more: Any) -> Any:
        decoded.append(latents)
        return decode(latents, **more)

    monkeypatch.setattr(vae, "encode", keep_encoded)
    latents = case.family.encode_media(case.pipeline, frames)["latents"][None]
    monkeypatch.setattr(vae, "decode", keep_decoded)
    # A last step that makes the clean latents of whatever there was before.
    clean = case.pipeline.scheduler.step

    def finish(prediction: torch.Tensor, timestep: Any, sample: torch.Tensor, **more: Any) -> Any:
        clean(prediction, timestep, sample, **more)
        return (_packed(case, latents, sample),)

    monkeypatch.setattr(case.pipeline.scheduler, "step", finish)
    case.stock(prompt="x", output_type="np")
    assert relative_error(decoded[-1].reshape(expected[0].shape), expected[0]) <= 1e-5


def _packed(case: Case, latents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Find, through the pipeline's own unpacking, the packed form of latents."""
    places = case.grid(torch.arange(like.numel(), dtype=torch.float32).reshape(like.shape)).flatten().long()
    packed = torch.empty(like.numel())
    packed[places] = latents.flatten()
    return packed.reshape(like.shape)


class Undivided(Tokens):
    """All tokens on one process."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def split(self, whole: torch.Tensor, dim: int, *, stream: str) -> torch.Tensor:
        self._lengths[stream] = whole.shape[dim]
        return whole

    def gather(self, part: torch.Tensor, dim: int, *, stream: str, summed: bool = False) -> torch.Tensor:
        return part

    def length(self, stream: str) -> int:
        return self._lengths[stream]

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        streams: tuple[str, ...],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert query.shape[1] == sum(self._lengths[stream] for stream in streams)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mask = None if mask is None else mask[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def _outcome(case: Case, model: Any, *prompts: str, places: slice = slice(None)) -> tuple[torch.Tensor, dict[str, Any]]:
    """Prediction for these prompts, and the gradients of all weights."""
    noisy, sigma = case.noise(2)[places], torch.tensor([0.7, 0.2])[places]
    model.zero_grad()
    prediction = case.family.denoise(model, noisy, sigma, case.conditions(*prompts))
    prediction.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return prediction.detach(), gradients


def _assert_equal_gradients(found: dict[str, Any], expected: dict[str, Any], bound: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        if float(value.norm()) > 1e-6 * largest:
            assert relative_error(found[name], value) <= bound, name


def test_our_processors_equal_the_stock_ones_on_one_process(case: Case) -> None:
    """With prompts of different length, so with masks."""
    model = type(case.pipeline.transformer).from_pretrained(case.folder / "transformer")
    expected, gradients = _outcome(case, model, *PROMPTS)
    stock = {name: type(module.processor) for name, module in model.named_modules() if hasattr(module, "processor")}
    tokens = Undivided()
    plan = case.family.sequence_plan(model, tokens)
    install_plan(model, plan, tokens)
    replaced = [name for name, kind in stock.items() if type(model.get_submodule(name).processor) is not kind]
    assert set(replaced) == set(plan.processors)
    found, others = _outcome(case, model, *PROMPTS)
    assert relative_error(found, expected) <= 1e-6
    _assert_equal_gradients(others, gradients)


def test_padding_of_a_shorter_prompt_changes_nothing(case: Case) -> None:
    model = case.pipeline.transformer
    together, gradients = _outcome(case, model, *PROMPTS)
    summed: dict[str, Any] = {}
    for place, prompt in enumerate(PROMPTS):
        alone, own = _outcome(case, model, prompt, places=slice(place, place + 1))
        assert relative_error(together[place : place + 1], alone) <= 2e-6
        summed = {name: summed.get(name, 0) + value for name, value in own.items()}
    _assert_equal_gradients(gradients, summed, 5e-5)  # biases of keys are sums that nearly cancel
    model.zero_grad()


@pytest.mark.parametrize("variant", IMAGES)
def test_the_automatic_shift_is_that_of_the_publishers_sampler(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, variant: str
) -> None:
    options = (f"model.variant={variant}", "data.frames=1", "data.height=512", "data.width=768")
    inputs = check_inputs(runs.config(tiny_models(variant), clips, tmp_path / "run", *options))
    tokens = 32 * 48
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    scheduler = find_variant(variant, option="")[1].scheduler
    if variant == "z-image-turbo":
        expected = scheduler["shift"]
    elif variant == "flux.2-dev":
        expected = math.exp(compute_empirical_mu(tokens, 50))
    else:
        expected = math.exp(calculate_shift(tokens, *(scheduler[key] for key in keys)))
    assert inputs.shift == pytest.approx(expected, rel=1e-9)
    if variant == "flux.2-dev":
        long = math.exp(compute_empirical_mu(5000, 50))
        assert inputs.family.shift(inputs.source.scheduler, 5000) == pytest.approx(long)
    sigma = torch.tensor([0.1, 0.5, 0.9])
    stock = FlowMatchEulerDiscreteScheduler().time_shift(math.log(expected), 1.0, sigma)
    torch.testing.assert_close(expected * sigma / (1 + (expected - 1) * sigma), stock)


@pytest.mark.parametrize("variant", BASES)
def test_guidance_is_for_models_that_take_it(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, variant: str
) -> None:
    options = (f"model.variant={variant}", "data.frames=1")
    folder = tiny_models(variant)
    distilled = variant.startswith("flux")
    assert check_inputs(runs.config(folder, clips, tmp_path / "a", *options)).guidance == (1.0 if distilled else None)
    config = runs.config(folder, clips, tmp_path / "b", *options, "objective.guidance=3.5")
    if not distilled:
        with pytest.raises(UserError, match=r"objective.guidance: 3.5, but .* is not guidance-distilled"):
            check_inputs(config)
        return
    if variant == "flux.2-dev":  # whose published config lacks the entry
        family = find_variant(variant, option="")[0]
        assert family.takes_guidance({}) and not family.takes_guidance({"guidance_embeds": False})
    batch = next(runs.batches(check_inputs(config)).micro_batches(0))
    assert batch.conditions["guidance"].tolist() == [3.5]


@dataclass
class _Keeper(Observer):
    """Keeps the trained model."""

    model: Any = None

    def run_done(self, strategy: Strategy) -> None:
        self.model = strategy.model


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_was_trained_loads_into_the_stock_pipeline(case: Case, clips: Path, tmp_path: Path, method: str) -> None:
    options = [f"model.variant={case.variant}", "data.frames=1", f"train.method={method}", "train.learning_rate=1e-2"]
    options += ["train.steps=2", "log.flops=true"]
    inputs = check_inputs(runs.config(case.folder, clips, tmp_path / "run", *options))
    keeper = _Keeper()
    checkpoint = train(inputs, Processes(inputs.layout, "cpu", timeout_minutes=1), keeper)
    assert checkpoint is not None
    assert runs.metrics(inputs.config)[1]["mfu"] > 0  # of a peak that is measured, so a busy machine may exceed it

    def predict(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return case.family.denoise(model, case.noise(1), torch.tensor([0.6]), case.conditions(PROMPTS[0]))

    trained, base = predict(keeper.model.eval()), predict(case.pipeline.transformer)
    assert relative_error(trained, base) > 1e-3
    if method == "full":
        loaded = type(case.pipeline.transformer).from_pretrained(checkpoint / "transformer")
        assert relative_error(predict(loaded), trained) <= 1e-6
        return
    exported = tmp_path / "exported.safetensors"
    assert main(["export", str(checkpoint), "--format", "diffusers", "--output", str(exported)]) == 0
    pipeline = DiffusionPipeline.from_pretrained(case.folder)
    pipeline.load_lora_weights(str(tmp_path), weight_name=exported.name)
    assert relative_error(predict(pipeline.transformer), trained) <= 1e-5


@pytest.mark.parametrize("negative", ["", "a dog"])
def test_generate_equals_the_stock_pipeline(
    case: Case, tmp_path: Path, negative: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "picture.png"
    size = ["--height", str(HEIGHT), "--width", str(WIDTH), "--frames", "1", "--steps", "2", "--guidance", "3"]
    own = ["--prompt", PROMPTS[0], "--negative-prompt", negative, "--dtype", "float32", "--device", "cpu"]
    status = main(["generate", "--model", str(case.folder), *size, *own, "--output", str(file)])
    if negative and not case.family.takes_negative_prompt:
        assert status == 2
        assert "--negative-prompt: flux." in capsys.readouterr().err
        return
    assert status == 0
    guidance = {"true_cfg_scale" if case.variant == "qwen-image" else "guidance_scale": 3.0}
    more = {"negative_prompt": negative} if case.family.takes_negative_prompt else {}
    output = case.stock(
        prompt=PROMPTS[0], generator=torch.Generator().manual_seed(0), output_type="np", **guidance, **more
    )
    stock = output.frames[0][0] if hasattr(output, "frames") else output.images[0]
    assert np.array_equal(np.asarray(Image.open(file)), (stock * 255).round().astype(np.uint8))


def test_generate_in_bfloat16_runs(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    size = ["--height", "32", "--width", "32", "--frames", "1", "--steps", "2", "--device", "cpu"]
    assert main(["generate", "--model", str(case.folder), *size, "--prompt", "x", "--output", str(file)]) == 0
    assert Image.open(file).size == (32, 32)


@pytest.mark.parametrize("variant", IMAGES)
def test_families_of_pictures_refuse_clips(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.config(tiny_models(variant), clips, tmp_path / "run", f"model.variant={variant}")
    with pytest.raises(UserError, match=r"data.frames: 5, but .* makes pictures; use 1"):
        check_inputs(config)
    arguments = [
        "generate",
        "--model",
        str(tiny_models(variant)),
        "--frames",
        "5",
        "--prompt",
        "x",
        "--output",
        "x.mp4",
    ]
    assert main(arguments) == 2
    assert "--frames: 5, but" in capsys.readouterr().err
