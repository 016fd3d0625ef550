"""Applies to the plain model, in a fixed order, all that a run needs, and makes its loss function."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowshard.config import ActivationPolicy
from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.memory.activations import apply_activation_policies, block_policies
from flowshard.objective.flow import add_noise, sample_losses
from flowshard.parallel.plan import apply_sequence_plan
from flowshard.parallel.sequence import SequenceGroup
from flowshard.parallel.strategies import GroupSettings, Strategy
from flowshard.patterns import select
from flowshard.train.checkpoint import Checkpoint, StateReader
from flowshard.train.inputs import RunInputs
from flowshard.train.optimizer import group_settings
from flowshard.weights import lora
from flowshard.weights.extend import Extension, extend_model
from flowshard.weights.load import NewTensor, build_model, declare_types, materialise
from flowshard.weights.lora_files import load_factors
from flowshard.weights.precision import compute_in_float32
from flowshard.weights.report import LoadReport, some

PolicyChoice = Callable[[torch.nn.Module, Sequence[torch.nn.Module]], list[ActivationPolicy]]
LossFunction = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


@dataclass
class Build:
    """A transformer on its way from the meta device to its strategy."""

    model: torch.nn.Module
    blocks: list[torch.nn.Module]
    policies: list[ActivationPolicy]
    settings: dict[str, GroupSettings]
    """Of every trained parameter, by its name in the model."""
    new: dict[str, NewTensor]
    """What makes the value of every tensor that the files may lack."""
    removed: frozenset[str] = frozenset()
    """Names of the stock model that are gone."""


def build_on_meta(
    inputs: RunInputs,
    sequence: SequenceGroup | None = None,
    *,
    measure: Callable[[torch.nn.Module], None] | None = None,
    choose: PolicyChoice | None = None,
) -> Build:
    """The transformer with adapters, sequence plan and activation policies; no weight has been read.

    Order: build, the user's extension, adapters, what is trained, types, sequence plan, activation policies.

    Args:
        inputs: checked.
        sequence: the processes that share the tokens of a sample, if there are several.
        measure: is shown the model in its final types, before its tokens are divided and its activations have policies.
        choose: is shown the model and its blocks before the activations have policies, and gives these if they are `auto`.

    Raises:
        UserError: the extension fails, a pattern matches nothing, or the policies name more blocks than there are.
    """
    config = inputs.config
    model = build_model(inputs.family.transformer_class, {**inputs.source.config, **_shortened(inputs)})
    spec = config.model.extend
    extension = Extension() if spec is None else extend_model(model, spec, seed=config.seed)
    trained = _trained(model, inputs, extension)
    model.requires_grad_(False)
    if inputs.adapted:
        modules = dict(model.named_modules())
        targets = [name for name in inputs.adapted if name in modules]
        lora.inject(model, targets=targets, rank=config.lora.rank, alpha=config.lora.alpha)
    for name, parameter in model.named_parameters():
        if lora.base_name(name) in trained:
            parameter.requires_grad_(True)
    dtype = getattr(torch, config.model.dtype)
    declare_types(model, dtype)
    if dtype != torch.float32:
        compute_in_float32(model)
    if measure is not None:
        measure(model)
    if sequence is not None:
        apply_sequence_plan(model, inputs.family.sequence_plan, sequence)
    blocks = inputs.family.blocks(model)
    if config.memory.activations == "auto" and choose is not None:
        policies = choose(model, blocks)
    else:
        policies = block_policies(config.memory, len(blocks))
    apply_activation_policies(model, blocks, policies, partitioned=inputs.layout.strategy == "zero3")
    new = {name: NewTensor(make, "LoRA") for name, make in lora.initial_values(model, seed=config.seed).items()}
    if inputs.init_from is not None:
        scale = config.lora.alpha / config.lora.rank
        for name, make in lora.values_from(load_factors(inputs.init_from), scale=scale).items():
            new[name] = NewTensor(make, f"LoRA from {inputs.init_from.path}")
    for name, value in extension.values.items():
        new[name] = NewTensor(partial(_given, value), extension.how[name], forced=name in extension.declared)
    settings = group_settings(model, config.train)
    return Build(model.train(), blocks, policies, settings, new, frozenset(extension.removed))


def _trained(model: torch.nn.Module, inputs: RunInputs, extension: Extension) -> set[str]:
    """Names of the parameters that are trained, adapters left out: what was selected, and what was added."""
    if inputs.config.model.extend is None:
        return set(inputs.trained)
    train = inputs.config.train
    names = [name for name, _ in model.named_parameters()]
    if train.method == "full" and not train.modules:
        return set(names)
    chosen = set(select(names, train.modules, option="train.modules"))
    return chosen if train.method == "full" else chosen | (extension.values.keys() & set(names))


def _given(value: torch.Tensor) -> torch.Tensor:
    return value


def _shortened(inputs: RunInputs) -> dict[str, Any]:
    """What `model.layers` changes in the transformer's config."""
    layers = inputs.config.model.layers
    return {} if layers is None else inputs.family.shortened(inputs.source.config, layers)


def use_masters(build: Build, checkpoint: Checkpoint, reader: StateReader) -> None:
    """Let every trained parameter get its value from a checkpoint.

    Raises:
        UserError: other parameters were trained.
    """
    missing = [name for name in build.settings if name not in checkpoint.masters]
    more = [name for name in checkpoint.masters if name not in build.settings]
    if missing or more:
        problems = [f"it lacks {some(missing)}"] * bool(missing) + [f"it has besides {some(more)}"] * bool(more)
        raise UserError(
            f"resume: {checkpoint.path} trained other tensors: {'; '.join(problems)}; set train.modules, lora.targets and "
            "model.extend as they were"
        )
    for name in build.settings:
        build.new[name] = NewTensor(partial(reader.master, name), f"from {checkpoint.path}", forced=True)


def fill(build: Build, inputs: RunInputs, strategy: Strategy) -> LoadReport:
    """Divide the model as the strategy does and give it its weights.

    Raises:
        UserError: the files do not fill the model.
    """
    strategy.shard(build.model, build.blocks)
    return materialise(
        build.model,
        inputs.tensors,
        source=inputs.source.transformer,
        units=build.blocks,
        new=build.new,
        strategy=strategy,
        removed=build.removed,
        presets=[load_factors(file) for file in inputs.presets],
        ignore_unexpected=inputs.config.model.unexpected == "ignore",
    )


def loss_function(family: Family, *, dtype: torch.dtype, device: torch.device) -> LossFunction:
    """What maps a model and the tensors of a micro-batch (`MicroBatch.tensors`) to its loss.

    The loss is float32: the mean over the samples of weight times what `sample_loss_function` gives.
    """
    losses_of = sample_loss_function(family, dtype=dtype, device=device)

    def loss(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return (losses_of(model, tensors) * tensors["weight"].to(device)).mean()

    return loss


def sample_loss_function(family: Family, *, dtype: torch.dtype, device: torch.device) -> LossFunction:
    """What maps a model and the tensors of a micro-batch to the loss of each sample, without its weight.

    The losses are float32 of shape (batch,): mean squared errors. The model computes under autocast to `dtype`, with
    inputs of that type, unless it is float32.
    """

    def losses(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        clean, noise, sigma, _ = (tensors.pop(name) for name in ("latents", "noise", "sigma", "weight"))
        noisy = add_noise(clean, noise, sigma).to(dtype)
        conditions = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
        with mixed:
            prediction = family.denoise(model, noisy, sigma, conditions)
        learned = (family.learned(tensor, conditions) for tensor in (prediction, clean, noise))
        return sample_losses(*learned)

    return losses
