"""How far float32 gradients of one process and of several are from those of stock diffusers in float64."""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from flowshard.config_file import load_config
from flowshard.objective.flow import add_noise
from flowshard.parity.cases import case_config, parse_case
from flowshard.parity.compare import ROUNDING
from flowshard.parity.launch import trace_cases
from flowshard.parity.trace import GRADIENTS
from flowshard.train.batches import MicroBatch
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.test_layouts_agree import METHODS, options
from tests.test_sequence import ODD


def _exact_gradients(transformer: Path, batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Of the mean loss, in float64 from the inputs on, which are the run's own in float32."""
    model = WanTransformer3DModel.from_pretrained(transformer).double()
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
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_gradients_of_one_process_and_of_several_are_those_of_float64(tiny: Path, tmp_path: Path) -> None:
    """With two to four tokens a process, for which torch's attention on the CPU rounds most, and with six."""
    asked = options(tiny, ["single", "sp:3", "sp:5", "sp:8"], *METHODS["full"], *ODD)
    cases = [parse_case(label) for label in asked.layouts]
    overrides = [*asked.overrides, "train.steps=1"]
    configs = {case: case_config(case, asked.config, overrides, tmp_path) for case in cases}
    traces = trace_cases(configs, tmp_path, fault=None)
    inputs = check_inputs(load_config(traces[cases[0]] / "config.yaml"))
    exact = _exact_gradients(tiny / "transformer", list(runs.batches(inputs).micro_batches(0)))
    whole = float(torch.cat([value.flatten() for value in exact.values()]).norm())
    for case in cases:
        found = load_file(traces[case] / GRADIENTS)
        assert found.keys() == exact.keys()
        for name, value in exact.items():
            error = float((found[name].double() - value).norm())
            assert error <= max(1e-5 * float(value.norm()), ROUNDING * whole), f"{case.label}: {name}"
