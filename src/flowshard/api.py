"""Loading outside of a training run, for people who write their own loop: `flowshard.load`, `flowshard.load_pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowshard.device import resolve_device
from flowshard.families import Family, find_variant
from flowshard.parallel.plan import apply_plans
from flowshard.weights.extend import Extension, extend_model
from flowshard.weights.load import NewTensor, Whole, build_model, declare_types, materialise
from flowshard.weights.report import LoadReport
from flowshard.weights.source import ModelSource, find_source


def load(
    variant: str,
    path: str | Path | Sequence[str],
    *,
    extend: str | None = None,
    expert: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.nn.Module, LoadReport]:
    """The transformer of a variant, every weight of which comes from the files or from the extension.

    Args:
        variant: for example `wan2.1-t2v-1.3b`.
        path: a diffusers folder, the id of one on the hub, or the publisher's files: `model.path` of a config.
        extend: `FILE.py:FUNCTION` that adds, replaces or removes modules; see `docs/weights.md`.
        expert: which transformer of a model with two, `high` or `low`.
        dtype: of the weights, but for those that the model keeps in float32.
        device: `auto`, `cpu`, `cuda` or `npu`, or with an index.
        seed: of new weights.

    Returns:
        The diffusers model, all of whose parameters require gradients, and what became of every tensor. On an NPU, with
        rotary tables and attention that run there.

    Raises:
        UserError: the files do not fill the model, or the extension fails.
    """
    family, row = find_variant(variant, option="variant")
    source = find_source(_paths(path), family, row, option="path", expert=expert, encoders=False)
    place = resolve_device(device)
    transformer, report = load_transformer(
        family, source, extend=extend, dtype=dtype, device=place, seed=seed, trainable=True
    )
    apply_plans(transformer, family, None, place)
    return transformer, report


def _paths(path: str | Path | Sequence[str]) -> str | list[str]:
    return str(path) if isinstance(path, (str, Path)) else [str(one) for one in path]


def load_pipeline(
    variant: str,
    path: str | Path | Sequence[str],
    *,
    extend: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Any, LoadReport]:
    """The stock diffusers pipeline of a variant around the transformer that `load` gives; arguments as there."""
    family, row = find_variant(variant, option="variant")
    source = find_source(_paths(path), family, row, option="path")
    place = resolve_device(device)
    transformer, report = load_transformer(
        family, source, extend=extend, dtype=dtype, device=place, seed=seed, trainable=True
    )
    apply_plans(transformer, family, None, place)
    return family.make_pipeline(source, transformer.eval(), dtype=dtype).to(place), report


def load_transformer(
    family: Family,
    source: ModelSource,
    *,
    extend: str | None,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    trainable: bool = False,
    option: str = "extend",
) -> tuple[torch.nn.Module, LoadReport]:
    """The transformer of a source.

    Args:
        family: of the model.
        source: its files.
        extend: function that changes the model first.
        dtype: of the weights, but for those that the model keeps in float32.
        device: where the weights go.
        seed: of new weights.
        trainable: whether parameters require gradients; else they stay views of the mapped files where they can.
        option: names the extension in messages.
    """
    model = build_model(family.transformer_class, source.config)
    extension = Extension() if extend is None else extend_model(model, extend, seed=seed, option=option)
    model.requires_grad_(False)
    declare_types(model, dtype)
    model.requires_grad_(trainable)
    new = {
        name: NewTensor(value.clone, extension.how[name], forced=name in extension.declared)
        for name, value in extension.values.items()
    }
    report = materialise(
        model,
        source.tensors,
        source=source.transformer,
        units=[],
        new=new,
        strategy=Whole(device),
        removed=extension.removed,
    )
    return model, report
