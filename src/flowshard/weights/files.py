"""Model folders and safetensors files, looked at without loading a tensor. Needs no torch."""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.weights.names import Rows

if TYPE_CHECKING:
    import torch

LORA_FILE = "lora.safetensors"
"""The adapters of a checkpoint, in diffusers' LoRA layout."""
MODULES_FILE = "modules.safetensors"
"""What was trained in full beside the adapters, in diffusers' names."""
TRANSFORMER_FOLDER = "transformer"
"""The transformer of a pipeline or of a checkpoint of full training."""
LOW_EXPERT_FOLDER = "transformer_2"
"""The transformer for low noise of a pipeline with two."""

HUB = "FLOWSHARD_HUB"
"""Environment variable that says which hub models are downloaded from."""
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says of one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    stored: str = ""
    """Its name in the file, if it has another here."""
    rows: Rows = ()
    """The rows of what is stored that it consists of, one range after another; all of them if there are none."""

    def read(self, file: Any, name: str) -> "torch.Tensor":
        """Its value, a view of the mapped file where that holds it in one piece.

        Args:
            file: `self.file`, opened with `safe_open`.
            name: its name here.
        """
        import torch

        stored = self.stored or name
        if not self.rows:
            whole: torch.Tensor = file.get_tensor(stored)
            return whole
        pieces: list[torch.Tensor] = [file.get_slice(stored)[start:end] for start, end in self.rows]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file by name.

    Format: https://huggingface.co/docs/safetensors/index#format.

    Raises:
        UserError: the file is not safetensors, or is shorter than its header says.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise UserError(f"{file}: is not a safetensors file or is cut off; copy or download it again")
            header: dict[str, Any] = json.loads(stream.read(length))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError:  # broken JSON or broken UTF-8
        raise UserError(f"{file}: is not a safetensors file; its header is broken") from None
    try:
        header.pop("__metadata__", None)
        end = max((0 + entry["data_offsets"][1] for entry in header.values()), default=0)
        tensors = {name: TensorInfo(file, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (AttributeError, TypeError, KeyError, IndexError):
        raise UserError(f"{file}: is not a safetensors file; its header is broken") from None
    if 8 + length + end != size:
        raise UserError(
            f"{file}: has {size} bytes where its header announces {8 + length + end}; copy or download it again"
        )
    return tensors


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a model saved by diffusers, in one file or in the shards of an index.

    Raises:
        UserError: there are no weights, or a shard of the index is missing.
    """
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        weight_map = read_json(indices[0]).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{indices[0]}: has no weight_map from tensors to files; copy or download it again")
        files = [folder / name for name in dict.fromkeys(weight_map.values())]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(f"{indices[0]}: names shards that are not there: {', '.join(missing)}; copy them as well")
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: holds no .safetensors weights")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(file))
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        UserError: the file is missing or broken.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: is not a JSON object")
    return value


def find_trained(path: Path, *names: str, option: str) -> Path:
    """The file itself, or the newest of these names in a checkpoint or a run.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return path
    checkpoints = sorted((path / "checkpoints").glob("step-*"), reverse=True)
    for folder in (path, *checkpoints):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise UserError(
        f"{option}: {path} does not exist or holds no {' or '.join(names)}; give a file, a checkpoint or a run"
    )


def check_spec(spec: str, *, option: str) -> tuple[str, str]:
    """Split `FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`.

    Raises:
        UserError: it is of neither form, or there is no such file.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise UserError(f"{option}: {spec!r} is not FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(f"{option}: the file {place} does not exist")
    return place, name


def find_pipeline(path: str, *, option: str) -> Path:
    """The local folder of a diffusers pipeline, downloaded from the hub if `path` is a repository id.

    Raises:
        UserError: there is no such folder, it is not a pipeline, or the repository cannot be had.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
            raise UserError(
                f"{option}: the folder {path} does not exist; give a diffusers folder or the id of one on the hub"
            )
        folder = download(path, option=option, ignore_patterns=_NO_WEIGHTS)
    if not (folder / "model_index.json").is_file():
        raise UserError(f"{option}: {folder} is not a diffusers pipeline, as it has no model_index.json")
    return folder


_NO_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.md", "assets/*"]
"""What a repository in the diffusers layout holds besides."""


def download(
    repository: str, *, option: str, allow_patterns: list[str] | None = None, ignore_patterns: list[str] | None = None
) -> Path:
    """The local copy of a repository of the hub, or of the part of it that the patterns select.

    The hub is Hugging Face's, or ModelScope's if the environment variable FLOWSHARD_HUB is `modelscope`.

    Raises:
        UserError: the hub does not give it.
    """
    hub = os.environ.get(HUB, "huggingface")
    if hub == "modelscope":
        try:
            from modelscope import snapshot_download
        except ImportError:
            raise UserError(f"{HUB}: modelscope is not installed; run `pip install modelscope`") from None
    elif hub == "huggingface":
        from huggingface_hub import snapshot_download
    else:
        raise UserError(f"{HUB}: {hub!r} is not huggingface or modelscope")

    try:
        return Path(snapshot_download(repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
    except Exception as error:  # the hub library raises many kinds, of which all mean the same here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{option}: {repository} is no local folder, and the hub does not give it ({reason}); check the name, or "
            "download it on a machine with access and give the folder"
        ) from None


def check_pipeline(folder: Path, family: Family, *, option: str, transformer: str = TRANSFORMER_FOLDER) -> None:
    """Refuse a pipeline folder of another family, or one that lacks the transformer.

    Raises:
        UserError: naming `option`.
    """
    check_pipeline_class(folder, family, option=option)
    if not (folder / transformer / "config.json").is_file():
        raise UserError(f"{option}: {folder} lacks {transformer}/config.json")


def check_pipeline_class(folder: Path, family: Family, *, option: str) -> None:
    """Refuse a pipeline folder of another family.

    Raises:
        UserError: naming `option`.
    """
    found = read_json(folder / "model_index.json").get("_class_name")
    if found != family.pipeline_class:
        raise UserError(
            f"{option}: {folder} holds a {found}, the variant needs a {family.pipeline_class}; give the right folder or "
            "change model.variant"
        )


def scheduler_settings(folder: Path, default: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the pipeline's scheduler is configured; `default` if it says nothing of a sigma shift."""
    file = folder / "scheduler" / "scheduler_config.json"
    settings: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    says = any(settings.get(key) for key in ("flow_shift", "shift", "use_dynamic_shifting"))
    return settings if says else default


def fingerprint(folder: Path) -> str:
    """Identifies the weights and settings in a folder, or in a file, without reading all of a large file.

    Files up to 1 MiB count whole, larger ones with their size and 64 evenly spaced blocks of 16 KiB, first and last
    included: a retrained or converted model differs in every block.
    """
    digest = hashlib.sha256()
    files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= 2**20:
                digest.update(stream.read())
                continue
            for block in range(64):
                stream.seek((size - 2**14) * block // 63)
                digest.update(stream.read(2**14))
    return digest.hexdigest()


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path; what was written there takes the place of `path` only when all went well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        apply_umask(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def apply_umask(path: Path) -> None:
    """Give a file the permissions that new files have; safetensors writes for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def sync(path: Path) -> None:
    """Make the operating system write a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
