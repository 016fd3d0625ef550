"""From the options of a command line to a config of ours. Needs no torch."""

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowshard.compat.arguments import Arguments
from flowshard.compat.model_files import find_models
from flowshard.compat.names import DIT, VACE, lora_targets
from flowshard.compat.options import WAN, Script
from flowshard.config import Config
from flowshard.config_file import config_of
from flowshard.errors import UserError
from flowshard.families.variant import Input
from flowshard.parallel.deepspeed_config import read_deepspeed_file
from flowshard.parallel.launcher import launcher_deepspeed_file, launcher_strategy
from flowshard.parity.cases import parse_case
from flowshard.weights.lora_files import adapted_layers
from flowshard.weights.source import find_source

RUN_FOLDER = "flowshard"
"""Of our own run, in the folder of `--output_path`."""
ENCODE, TRAIN = "sft:data_process", "sft:train"
_TASKS = ("sft", ENCODE, TRAIN)
_FROM_CLIP = {"input_image", "end_image"}
"""Inputs that the scripts take from the clip, whatever the metadata says."""
_BRANCH = ["vace_blocks", "vace_patch_embedding"]
"""Modules of the branch of VACE."""


@dataclass
class Translation:
    """What a command line means here."""

    tree: dict[str, Any]
    """The options of the config, by section, without `overrides`."""
    overrides: list[str]
    """Of `--layout` and `--set`."""
    encode: bool
    """Whether samples are encoded and nothing is trained."""
    notes: list[str] = field(default_factory=list)
    """Lines about options that act otherwise than in DiffSynth-Studio, or not at all."""
    epoch: int | None = None
    """Updates of an epoch, of a script whose epochs are no passes over the data."""

    def config(self) -> Config:
        """The config.

        Raises:
            UserError: it is wrong, or contradicts itself.
        """
        return config_of(copy.deepcopy(self.tree), self.overrides)


def translate(script: Script, arguments: Arguments, environment: Mapping[str, str] | None = None) -> Translation:
    """The config of a command line.

    Args:
        script: whose options they are.
        arguments: the options.
        environment: of the process, as a launcher sets it; the process's own if None.

    Raises:
        UserError: the message names option, value and fix.
    """
    environment = os.environ if environment is None else environment
    return _Translator(script, arguments, environment).translate()


class _Translator:
    def __init__(self, script: Script, arguments: Arguments, environment: Mapping[str, str]) -> None:
        self.script, self.arguments, self.environment = script, arguments, environment
        self.notes: list[str] = []
        task = arguments["task"]
        if task not in _TASKS:
            raise UserError(f"--task: {task!r} is not honoured here; use {', '.join(_TASKS)}")
        self.encode = task == ENCODE
        self.from_cache = task == TRAIN and arguments["dataset_metadata_path"] is None
        if arguments["dataset_metadata_path"] is None and not self.from_cache:
            raise UserError(
                f"--dataset_metadata_path: must be given, but with --task {TRAIN}, which reads encoded samples"
            )
        self.trained = "" if self.encode else self._trained()

    def translate(self) -> Translation:
        chosen = [one.partition("=") for one in self.arguments.overrides]
        variant = next((value for name, _, value in chosen if name == "model.variant"), None)
        self.models = find_models(self.script, self.arguments, encoders=not self.from_cache, variant=variant)
        self._refuse_unfit()
        output = Path(self.arguments["output_path"])
        tree: dict[str, Any] = {
            "seed": self.arguments["seed"],
            "output": str(output / RUN_FOLDER),
            "model": self._model(),
            "data": self._data(output),
            "train": self._train(),
            "lora": self._lora(),
            "objective": {"preset": "diffsynth", "index_range": self._index_range(), "stratified": False},
            "layout": self._layout(),
            "memory": {"activations": self._activations()},
            "save": {"every": self.arguments["save_steps"]} if self.arguments["save_steps"] else {"every_epochs": 1},
            "log": self._log(),
        }
        tree["save"]["keep"] = 1
        overrides = [*self._case(), *self.arguments.overrides]
        return Translation({name: one for name, one in tree.items() if one != {}}, overrides, self.encode, self.notes)

    def _trained(self) -> str:
        """Which of the pipeline's models are trained, separated by commas."""
        lora, full = self.arguments["lora_base_model"], self.arguments["trainable_models"]
        if lora is None and full is None:
            raise UserError("--lora_base_model or --trainable_models must be given: what is trained, for example dit")
        for option, value in (("lora_base_model", lora), ("trainable_models", full)):
            names = [] if value is None else value.split(",")
            wrong = next((name for name in names if name not in (DIT, VACE)), None)
            if wrong is not None:
                raise UserError(f"--{option}: {wrong!r} is not trained here; only {DIT} and, of VACE models, {VACE}")
        if lora is not None and "," in lora:
            raise UserError(f"--lora_base_model: {lora!r}: adapters go to one model; give {DIT} or {VACE}")
        if lora is not None and full not in (None, lora):
            raise UserError(f"--trainable_models: {full!r} beside --lora_base_model {lora!r}; give one of them")
        if lora is not None and full is not None:
            self.notes.append(f"--trainable_models {full}: adapters alone are trained, as --lora_base_model is given")
        if lora is None and self._has("align_to_opensource_format") and self.arguments["align_to_opensource_format"]:
            raise UserError(
                "--align_to_opensource_format: is a format of LoRA files; leave it out with --trainable_models"
            )
        return str(lora if lora is not None else full)

    def _has(self, name: str) -> bool:
        return hasattr(self.arguments, name)

    def _refuse_unfit(self) -> None:
        """Options that do not fit the model; and notes about those that have no effect with it."""
        arguments, row = self.arguments, self.models.variant
        has_branch = VACE in row.name
        if VACE in self.trained and not has_branch:
            raise UserError(f"--lora_base_model / --trainable_models: {row.name} has no {VACE}; give {DIT}")
        if arguments["lora_base_model"] is None and self.trained == DIT and has_branch:
            raise UserError(
                f"--trainable_models: {DIT} alone of a VACE model is not trained here; give {VACE}, or {DIT},{VACE}"
            )
        preset = arguments["preset_lora_model"]
        if preset not in (None, DIT, VACE):
            raise UserError(f"--preset_lora_model: {preset!r}: a LoRA is added to {DIT} or {VACE} only")
        if arguments["preset_lora_path"] is not None and preset is None:
            raise UserError("--preset_lora_model: must be given with --preset_lora_path, for example dit")
        if self._has("zero_cond_t"):
            always = row.known_by.get("zero_cond_t") is True
            if arguments["zero_cond_t"] and not always:
                raise UserError(f"--zero_cond_t: belongs to Qwen-Image-Edit-2511; {row.name} is trained without it")
            if always and not arguments["zero_cond_t"]:
                self.notes.append(f"--zero_cond_t: {row.name} is trained with it, as it was made")
        if arguments["fp8_models"] is not None:
            self.notes.append(
                "--fp8_models: frozen weights stay in bfloat16, which takes twice the memory of fp8; with LoRA "
                "--set model.frozen_dtype=float8 holds those of the transformer in it"
            )
        if self._has("audio_processor_path") and arguments["audio_processor_path"] is not None:
            self.notes.append(f"--audio_processor_path: has no effect, as {row.name} hears nothing")
        if arguments["save_steps"] is not None and arguments["save_steps"] < 1:
            raise UserError(f"--save_steps: {arguments['save_steps']} is not a number from 1 upwards")
        if arguments["save_steps"] is not None and arguments["gradient_accumulation_steps"] > 1:
            self.notes.append("--save_steps: counts optimizer updates, not the micro-batches that are accumulated")
        if arguments["enable_optimizer_cpu_offload"] and not arguments["enable_model_cpu_offload"]:
            self.notes.append("--enable_optimizer_cpu_offload: has no effect without --enable_model_cpu_offload")

    def _model(self) -> dict[str, Any]:
        optional = {
            "parts": self.models.parts or None,
            "weights": self.arguments["resume_from_checkpoint"],
            "extend": self.arguments["extend"],
            "expert": self.models.expert,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        return {"variant": self.models.variant.name, "path": self.models.path, **given}

    def _data(self, output: Path) -> dict[str, Any]:
        arguments = self.arguments
        data: dict[str, Any] = {**self._size(), "repeat": arguments["dataset_repeat"]}
        if self.from_cache:
            # Samples keep the size at which they were encoded; one that is given has to be that.
            size = {name: value for name, value in data.items() if name != "max_pixels" or name in arguments.given}
            frames = {"frames": arguments["num_frames"]} if "num_frames" in arguments.given else {}
            return {**size, **frames, "cache": arguments["dataset_base_path"]}
        if self.script.series == WAN:
            data |= {"frames": arguments["num_frames"], "short": "trim"}
        if self.encode:
            data["cache"] = str(output)
        return {
            "metadata": arguments["dataset_metadata_path"],
            "root": arguments["dataset_base_path"] or ".",
            "columns": self._columns(),
            **data,
        }

    def _size(self) -> dict[str, Any]:
        height, width, pixels = (self.arguments[name] for name in ("height", "width", "max_pixels"))
        if (height is None) != (width is None):
            raise UserError(
                f"--{'height' if width is None else 'width'}: has no effect alone; give both, or neither for each sample's "
                "own size"
            )
        if height is not None:
            return {"height": height, "width": width}
        return {"max_pixels": pixels}

    def _columns(self) -> list[str]:
        """The columns of the metadata that are read."""
        keys, asked = self.arguments.listed("data_file_keys"), self.arguments.listed("extra_inputs")
        family, row = self.models.family, self.models.variant
        known = {one.column: one for one in family.inputs}
        for name in asked:
            if name not in known:
                has = ", ".join(known) or "none"
                raise UserError(f"--extra_inputs: {name!r} is no input of {row.name}; its inputs: {has}")
            if name not in _FROM_CLIP and name not in keys:
                raise UserError(
                    f"--data_file_keys: lacks {name!r}, which --extra_inputs names; give {','.join([*keys, name])}"
                )
        if self.script.media not in keys:
            raise UserError(f"--data_file_keys: lacks {self.script.media!r}, the column that is trained on; add it")
        for name, one in known.items():
            if one.required and name not in asked:
                self._not_asked(name, one)
        family.check_given({*asked}, where="--extra_inputs: ")
        return [self.script.media, *(name for name in asked if name not in _FROM_CLIP)]

    def _not_asked(self, name: str, one: Input) -> None:
        """What the model needs and the command line does not name."""
        row = self.models.variant
        if one.from_clip is None:
            keys = ",".join(dict.fromkeys([*self.arguments.listed("data_file_keys"), name]))
            raise UserError(f"--extra_inputs: {row.name} needs {name}; give it, and --data_file_keys {keys}")
        self.notes.append(f"--extra_inputs: {row.name} needs {name}, which is the {one.from_clip} frame of the clip")

    def _train(self) -> dict[str, Any]:
        arguments = self.arguments
        is_lora = arguments["lora_base_model"] is not None
        decay = arguments["weight_decay"]
        train: dict[str, Any] = {
            "method": "lora" if is_lora or self.encode else "full",
            "epochs": arguments["num_epochs"],
            "global_batch": self._global_batch(),
            "learning_rate": arguments["learning_rate"],
            "weight_decay": decay,
            "clip_norm": self._clip_norm(),
        }
        if arguments["customized_optimizer"] is not None:
            train["optimizer"] = arguments["customized_optimizer"]
        if train["method"] == "full":
            # torch's optimizers decay norms and biases like everything else.
            train["groups"] = [{"pattern": "*", "weight_decay": decay}]
        if not is_lora and self.trained == VACE:
            train["modules"] = list(_BRANCH)
        return train

    def _global_batch(self) -> int:
        """One sample a process, or a group that shares samples, and accumulated micro-batch."""
        arguments, world = self.arguments, int(self.environment.get("WORLD_SIZE", "1"))
        sequence, accumulation = arguments["sp_size"], arguments["gradient_accumulation_steps"]
        case = self._case()
        shared = next((one.partition("=")[2] for one in case if one.startswith("layout.sequence=")), None)
        if shared is not None and "sp_size" in arguments.given and shared != str(sequence):
            raise UserError(f"--sp_size: {sequence}, but --layout says sequence={shared}; give one of them")
        if shared is not None:
            sequence = int(shared) if shared.isdecimal() else 1
        if accumulation < 1:
            raise UserError(f"--gradient_accumulation_steps: {accumulation} is not a number from 1 upwards")
        if sequence < 1 or world % sequence:
            raise UserError(f"--sp_size: {sequence} does not divide the {world} processes that were started")
        launchers = self.environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
        if accumulation == 1 and launchers.isdecimal():
            accumulation = int(launchers)
        return world // sequence * accumulation

    def _clip_norm(self) -> float | None:
        """The launcher's, as the scripts have none of their own."""
        asked: Any = self.environment.get("ACCELERATE_GRADIENT_CLIPPING", "none")
        file = launcher_deepspeed_file(self.environment)
        if file is not None:
            asked = read_deepspeed_file(file).get("gradient_clipping", asked)
        if asked in ("none", "auto", None):
            return None
        clip = float(asked)
        return clip if math.isfinite(clip) and clip > 0 else None

    def _lora(self) -> dict[str, Any]:
        arguments = self.arguments
        preset = {} if arguments["preset_lora_path"] is None else {"preset": [arguments["preset_lora_path"]]}
        if arguments["lora_base_model"] is None or self.encode:
            return preset
        source = find_source(
            self.models.path,
            self.models.family,
            self.models.variant,
            option="model.path",
            expert=self.models.expert,
            encoders=False,
        )
        layers = adapted_layers((name, info.shape) for name, info in source.tensors.items())
        targets, unknown = lora_targets(
            arguments.listed("lora_target_modules"), self.models.family, layers, arguments["lora_base_model"]
        )
        if unknown:
            self.notes.append(f"--lora_target_modules: the model has no {', '.join(unknown)}")
        lora = {"rank": arguments["lora_rank"], "alpha": arguments["lora_rank"], "targets": targets, **preset}
        if arguments["lora_checkpoint"] is not None:
            lora["init_from"] = arguments["lora_checkpoint"]
        return lora

    def _index_range(self) -> list[float]:
        if self.script.series != WAN:
            return [0.0, 1.0]
        low, high = self.arguments["min_timestep_boundary"], self.arguments["max_timestep_boundary"]
        if not 0.0 <= low < high <= 1.0:
            raise UserError(
                f"--min_timestep_boundary {low:g} and --max_timestep_boundary {high:g}: give fractions of the timesteps "
                "with 0 <= min < max <= 1"
            )
        return [low, high]

    def _layout(self) -> dict[str, Any]:
        """What the options and the launcher's config ask for."""
        layout: dict[str, Any] = {}
        if self.arguments["sp_size"] != 1:
            layout["sequence"] = self.arguments["sp_size"]
        strategy = launcher_strategy(self.environment)
        host = ("cpu", "nvme")
        if strategy is not None and strategy.startswith("zero"):
            asked = self.environment.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none").lower()
            layout |= {"offload_optimizer": True} if asked in host else {}
        if strategy == "zero3":
            asked = self.environment.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none").lower()
            layout |= {"offload_parameters": True} if asked in host else {}
        if strategy == "fsdp2" and self.environment.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
            layout["offload_parameters"] = True
        if self.arguments["enable_model_cpu_offload"]:
            layout["offload_parameters"] = True
            if strategy is None and not self._case():
                layout["strategy"] = "fsdp2"
        return layout

    def _case(self) -> list[str]:
        """The overrides of `--layout`."""
        asked = self.arguments["layout"]
        if asked is None:
            return []
        case = parse_case(asked)
        world = int(self.environment.get("WORLD_SIZE", "1"))
        if ":" in asked.partition(",")[0] and case.processes != world:
            raise UserError(f"--layout: {asked} is of {case.processes} processes, but {world} were started")
        return list(case.overrides)

    def _activations(self) -> str:
        if self.arguments["use_gradient_checkpointing_offload"]:
            return "offload"
        asked = self.arguments["use_gradient_checkpointing"] or self.script.series == WAN
        launchers = self.environment.get("FSDP_ACTIVATION_CHECKPOINTING", "false").lower() == "true"
        return "recompute" if asked or launchers else "keep"

    def _log(self) -> dict[str, Any]:
        arguments = self.arguments
        trackers = [name for name in ("tensorboard", "wandb", "swanlab") if arguments[f"enable_{name}_log"]]
        projects = {arguments[f"{name}_project"] for name in ("wandb", "swanlab") if name in trackers}
        if len(projects) > 1:
            raise UserError(
                f"--swanlab_project: {' and '.join(sorted(projects))}: trackers of a run share a project here"
            )
        if not trackers:
            return {}
        return {"trackers": trackers, **({"project": projects.pop()} if projects else {})}
