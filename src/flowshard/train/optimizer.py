"""Parameter groups, the optimizer, the moving average of the weights and the learning-rate schedule."""

import importlib
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from flowshard.config import Config, TrainConfig
from flowshard.errors import UserError
from flowshard.parallel.strategies.base import GroupSettings, OptimizerFactory, ParameterGroups, Strategy
from flowshard.patterns import matches
from flowshard.weights.lora import base_name, export_name

AVERAGE = "ema"
"""The key of the moving average among what an optimizer keeps of a parameter."""
_SHORT_NAMES = {"adamw": "torch.optim.AdamW"}
_FUSED = {"cpu", "cuda"}
"""Devices on which torch's Adam and AdamW update a parameter in one pass over its memory."""


def group_settings(model: torch.nn.Module, train: TrainConfig) -> dict[str, GroupSettings]:
    """Learning rate and weight decay of every trained parameter by its name, in the order of the model.

    A parameter takes both from the first group of `train.groups` that matches its name. Otherwise norms, biases and
    other vectors get no decay. To be called before a strategy changes the parameters' shapes.
    """
    vectors = _without_decay(model)
    settings = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate, decay = train.learning_rate, 0.0 if name in vectors else train.weight_decay
        public_name = export_name(base_name(name))
        group = next((group for group in train.groups if matches(public_name, group.pattern)), None)
        if group is not None:
            rate = rate if group.learning_rate is None else group.learning_rate
            decay = decay if group.weight_decay is None else group.weight_decay
        settings[name] = GroupSettings(rate, decay)
    return settings


def _without_decay(model: torch.nn.Module) -> set[str]:
    names = set()
    for module_name, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for leaf, parameter in module.named_parameters(recurse=False):
            if is_norm or leaf == "bias" or parameter.ndim <= 1:
                names.add(f"{module_name}.{leaf}" if module_name else leaf)
    return names


def optimizer_factory(config: Config) -> OptimizerFactory:
    """What makes the run's optimizer from parameter groups.

    Raises:
        UserError: the import path leads to no torch optimizer, or it does not take the options.
    """
    path = _SHORT_NAMES.get(config.train.optimizer, config.train.optimizer)
    module_name, _, attribute = path.rpartition(".")
    try:
        optimizer_class: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError):
        raise UserError(
            f"train.optimizer: {config.train.optimizer!r} cannot be imported; use {', '.join(_SHORT_NAMES)} or an "
            "import path such as torch.optim.SGD"
        ) from None
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise UserError(f"train.optimizer: {path} is not a torch optimizer")

    def make(groups: ParameterGroups) -> torch.optim.Optimizer:
        options = config.train.optimizer_options
        if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and not {"fused", "foreach"} & options.keys():
            options = {**options, "fused": _devices(groups) <= _FUSED}
        try:
            optimizer: torch.optim.Optimizer = optimizer_class(groups, **options)
        except (TypeError, ValueError) as error:
            raise UserError(f"train.optimizer_options: {path} refuses them: {error}") from None
        if config.train.ema is not None:
            keep_average(optimizer, config.train.ema)
        return optimizer

    return make


def _devices(groups: ParameterGroups) -> set[str]:
    members: list[Any] = [group["params"] for group in groups]
    return {parameter.device.type for parameters in members for parameter in parameters}


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Let an optimizer keep an exponential moving average of its parameters, as a part of its state.

    So engines divide it, and checkpoints hold it, like any other state. It begins with the weights before the first
    update.

    Args:
        optimizer: whose parameters need not be the model's: engines hand it parts of them, in turn.
        decay: the part of the average that an update leaves.
    """
    before: dict[torch.Tensor, torch.Tensor] = {}

    def members() -> Iterator[torch.Tensor]:
        for group in optimizer.param_groups:
            yield from group["params"]

    def note(*_: Any) -> None:
        # Not into the state, as optimizers make theirs where there is none.
        before.update(
            (each, each.detach().clone()) for each in members() if AVERAGE not in optimizer.state.get(each, {})
        )

    def update(*_: Any) -> None:
        for each in members():
            state = optimizer.state[each]
            if AVERAGE not in state:
                state[AVERAGE] = before.pop(each)
            state[AVERAGE].lerp_(each.detach(), 1.0 - decay)

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(update)


def averaged(strategy: Strategy, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """`Strategy.parameters` with the moving averages of those that are trained. Collective."""
    trained = set(strategy.trained_names())
    for is_trained, run in groupby(names, trained.__contains__):
        some = list(run)
        yield from strategy.optimizer_tensors(some, AVERAGE) if is_trained else strategy.parameters(some)


def schedule_factor(step: int, *, steps: int, train: TrainConfig) -> float:
    """What the learning rates are multiplied by at an update.

    Args:
        step: the update, from 0.
        steps: updates of the whole run.
        train: warm-up and kind of schedule.

    Returns:
        A linear rise to 1 over `warmup_steps`, then the schedule, which ends at the last update.
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    progress = (step - train.warmup_steps) / max(steps - 1 - train.warmup_steps, 1)
    return 1.0 - progress if train.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
