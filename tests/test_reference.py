"""A run against loops written by hand over the stock diffusers transformer."""

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file

from flowshard.config import Config
from flowshard.data.media import read_frames
from flowshard.train.batches import MicroBatch
from flowshard.train.build import loss_function
from flowshard.train.inputs import check_inputs
from tests import runs

CPU = torch.device("cpu")


def _stock_loss(transformer: torch.nn.Module, pipeline: WanPipeline, batch: MicroBatch, config: Config) -> torch.Tensor:
    """The loss of a micro-batch from the media up, sharing only noise and sigma with the run."""
    losses = []
    for row, noise, sigma in zip(batch.rows, batch.noise, batch.sigma, strict=True):
        frames = read_frames(row.media, height=runs.SIZE, width=runs.SIZE, frames=config.data.frames, where="")
        video = pipeline.video_processor.preprocess_video(torch.from_numpy(frames).permute(0, 3, 1, 2)[None] / 255.0)
        with torch.no_grad():
            latents = pipeline.vae.encode(video).latent_dist.mode()[0]
            embeds, _ = pipeline.encode_prompt(row.prompt, do_classifier_free_guidance=False, max_sequence_length=512)
        mean = torch.tensor(pipeline.vae.config.latents_mean).view(-1, 1, 1, 1)
        std = torch.tensor(pipeline.vae.config.latents_std).view(-1, 1, 1, 1)
        clean = (latents - mean) / std
        noisy = clean + sigma * (noise - clean)
        prediction = transformer(
            hidden_states=noisy[None], timestep=sigma[None] * 1000, encoder_hidden_states=embeds, return_dict=False
        )[0][0]
        losses.append(((prediction - (noise - clean)) ** 2).mean())
    return torch.stack(losses).mean()


def test_loss_of_a_micro_batch_equals_the_stock_transformer(tiny: Path, clips: Path, tmp_path: Path) -> None:
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "train.micro_batch=2", "train.global_batch=2"))
    batch = next(runs.batches(inputs).micro_batches(3))
    model = runs.fill_model(inputs).model
    found = loss_function(inputs.family, dtype=torch.float32, device=CPU)(model, batch.tensors())
    pipeline = WanPipeline.from_pretrained(tiny)
    expected = _stock_loss(pipeline.transformer, pipeline, batch, inputs.config)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_prediction_equals_the_pipelines_own_transformer_call(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """The call is taken from a one-step generation, so padding, timestep scale and shapes are all checked."""
    pipeline = WanPipeline.from_pretrained(tiny)
    calls: list[dict[str, torch.Tensor]] = []
    outputs: list[torch.Tensor] = []

    def note(
        _: torch.nn.Module, __: tuple[()], arguments: dict[str, torch.Tensor], output: tuple[torch.Tensor]
    ) -> None:
        calls.append(arguments)
        outputs.append(output[0])

    hook = pipeline.transformer.register_forward_hook(note, with_kwargs=True)
    prompt = "a fat grey rabbit yawns, animation"
    pipeline(
        prompt=prompt,
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=1,
        guidance_scale=1.0,
        output_type="latent",
    )
    hook.remove()
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "train.method=full", "lora.targets=null"))
    model = runs.fill_model(inputs).model
    encoders = inputs.family.load_encoders(inputs.source, dtype=torch.float32, device=CPU)
    conditions = inputs.family.batch_conditions([inputs.family.encode_text(encoders, prompt)])
    with torch.no_grad():
        found = inputs.family.denoise(model, calls[0]["hidden_states"], calls[0]["timestep"] / 1000, conditions)
    assert torch.equal(conditions["prompt_embeds"], calls[0]["encoder_hidden_states"])
    torch.testing.assert_close(found, outputs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["torch.optim.SGD", "adamw"])
def test_full_training_equals_a_hand_written_loop(tiny: Path, clips: Path, tmp_path: Path, optimizer: str) -> None:
    config = runs.config(
        tiny,
        clips,
        tmp_path / "run",
        "train.method=full",
        "train.micro_batch=2",
        "train.clip_norm=0.5",
        f"train.optimizer={optimizer}",
        f"train.learning_rate={1e-2 if 'SGD' in optimizer else 1e-4}",
        "train.schedule=linear",
        "train.warmup_steps=1",
    )
    checkpoint = runs.run(config)
    found = load_file(checkpoint / "transformer" / "diffusion_pytorch_model.safetensors")

    inputs = check_inputs(config)
    batches = runs.batches(inputs)
    pipeline = WanPipeline.from_pretrained(tiny)
    transformer = WanTransformer3DModel.from_pretrained(tiny / "transformer")
    plain = [p for n, p in transformer.named_parameters() if p.ndim > 1]
    vectors = [p for n, p in transformer.named_parameters() if p.ndim <= 1]
    groups = [{"params": plain, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    kind = torch.optim.SGD if "SGD" in optimizer else torch.optim.AdamW
    reference = kind(groups, lr=config.train.learning_rate)
    losses, norms = [], []
    for step, factor in enumerate((1.0, 1.0, 0.0)):
        for group in reference.param_groups:
            group["lr"] = config.train.learning_rate * factor
        reference.zero_grad()
        loss = sum(_stock_loss(transformer, pipeline, batch, config) / 2 for batch in batches.micro_batches(step))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(transformer.parameters(), 0.5).item())
        reference.step()
        losses.append(loss.item())

    logged = runs.metrics(config)
    assert [line["loss"] for line in logged] == pytest.approx(losses, rel=1e-6)
    assert [line["grad_norm"] for line in logged] == pytest.approx(norms, rel=1e-5)
    assert [line["learning_rate"] for line in logged] == [config.train.learning_rate] * 2 + [0.0]
    start = WanTransformer3DModel.from_pretrained(tiny / "transformer").state_dict()
    expected = dict(transformer.state_dict())
    assert runs.distance(start, expected) > 1e-5, "the reference must have moved"
    assert runs.distance(found, expected) < (1e-6 if "SGD" in optimizer else 1e-5)
