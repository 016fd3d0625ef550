"""Loading outside of a training run, for people who write their own loop: `flowshard.load`, `flowshard.load_pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

from flowshard.device import resolve_device
from flowshard.families import Family, find_variant
from flowshard.weights.extend import Extension, extend_model
from flowshard.weights.files import TRANSFORMER_FOLDER, check_pipeline, find_pipeline, read_headers
from flowshard.weights.load import NewTensor, Whole, build_model, declare_types, materialise
from flowshard.weights.report import LoadReport


def load(
    variant: str,
    path: str | Path,
    *,
    extend: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.nn.Module, LoadReport]:
    """The transformer of a variant, every weight of which comes from the files or from the extension.

    Args:
        variant: for example `wan2.1-t2v-1.3b`.
        path: a diffusers folder, or the id of one on the hub.
        extend: `FILE.py:FUNCTION` that adds, replaces or removes modules; see `docs/weights.md`.
        dtype: of the weights, but for those that the model keeps in float32.
        device: `auto`, `cpu`, `cuda` or `npu`, or with an index.
        seed: of new weights.

    Returns:
        The diffusers model, all of whose parameters require gradients, and what became of every tensor.

    Raises:
        UserError: the files do not fill the model, or the extension fails.
    """
    family, _ = find_variant(variant, option="variant")
    folder = find_pipeline(str(path), option="path")
    check_pipeline(folder, family, option="path")
    source = folder / TRANSFORMER_FOLDER
    return load_transformer(
        family, source, extend=extend, dtype=dtype, device=resolve_device(device), seed=seed, trainable=True
    )


def load_pipeline(
    variant: str,
    path: str | Path,
    *,
    extend: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Any, LoadReport]:
    """The stock diffusers pipeline of a variant around the transformer that `load` gives; arguments as there."""
    transformer, report = load(variant, path, extend=extend, dtype=dtype, device=device, seed=seed)
    family, _ = find_variant(variant, option="variant")
    folder = find_pipeline(str(path), option="path")
    return assemble(family, folder, transformer.eval(), dtype=dtype).to(resolve_device(device)), report


def load_transformer(
    family: Family,
    source: Path,
    *,
    extend: str | None,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    trainable: bool = False,
    option: str = "extend",
) -> tuple[torch.nn.Module, LoadReport]:
    """The transformer from a folder with its `config.json` and weights.

    Args:
        family: of the model.
        source: the folder.
        extend: function that changes the model first.
        dtype: of the weights, but for those that the model keeps in float32.
        device: where the weights go.
        seed: of new weights.
        trainable: whether parameters require gradients; else they stay views of the mapped files where they can.
        option: names the extension in messages.
    """
    model = build_model(family.transformer_class, source)
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
        read_headers(source),
        source=source,
        units=[],
        new=new,
        strategy=Whole(device),
        removed=extension.removed,
    )
    return model, report


def assemble(family: Family, folder: Path, transformer: torch.nn.Module, *, dtype: torch.dtype) -> Any:
    """The stock pipeline with this transformer. Its VAE works in float32, as in training."""
    pipeline_class = getattr(diffusers, family.pipeline_class)
    return pipeline_class.from_pretrained(
        folder,
        transformer=transformer,
        torch_dtype={"default": dtype, "vae": torch.float32},
        local_files_only=True,
    )
