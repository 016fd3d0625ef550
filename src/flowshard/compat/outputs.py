"""The files that DiffSynth-Studio's scripts write: weights in its names, `loss.csv` and `training_args.json`."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flowshard.compat.arguments import Arguments
from flowshard.compat.names import DIT, model_of, vocabulary
from flowshard.errors import RunError, UserError
from flowshard.families.flux_files import FLUX_NAMES
from flowshard.train.inputs import RunInputs, completed_epochs
from flowshard.train.observer import Observer
from flowshard.weights.files import LORA_FILE, MODULES_FILE, TRANSFORMER_FOLDER, atomic_file
from flowshard.weights.fused import fused_factors, grouped, original_tensors
from flowshard.weights.lora_files import Factors, adapted_layers, load_factors, lora_tensors, read_lora

if TYPE_CHECKING:
    from flowshard.parallel.strategies import Strategy

    Tensors = dict[str, torch.Tensor]

ARGUMENTS_FILE, LOSS_FILE = "training_args.json", "loss.csv"
_COLUMNS = ("step", "key", "value")


class Outputs(Observer):
    """Writes them beside the run's own folder."""

    def __init__(self, inputs: RunInputs, arguments: Arguments, *, epoch: int | None = None) -> None:
        """Write what `arguments` ask for of a run with these inputs; `epoch` is that of `Translation`."""
        self._inputs = inputs
        self._arguments = arguments
        self._epoch = epoch
        self._folder = Path(arguments["output_path"])
        self._is_main = inputs.layout.rank == 0
        self._losses = (
            self._folder / LOSS_FILE if self._is_main and getattr(arguments, "enable_csv_log", False) else None
        )

    def started(self, model: torch.nn.Module) -> None:
        del model
        if not self._is_main:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            given = {
                name: value
                for name, value in vars(self._arguments).items()
                if name not in ("given", "overrides", "script")
            }
            with atomic_file(self._folder / ARGUMENTS_FILE) as temporary:
                temporary.write_text(json.dumps(given, indent=4, ensure_ascii=False), encoding="utf-8")
            if self._losses is not None:
                checkpoint = self._inputs.checkpoint
                _begin_losses(self._losses, 0 if checkpoint is None else checkpoint.step)
        except OSError as error:
            raise RunError(f"cannot write to {self._folder}: {error.strerror}; choose another --output_path") from None

    def step_done(self, step: int, loss: float, gradient_norm: float, strategy: Strategy) -> None:
        del gradient_norm, strategy
        if self._losses is not None:
            with self._losses.open("a", encoding="utf-8", newline="") as stream:
                csv.writer(stream, lineterminator="\n").writerow((step + 1, "loss", loss))

    def saved(self, step: int, checkpoint: Path) -> None:
        try:
            tensors = self._tensors(checkpoint)
            for name in self._names(step):
                with atomic_file(self._folder / name) as temporary:
                    save_file(tensors, temporary, metadata={"format": "pt"})
        except (OSError, SafetensorError, UserError) as error:
            raise RunError(
                f"cannot write the weights of step {step} to {self._folder}: {error}; they are in {checkpoint} in our own "
                "layout"
            ) from None

    def _names(self, step: int) -> list[str]:
        """Of the files of a step: after an epoch, or with a number of updates."""
        if self._epoch is not None and step % self._epoch == 0:
            return [f"epoch-{step // self._epoch - 1}.safetensors"]
        config = self._inputs.config
        if config.save.every_epochs:
            epochs = completed_epochs(config, self._inputs.samples, step)
            last = config.train.epochs
            done = [epoch for epoch in epochs if last is None or epoch < last]
            if done:
                return [f"epoch-{epoch}.safetensors" for epoch in done]
        return [f"step-{step}.safetensors"]

    def _tensors(self, checkpoint: Path) -> Tensors:
        """What a checkpoint has trained, in DiffSynth-Studio's names."""
        family = self._inputs.family
        if self._inputs.config.train.method == "lora":
            factors = self._factors(checkpoint / LORA_FILE)
            modules = checkpoint / MODULES_FILE
            others = self._renamed(load_file(modules)) if modules.is_file() else {}
            if self._aligned:
                return {**aligned_tensors(factors), **others}
            tensors = lora_tensors(factors, vocabulary(family, factors), "original")
            return self._prefixed({**tensors, **others})
        frozen = self._inputs.tensors.keys() - set(self._inputs.trained)
        own: Tensors = {}
        for file in sorted((checkpoint / TRANSFORMER_FOLDER).glob("*.safetensors")):
            own.update({name: value for name, value in load_file(file).items() if name not in frozen})
        return self._prefixed({name: value.contiguous() for name, value in self._renamed(own).items()})

    def _renamed(self, tensors: Tensors) -> Tensors:
        """In DiffSynth-Studio's names; what was added to the model keeps its own."""
        return original_tensors(tensors, vocabulary(self._inputs.family, tensors), option="--output_path")

    @property
    def _aligned(self) -> bool:
        return bool(getattr(self._arguments, "align_to_opensource_format", False))

    def _factors(self, file: Path) -> dict[str, Factors]:
        inputs = self._inputs
        layers = adapted_layers((name, info.shape) for name, info in inputs.tensors.items())
        extended = inputs.config.model.extend is not None  # with layers of its own
        return load_factors(read_lora(file, None if extended else layers, inputs.family.names, option="--output_path"))

    def _prefixed(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """With the names that they have in the pipeline, without the prefix that is to be removed."""
        prefix = getattr(self._arguments, "remove_prefix_in_ckpt", f"pipe.{DIT}.") or ""
        return {f"pipe.{model_of(name)}.{name}".removeprefix(prefix): value for name, value in tensors.items()}


def aligned_tensors(factors: Mapping[str, Factors]) -> Tensors:
    """A LoRA of FLUX.1 in the names of `--align_to_opensource_format`: the publisher's layers, and alpha."""
    tensors: Tensors = {}
    for original, parts in grouped(factors, FLUX_NAMES).items():
        one = fused_factors(parts, factors)
        name = f"lora_unet_{original.replace('.', '_')}"
        tensors[f"{name}.lora_up.weight"] = one.folded().contiguous()
        tensors[f"{name}.lora_down.weight"] = one.first.contiguous()
        tensors[f"{name}.alpha"] = torch.tensor(one.first.shape[0])
    return tensors


def _begin_losses(file: Path, step: int) -> None:
    """A file with a header; a run that goes on keeps its lines, but for those of steps that it comes to again."""
    lines = file.read_text(encoding="utf-8").splitlines() if step and file.is_file() else []
    kept = [line for line in lines[1:] if line.partition(",")[0].isdecimal() and int(line.partition(",")[0]) <= step]
    with atomic_file(file) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in [",".join(_COLUMNS), *kept]), encoding="utf-8")
