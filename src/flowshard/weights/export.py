"""Writing trained weights in the layouts that diffusers reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from flowshard.config import Config
from flowshard.weights.files import LORA_FILE, MODULES_FILE, TRANSFORMER_FOLDER
from flowshard.weights.lora import base_name, is_lora, lora_state
from flowshard.weights.precision import float32_modules, keeps_float32

_METADATA = {"format": "pt"}


def write_weights(folder: Path, model: Any, trained: Mapping[str, torch.Tensor], config: Config) -> None:
    """Write what was trained into an existing folder, in the types that `save.dtype` says.

    With LoRA: `lora.safetensors` for `load_lora_weights`, and `modules.safetensors` with what `train.modules` trained in
    full beside it. Otherwise `transformer/`, all weights, for `from_pretrained`.

    Args:
        folder: an existing folder.
        model: the diffusers model.
        trained: full values of the trained parameters by their name in the model.
        config: of the run.
    """
    chosen = config.save.dtype
    full_dtype = getattr(torch, config.model.dtype if chosen == "auto" else chosen)
    lora_dtype = torch.float32 if chosen == "auto" else full_dtype
    keep = float32_modules(model)

    def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
        wanted = torch.float32 if keeps_float32(name, keep) else full_dtype
        return tensor.detach().to("cpu", wanted if tensor.is_floating_point() else tensor.dtype).contiguous()

    if config.train.method == "lora":
        adapters = {
            f"transformer.{name}": value.to("cpu", lora_dtype) for name, value in lora_state(model, trained).items()
        }
        _save(adapters, folder / LORA_FILE)
        modules = {base_name(name): value for name, value in trained.items() if not is_lora(name)}
        if modules:
            _save({name: cast(name, value) for name, value in modules.items()}, folder / MODULES_FILE)
        return
    weights = {name: cast(name, trained.get(name, value)) for name, value in model.state_dict().items()}
    write_transformer(folder / TRANSFORMER_FOLDER, model, weights)


def write_transformer(folder: Path, model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Write a diffusers model folder: config and safetensors shards with their index."""
    folder.mkdir()
    model.save_config(folder)
    plan = split_torch_state_dict_into_shards(
        weights, filename_pattern="diffusion_pytorch_model{suffix}.safetensors", max_shard_size="10GB"
    )
    for file, names in plan.filename_to_tensors.items():
        _save({name: weights[name] for name in names}, folder / file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True)
        )


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    if empty:
        raise RuntimeError(f"refusing to write empty tensors, a sign of partitioned parameters: {', '.join(empty[:8])}")
    save_file(tensors, file, metadata=_METADATA)
