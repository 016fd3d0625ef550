"""Writing trained weights in the layouts that diffusers reads, file by file, so that no more than one is in memory."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from flowshard.config import Config
from flowshard.weights.files import LORA_FILE, MODULES_FILE, TRANSFORMER_FOLDER
from flowshard.weights.lora import base_name, export_name, export_scales, is_lora
from flowshard.weights.precision import float32_modules, keeps_float32

MAX_SHARD_BYTES = 5 * 10**9
"""Size from which full weights are split into several files."""
_WEIGHTS = "diffusion_pytorch_model"
_METADATA = {"format": "pt"}

Gather = Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file."""

    parameter: str
    """Its name in the model."""
    name: str
    """Its name in the file."""
    dtype: torch.dtype
    scale: float


class WeightsWriter:
    """What a checkpoint's weights consist of, worked out once on the meta model."""

    def __init__(self, model: Any, config: Config) -> None:
        """Plan the files.

        With LoRA: `lora.safetensors` for `load_lora_weights`, and `modules.safetensors` with what `train.modules` trained
        in full beside it. Otherwise `transformer/`, all weights, for `from_pretrained`.

        Args:
            model: the diffusers model, with adapters, not yet divided.
            config: of the run; `save.dtype` decides the types.
        """
        self._save_model_config = model.save_config
        self._index: dict[str, Any] | None = None
        chosen = config.save.dtype
        full_dtype = getattr(torch, config.model.dtype if chosen == "auto" else chosen)
        lora_dtype = torch.float32 if chosen == "auto" else full_dtype
        keep, scales = float32_modules(model), export_scales(model)

        def entry(name: str, tensor: torch.Tensor) -> _Entry:
            if is_lora(name):
                return _Entry(name, f"transformer.{export_name(name)}", lora_dtype, scales.get(name, 1.0))
            dtype = torch.float32 if keeps_float32(name, keep) else full_dtype
            return _Entry(name, base_name(name), dtype if tensor.is_floating_point() else tensor.dtype, 1.0)

        if config.train.method == "lora":
            trained = [entry(name, value) for name, value in model.named_parameters() if value.requires_grad]
            self._files = {
                LORA_FILE: [one for one in trained if is_lora(one.parameter)],
                MODULES_FILE: [one for one in trained if not is_lora(one.parameter)],
            }
            self._files = {file: entries for file, entries in self._files.items() if entries}
        else:
            state = model.state_dict()
            self._files = self._shards([entry(name, value) for name, value in state.items()], state)

    def _shards(self, entries: list[_Entry], state: dict[str, torch.Tensor]) -> dict[str, list[_Entry]]:
        shards: list[list[_Entry]] = [[]]
        sizes = [0]
        for one in entries:
            size = state[one.parameter].numel() * one.dtype.itemsize
            if sizes[-1] and sizes[-1] + size > MAX_SHARD_BYTES:
                shards.append([])
                sizes.append(0)
            shards[-1].append(one)
            sizes[-1] += size
        if len(shards) == 1:
            return {f"{TRANSFORMER_FOLDER}/{_WEIGHTS}.safetensors": shards[0]}
        files = [f"{_WEIGHTS}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        places = {one.name: file for file, shard in zip(files, shards, strict=True) for one in shard}
        self._index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
        return {f"{TRANSFORMER_FOLDER}/{file}": shard for file, shard in zip(files, shards, strict=True)}

    def write(self, folder: Path | None, gather: Gather) -> Exception | None:
        """Write the files into a folder, which is made if it is not there. Collective.

        Args:
            folder: where; None on processes that only help to gather.
            gather: full values by name, one at a time, on every process.

        Returns:
            What the disk refused, if it did; gathering then went on without writing, so that all processes stay in step.
        """
        failure: Exception | None = None
        for file, entries in self._files.items():
            tensors: dict[str, torch.Tensor] = {}
            for one, (_, value) in zip(entries, gather([one.parameter for one in entries]), strict=True):
                if folder is not None and failure is None:
                    scaled = value if one.scale == 1.0 else value * one.scale
                    tensors[one.name] = scaled.detach().to("cpu", one.dtype).contiguous()
            if folder is not None and failure is None:
                try:
                    self._save(tensors, folder / file)
                except (OSError, SafetensorError) as error:
                    failure = error
        return failure

    def _save(self, tensors: dict[str, torch.Tensor], file: Path) -> None:
        empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
        if empty:
            raise RuntimeError(f"refusing to write empty tensors, a sign of divided parameters: {', '.join(empty[:8])}")
        new = not file.parent.exists()
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent.name == TRANSFORMER_FOLDER and new:
            self._save_model_config(file.parent)
            if self._index is not None:
                text = json.dumps(self._index, indent=2, sort_keys=True)
                (file.parent / f"{_WEIGHTS}.safetensors.index.json").write_text(text, encoding="utf-8")
        save_file(tensors, file, metadata=_METADATA)
