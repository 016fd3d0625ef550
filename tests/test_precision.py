"""Modules that a model keeps in float32."""

from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from flowshard.train.inputs import check_inputs
from flowshard.weights.precision import float32_modules, keeps_float32
from tests import runs


def test_diffusers_still_names_its_float32_modules_where_we_read_them(tiny: Path) -> None:
    """Fails when the private attribute is renamed or changes its meaning."""
    modules = float32_modules(WanTransformer3DModel)
    assert set(modules) >= {"time_embedder", "scale_shift_table", "norm2"}
    stock = WanTransformer3DModel.from_pretrained(tiny / "transformer", dtype=torch.bfloat16)
    for name, parameter in stock.named_parameters():
        assert (parameter.dtype == torch.float32) == keeps_float32(name, modules), name


def test_time_embedding_computes_in_float32_under_autocast(tiny: Path, clips: Path, tmp_path: Path) -> None:
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "model.dtype=bfloat16"))
    model = runs.fill_model(inputs).model
    embedder = model.get_submodule("condition_embedder.time_embedder")
    features = torch.randn(2, 256)
    expected = embedder(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = embedder(features)
        other = model.get_submodule("condition_embedder.time_proj")(expected)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert other.dtype == torch.bfloat16, "everything else is cast"


def test_bfloat16_loss_equals_the_stock_model_in_bfloat16(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Autocast over a frozen bfloat16 base computes what stock diffusers computes with bfloat16 weights."""
    inputs = check_inputs(runs.config(tiny, clips, tmp_path / "run", "model.dtype=bfloat16"))
    model = runs.fill_model(inputs).model
    stock = WanTransformer3DModel.from_pretrained(tiny / "transformer", dtype=torch.bfloat16)
    noisy = torch.randn(1, 16, 2, 4, 4).bfloat16()
    conditions = {"prompt_embeds": torch.randn(1, 512, 64).bfloat16()}
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = inputs.family.denoise(model, noisy, torch.tensor([0.5]), conditions)
        expected = stock(noisy, torch.tensor([500.0]), conditions["prompt_embeds"], return_dict=False)[0]
    assert (found.float() - expected.float()).norm() < 5e-3 * expected.float().norm()
