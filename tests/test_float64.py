"""How far float32 gradients of one process and of several are from those of stock diffusers in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file

from flowshard.config_file import load_config
from flowshard.objective.flow import add_noise
from flowshard.parity.cases import case_config, parse_case
from flowshard.parity.launch import trace_cases
from flowshard.parity.padding import fill_padding
from flowshard.parity.trace import GRADIENTS, spread
from flowshard.train.batches import MicroBatch
from flowshard.train.inputs import RunInputs, check_inputs
from flowshard.weights.lora import is_lora_b
from tests import runs
from tests.test_family_layouts import OWN
from tests.test_layouts_agree import options
from tests.test_sequence import ODD

LAYOUTS = {
    "full": ["single", "sp:3", "sp:5", "sp:8"],
    "lora": ["single", "single,compile=true,micro_batch=4", "sp:2,micro_batch=2", "fsdp2:2,sequence=2,ring=2"],
}
"""Of the first, with two to four tokens a process, for which torch's attention on the CPU rounds most, and with six."""


def _exact_gradients(model: Any, batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Of the mean loss, in float64 from the inputs on, which are the run's own in float32."""
    model.double()
    embedding = model.condition_embedder.timesteps_proj
    for batch in batches:
        noisy = add_noise(batch.latents, batch.noise, batch.sigma).double()
        embedded = embedding(batch.sigma * 1000).double()
        # Norms and residual sums of the model would otherwise go back to float32.
        with (
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
            mock.patch.object(embedding, "forward", return_value=embedded),
        ):
            prediction = model(
                hidden_states=noisy,
                timestep=batch.sigma * 1000,
                encoder_hidden_states=batch.conditions["prompt_embeds"].double(),
                return_dict=False,
            )[0]
        assert prediction.dtype == torch.float64
        loss = (prediction - (batch.noise.double() - batch.latents.double())).square().mean()
        (loss / len(batches)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _stock(transformer: Path, inputs: RunInputs) -> Any:
    """The stock model, with peft's adapters if the run has some, which start as they do in a trace."""
    model = WanTransformer3DModel.from_pretrained(transformer)
    if inputs.config.train.method == "full":
        return model
    lora = inputs.config.lora
    start = {name: one.data for name, one in runs.fill_model(inputs).model.named_parameters() if "lora_" in name}
    targets = [name.partition(".lora_")[0] for name in start]
    model.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(spread(name, start[name].clone) if is_lora_b(name) else start[name])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("method", LAYOUTS)
def test_gradients_of_one_process_and_of_several_are_those_of_float64(tiny: Path, tmp_path: Path, method: str) -> None:
    """Within the bound by which they may differ from one another."""
    asked = options(tiny, LAYOUTS[method], *OWN[method], *ODD)
    cases = [parse_case(label) for label in asked.layouts]
    overrides = [*asked.overrides, "train.steps=1"]
    configs = {case: case_config(case, asked.config, overrides, tmp_path) for case in cases}
    traces = trace_cases(configs, tmp_path, fault=None)
    inputs = check_inputs(load_config(traces[cases[0]] / "config.yaml"))
    batches = [fill_padding(batch, 0) for batch in runs.batches(inputs).micro_batches(0)]
    exact = _exact_gradients(_stock(tiny / "transformer", inputs), batches)
    for case in cases:
        found = load_file(traces[case] / GRADIENTS)
        assert found.keys() == exact.keys()
        for name, value in exact.items():
            error = runs.relative_error(found[name].double(), value)
            assert error < 1e-5, f"{case.label}: {name}: {error:.1e}"
