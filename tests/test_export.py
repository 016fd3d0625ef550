"""What is saved gives, in the stock pipeline, what was trained."""

import math
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from flowshard.train.inputs import check_inputs
from tests import runs


def _trained_in_memory(tiny: Path, clips: Path, folder: Path, *options: str) -> tuple[torch.nn.Module, Path]:
    """A model whose trained parameters were moved by random amounts, and a folder with what was saved of it."""
    config = runs.config(tiny, clips, folder / "run", *options)
    filled = runs.fill_model(check_inputs(config))
    model = filled.model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    saved = folder / "saved"
    saved.mkdir()
    assert filled.writer.write(saved, filled.strategy.parameters) is None
    return model, saved


def _output(transformer: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    dtype = next(transformer.parameters()).dtype
    with torch.no_grad():
        output: torch.Tensor = transformer(
            hidden_states=torch.randn(2, 16, 2, 4, 4, generator=generator).to(dtype),
            timestep=torch.tensor([300.0, 700.0]),
            encoder_hidden_states=torch.randn(2, 512, 64, generator=generator).to(dtype),
            return_dict=False,
        )[0]
    return output


@pytest.mark.parametrize(("rank", "alpha"), [(4, 4), (32, 1), (16, 64)])
def test_lora_in_the_stock_pipeline_equals_the_trained_model(
    tiny: Path, clips: Path, tmp_path: Path, rank: int, alpha: int
) -> None:
    model, saved = _trained_in_memory(tiny, clips, tmp_path, f"lora.rank={rank}", f"lora.alpha={alpha}")
    pipeline = WanPipeline.from_pretrained(tiny)
    base = _output(pipeline.transformer)
    pipeline.load_lora_weights(str(saved), weight_name="lora.safetensors")
    expected = _output(model)
    assert (expected - base).norm() > 1e-3 * base.norm(), "the adapter must have an effect"
    torch.testing.assert_close(_output(pipeline.transformer), expected, rtol=1e-6, atol=1e-6)
    pipeline.fuse_lora()
    torch.testing.assert_close(_output(pipeline.transformer), expected, rtol=1e-5, atol=1e-5)


def test_lora_file_has_diffusers_names_for_every_target_and_nothing_else(
    tiny: Path, clips: Path, tmp_path: Path
) -> None:
    _, saved = _trained_in_memory(tiny, clips, tmp_path, "lora.targets=[q,ffn.0]", "lora.rank=3")
    with safe_open(saved / "lora.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
    layers = [f"blocks.{i}.{a}.to_q" for i in range(3) for a in ("attn1", "attn2")] + [
        f"blocks.{i}.ffn.net.0.proj" for i in range(3)
    ]
    assert names == {f"transformer.{layer}.lora_{factor}.weight" for layer in layers for factor in "AB"}
    assert not (saved / "modules.safetensors").exists()


def test_initial_adapters_follow_peft_and_do_not_depend_on_other_targets(
    tiny: Path, clips: Path, tmp_path: Path
) -> None:
    states = []
    for name, targets in (("a", "[q]"), ("b", "[k,q]")):
        inputs = check_inputs(
            runs.config(tiny, clips, tmp_path / name, f"lora.targets={targets}", "model.dtype=bfloat16")
        )
        states.append(dict(runs.fill_model(inputs).model.named_parameters()))
    key = "blocks.1.attn1.to_q.lora_A.default.weight"
    assert torch.equal(states[0][key], states[1][key])
    bound = math.sqrt(6 / ((1 + 5) * 192))  # Kaiming uniform with a = sqrt(5) over 192 inputs
    assert 0.95 * bound < states[0][key].abs().max() <= bound
    assert states[0][key].dtype == torch.float32
    assert not torch.equal(states[0][key], states[0][key.replace("blocks.1", "blocks.0")])
    assert all(not value.any() for name, value in states[1].items() if "lora_B" in name)
    normal = runs.config(tiny, clips, tmp_path / "c", "lora.targets=[q]", "lora.init=gaussian", "lora.rank=8")
    value = dict(runs.fill_model(check_inputs(normal)).model.named_parameters())[key]
    assert value.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert value.abs().max() > 0.3  # uniform values of that deviation end at 0.22


def test_lora_file_loads_with_peft_alone(tiny: Path, clips: Path, tmp_path: Path) -> None:
    model, saved = _trained_in_memory(tiny, clips, tmp_path)
    plain = WanTransformer3DModel.from_pretrained(tiny / "transformer")
    state = {name.removeprefix("transformer."): value for name, value in load_file(saved / "lora.safetensors").items()}
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in state})
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=modules), plain)
    outcome = set_peft_model_state_dict(plain, state)
    assert not outcome.unexpected_keys
    torch.testing.assert_close(_output(plain), _output(model), rtol=1e-6, atol=1e-6)


def test_full_weights_in_from_pretrained_equal_the_trained_model(tiny: Path, clips: Path, tmp_path: Path) -> None:
    model, saved = _trained_in_memory(tiny, clips, tmp_path, "train.method=full")
    stock = WanTransformer3DModel.from_pretrained(saved / "transformer")
    for name, value in model.state_dict().items():
        assert torch.equal(stock.state_dict()[name], value), name
    torch.testing.assert_close(_output(stock), _output(model), rtol=1e-6, atol=1e-6)


def test_only_the_chosen_modules_change_in_full_training(tiny: Path, clips: Path, tmp_path: Path) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", "train.method=full", "train.modules=[blocks.1, proj_out]")
    found = load_file(runs.run(config) / "transformer" / "diffusion_pytorch_model.safetensors")
    base = WanTransformer3DModel.from_pretrained(tiny / "transformer").state_dict()
    changed = {name for name in base if not torch.equal(base[name], found[name])}
    assert changed == {name for name in base if name.startswith(("blocks.1.", "proj_out."))}


def test_modules_beside_a_lora_are_saved_in_full(tiny: Path, clips: Path, tmp_path: Path) -> None:
    model, saved = _trained_in_memory(tiny, clips, tmp_path, "train.modules=[proj_out, blocks.0.attn1.norm_q]")
    modules = load_file(saved / "modules.safetensors")
    assert modules.keys() == {"proj_out.weight", "proj_out.bias", "blocks.0.attn1.norm_q.weight"}
    pipeline = WanPipeline.from_pretrained(tiny)
    pipeline.transformer.load_state_dict(modules, strict=False)
    pipeline.load_lora_weights(str(saved), weight_name="lora.safetensors")
    torch.testing.assert_close(_output(pipeline.transformer), _output(model), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "lora", "plain"),
    [
        ((), torch.float32, torch.bfloat16),
        (("save.dtype=bfloat16",), torch.bfloat16, torch.bfloat16),
        (("save.dtype=float32",), torch.float32, torch.float32),
    ],
)
def test_saved_types_follow_the_option_and_the_model(
    tiny: Path, clips: Path, tmp_path: Path, options: tuple[str, ...], lora: torch.dtype, plain: torch.dtype
) -> None:
    _, adapters = _trained_in_memory(tiny, clips, tmp_path / "lora", "model.dtype=bfloat16", *options)
    assert {tensor.dtype for tensor in load_file(adapters / "lora.safetensors").values()} == {lora}
    _, full = _trained_in_memory(tiny, clips, tmp_path / "full", "model.dtype=bfloat16", "train.method=full", *options)
    weights = load_file(full / "transformer" / "diffusion_pytorch_model.safetensors")
    assert weights["proj_out.weight"].dtype == plain
    assert weights["blocks.0.scale_shift_table"].dtype == torch.float32, "the model keeps it in float32"
    assert weights["condition_embedder.time_embedder.linear_1.weight"].dtype == torch.float32
