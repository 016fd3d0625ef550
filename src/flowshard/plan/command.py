"""`flowshard plan`: all layouts of a config with what they need, and the one to take."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from flowshard.device import check_frozen_dtype, known_peak
from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.memory.fakes import Tensors
from flowshard.parallel.layout import encoding_layout, first_process, resolve_layout
from flowshard.plan.candidates import Assessed, assess, candidates
from flowshard.plan.hardware import USABLE
from flowshard.plan.inputs import PlanInputs, Question
from flowshard.plan.model import PlannedModel
from flowshard.train.build import typed_model
from flowshard.train.inputs import select_trained
from flowshard.units import amount
from flowshard.weights.files import TensorInfo
from flowshard.weights.load import build_model
from flowshard.weights.lora_files import adapted_layers, read_lora

_NEARLY = 1.03
"""Layouts whose step takes so many times that of the fastest count as equally fast."""


@dataclass(frozen=True)
class Plan:
    """The answer."""

    question: Question
    model: PlannedModel
    tokens: int
    """Image or video tokens of a sample."""
    layouts: list[Assessed]
    """Those that fit first, the fastest first; then the others, the smallest first."""
    recommended: Assessed | None
    why: str

    @property
    def usable(self) -> int:
        """Bytes of a device that tensors may take."""
        return int(USABLE * self.question.memory)

    def fits(self, one: Assessed) -> bool:
        """Whether a layout fits on a device."""
        return one.memory.peak <= self.usable


def make_plan(question: Question) -> Plan:
    """Answer a question.

    Raises:
        UserError: no layout is legal, a pattern of the config matches nothing, or the device cannot hold weights in
            `model.frozen_dtype`.
    """
    config, family = question.config, question.family
    check_frozen_dtype(question.hardware.kind, config.model.frozen_dtype)
    inputs = _inputs(question)
    tensors, tokens = _micro_batch(inputs, question)
    whole, _ = typed_model(inputs)
    model = PlannedModel(inputs, whole, tensors, accelerator=not config.device.startswith("cpu"))
    blocks = len(family.blocks(whole))
    found = list(candidates(config, devices=question.devices, nodes=question.nodes, tokens=tokens, blocks=blocks))
    if not found:
        resolve_layout(config, first_process(question.devices, question.devices // question.nodes))  # says why
        raise UserError(
            f"--devices: no layout of {question.devices} processes is legal for this config; use another number"
        )
    peak = known_peak(question.hardware.product)
    assert peak is not None  # noqa: S101 - tests/test_plan.py looks at the whole table
    if config.model.dtype == "float32":
        peak /= 2  # of TF32, which is as fast as the devices get with float32 operands
    assessed = assess(model, found, hardware=question.hardware, peak_flops=peak)
    usable = int(USABLE * question.memory)
    fitting = sorted((one for one in assessed if one.memory.peak <= usable), key=_preference)
    others = sorted((one for one in assessed if one.memory.peak > usable), key=lambda one: one.memory.peak)
    recommended, why = _choose(fitting, others, usable)
    return Plan(question, model, tokens, [*fitting, *others], recommended, why)


def _preference(one: Assessed) -> tuple[Any, ...]:
    return one.time.total, one.candidate.complexity, one.memory.peak


def _choose(fitting: Sequence[Assessed], others: Sequence[Assessed], usable: int) -> tuple[Assessed | None, str]:
    """Of the layouts that are about as fast as the fastest the simplest, and why."""
    if not fitting:
        least = others[0]
        return None, (
            f"nothing fits: {least.candidate.name} with {least.candidate.activations} needs least, "
            f"{amount(least.memory.peak)} of {amount(usable)}; take more devices, fewer frames or pixels, or LoRA"
        )
    fastest = fitting[0]
    near = [one for one in fitting if one.time.total <= _NEARLY * fastest.time.total]
    best = min(near, key=lambda one: (one.candidate.complexity, one.time.total, one.memory.peak))
    why = (
        "the fastest that fits"
        if best is fastest
        else f"within {_NEARLY - 1:.0%} of the fastest that fits, and simpler"
    )
    simpler = [one for one in others if one.candidate.complexity < best.candidate.complexity]
    if simpler:
        least = min(simpler, key=lambda one: one.memory.peak)
        why += f"; {least.candidate.name} needs {amount(least.memory.peak)} with {least.candidate.activations}"
    return best, why


def _inputs(question: Question) -> PlanInputs:
    """What models are built from."""
    config, family = question.config, question.family
    settings = transformer_settings(family, question.settings)
    base = settings
    if config.model.layers is not None:
        base = {**settings, **family.shortened(settings, config.model.layers)}
    state = build_model(family.transformer_class, base).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    init = None
    if config.lora.init_from is not None:
        init = read_lora(
            Path(config.lora.init_from), adapted_layers(shapes.items()), family.names, option="lora.init_from"
        )
    infos = {name: TensorInfo(Path(), "", shape) for name, shape in shapes.items()}
    adapted, trained = select_trained(config, family, infos, init)
    return PlanInputs(config, family, question.variant, settings, adapted, trained, init, encoding_layout({}))


def transformer_settings(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """A transformer's config with the defaults of its class in diffusers."""
    signature = inspect.signature(getattr(diffusers, family.transformer_class).__init__)
    defaults = {
        name: one.default for name, one in signature.parameters.items() if one.default is not inspect.Parameter.empty
    }
    return {**defaults, **config}


def _micro_batch(inputs: PlanInputs, question: Question) -> tuple[Tensors, int]:
    """The tensors of one, all zero, and the tokens of a sample."""
    family, micro = inputs.family, question.config.train.micro_batch
    sample = family.stand_in(
        inputs.transformer_config, question.size, text_tokens=question.text_tokens, pictures=question.pictures
    )
    latents = sample.pop("latents")
    tensors = family.batch_conditions([sample] * micro)
    if family.takes_guidance(inputs.transformer_config):
        tensors["guidance"] = torch.ones(micro)
    tokens = family.tokens(latents.shape) + family.reference_tokens(tensors)
    shape = (micro, *latents.shape)
    own = {"latents": torch.zeros(shape), "noise": torch.zeros(shape)}
    return {**tensors, **own, "sigma": torch.full((micro,), 0.5), "weight": torch.ones(micro)}, tokens
