"""DiffSynth-Studio's earlier script for Wan: its two tasks as `flowshard cache` and `flowshard train`.

DATASET/metadata.csv             file_name,text
DATASET/train/                   the media
DATASET/flowshard_cache/         what `--task data_process` encodes
DATASET/flowshard_cache/data_process.json   at which size, and for which model
OUTPUT/epoch-0.safetensors ...   what was trained, a file an epoch; OUTPUT/flowshard is the run's own folder
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flowshard.cli import end_process, exit_status
from flowshard.compat.arguments import Arguments, in_their_words, parse
from flowshard.compat.diffsynth import run
from flowshard.compat.mapping import RUN_FOLDER, Translation
from flowshard.compat.names import DIT, lora_targets
from flowshard.compat.wan_t2v_options import EARLIER
from flowshard.errors import UserError
from flowshard.families import Family, Variant, find_variant, key_of
from flowshard.weights.files import atomic_file, read_json
from flowshard.weights.lora_files import adapted_layers
from flowshard.weights.source import find_source, recognise_variant

CACHE, RECORD = "flowshard_cache", "data_process.json"
_ENCODE, _TRAIN = "data_process", "train"
_CHOICES = {
    "task": (_ENCODE, _TRAIN),
    "train_architecture": ("lora", "full"),
    "training_strategy": ("auto", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
    "init_lora_weights": ("kaiming", "gaussian"),
}
_POSITIVE = ("steps_per_epoch", "max_epochs", "accumulate_grad_batches")
_SIZE = {"num_frames": "frames", "height": "height", "width": "width"}
_LATENT = 8
"""Pixels of a side that a latent pixel stands for."""
_TEXT_TO_VIDEO, _IMAGE_TO_VIDEO = "wan2.1-t2v-1.3b", "wan2.1-i2v-14b-480p"
"""Variants that stand for all of their kind, which are encoded alike."""


def program() -> NoReturn:
    """The script as a program of its own."""
    end_process(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what a command line of the script asks for; the exit status, as of `flowshard`."""
    return exit_status(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> None:
    options = parse(EARLIER, arguments)
    count = _processes_to_start(options, os.environ)
    if options["swanlab_mode"] is not None:
        os.environ["SWANLAB_MODE"] = options["swanlab_mode"]
    try:
        translation = translate(options, {**os.environ, "WORLD_SIZE": str(count)} if count > 1 else os.environ)
        if count > 1:
            _check(translation, count)
            _start(arguments, count)
        run(translation, options)
    except UserError as error:
        raise UserError(in_their_words(str(error), options)) from None
    if translation.encode and os.environ.get("RANK", "0") == "0":
        _write_record(translation)


def translate(options: Arguments, environment: Mapping[str, str]) -> Translation:
    """The config of a command line.

    Args:
        options: of the script.
        environment: of the process, as a launcher sets it.

    Raises:
        UserError: the message names option, value and fix.
    """
    for name, choices in _CHOICES.items():
        if options[name] not in choices:
            raise UserError(f"--{name}: {options[name]!r} is none of {', '.join(choices)}")
    for name in _POSITIVE:
        if options[name] < 1:
            raise UserError(f"--{name}: {options[name]} is not a number from 1 upwards")
    encode = options["task"] == _ENCODE
    files = [name for option in _file_options(options) for name in options.listed(option)]
    chosen = [one.partition("=") for one in options.overrides]
    asked = next((value for name, _, value in chosen if name == "model.variant"), None)
    family, variant = find_variant(asked or _variant(options, files), option="--set model.variant")
    if family.name != EARLIER.series:
        raise UserError(f"--dit_path: the files are of {variant.name}, and {EARLIER.path} trains Wan only")
    notes: list[str] = []
    folder = Path(options["dataset_path"])
    size = _own_size(options) if encode else _encoded_size(options, folder, family, variant, notes)
    tree: dict[str, Any] = {
        "seed": options["seed"],
        "output": str(Path(options["output_path"], RUN_FOLDER)),
        "model": {"variant": variant.name, "path": files},
        "data": {
            "metadata": str(folder / "metadata.csv"),
            "root": str(folder / "train"),
            "cache": str(folder / CACHE),
            **size,
        },
        "train": {"steps": 1} if encode else _train(options, environment),
        "lora": {} if encode else _lora(options, files, family, variant, notes),
        "objective": {"preset": "diffsynth", "stratified": False},
        "layout": {"strategy": options["training_strategy"].replace("deepspeed_stage_", "zero")},
        "memory": {"activations": _activations(options)},
        "save": {"every": 1 if encode else _updates(options, environment), "keep": 1},
        "log": {"trackers": ["swanlab"], "project": "wan"} if options["use_swanlab"] else {},
    }
    if options["swanlab_mode"] is not None and not options["use_swanlab"]:
        notes.append("--swanlab_mode: has no effect without --use_swanlab")
    given = {name: one for name, one in tree.items() if one != {}}
    return Translation(given, options.overrides, encode, notes, epoch=None if encode else tree["save"]["every"])


def _file_options(options: Arguments) -> list[str]:
    """The options that name files of the model."""
    encoders = ["text_encoder_path", "vae_path"]
    if options["task"] == _ENCODE:
        for name in encoders:
            if options[name] is None:
                raise UserError(f"--{name}: must be given with --task {_ENCODE}")
    elif options["dit_path"] is None:
        raise UserError(f"--dit_path: must be given with --task {_TRAIN}")
    return ["dit_path", *encoders, "image_encoder_path"]


def _variant(options: Arguments, files: Sequence[str]) -> str:
    """The model, by its files; without any of the transformer one that is encoded alike."""
    if options["dit_path"] is None:
        return _TEXT_TO_VIDEO if options["image_encoder_path"] is None else _IMAGE_TO_VIDEO
    return recognise_variant(files, option="--dit_path", variant_option="--set model.variant", own_schedule=True)


def _own_size(options: Arguments) -> dict[str, Any]:
    size = {ours: options[theirs] for theirs, ours in _SIZE.items()}
    if options["tiled"]:
        size["tiles"] = [
            options[f"tile_{kind}_{side}"] * _LATENT for kind in ("size", "stride") for side in ("height", "width")
        ]
    return size


def _encoded_size(
    options: Arguments, folder: Path, family: Family, variant: Variant, notes: list[str]
) -> dict[str, Any]:
    """The size at which the samples were encoded, whatever the options say: it was so in the script as well."""
    record = folder / CACHE / RECORD
    if not record.is_file():
        if options["text_encoder_path"] is not None and options["vae_path"] is not None:
            return _own_size(options)
        raise UserError(
            f"--dataset_path: {folder} holds no encoded samples; run --task {_ENCODE} first, which writes {folder / CACHE} "
            "(files *.tensors.pth of DiffSynth-Studio are not read)"
        )
    found = read_json(record)
    kind = key_of(family)
    if found.get("kind") != kind:
        with_encoder = " with --image_encoder_path" if "image_encoder" in family.media_components else ""
        needs = ", ".join(one.column for one in family.inputs) or "no picture"
        raise UserError(
            f"--dit_path: the files are of {variant.name}, which needs {needs}, and {folder / CACHE} was encoded for another "
            f"kind of model ({found.get('kind')}); run --task {_ENCODE} again{with_encoder} and --dit_path"
        )
    size: dict[str, Any] = found["size"]
    for theirs, ours in _SIZE.items():
        if theirs in options.given and options[theirs] != size[ours]:
            notes.append(f"--{theirs} {options[theirs]}: the samples were encoded with {size[ours]}, which counts")
    return size


def _write_record(translation: Translation) -> None:
    """Note how the samples were encoded, for `--task train`."""
    data, config = translation.tree["data"], translation.config()
    size = {name: data[name] for name in (*_SIZE.values(), "tiles") if name in data}
    family, _ = find_variant(str(config.model.variant), option="--dit_path")
    with atomic_file(Path(data["cache"], RECORD)) as temporary:
        temporary.write_text(json.dumps({"kind": key_of(family), "size": size}, indent=2), encoding="utf-8")


def _train(options: Arguments, environment: Mapping[str, str]) -> dict[str, Any]:
    full = options["train_architecture"] == "full"
    return {
        "method": options["train_architecture"],
        "steps": _updates(options, environment) * options["max_epochs"],
        "global_batch": _world(environment) * options["accumulate_grad_batches"],
        "learning_rate": options["learning_rate"],
        "clip_norm": None,
        # torch's AdamW decays norms and biases like everything else.
        **({"groups": [{"pattern": "*", "weight_decay": 0.01}]} if full else {}),
    }


def _updates(options: Arguments, environment: Mapping[str, str]) -> int:
    """Updates of an epoch: `--steps_per_epoch` samples are shared by the processes, what is left over is an update too."""
    own = math.ceil(options["steps_per_epoch"] / _world(environment))
    return math.ceil(own / options["accumulate_grad_batches"])


def _world(environment: Mapping[str, str]) -> int:
    return int(environment.get("WORLD_SIZE", "1"))


def _lora(
    options: Arguments, files: Sequence[str], family: Family, variant: Variant, notes: list[str]
) -> dict[str, Any]:
    if options["train_architecture"] != "lora":
        if options["pretrained_lora_path"] is not None:
            raise UserError("--pretrained_lora_path: belongs to --train_architecture lora")
        return {}
    source = find_source(files, family, variant, option="model.path", encoders=False)
    layers = adapted_layers((name, info.shape) for name, info in source.tensors.items())
    targets, unknown = lora_targets(options.listed("lora_target_modules"), family, layers, DIT)
    if unknown:
        notes.append(f"--lora_target_modules: the model has no {', '.join(unknown)}")
    lora: dict[str, Any] = {
        "rank": options["lora_rank"],
        "alpha": options["lora_alpha"],
        "targets": targets,
        "init": options["init_lora_weights"],
    }
    before = options["pretrained_lora_path"]
    if before is not None:
        if not before.endswith(".safetensors"):
            raise UserError(
                f"--pretrained_lora_path: {before} is no .safetensors file; docs/from-diffsynth.md says how to make one of a "
                ".ckpt file"
            )
        lora["init_from"] = before
    return lora


def _activations(options: Arguments) -> str:
    if options["use_gradient_checkpointing_offload"]:
        return "offload"
    return "recompute" if options["use_gradient_checkpointing"] else "keep"


def _processes_to_start(options: Arguments, environment: Mapping[str, str]) -> int:
    """How many processes this one has to start; 1 is none, as a launcher did or one is enough."""
    asked = options["processes"]
    if "WORLD_SIZE" in environment:
        if asked not in (None, int(environment["WORLD_SIZE"])):
            raise UserError(f"--processes: {asked}, but a launcher started {environment['WORLD_SIZE']}; leave it out")
        return 1
    if asked is None:
        from flowshard.device import device_count

        return device_count()
    if asked < 1:
        raise UserError(f"--processes: {asked} is not a number from 1 upwards")
    return int(asked)


def _check(translation: Translation, count: int) -> None:
    """Find what is wrong before processes are started."""
    if translation.encode:
        from flowshard.train.encode import check_encoding

        check_encoding(translation.config())
        return
    from flowshard.train.inputs import check_inputs

    check_inputs(translation.config(), {**os.environ, "WORLD_SIZE": str(count)})


def _start(arguments: Sequence[str], count: int) -> NoReturn:
    """Become torchrun, which starts this module in so many processes."""
    sys.stdout.flush()
    agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    os.execv(sys.executable, [sys.executable, *agent, "-m", "flowshard.compat.wan_t2v", *arguments])  # noqa: S606


if __name__ == "__main__":
    program()
