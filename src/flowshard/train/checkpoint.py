"""What a checkpoint holds to go on from, written and read: masters, optimizer state, and what both belong to.

    masters/00001.safetensors      every trained parameter in float32, whole, by its name in the model
    optimizer/00001.safetensors    what the optimizer keeps of it, as NAME/exp_avg and so on; NAME/ema with `train.ema`
    state.json                     step, config, loss scale, digest of the data
    manifest.json                  size and fingerprint of every file; written last

Names and shapes say nothing of the layout, so any layout reads them.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowshard.config import Config
from flowshard.data.metadata import Metadata
from flowshard.errors import UserError
from flowshard.weights.files import TensorInfo, fingerprint, read_headers, read_json

if TYPE_CHECKING:
    import torch

    from flowshard.parallel.processes import Processes
    from flowshard.parallel.strategies import Strategy

MASTERS, OPTIMIZER = "masters", "optimizer"
STATE, MANIFEST = "state.json", "manifest.json"
SHARD_BYTES = 2 * 2**30
"""Size from which masters and optimizer state go on in another file; about as much is in memory while saving."""
_WEIGHTS_ONLY = "weights:"
_FIXED = (
    "seed",
    "model.variant",
    "model.extend",
    "model.expert",
    "model.layers",
    "model.weights",
    "model.dtype",
    "model.frozen_dtype",
    "data.columns",
    "data.height",
    "data.width",
    "data.max_pixels",
    "data.bucket_step",
    "data.buckets",
    "data.frames",
    "data.tiles",
    "data.fps",
    "data.sampling",
    "data.short",
    "data.repeat",
    "data.caption_prefix",
    "data.caption_dropout",
    "data.input_dropout",
    "train.method",
    "train.global_batch",
    "train.optimizer",
    "lora.rank",
    "lora.alpha",
    "lora.preset",
    "objective",
)
"""Options that decide what was trained, on what and how: going on with others would be another run."""
_OF_INTEREST = ("train", "model.path")
"""Options whose change is worth a line."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint that a run goes on from."""

    path: Path
    state: Mapping[str, Any]
    masters: Mapping[str, TensorInfo]
    weights_only: bool
    """Whether only the weights are taken, and the run begins at its first step."""

    @property
    def step(self) -> int:
        """Updates done."""
        return 0 if self.weights_only else int(self.state["step"])


def find_checkpoint(config: Config) -> Checkpoint | None:
    """The checkpoint that `resume` names; None if it is `auto` and there is none yet.

    Raises:
        UserError: it does not exist, is damaged, or cannot be resumed from.
    """
    asked = config.resume
    if asked is None:
        return None
    weights_only = asked.startswith(_WEIGHTS_ONLY)
    if asked == "auto":
        newest = next(complete_checkpoints(Path(config.output)), None)
        return _open(newest, weights_only=False) if newest is not None else None
    place = Path(asked.removeprefix(_WEIGHTS_ONLY))
    if (place / STATE).is_file():
        _check_complete(place)
        return _open(place, weights_only=weights_only)
    newest = next(complete_checkpoints(place), None)
    if newest is None:
        raise UserError(f"resume: {place} is neither a checkpoint with a {STATE} nor a run with a complete checkpoint")
    return _open(newest, weights_only=weights_only)


def complete_checkpoints(run: Path) -> Iterator[Path]:
    """The undamaged checkpoints of a run that can be resumed from, newest first; each is looked at when asked for."""
    for folder in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            _check_complete(folder)
        except UserError:
            continue
        yield folder


def _check_complete(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        raise UserError(f"resume: {folder} has no {MANIFEST}; it was saved with save.resumable=false or is incomplete")
    for name, expected in read_json(folder / MANIFEST).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            raise UserError(f"resume: {file} is missing or cut off; give an earlier checkpoint")
        if fingerprint(file) != expected["fingerprint"]:
            raise UserError(f"resume: {file} is not what was saved; give an earlier checkpoint")


def _open(folder: Path, *, weights_only: bool) -> Checkpoint:
    return Checkpoint(folder, read_json(folder / STATE), read_headers(folder / MASTERS), weights_only)


def write_manifest(folder: Path) -> None:
    """Note size and fingerprint of every file that is there."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    entries = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "fingerprint": fingerprint(file)}
        for file in files
    }
    (folder / MANIFEST).write_text(json.dumps(entries, indent=2), encoding="utf-8")


def data_digest(metadata: Metadata) -> str:
    """Identifies the samples and their order: names of files and prompts."""
    rows = [
        [
            row.media.name,
            row.prompt if len(row.prompts) == 1 else row.prompts,
            {column: [file.name for file in files] for column, files in row.inputs.items()},
            *([row.start, row.end] if row.start or row.end else []),
            *(picture.name for picture in row.pictures),
        ]
        for row in metadata.rows
    ]
    order = [] if isinstance(metadata.epoch, range) else list(metadata.epoch)
    return hashlib.sha256(json.dumps([*rows, *order]).encode()).hexdigest()


def agreed_digest(metadata: Metadata, processes: "Processes") -> str:
    """The digest of samples that all processes have found alike. Collective.

    Raises:
        UserError: this process has found others than the first one.
    """
    digest = data_digest(metadata)
    if processes.share(digest) != digest:
        raise UserError(
            f"data: this process has found other samples in {metadata.label} ({len(metadata.rows)} rows) than the first one; "
            "all machines must see the same files"
        )
    return digest


def check_resumable(checkpoint: Checkpoint, config: Config, metadata: Metadata) -> list[str]:
    """Refuse to go on with a run that would be another one.

    Returns:
        Lines about what changed and may.

    Raises:
        UserError: naming the options, what they were and what they are.
    """
    was, now = checkpoint.state["config"], json.loads(config.model_dump_json())
    if checkpoint.weights_only:
        fixed = [name for name in _FIXED if name.split(".")[0] in ("model", "lora")] + ["train.method"]
        fixed = [name for name in fixed if name not in ("model.dtype", "model.frozen_dtype", "lora.alpha")]
    else:
        fixed = list(_FIXED)
    different = [name for name in fixed if _value(was, name) != _value(now, name)]
    if different:
        shown = ", ".join(f"{name} was {_value(was, name)!r} and is {_value(now, name)!r}" for name in different)
        advice = (
            "set it back"
            if checkpoint.weights_only
            else (f"set it back, or begin anew from the weights with resume={_WEIGHTS_ONLY}{checkpoint.path}")
        )
        raise UserError(f"resume: {checkpoint.path} belongs to another run: {shown}; {advice}")
    if checkpoint.weights_only:
        return []
    if checkpoint.state["data"] != data_digest(metadata):
        raise UserError(
            f"resume: {metadata.label} has other rows than when {checkpoint.path} was saved, so samples would come in "
            f"another order; give the same rows, or begin anew from the weights with resume={_WEIGHTS_ONLY}{checkpoint.path}"
        )
    changed = [
        f"{name} {_value(was, name)!r} -> {_value(now, name)!r}"
        for name in _leaves(now)
        if name.startswith(_OF_INTEREST) and _value(was, name) != _value(now, name)
    ]
    return [f"resume: changed since step {checkpoint.step}: {', '.join(changed)}"] if changed else []


def _value(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if prefix == "" and isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        else:
            yield f"{prefix}{key}"


class StateReader:
    """The tensors of a checkpoint by parameter, read one at a time from mapped files."""

    def __init__(self, checkpoint: Checkpoint, without: Collection[str] = ()) -> None:
        """Open it; `without` are keys of optimizer state that this run does not keep."""
        self._masters = checkpoint.masters
        self._optimizer: dict[str, dict[str, TensorInfo]] = {}
        # Without the folder no update had been made: there is no state yet.
        if not checkpoint.weights_only and (checkpoint.path / OPTIMIZER).is_dir():
            for name, info in read_headers(checkpoint.path / OPTIMIZER).items():
                parameter, _, key = name.rpartition("/")
                if key in without:
                    continue
                self._optimizer.setdefault(parameter, {})[key] = info
        self._files: dict[Path, Any] = {}

    @property
    def has_optimizer_state(self) -> bool:
        """Whether any update had been made."""
        return bool(self._optimizer)

    def master(self, name: str) -> "torch.Tensor":
        """A trained parameter, float32."""
        return self._read(self._masters[name], name)

    def optimizer(self, name: str) -> "dict[str, torch.Tensor]":
        """What the optimizer kept of it."""
        return {key: self._read(info, f"{name}/{key}") for key, info in self._optimizer[name].items()}

    def _read(self, info: TensorInfo, name: str) -> "torch.Tensor":
        from safetensors import safe_open

        if info.file not in self._files:
            self._files[info.file] = safe_open(info.file, framework="pt")
        return info.read(self._files[info.file], name)


def write_training_state(folder: Path | None, strategy: "Strategy") -> Exception | None:
    """Write masters and optimizer state into an existing folder. Collective.

    Args:
        folder: where; None on processes that only help to gather.
        strategy: of the run.

    Returns:
        What went wrong on the main process; gathering then went on without writing, so that all stay in step.
    """
    masters = ((name, value) for name, value in strategy.parameters(strategy.trained_names()))
    moments = ((f"{name}/{key}", value) for name, state in strategy.optimizer_state() for key, value in state.items())
    failure = _write_files(folder and folder / MASTERS, masters)
    return _write_files(folder and folder / OPTIMIZER, moments) or failure


def _write_files(folder: Path | None, tensors: "Iterator[tuple[str, torch.Tensor]]") -> Exception | None:
    """Write named tensors into files of bounded size."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    failure: Exception | None = None
    pending: dict[str, torch.Tensor] = {}
    number = size = 0

    def flush() -> None:
        nonlocal number, size
        assert folder is not None  # noqa: S101
        number, size = number + 1, 0
        folder.mkdir(exist_ok=True)
        save_file(pending, folder / f"{number:05d}.safetensors", metadata={"format": "pt"})
        pending.clear()

    for name, value in tensors:
        if folder is None or failure is not None:
            continue
        try:
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} holds values that are no numbers")
            pending[name] = value.detach().to("cpu", copy=True).contiguous()
            size += value.nbytes
            if size > SHARD_BYTES:
                flush()
        except (OSError, ValueError, SafetensorError) as error:
            failure = error
            pending.clear()
    if folder is not None and failure is None and pending:
        try:
            flush()
        except (OSError, SafetensorError) as error:
            failure = error
    return failure


WarmUp = Callable[[], "torch.Tensor"]


def restore(reader: StateReader, checkpoint: Checkpoint, strategy: "Strategy", warm_up: WarmUp) -> None:
    """Give a started strategy the optimizer state and the loss scale of a checkpoint. Collective."""
    if reader.has_optimizer_state:
        strategy.restore_optimizer_state(reader.optimizer, warm_up)
    strategy.loss_scale.restore(checkpoint.state["loss_scale"])
