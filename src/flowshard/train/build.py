"""Applies to the plain model, in a fixed order, all that a run needs, and makes its loss function."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from flowshard.families.base import Family
from flowshard.objective.flow import add_noise, sample_losses
from flowshard.train.inputs import RunInputs
from flowshard.weights import lora
from flowshard.weights.files import TRANSFORMER_FOLDER
from flowshard.weights.load import LoadReport, build_on_meta, materialise
from flowshard.weights.precision import compute_in_float32

LossFunction = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def build_transformer(inputs: RunInputs, *, device: torch.device) -> tuple[torch.nn.Module, LoadReport]:
    """The transformer with adapters and weights, ready for a strategy.

    Order: build on meta, adapters, what is trained, weights, new weights.

    Raises:
        UserError: the files do not fill the model.
    """
    config = inputs.config
    source = inputs.folder / TRANSFORMER_FOLDER
    model = build_on_meta(inputs.family.transformer_class, source)
    model.requires_grad_(False)
    if inputs.adapted:
        lora.inject(model, targets=inputs.adapted, rank=config.lora.rank, alpha=config.lora.alpha)
    trained = set(inputs.trained)
    for name, parameter in model.named_parameters():
        if lora.base_name(name) in trained:
            parameter.requires_grad_(True)
    dtype = getattr(torch, config.model.dtype)
    report = materialise(model, inputs.tensors, source=source, dtype=dtype, device=device)
    report.new.update(lora.initialise(model, seed=config.seed, device=device))
    if dtype != torch.float32:
        compute_in_float32(model)
    return model.train(), report


def loss_function(family: Family, *, dtype: torch.dtype, device: torch.device) -> LossFunction:
    """What maps a model and the tensors of a micro-batch (`MicroBatch.tensors`) to its loss.

    The loss is float32: the mean over the samples of weight times mean squared error. The model computes under autocast
    to `dtype`, with inputs of that type, unless it is float32.
    """

    def loss(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        clean, noise, sigma, weight = (tensors.pop(name) for name in ("latents", "noise", "sigma", "weight"))
        noisy = add_noise(clean, noise, sigma).to(dtype)
        conditions = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
        with mixed:
            prediction = family.denoise(model, noisy, sigma, conditions)
        return (sample_losses(prediction, clean, noise) * weight).mean()

    return loss
