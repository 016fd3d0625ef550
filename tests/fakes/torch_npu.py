"""A stand-in for torch_npu on machines without an Ascend NPU: tensors say that they are on an NPU and lie on the CPU.

Importing it adds `torch.npu` and makes the device known to torch, as importing the real one does. Every operator on such
tensors comes through here, so that what the hardware cannot do is refused: float64 and complex numbers, and tensors of
the host among those of the device. The kernels have the names, arguments, results and limits that the pages of
https://gitee.com/ascend/op-plugin (docs/context) give them, and are computed in plain torch. `calls` counts them.
"""

import math
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from tests.copies import PendingCopy
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

Tensor = torch.Tensor
FORBIDDEN = (torch.float64, torch.complex32, torch.complex64, torch.complex128)
_HOST_VALUES = ("aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operators that take tensors of the host beside those of the device: copies, and indexing."""
calls: Counter[str] = Counter()
"""How often each kernel ran; under `moved` how many tensors came to the device, under `beside` how many copies another
stream made than the one that computes."""


_current = [0]
"""The device of this process."""
_given = [0]
"""Tensors that were made on the device."""
_streams: list["Stream | None"] = [None]
"""The stream that operators go to: None, which is the one that computes, or another."""


class NotOnNpuError(RuntimeError):
    """The hardware cannot do this."""


class NpuTensor(torch.Tensor):
    """A tensor on the device; `raw` has its values."""

    raw: Tensor
    number: int
    """Of tensors, in the order in which they were made."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> "NpuTensor":
        made: NpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(
                "npu", 0
            ),  # whichever it was asked for, as torch knows of no more than one such device here
        )
        made.raw = raw
        _given[0] += 1
        made.number = _given[0]
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"NpuTensor({self.raw!r})"

    def tolist(self) -> Any:
        """As torch refuses it to subclasses."""
        return self.raw.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _on_device(func, args, kwargs or {})


def _is_npu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "npu"


def _on_device(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the values, and put its results on the device unless it was told to put them elsewhere."""
    name = func.name().split(".")[0]
    wrappers: dict[int, NpuTensor] = {}
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    host = [one for one in given if not isinstance(one, NpuTensor) and one.ndim]
    to = kwargs.get("device")
    if host and not _is_npu(to) and name not in _HOST_VALUES and not name.startswith("c10d"):
        raise NotOnNpuError(f"{func}: tensors of the host among those of the device: {[one.shape for one in host]}")

    def unwrapped(value: Any) -> Any:
        if isinstance(value, NpuTensor):
            wrappers[id(value.raw)] = value
            return value.raw
        return value

    stream = _streams[0]
    if stream is not None:
        if name != "aten::copy_":
            raise NotOnNpuError(f"{func}: only copies go to the second stream")
        stream.take(*args[:2])
        return args[0]
    if func.namespace == "flowshard":  # runs on tensors of the device, as it has no kernel of its own for it
        return OPDEFS[name]._init_fn(*args, **kwargs)
    args, kwargs = tree_map(unwrapped, args), tree_map(unwrapped, kwargs)
    if _is_npu(to):
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        calls["moved"] += name == "aten::_to_copy"
    result = func(*args, **kwargs)
    stays = to is not None and not _is_npu(to)
    into_host = name == "aten::copy_" and id(args[0]) not in wrappers
    if stays or into_host:
        return result

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in wrappers:
            return wrappers[id(value)]
        if value.dtype in FORBIDDEN:
            raise NotOnNpuError(f"{func}: a tensor of {value.dtype} would be on the device")
        return NpuTensor(value)

    return tree_map(wrapped, result)


class _Hardware(TorchDispatchMode):
    """While active there is the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # fake tensors know their devices themselves
        if kwargs.get("pin_memory"):  # which this build of torch refuses without another kind of device
            kwargs = {**kwargs, "pin_memory": False}
        if _is_npu(kwargs.get("device")) or any(issubclass(kind, NpuTensor) for kind in types):
            with self:
                return _on_device(func, args, kwargs)
        return func(*args, **kwargs)


class _Literals(TorchFunctionMode):
    """While active, tensors of Python numbers are made on the device, which torch does past the other mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _is_npu(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        return func(*args, **kwargs)


@contextmanager
def hardware() -> Iterator[None]:
    """The context in which tensors can be on the device. Not always on, as it makes every operator slow."""
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    # Else a module that changes its type gives its parameters new data, of which `raw` would not know.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Hardware(), _Literals():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


class Event:
    """A mark in a stream."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        del enable_timing

    def record(self, stream: "Stream | None" = None) -> None:
        self._time = time.perf_counter()
        self._stream, self._copies = stream, 0 if stream is None else stream.taken

    def reach(self) -> None:
        """What was given to the stream before the mark is done."""
        if self._stream is not None:
            self._stream.finish(self._copies)

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds."""
        return 1000 * (later._time - self._time)


class Stream:
    """A stream beside the one that computes. What is given to it is done when somebody waits for it, and not before."""

    def __init__(self, device: Any = None) -> None:
        del device
        self.taken = 0
        self._done = 0
        self._copies: list[PendingCopy] = []
        self._seen = 0

    def wait_stream(self, stream: "_Computing") -> None:
        """What is given from now on comes after what the other stream has been given."""
        assert isinstance(stream, _Computing)
        self._seen = _given[0]

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def take(self, target: Tensor, source: Tensor) -> None:
        """A copy, one of whose tensors is on the device."""
        for one in (target, source):
            if isinstance(one, NpuTensor) and one.number > self._seen:
                raise NotOnNpuError("a stream copies what the other has not made yet: it did not wait for it")
        target, source = (one.raw if isinstance(one, NpuTensor) else one for one in (target, source))
        self._copies.append(PendingCopy(target, source))
        self.taken += 1

    def finish(self, taken: int) -> None:
        """Do so many of the copies that were ever given."""
        while self._done < taken:
            self._copies.pop(0).run()
            self._done += 1
            calls["beside"] += 1


class _Computing:
    """The stream that computes, at once."""

    def wait_event(self, event: Event) -> None:
        event.reach()


@contextmanager
def _into(stream: Stream) -> Iterator[None]:
    before, _streams[0] = _streams[0], stream
    try:
        yield
    finally:
        _streams[0] = before


def _module() -> types.ModuleType:
    """`torch.npu`."""
    module = types.ModuleType("torch.npu")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 8,
        current_device=lambda: _current[0],
        set_device=lambda device: _current.__setitem__(0, torch.device(device).index),
        get_device_name=lambda _=None: "Ascend910B3",
        synchronize=lambda _=None: None,
        empty_cache=lambda: None,
        max_memory_allocated=lambda _=None: 12_345_678,
        mem_get_info=lambda _=None: (60 * 2**30, 64 * 2**30),
        manual_seed_all=lambda _: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        Event=Event,
        Stream=Stream,
        stream=_into,
        current_stream=lambda _=None: _Computing(),
        config=types.SimpleNamespace(allow_internal_format=True),
        _is_in_bad_fork=lambda: False,
    )
    return module


def _make_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """HCCL, for which gloo stands in."""
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


_setup_privateuseone_for_python_backend("npu", _module())
# Page-locked memory is that of a device's driver; all memory here is the CPU's.
torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
torch.distributed.Backend.register_backend("hccl", _make_backend, devices=["npu", "cpu"])

# Autocast as torch_npu has it: matrix products in the short type, all else in the type of what it gets.
_AUTOCAST = "AutocastPrivateUse1"
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d", "conv3d", "scaled_dot_product_attention")
_fall_through = torch.library.Library("_", "IMPL")
_fall_through.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
_casts = torch.library.Library("aten", "IMPL")


def _in_short_type(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
            return value.to(torch.get_autocast_dtype("npu")) if floating else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST))):
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


for _name in _PRODUCTS:
    _casts.impl(_name, _in_short_type(getattr(torch.ops.aten, _name).default), _AUTOCAST)

_kernels = torch.library.Library("npu", "DEF")
_SHARED = (
    "int head_num, str input_layout, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, {}"
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, {}"
    "int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
    "bool gen_mask_parallel=True, bool sync=False"
)
_kernels.define(
    f"npu_fusion_attention(Tensor query, Tensor key, Tensor value, {_SHARED.format('float scale=1., ', '')}) -> "
    "(Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
_statistics = (
    "Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, "
    "float scale_value=1., "
)
_grad = _SHARED.format(_statistics, "int seed=0, int offset=0, int numels=0, ").replace(
    "input_layout, ", "input_layout, *, "
)
_kernels.define(
    f"npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, {_grad}) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)


def _scores(query: Tensor, key: Tensor, head_num: int, layout: str, mask: Tensor | None, scale: float) -> Tensor:
    """float32 of shape (batch, heads, queries, keys), after the limits of the kernel have been checked."""
    batch, queries, heads, size = query.shape
    wanted = (batch, 1, queries, key.shape[1])
    for wrong in (
        layout != "BSND" and "a layout that this stand-in does not know",
        query.dtype not in (torch.float16, torch.bfloat16, torch.float32) and f"{query.dtype}",
        query.dtype != key.dtype and "types differ",
        not (heads == head_num <= 256 and size <= 768) and "too many heads or too large ones",
        not query.is_contiguous() and "not contiguous",
        mask is not None and not (mask.dtype == torch.bool and mask.shape == wanted) and f"a mask of {mask.shape}",
        mask is not None and bool(mask.all(dim=3).any()) and "a row that sees nothing",
    ):
        if wrong:
            raise NotOnNpuError(f"npu_fusion_attention: {wrong}")
    products = scale * torch.einsum("bqhd,bkhd->bhqk", query.float(), key.float())
    return products if mask is None else products.masked_fill(mask, -math.inf)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: None = None,
    padding_mask: None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    *_: Any,
) -> tuple[Any, ...]:
    assert pse is None and padding_mask is None and keep_prob == 1.0
    calls["npu_fusion_attention"] += 1
    scores = _scores(query, key, head_num, input_layout, atten_mask, scale)
    largest = scores.amax(dim=3, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(dim=3, keepdim=True)
    output = torch.einsum("bhqk,bkhd->bqhd", weights / total, value.float()).to(query.dtype)
    return output, largest.repeat(1, 1, 1, 8), total.repeat(1, 1, 1, 8), query.new_empty(0), 0, 0, 0


def _attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **named: Any
) -> tuple[Tensor, ...]:
    assert named.get("pse") is None and named.get("padding_mask") is None and named.get("keep_prob", 1.0) == 1.0
    calls["npu_fusion_attention_grad"] += 1
    scale = named.get("scale_value", 1.0)
    scores = _scores(query, key, head_num, input_layout, named.get("atten_mask"), scale)
    assert named["softmax_max"].shape[3] == named["softmax_sum"].shape[3] == 8
    assert dy.dtype == query.dtype and dy.is_contiguous()
    weights = (scores - named["softmax_max"][..., :1]).exp() / named["softmax_sum"][..., :1]
    dy, output = dy.float(), named["attention_in"].float()
    delta = (dy * output).sum(dim=3).transpose(1, 2)[..., None]
    products = weights * (torch.einsum("bqhd,bkhd->bhqk", dy, value.float()) - delta) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", products, key.float())
    dk = torch.einsum("bhqk,bqhd->bkhd", products, query.float())
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, dy)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), query.new_empty(0)


def _attention_shapes(query: Tensor, key: Tensor, value: Tensor, head_num: int, *_: Any, **__: Any) -> tuple[Any, ...]:
    statistics = query.new_empty(query.shape[0], head_num, query.shape[1], 8, dtype=torch.float32)
    return torch.empty_like(query), statistics, torch.empty_like(statistics), query.new_empty(0), 0, 0, 0


_NAMES = ("query", "key", "value", "head_num", "input_layout", "pse", "padding_mask", "atten_mask", "scale")


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    given = dict(zip(_NAMES, inputs, strict=False))
    ctx.save_for_backward(given["query"], given["key"], given["value"], given["atten_mask"], *output[:3])
    ctx.given = given["head_num"], given["input_layout"], given["scale"]


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    query, key, value, mask, output, largest, total = ctx.saved_tensors
    heads, layout, scale = ctx.given
    gradients = torch.ops.npu.npu_fusion_attention_grad(
        query,
        key,
        value,
        gradient.contiguous(),
        heads,
        layout,
        atten_mask=mask,
        softmax_max=largest,
        softmax_sum=total,
        attention_in=output,
        scale_value=scale,
    )
    return *gradients[:3], *[None] * 15


_kernels.impl("npu_fusion_attention", _attention, "CPU")
_kernels.impl("npu_fusion_attention_grad", _attention_grad, "CPU")
torch.library.register_fake("npu::npu_fusion_attention", _attention_shapes)
torch.library.register_autograd("npu::npu_fusion_attention", _backward, setup_context=_keep)


def npu_fusion_attention(*args: Any, **kwargs: Any) -> Any:
    """See docs/context/torch_npu-npu_fusion_attention.md."""
    return torch.ops.npu.npu_fusion_attention(*args, **kwargs)


def npu_fusion_attention_grad(*args: Any, **kwargs: Any) -> Any:
    """Its backward pass, with the maximum and sum that it is given."""
    return torch.ops.npu.npu_fusion_attention_grad(*args, **kwargs)


class _RmsNorm(torch.autograd.Function):
    """Keeps what the kernel keeps: its inputs and the factors."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        wide = states.float()
        factor = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        ctx.save_for_backward(states, gamma, factor)
        ctx.mark_non_differentiable(factor)
        return (wide * factor * gamma.float()).to(states.dtype), factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        states, gamma, factor = ctx.saved_tensors
        normal = states.float() * factor
        gradient = gradient.float()
        of_gamma = (gradient * normal).flatten(0, -2).sum(dim=0).to(gamma.dtype)
        inner = gradient * gamma.float()
        of_states = factor * (inner - normal * (inner * normal).mean(dim=-1, keepdim=True))
        return of_states.to(states.dtype), of_gamma if ctx.needs_input_grad[1] else None, None


class _Rotary(torch.autograd.Function):
    """Keeps its input as the kernel does."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        ctx.save_for_backward(states, r1, r2)
        turned = torch.stack((-states[..., 1::2], states[..., 0::2]), dim=-1).flatten(-2)
        return states * r1 + turned * r2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, r1, r2 = ctx.saved_tensors
        scaled = gradient * r2
        turned = torch.stack((scaled[..., 1::2], -scaled[..., 0::2]), dim=-1).flatten(-2)
        return gradient * r1 + turned, None, None


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """See docs/context/torch_npu-npu_rms_norm.md."""
    if self.dtype != gamma.dtype or self.dtype in FORBIDDEN:
        raise NotOnNpuError(f"npu_rms_norm: {self.dtype} and {gamma.dtype}")
    calls["npu_rms_norm"] += isinstance(self, NpuTensor)
    output: tuple[Tensor, Tensor] = _RmsNorm.apply(self, gamma, epsilon)
    return output


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """See docs/context/torch_npu-npu_rotary_mul.md."""
    batch, tokens, heads, size = input.shape
    if rotary_mode != "interleave" or {r1.shape, r2.shape} != {(1, tokens, 1, size)} or r1.dtype != input.dtype:
        raise NotOnNpuError(f"npu_rotary_mul: {rotary_mode}, {input.shape}, {r1.shape}, {r1.dtype}, {input.dtype}")
    if batch * heads >= 1000 or size >= 896 or size % 2:
        raise NotOnNpuError(f"npu_rotary_mul: {input.shape}")
    calls["npu_rotary_mul"] += isinstance(input, NpuTensor)
    output: Tensor = _Rotary.apply(input, r1, r2)
    return output
