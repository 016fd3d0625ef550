"""Linear layers whose frozen weight is held in fewer bits, and multiplied in the type of its input.

| held as | codes of a weight | scales | bytes of an element |
|---|---|---|---|
| `float8` | float8 with 4 bits of exponent and 3 of mantissa | a float32 for each row (output) | 1 |
| `int8` | whole numbers from -127 to 127 | the same | 1 |
| `nf4` | one of 16 quantiles of the normal distribution, two in a byte (https://arxiv.org/abs/2305.14314, section 3) | a float32 for every 64 elements | 0.5625 |

The first two are torch's own types; `nf4` is packed and unpacked by bitsandbytes. Multiplying is one operator of torch,
forwards and backwards: it unpacks the whole weight, multiplies and lets go of it. So autograd and compiled code keep
nothing but the codes, whatever becomes of activations, and the gradient is that of the input alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.library import custom_op, register_autograd
from torch.utils.flop_counter import register_flop_formula

from flowshard.config import FrozenDtype
from flowshard.weights.precision import float32_modules, keeps_float32

Tensor = torch.Tensor

NF4_BLOCK = 64
"""Elements of a weight, row after row, that have a scale in common."""
_LARGEST = {"float8": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.0}
_OPERATOR = "flowshard::frozen_linear"


class FrozenLinear(torch.nn.Module):
    """`torch.nn.Linear` with a weight that is not trained and that `fill` gives its value."""

    def __init__(self, linear: torch.nn.Linear, held_as: FrozenDtype) -> None:
        """Take the place of a layer whose parameters are on the meta device and need no gradient."""
        super().__init__()
        self.in_features, self.out_features, self.held_as = linear.in_features, linear.out_features, held_as
        self.place = linear.weight.detach()
        """What the files have to have: a meta tensor of the shape (out_features, in_features)."""
        self.bias = linear.bias
        codes, scales = _empty(self.place.shape, held_as)
        # Not parameters, as engines flatten, cast and send these; not in the state dict, as the files have another form.
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def fill(self, weight: Tensor) -> None:
        """Hold a value in fewer bits, on the device where it is; see `quantised`."""
        self.codes, self.scales = quantised(weight, self.held_as)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the type of autocast or else of the input."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        result: Tensor = _linear(
            input, self.codes, self.scales, bias, self.held_as, [self.out_features, self.in_features]
        )
        return result

    def extra_repr(self) -> str:
        """What printing a model says of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, held_as={self.held_as}"


def hold_frozen(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], held_as: FrozenDtype) -> None:
    """Replace the linear layers of blocks of which nothing is trained, those below adapters too.

    Args:
        model: on the meta device in its final types, with adapters. What it keeps in float32 stays so.
        blocks: parts of it.
        held_as: the form.
    """
    keep = float32_modules(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    made: dict[int, FrozenLinear] = {}  # a layer with several names stays one
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is not torch.nn.Linear or id(module) not in inside or keeps_float32(name, keep):
            continue
        if any(parameter.requires_grad for parameter in module.parameters()):
            continue
        if id(module) not in made:
            made[id(module)] = FrozenLinear(module, held_as)
        model.set_submodule(name, made[id(module)])


def frozen_layers(model: torch.nn.Module) -> dict[str, FrozenLinear]:
    """Those of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}


def frozen_elements(model: torch.nn.Module) -> int:
    """How many elements their weights have."""
    return sum(layer.place.numel() for layer in frozen_layers(model).values())


def quantised(weight: Tensor, held_as: FrozenDtype) -> tuple[Tensor, Tensor]:
    """The codes and scales of a weight.

    Args:
        weight: (out_features, in_features), of any floating type.
        held_as: the form.

    Returns:
        For `float8` and `int8`: codes of the same shape and scales (out_features, 1), whose product is near the weight.
        For `nf4`: bytes of two codes each, (32 * groups, 1), and scales (groups,), each of 64 elements.
    """
    if held_as == "nf4":
        # In rows of one scale each: its kernels on the CPU take wrong scales where several do not make up a row (0.50.2).
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % NF4_BLOCK))
        rows = flat.view(-1, NF4_BLOCK)
        codes, state = _bitsandbytes().quantize_4bit(rows, blocksize=NF4_BLOCK, quant_type="nf4")
        return codes, state.absmax
    weight = weight.float()
    scales = weight.abs().amax(dim=1, keepdim=True) / _LARGEST[held_as]
    levels = weight / torch.where(scales > 0, scales, 1.0)
    return (levels.to(torch.float8_e4m3fn) if held_as == "float8" else levels.round_().to(torch.int8)), scales


def dequantised(codes: Tensor, scales: Tensor, held_as: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight that codes and scales stand for, rounded once to `dtype`.

    Args:
        codes: from `quantised`, as are the scales.
        scales: see there.
        held_as: the form.
        shape: (out_features, in_features).
        dtype: of the result.
    """
    if held_as != "nf4":
        return codes.to(dtype).mul_(scales)  # codes are exact in every type that is computed with
    library = _bitsandbytes()
    state = library.QuantState(
        absmax=scales,
        shape=torch.Size([len(scales), NF4_BLOCK]),
        dtype=dtype,
        blocksize=NF4_BLOCK,
        quant_type="nf4",
    )
    rows, columns = shape
    weight: Tensor = library.dequantize_4bit(codes, state).flatten()
    return weight[: rows * columns].view(rows, columns)


def _empty(shape: Sequence[int], held_as: FrozenDtype) -> tuple[Tensor, Tensor]:
    """Codes and scales on the meta device."""
    rows, columns = shape
    if held_as == "nf4":
        groups = -(-rows * columns // NF4_BLOCK)
        codes = torch.empty(groups * NF4_BLOCK // 2, 1, dtype=torch.uint8, device="meta")
        return codes, torch.empty(groups, device="meta")
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn if held_as == "float8" else torch.int8, device="meta")
    return codes, torch.empty(rows, 1, device="meta")


def _bitsandbytes() -> Any:
    from bitsandbytes import functional

    return functional


@custom_op(
    _OPERATOR,
    mutates_args=(),
    schema="(Tensor input, Tensor codes, Tensor scales, Tensor? bias, str held_as, int[] shape) -> Tensor",
)
def _linear(
    input: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, held_as: str, shape: list[int]
) -> Tensor:
    rows = input.reshape(-1, shape[1])
    weight = dequantised(codes, scales, held_as, shape, input.dtype)
    return torch.nn.functional.linear(rows, weight, bias).view(*input.shape[:-1], shape[0])


@_linear.register_fake
def _linear_shape(
    input: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, held_as: str, shape: list[int]
) -> Tensor:
    del codes, scales, bias, held_as
    return input.new_empty(*input.shape[:-1], shape[0])


@custom_op(
    f"{_OPERATOR}_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor codes, Tensor scales, str held_as, int[] shape) -> Tensor",
)
def _linear_backward(gradient: Tensor, codes: Tensor, scales: Tensor, held_as: str, shape: list[int]) -> Tensor:
    """The gradient of the input."""
    rows = gradient.reshape(-1, shape[0])
    weight = dequantised(codes, scales, held_as, shape, gradient.dtype)
    return (rows @ weight).view(*gradient.shape[:-1], shape[1])


@_linear_backward.register_fake
def _linear_backward_shape(gradient: Tensor, codes: Tensor, scales: Tensor, held_as: str, shape: list[int]) -> Tensor:
    del codes, scales, held_as
    return gradient.new_empty(*gradient.shape[:-1], shape[1])


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    _, codes, scales, _, ctx.held_as, shape = inputs
    ctx.shape = list(shape)
    ctx.save_for_backward(codes, scales)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    codes, scales = ctx.saved_tensors
    return _linear_backward(gradient, codes, scales, ctx.held_as, ctx.shape), None, None, None, None, None


register_autograd(_OPERATOR, _backward, setup_context=_keep_for_backward)


@register_flop_formula([torch.ops.flowshard.frozen_linear, torch.ops.flowshard.frozen_linear_backward])
def _flops(given: Sequence[int], *args: Any, **_: Any) -> int:
    """Of the matrix product, from the shape of its input or of its gradient, and that of the weight, which comes last."""
    out, into = args[-1]
    rows = torch.Size(given).numel() // given[-1]
    return 2 * rows * out * into


_OPERATORS = {torch.ops.flowshard.frozen_linear.default, torch.ops.flowshard.frozen_linear_backward.default}


def workspace_of(operator: Any, args: Sequence[Any]) -> int:
    """Bytes that a call of one of these operators needs for the whole weight while it runs; 0 for other operators."""
    if operator not in _OPERATORS:
        return 0
    out, into = args[-1]
    given: Tensor = args[0]
    return out * into * given.element_size()
