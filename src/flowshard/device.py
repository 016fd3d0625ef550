"""All that depends on the kind of device: CPU, CUDA or Ascend NPU. Everything else asks here."""

import functools
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flowshard.config import MemoryConfig
from flowshard.errors import UserError

_KINDS = ("cuda", "npu", "cpu")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def resolve_device(name: str, *, option: str = "device") -> torch.device:
    """The device to run on, always with its index.

    Args:
        name: `auto`, or a kind, or a kind with an index.
        option: names the option in messages.

    Raises:
        UserError: the name is no device, or this machine has no such device.
    """
    available = [kind for kind in _KINDS if _count(kind)]
    if name == "auto":
        name = available[0]
    kind, _, index = name.partition(":")
    if kind not in _KINDS or (index and not index.isdecimal()):
        raise UserError(f"{option}: {name!r} is not auto, cpu, cuda or npu, nor one of them with an index as in cuda:1")
    number = int(index or 0)
    if number >= _count(kind):
        found = ", ".join(f"{kind}:{i}" for kind in available for i in range(_count(kind)))
        reason = f". {_without_npu()}" if kind == "npu" and not _count("npu") else ""
        raise UserError(f"{option}: this machine has no {kind}:{number}; it has {found}{reason}")
    return torch.device(kind, number) if kind != "cpu" else torch.device("cpu")


def device_count() -> int:
    """How many devices there are of the kind that `auto` takes; the CPU is one."""
    return next(number for kind in _KINDS if (number := _count(kind)))


def check_dtype(device: torch.device, dtype: str) -> None:
    """Refuse a `model.dtype` that the device does not train in.

    Raises:
        UserError: float16 on the CPU.
    """
    if dtype == "float16" and device.type == "cpu":
        raise UserError("model.dtype: 'float16' is not trained on the CPU; use bfloat16 or float32, or device=cuda")


def check_memory_options(device: torch.device, memory: MemoryConfig) -> None:
    """Refuse options that say what is kept in host memory where that is the device's.

    Raises:
        UserError: the device is the CPU.
    """
    if device.type == "cpu" and memory.offload_overlap:
        raise UserError(
            "memory.offload_overlap: true, but the run is on the CPU, which has no other memory to copy to; set "
            "memory.offload_overlap=false, or device=cuda"
        )
    if device.type == "cpu" and memory.parameters == "host":
        raise UserError(
            "memory.parameters: host, but the run is on the CPU, whose memory is the host's; set memory.parameters=device, "
            "or device=cuda"
        )


def check_frozen_dtype(kind: str, held_as: str | None) -> None:
    """Refuse a `model.frozen_dtype` that there is nothing for on devices of a kind, such as `npu`.

    Raises:
        UserError: nf4 or float8 on an NPU.
    """
    if kind == "npu" and held_as in ("nf4", "float8"):
        why = "bitsandbytes does not support them" if held_as == "nf4" else "the 910 series has no such type"
        raise UserError(f"model.frozen_dtype: {held_as!r} is not for NPUs, as {why}; use int8 or null")


def _count(kind: str) -> int:
    if kind == "cpu":
        return 1
    if kind == "npu" and _npu_error() is not None:
        return 0
    backend: Any = getattr(torch, kind)
    return int(backend.device_count()) if backend.is_available() else 0


def _npu_error() -> Exception | None:
    """Why torch has no Ascend NPUs, if that is because of torch_npu, which adds them when it is imported."""
    try:
        import torch_npu  # noqa: F401 - adds torch.npu
    except (ImportError, OSError, RuntimeError) as error:  # of the libraries of CANN, which it loads
        return error
    return None


def _without_npu() -> str:
    """What to do about the lack of an NPU."""
    if find_spec("torch_npu") is None:
        return "For npu install torch_npu in the version of torch"
    error = _npu_error()
    if error is not None:
        return f"torch_npu cannot be imported ({error}); source the set_env.sh of the CANN toolkit"
    return "torch_npu finds no device; see npu-smi info and ASCEND_RT_VISIBLE_DEVICES"


def collective_backend(device: torch.device) -> str:
    """torch's name of the library through which processes with such devices exchange tensors."""
    return _BACKENDS[device.type]


def claim(device: torch.device) -> None:
    """Make a device the one that this process uses where no other is named. To be called before tensors are on it."""
    if _npu_error() is None:
        # DeepSpeed takes an NPU wherever torch_npu is installed, at its first import, which may be by another library.
        os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.type == "cpu":
        return
    getattr(torch, device.type).set_device(device)
    if device.type == "npu":
        # Weights in the NPU's own formats could not be cut into parts or written as they are.
        settings: Any = torch.npu.config  # type: ignore[attr-defined]
        settings.allow_internal_format = False


def has_double(device: torch.device) -> bool:
    """Whether the device computes in float64 and with complex numbers. An Ascend NPU does neither."""
    return device.type != "npu"


def sum_dtype(device: torch.device) -> torch.dtype:
    """In which sums of many numbers are kept on a device: float64 where it has that."""
    return torch.float64 if has_double(device) else torch.float32


def tables_device(device: torch.device) -> torch.device:
    """Where tables that are computed in float64 are made for a model on a device: there, or on the CPU."""
    return device if has_double(device) else torch.device("cpu")


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The context in which a model computes in `dtype`; none for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The type to which autocast would cast a tensor: its own if that is off."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def memory_peak_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on an accelerator, resident in the process on the CPU."""
    if device.type != "cpu":
        backend: Any = getattr(torch, device.type)
        return int(backend.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def free_memory_bytes(device: torch.device) -> int:
    """What this process could still allocate on an accelerator; on the CPU all memory there is."""
    if device.type == "cpu":
        return memory_total_bytes(device)
    backend: Any = getattr(torch, device.type)
    # torch keeps what it has freed, to use it again.
    unused = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0] + unused)


def memory_total_bytes(device: torch.device) -> int:
    """All memory of the device; on the CPU the machine's, or what the process's control group may use of it."""
    if device.type != "cpu":
        backend: Any = getattr(torch, device.type)
        return int(backend.mem_get_info(device)[1])
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdecimal() else physical


_PEAKS = (
    # TFLOP/s of dense matrix products in bfloat16 or float16, accumulated in float32, from the makers' data sheets, which
    # often give twice that, for sparse ones. NVIDIA: data sheets of A100, H100, H200, HGX B200, L40S and the Ada
    # architecture's white paper. Huawei: the Atlas 800T A2 product pages. The first pattern that is found counts.
    (r"A100", 312.0),
    (r"H100 PCIe", 756.0),
    (r"H100 NVL|H200 NVL", 835.5),
    (r"H100|H200", 989.4),
    (r"B200", 2250.0),
    (r"L40S", 362.05),
    (r"RTX 4090$", 165.2),
    (r"910B2", 376.0),
    (r"910B3", 313.0),
    (r"910B4", 280.0),
)
_MEASURED_SECONDS = 0.1


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second that the device can do at most in matrix products; None if that is not known.

    The CPU is measured, once; what other processes do meanwhile lowers its value.
    """
    if device.type == "cpu":
        return _measured_peak(dtype)
    if dtype == torch.float32:  # depends on whether products are rounded to TF32
        return None
    backend: Any = getattr(torch, device.type)
    return known_peak(str(backend.get_device_name(device)))


def known_peak(name: str) -> float | None:
    """The peak of an accelerator with that name in bfloat16 and float16; None if the table does not have it."""
    return next((1e12 * peak for pattern, peak in _PEAKS if re.search(pattern, name)), None)


@functools.cache
def _measured_peak(dtype: torch.dtype) -> float:
    size = 768
    factors = torch.ones(2, size, size, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + _MEASURED_SECONDS
    while (start := time.perf_counter()) < end:
        torch.mm(factors[0], factors[1])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given; the CPU always has."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor in host memory for copies to and from a device: pinned, so that these need not be waited for.

    torch keeps pinned memory for the next tensor, which gets it only when the copies that were started are done.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")


class HostMemory:
    """Host memory for many tensors that stay.

    torch takes a power of two of bytes for each piece that it pins, which for large tensors can be nearly twice what they
    need, so tensors share pieces.
    """

    def __init__(self, device: torch.device, piece: int = 2**30) -> None:
        """For copies to `device`, in pieces of so many bytes."""
        self._device, self._size = device, piece
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > self._piece.numel():
            self._piece = host_tensor((max(size, self._size),), torch.uint8, self._device)
            self._used = 0
        part = self._piece[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype).view(tuple(shape))


_ALIGNMENT = 256
"""Bytes at whose multiples tensors begin, as in the devices' own memory."""


class CopyStream:
    """Copies between device and pinned host memory beside what the device computes.

    A copy begins when the device has done what it was given before. What it is given later comes after the copy only from
    `wait` on. Until then both tensors have to be kept: the memory of one that is let go of is given out again in the order
    in which the device computes, and that knows nothing of the copy. On the CPU a copy is made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = getattr(torch, device.type) if device.type != "cpu" else None
        self._stream: Any = None if self._backend is None else self._backend.Stream(device)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Copy into the first tensor of each pair what the second holds; what to `wait` for."""
        if self._backend is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(self._backend.current_stream(self._device))
        with self._backend.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Let what the device is given from now on come after the copies for which `copy` returned this."""
        if self._backend is not None:
            self._backend.current_stream(self._device).wait_event(copied)


class Stopwatch:
    """Splits the time of a step into phases without making an accelerator wait at every phase.

    On an accelerator, events are put into the stream and read in `read`, which waits once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = getattr(torch, device.type) if device.type != "cpu" else None
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begin a step."""
        self._marks = [("", self._now())]

    def lap(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`; laps of one name add up."""
        self._marks.append((phase, self._now()))

    def read(self) -> dict[str, float]:
        """Seconds of each phase."""
        synchronize(self._device)
        seconds: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            span = after - before if self._backend is None else before.elapsed_time(after) / 1000.0
            seconds[phase] = seconds.get(phase, 0.0) + span
        return seconds

    def _now(self) -> Any:
        if self._backend is None:
            return time.perf_counter()
        event = self._backend.Event(enable_timing=True)
        event.record()
        return event
