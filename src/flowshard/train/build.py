"""Applies to the plain model, in a fixed order, all that a run needs, and makes its loss function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from flowshard.config import ActivationPolicy, Config
from flowshard.device import CopyStream, autocast
from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.memory.activations import apply_activation_policies, block_policies
from flowshard.memory.compiled import CompileChoice, compile_blocks
from flowshard.memory.flops import CPU
from flowshard.memory.streaming import stream_blocks
from flowshard.objective.flow import add_noise, sample_losses
from flowshard.parallel.layout import Layout
from flowshard.parallel.plan import apply_plans
from flowshard.parallel.sequence import GroupShape
from flowshard.parallel.strategies import GroupSettings, Strategy
from flowshard.patterns import select
from flowshard.train.checkpoint import Checkpoint, StateReader
from flowshard.train.inputs import RunInputs
from flowshard.train.optimizer import group_settings
from flowshard.weights import lora
from flowshard.weights.extend import Extension, extend_model
from flowshard.weights.frozen import hold_frozen
from flowshard.weights.load import NewTensor, build_model, declare_types, materialise
from flowshard.weights.lora_files import LoraFile, load_factors
from flowshard.weights.precision import compute_in_float32
from flowshard.weights.report import LoadReport, some

PolicyChoice = Callable[[torch.nn.Module, Sequence[torch.nn.Module]], list[ActivationPolicy]]
LossFunction = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


class ModelInputs(Protocol):
    """What a model is built from; see `RunInputs`."""

    @property
    def config(self) -> Config: ...
    @property
    def family(self) -> Family: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def transformer_config(self) -> Mapping[str, Any]: ...
    @property
    def adapted(self) -> list[str]: ...
    @property
    def trained(self) -> list[str]: ...
    @property
    def init_from(self) -> LoraFile | None: ...


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
    inputs: ModelInputs,
    sequence: GroupShape | None = None,
    *,
    device: torch.device = CPU,
    measure: Callable[[torch.nn.Module], None] | None = None,
    compiling: CompileChoice | None = None,
    choose: PolicyChoice | None = None,
) -> Build:
    """The transformer with adapters, sequence plan, activation policies, streamed or compiled blocks; no weight has been read.

    Order: build, the user's extension, adapters, what is trained, types, what the device needs, sequence plan, activation
    policies, which may be chosen here, parameters in host memory, compiled blocks.

    Args:
        inputs: checked.
        sequence: the processes that share the tokens of a sample, if there are several.
        device: that the model will be on.
        measure: is shown the model in its final types, before its tokens are divided and its activations have policies.
        compiling: whether blocks are compiled, from `choose_compile`; None compiles none.
        choose: is shown the model and its blocks before the activations have policies, and gives these if they are `auto`.

    Raises:
        UserError: the extension fails, a pattern matches nothing, or the policies name more blocks than there are.
    """
    config = inputs.config
    model, extension = typed_model(inputs)
    if measure is not None:
        measure(model)
    apply_plans(model, inputs.family, sequence, device)
    blocks = inputs.family.blocks(model)
    if choose is not None and config.memory.activations == "auto":
        policies = choose(model, blocks)
    else:
        policies = block_policies(config.memory, len(blocks))
    compiled = compiling is not None and compiling.enabled
    apply_activation_policies(
        model,
        blocks,
        policies,
        partitioned=inputs.layout.strategy == "zero3",
        overlap=CopyStream(device) if config.memory.offload_overlap else None,
        compiled=compiled,
    )
    if config.memory.parameters == "host":
        stream_blocks(model, blocks, policies, device=device, copies=CopyStream(device))
    if compiling is not None and compiled:
        compile_blocks(model, blocks, policies, fall_back=compiling.fall_back)
    values = lora.initial_values(model, kind=config.lora.init, seed=config.seed)
    new = {name: NewTensor(make, "LoRA") for name, make in values.items()}
    if inputs.init_from is not None:
        scale = config.lora.alpha / config.lora.rank
        for name, make in lora.values_from(load_factors(inputs.init_from), scale=scale).items():
            new[name] = NewTensor(make, f"LoRA from {inputs.init_from.path}")
    for name, value in extension.values.items():
        new[name] = NewTensor(partial(_given, value), extension.how[name], forced=name in extension.declared)
    settings = group_settings(model, config.train)
    return Build(model.train(), blocks, policies, settings, new, frozenset(extension.removed))


def typed_model(inputs: ModelInputs, few: int | None = None) -> tuple[Any, Extension]:
    """The transformer on the meta device with adapters, in its final types; what is frozen needs no gradient.

    Args:
        inputs: checked.
        few: build only so many blocks of each kind, to measure them.

    Raises:
        UserError: the extension fails, or a pattern matches nothing.
    """
    config, family = inputs.config, inputs.family
    settings = inputs.transformer_config
    if config.model.layers is not None:
        settings = {**settings, **family.shortened(settings, config.model.layers)}
    if few is not None:
        settings = {**settings, **family.few_blocks(settings, few)}
    model = build_model(family.transformer_class, settings)
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
    if config.model.frozen_dtype is not None:
        hold_frozen(model, family.blocks(model), config.model.frozen_dtype)
    if dtype != torch.float32:
        compute_in_float32(model)
    return model, extension


def _trained(model: torch.nn.Module, inputs: ModelInputs, extension: Extension) -> set[str]:
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
        return (losses_of(model, tensors) * tensors["weight"].to(device, non_blocking=True)).mean()

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
        with autocast(device, dtype):
            prediction = family.denoise(model, noisy, sigma, conditions)
        learned = (family.learned(tensor, conditions) for tensor in (prediction, clean, noise))
        return sample_losses(*learned)

    return losses
