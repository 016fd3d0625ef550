"""The Wan variants with conditions besides the prompt, or two transformers, against the stock pipelines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from flowshard.cli import main
from flowshard.config_file import load_config
from flowshard.data.media import read_frames
from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.objective.sigmas import NoiseLevels
from flowshard.parallel.plan import install_plan
from flowshard.parallel.processes import Processes
from flowshard.parity.command import parity
from flowshard.train.build import loss_function
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.weights.source import recognise_variant
from tests import runs
from tests.conftest import REPOSITORY
from tests.runs import relative_error
from tests.test_families import Undivided, _assert_equal_gradients, _Keeper
from tests.test_layouts_agree import METHODS, options
from tests.wan_variants import (
    FRAMES,
    HEIGHT,
    INPUTS,
    PROMPT,
    WIDTH,
    Case,
    TinyModels,
    assert_same_calls,
    open_case,
    record,
    write_data,
)

VARIANTS = (
    "wan2.1-i2v-14b-480p",
    "wan2.1-flf2v-14b-720p",
    "wan2.2-t2v-a14b",
    "wan2.2-i2v-a14b",
    "wan2.2-ti2v-5b",
    "wan2.1-vace-1.3b",
    "wan2.2-vace-fun-a14b",
)
SAME_CODE = ("wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "wan2.1-vace-14b")
"""Variants that differ from another one in size alone."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, clips)
    return folder


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tiny_models: TinyModels, data: Path) -> Case:
    return open_case(request.param, tiny_models, data)


@pytest.fixture(scope="module")
def ti2v(tiny_models: TinyModels, data: Path) -> Case:
    return open_case("wan2.2-ti2v-5b", tiny_models, data)


def test_conditions_and_denoise_are_what_the_stock_pipeline_does(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the files that the metadata names: latents, masks, CLIP embedding, timesteps, and which transformer."""
    batch = case.batch(tmp_path / "run", "train.global_batch=1")
    calls = record(case.pipeline, monkeypatch)
    case.stock()
    steps = list(calls)
    assert_same_calls(case, calls, batch.conditions)
    assert batch.latents.shape == steps[0].sample.shape
    if "vace" in case.name:  # the reference picture, as the branch gets it, before the clip
        assert torch.equal(batch.latents[:, :, 0], batch.conditions["control"][:, :16, 0])
    experts = case.variant.experts or {"high": (0.0, 1.0)}
    for call in steps:
        low, high = experts["high" if call.model is case.pipeline.transformer else "low"]
        assert low <= float(call.sigma) <= high
    assert len({id(call.model) for call in steps}) == len(experts)


def test_the_folder_of_another_variant_is_refused(case: Case, tmp_path: Path, tiny_models: TinyModels) -> None:
    """What all of them share are the class of the pipeline and of the transformer, and the number of heads."""
    mistakes = {
        "wan2.1-i2v-14b-480p": ("wan2.1-flf2v-14b-720p", "has pos_embed_seq_len 10, which wan2.1-i2v-14b-480p has not"),
        "wan2.1-flf2v-14b-720p": ("wan2.2-i2v-a14b", "has image_dim None, which wan2.1-flf2v-14b-720p has not"),
        "wan2.2-t2v-a14b": ("wan2.1-t2v-14b", "has one transformer, wan2.2-t2v-a14b has two"),
        "wan2.2-i2v-a14b": ("wan2.1-i2v-14b-480p", "has image_dim 32, which wan2.2-i2v-a14b has not"),
        "wan2.2-ti2v-5b": ("wan2.1-t2v-14b", "has out_channels 16, which wan2.2-ti2v-5b has not"),
        "wan2.1-vace-1.3b": ("wan2.2-vace-fun-a14b", "has two transformers, wan2.1-vace-1.3b has one"),
    }
    if case.name not in mistakes:
        return
    other, message = mistakes[case.name]
    expert = [] if case.variant.experts is None else ["model.expert=high"]
    with pytest.raises(UserError, match=message):
        check_inputs(case.config(tmp_path / "run", f"model.path={tiny_models(other)}", *expert))
    if case.name != "wan2.1-i2v-14b-480p":  # that of 720p is no other
        assert recognise_variant(str(case.folder), option="", variant_option="") == case.name


def test_a_picture_is_trained_as_text_to_image(ti2v: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = DiffusionPipeline.from_pretrained(ti2v.folder)
    batch = ti2v.batch(tmp_path / "run", "train.global_batch=1", metadata="picture.csv")
    calls = record(pipeline, monkeypatch)
    size = {"height": HEIGHT, "width": WIDTH, "num_frames": 1, "num_inference_steps": 2}
    pipeline(prompt=PROMPT, guidance_scale=1.0, output_type="latent", **size)
    assert calls[1].arguments["timestep"].ndim == 2
    assert_same_calls(ti2v, calls, batch.conditions)
    assert torch.equal(ti2v.family.learned(batch.latents, batch.conditions), batch.latents)


def test_our_processors_equal_the_stock_ones_on_one_process(case: Case, tmp_path: Path) -> None:
    """Two samples in a batch; the output and every gradient."""
    batch = case.batch(tmp_path / "run", "train.global_batch=2", "train.micro_batch=2")
    outcomes = []
    for own in (False, True):
        model = type(case.pipeline.transformer).from_pretrained(case.folder / "transformer")
        if own:
            tokens = Undivided()
            plan = case.family.sequence_plan(model, tokens)
            assert set(plan.processors) == {name for name, _ in model.named_modules() if name.endswith(".attn1")}
            install_plan(model, plan, tokens)
        output = case.family.denoise(model, batch.noise, torch.tensor([0.7, 0.2]), batch.conditions)
        output.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert len(gradients) == len(list(model.parameters()))
        outcomes.append((output.detach(), gradients))
    (expected, gradients), (found, others) = outcomes
    assert relative_error(found, expected) <= 1e-6
    _assert_equal_gradients(others, gradients)


def test_the_first_latent_frame_of_ti2v_takes_no_part_in_the_loss(ti2v: Case, tmp_path: Path) -> None:
    batch = ti2v.batch(tmp_path / "run", "train.global_batch=1")
    loss = loss_function(ti2v.family, dtype=torch.float32, device=torch.device("cpu"))

    def value(frame: int | None, name: str = "latents") -> float:
        tensors = {key: tensor.clone() for key, tensor in batch.tensors().items()}
        if frame is not None:
            tensors[name][:, :, frame] += 1.0
        with torch.no_grad():
            return float(loss(ti2v.pipeline.transformer, tensors))

    assert value(0) == value(0, "noise") == value(None)
    assert value(1) != value(None) != value(0, "first_frame")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "a14b" in name])
def test_an_expert_learns_its_own_noise_levels(
    tiny_models: TinyModels, data: Path, tmp_path: Path, variant: str
) -> None:
    case = open_case(variant, tiny_models, data)
    assert case.variant.experts is not None
    draws = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    for expert, (low, high) in case.variant.experts.items():
        inputs = check_inputs(case.config(tmp_path / "run", f"model.expert={expert}"))
        assert inputs.source.transformer.name == ("transformer" if expert == "high" else "transformer_2")
        low, high = torch.tensor([low, high]).tolist()  # in float32, as the levels are
        sigmas = NoiseLevels(inputs.config.objective, inputs.shift).sigmas(draws)
        assert low <= float(sigmas.min()) < low + 0.01 and high - 0.02 < float(sigmas.max()) <= high
        for step in range(3) if expert == "low" else ():
            for batch in runs.batches(inputs).micro_batches(step):
                assert low <= float(batch.sigma.min()) <= float(batch.sigma.max()) <= high
    for change, message in (
        ("model.expert=null", "model.expert: .* has two transformers; set model.expert to high"),
        ("objective.sigma_range=[0.2,1.0]", r"objective.sigma_range: \[0.2, 1\] is not inside"),
    ):
        with pytest.raises(UserError, match=message):
            check_inputs(case.config(tmp_path / "run", change))
    one = open_case("wan2.1-i2v-14b-480p", tiny_models, data)
    with pytest.raises(UserError, match=r"model.expert: 'low', but wan2.1-i2v-14b-480p has one transformer"):
        check_inputs(one.config(tmp_path / "run", "model.expert=low"))


def test_what_no_column_gives_comes_from_the_clip_or_is_refused(case: Case, tmp_path: Path) -> None:
    if "vace" in case.name:
        for metadata in ("plain.csv", "mask_alone.csv"):
            with pytest.raises(UserError, match="row 1: has no 'vace_video' and no 'vace_reference_image'"):
                check_inputs(case.config(tmp_path / "run", metadata=metadata))
        with pytest.raises(UserError, match=r"pictures differ: row 1 has none, row 2 vace_reference_image"):
            check_inputs(case.config(tmp_path / "run", "train.micro_batch=2", metadata="mixed.csv"))
        return
    found = case.batch(tmp_path / "run", "train.global_batch=1", metadata="plain.csv").conditions
    frames = read_frames(case.data / "clip_0.mp4", height=HEIGHT, width=WIDTH, frames=FRAMES, where="")
    own = {"input_image": frames[:1], "end_image": frames[-1:]}
    inputs = {one.column: own[one.column] for one in case.family.inputs}
    expected = case.family.encode_inputs(case.pipeline, frames, inputs)
    assert found.keys() == expected.keys() | {"prompt_embeds"}
    for name, tensor in expected.items():
        assert relative_error(found[name][0], tensor) <= 1e-6
    if case.family.pipeline_class == "WanImageToVideoPipeline":
        with pytest.raises(
            UserError, match=r"picture.csv: row 1: first.png is a picture: frames: 1, but image to video"
        ):
            check_inputs(case.config(tmp_path / "run", metadata="picture.csv"))


def test_generate_equals_the_stock_pipeline(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[np.ndarray] = []

    def write(path: Path, frames: np.ndarray, *, fps: int) -> None:
        path.write_bytes(bytes(fps))
        written.append(frames)

    monkeypatch.setattr("flowshard.generate.write_video", write)
    steps = "2" if case.variant.experts is None else "4"
    size = [
        "--height",
        str(HEIGHT),
        "--width",
        str(WIDTH),
        "--frames",
        str(FRAMES),
        "--steps",
        steps,
        "--guidance",
        "3",
    ]
    model = ["--model", str(case.folder), "--variant", case.name, "--dtype", "float32", "--device", "cpu"]
    given = [f"--input={one.column}={case.data / INPUTS[one.column]}" for one in case.family.inputs]
    command = ["generate", *model, *size, "--prompt", PROMPT, "--output", str(tmp_path / "clip.mp4")]
    low = {} if case.variant.experts is None else {"guidance_scale_2": 2.0}
    assert main([*command, *given, *(["--guidance-low", "2"] if low else [])]) == 0
    stock = case.stock(guidance_scale=3.0, **low, generator=torch.Generator().manual_seed(0), output_type="np")[0]
    assert np.array_equal(written[0], (stock * 255).round().astype(np.uint8))
    capsys.readouterr()
    if given and case.name != "wan2.2-ti2v-5b":
        assert main(command) == 2
        assert case.family.inputs[0].column in capsys.readouterr().err
    if not low:
        assert main([*command, *given, "--guidance-low", "2"]) == 2
        assert "--guidance-low: " in capsys.readouterr().err


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_what_was_trained_loads_into_the_stock_pipeline(case: Case, tmp_path: Path, method: str) -> None:
    expert = [] if case.variant.experts is None else ["model.expert=low"]
    run = (*expert, f"train.method={method}", "train.steps=2", "train.global_batch=1", "train.learning_rate=1e-2")
    inputs = check_inputs(case.config(tmp_path / "run", *run))
    keeper = _Keeper()
    checkpoint = train(inputs, Processes(inputs.layout, "cpu", timeout_minutes=1), keeper)
    assert checkpoint is not None
    pipeline = DiffusionPipeline.from_pretrained(case.folder)
    batch = case.batch(tmp_path / "again", "train.global_batch=1")

    def predict(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return case.family.denoise(model, batch.noise, torch.tensor([0.5]), batch.conditions)

    model = pipeline.transformer_2 if expert else pipeline.transformer
    base, trained = predict(model), predict(keeper.model.eval())
    assert relative_error(trained, base) > 1e-3
    if method == "lora":
        where = {"load_into_transformer_2": True} if expert else {}
        pipeline.load_lora_weights(str(checkpoint), weight_name="lora.safetensors", **where)
        assert relative_error(predict(model), trained) <= 1e-5
        return
    component = "transformer_2" if expert else "transformer"
    loaded = type(model).from_pretrained(checkpoint / "transformer")
    whole = type(pipeline).from_pretrained(case.folder, **{component: loaded})
    assert relative_error(predict(getattr(whole, component)), trained) <= 1e-6
    # Nothing is left as it was, so that no parameter was passed over.
    before, after = model.state_dict(), loaded.state_dict()
    assert after.keys() == before.keys()
    assert [name for name in before if torch.equal(after[name], before[name])] == []


def test_the_branch_of_vace_can_be_trained_alone(tiny_models: TinyModels, data: Path, tmp_path: Path) -> None:
    case = open_case("wan2.1-vace-1.3b", tiny_models, data)
    run = ("train.method=full", "train.modules=[vace_*]", "train.steps=1", "train.global_batch=1")
    checkpoint = runs.run(case.config(tmp_path / "run", *run))
    before = case.pipeline.transformer.state_dict()
    after = type(case.pipeline.transformer).from_pretrained(checkpoint / "transformer").state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("vace_") for name in changed)
    # Of three layers the first two; the branch has blocks at the first and the third.
    shorter: Any = runs.fill_model(check_inputs(case.config(tmp_path / "short", "model.layers=2"))).model
    assert (len(shorter.blocks), len(shorter.vace_blocks)) == (2, 1)


def test_layers_have_the_names_of_the_publisher(case: Case) -> None:
    """In exported LoRA files; against diffusers' own converter, which does not know the places of FLF2V."""
    ours = list(case.pipeline.transformer.state_dict())
    pairs = {name: case.family.names.to_original(name) for name in ours if "pos_embed" not in name}
    assert {case.family.names.from_original(str(theirs)): theirs for theirs in pairs.values()} == pairs
    assert convert_wan_transformer_to_diffusers({theirs: theirs for theirs in pairs.values()}) == pairs


@pytest.mark.parametrize("name", [*VARIANTS, *SAME_CODE])
def test_the_example_starts_with_the_published_model(name: str, tmp_path: Path, tiny_models: TinyModels) -> None:
    file = REPOSITORY / "examples" / f"{name}_lora.yaml"
    config = load_config(file)
    _, variant = find_variant(name, option="")
    assert (config.model.variant, config.model.path) == (name, variant.hub_id)
    assert config.data.frames <= 25 and config.train.global_batch == 4
    inputs = check_inputs(load_config(file, [f"model.path={tiny_models(name)}", f"output={tmp_path / 'run'}"]))
    assert inputs.source.config["num_attention_heads"] == variant.heads
    assert inputs.shift == variant.scheduler["flow_shift"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_layout_equals_one_process(
    tiny_models: TinyModels, name: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = REPOSITORY / "examples" / f"{name}_lora.yaml"
    data = (f"data.metadata={REPOSITORY / str(load_config(file).data.metadata)}", "data.height=64", "data.width=64")
    own = METHODS["full"] if method == "full" else ()
    layouts = ["single", "zero3:2,activations=offload", "fsdp2:2", "sp:2"]
    parity(options(tiny_models(name), layouts, *data, *own, "train.global_batch=2", config=str(file), steps=2))
    assert "all layouts agree" in capsys.readouterr().out
