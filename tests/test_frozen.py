"""Frozen weights in fewer bits: the numbers by hand, under every policy and layout, what they take, and what is refused."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowshard.config import FrozenDtype
from flowshard.config_file import load_config
from flowshard.device import check_frozen_dtype
from flowshard.errors import UserError
from flowshard.memory.compiled import CompileChoice
from flowshard.memory.estimate import Engine, estimate_memory
from flowshard.memory.flops import count_flops
from flowshard.memory.sizes import model_size
from flowshard.parallel.strategies import LossScale, Single
from flowshard.parity.command import parity
from flowshard.plan.model import PlannedModel
from flowshard.train import inputs as train_inputs
from flowshard.train.build import build_on_meta, fill, loss_function
from flowshard.train.inputs import RunInputs, check_inputs
from flowshard.weights import frozen
from flowshard.weights.frozen import FrozenLinear, dequantised, frozen_layers, quantised
from flowshard.weights.lora import base_name
from tests import runs
from tests.test_estimate import batch, measured_step
from tests.test_family_layouts import OWN, PICTURE
from tests.test_layouts_agree import options
from tests.workers.memory import Storages

TinyModels = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
NEEDS_LIBRARY = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
FORMS = ("float8", "int8", pytest.param("nf4", marks=NEEDS_LIBRARY))
# https://arxiv.org/abs/2305.14314, appendix E
NORMAL_FLOAT = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip


def _by_hand(weight: torch.Tensor, held_as: str) -> torch.Tensor:
    """What is left of a weight, in float64: each element takes the nearest value that the form has."""
    weight = weight.double()
    if held_as == "nf4":
        levels = torch.tensor(NORMAL_FLOAT, dtype=torch.float64)
        groups = weight.flatten().split(64)
        return torch.cat([_nearest(one / one.abs().max(), levels) * one.abs().max() for one in groups]).view_as(weight)
    if held_as == "int8":
        levels = torch.arange(-127, 128).double()
    else:  # sign, 4 bits of exponent and 3 of mantissa; the largest is not a number
        parts = [(exponent, mantissa) for exponent in range(16) for mantissa in range(8)][:-1]
        positive = [2.0 ** (e - 7) * (1 + m / 8) if e else 2.0**-6 * m / 8 for e, m in parts]
        levels = torch.tensor([*positive, *(-value for value in positive)], dtype=torch.float64)
    scales = weight.abs().amax(dim=1, keepdim=True) / levels.max()
    return _nearest(weight / scales, levels) * scales


def _nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return levels[(values[..., None] - levels).abs().argmin(dim=-1)]


def _layer(weight: torch.Tensor, held_as: FrozenDtype, *, bias: bool = True) -> FrozenLinear:
    with torch.device("meta"):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias).requires_grad_(False)
    layer = FrozenLinear(linear, held_as)
    expected = [(tensor.shape, tensor.dtype) for tensor in (layer.codes, layer.scales)]
    layer.fill(weight)
    assert [(tensor.shape, tensor.dtype) for tensor in (layer.codes, layer.scales)] == expected  # as it was planned
    if bias:
        layer.bias = torch.nn.Parameter(torch.randn(weight.shape[0]), requires_grad=False)
    return layer


@pytest.mark.parametrize("held_as", FORMS)
@pytest.mark.parametrize(("shape", "bias"), [((96, 64), True), ((7, 5), False)])
def test_a_layer_multiplies_by_the_nearest_values_that_its_form_has(
    held_as: FrozenDtype, shape: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 1, shape[0])[:, None]
    layer, left = _layer(weight, held_as, bias=bias), _by_hand(weight, held_as)
    assert runs.relative_error(left, weight.double()) > 1e-3  # something is lost
    input = torch.randn(2, 3, shape[1], requires_grad=True)
    result = layer(input)
    expected = input.detach().double() @ left.T + (layer.bias.double() if bias else 0.0)
    assert runs.relative_error(result.detach().double(), expected) < 1e-6
    gradient = torch.randn_like(result)
    result.backward(gradient)
    assert input.grad is not None
    assert runs.relative_error(input.grad.double(), gradient.double() @ left) < 1e-6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(input)
    assert mixed.dtype == torch.bfloat16
    assert runs.relative_error(mixed.detach().double(), expected) < 1e-2


@NEEDS_LIBRARY
def test_int8_is_what_bitsandbytes_makes_of_rows() -> None:
    from bitsandbytes import functional

    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).half()
    codes, scales = quantised(weight, "int8")
    theirs, largest, _ = functional.int8_vectorwise_quant(weight)
    assert torch.equal(codes, theirs)
    assert torch.equal(scales[:, 0], largest / 127)


@pytest.mark.parametrize("held_as", ["float8", "int8"])
def test_a_row_of_zeros_stays_one(held_as: FrozenDtype) -> None:
    weight = torch.zeros(2, 4)
    weight[0] = 1.0
    codes, scales = quantised(weight, held_as)
    assert torch.equal(dequantised(codes, scales, held_as, weight.shape, torch.float32), weight)


@pytest.mark.slow
@pytest.mark.parametrize("held_as", FORMS)
def test_the_operators_are_sound(held_as: FrozenDtype) -> None:
    """Shapes without computing, backward pass, and what compiled code needs, by torch's own check."""
    layer = _layer(torch.randn(8, 6), held_as)
    form = (layer.codes, layer.scales)
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tests += ["test_schema"] if held_as != "float8" else []  # it compares inputs in ways that float8 does not have
    operators: Any = torch.ops.flowshard
    given = torch.randn(2, 3, 6, requires_grad=True)
    torch.library.opcheck(operators.frozen_linear, (given, *form, layer.bias, held_as, [8, 6]), test_utils=tests)
    gradient = torch.randn(2, 3, 8)
    torch.library.opcheck(operators.frozen_linear_backward, (gradient, *form, held_as, [8, 6]), test_utils=tests)


def _inputs(folder: Path, variant: str, clips: Path, output: Path, *overrides: str) -> RunInputs:
    own = [] if variant.startswith("wan") else PICTURE
    return check_inputs(runs.config(folder, clips, output, f"model.variant={variant}", *own, *overrides))


def _start(model: torch.nn.Module) -> None:
    """Adapters that change something."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))


def _gradients(model: torch.nn.Module, inputs: RunInputs, samples: Tensors) -> tuple[float, Tensors]:
    model.zero_grad()
    loss = loss_function(inputs.family, dtype=torch.float32, device=CPU)(model, samples)
    loss.backward()
    return float(loss), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    ("variant", "held_as"),
    [
        pytest.param(variant, held_as, marks=[NEEDS_LIBRARY] * (held_as == "nf4"))
        for variant, held_as in (("wan2.1-t2v-1.3b", "int8"), ("qwen-image", "nf4"), ("flux.1-dev", "float8"))
    ],
)
def test_a_model_computes_with_what_is_left_of_its_weights_under_every_policy(
    tiny_models: TinyModels, clips: Path, tmp_path: Path, variant: str, held_as: str
) -> None:
    """Against the same model whose weights were replaced by hand."""
    given = (tiny_models(variant), variant, clips)
    plain = _inputs(*given, tmp_path / "plain")
    samples = next(runs.batches(plain).micro_batches(0)).tensors()
    expected = runs.fill_model(plain).model
    _start(expected)
    whole, _ = _gradients(expected, plain, samples)
    blocks = {id(module) for block in plain.family.blocks(expected) for module in block.modules()}
    changed = {}
    for name, module in expected.named_modules():
        if type(module) is torch.nn.Linear and id(module) in blocks and "lora_" not in name:
            changed[base_name(f"{name}.weight")] = held_as
            left = _by_hand(module.weight.detach(), held_as)
            module.weight = torch.nn.Parameter(left.float(), requires_grad=False)
    loss, gradients = _gradients(expected, plain, samples)
    assert 1e-7 < abs(loss / whole - 1) < 0.1
    for policy in ("keep", "selective", "recompute", "offload"):
        own = (f"model.frozen_dtype={held_as}", f"memory.activations={policy}")
        inputs = _inputs(*given, tmp_path / policy, *own)
        filled = runs.fill_model(inputs)
        assert filled.report.quantised == changed
        assert f"held as {held_as}  " in filled.report.table()
        assert not any(name in changed for name, _ in filled.model.named_parameters())
        _start(filled.model)
        found, ours = _gradients(filled.model, inputs, samples)
        assert found == pytest.approx(loss, rel=1e-6)
        assert ours.keys() == gradients.keys()
        assert runs.distance(ours, gradients) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "policy", "held_as"),
    [
        ("bfloat16", "recompute", "int8"),
        pytest.param("bfloat16", "keep", "nf4", marks=NEEDS_LIBRARY),
        pytest.param("bfloat16", "selective", "float8", marks=pytest.mark.slow),
    ],
)
def test_the_plan_knows_what_they_take(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, policy: str, held_as: str
) -> None:
    own = (f"model.dtype={dtype}", f"memory.activations={policy}", f"model.frozen_dtype={held_as}", "lora.rank=8")
    inputs = _inputs(tiny, "wan2.1-t2v-1.3b", clips, tmp_path / "run", *own)
    tensors = batch(16)
    model = PlannedModel(inputs, build_on_meta(inputs).model, tensors, accelerator=False)
    timeline = model.timeline(ulysses=1, ring=1, policies=model.policies())
    estimate = estimate_memory(timeline, model.size, Engine("single"), model.optimizer)

    class Plain(torch.autograd.Function):
        """The operator, with each step of its computation to be seen."""

        @staticmethod
        def forward(ctx: Any, given: torch.Tensor, *rest: Any) -> torch.Tensor:
            codes, scales, bias, held_as, shape = rest
            ctx.save_for_backward(codes, scales)
            ctx.form = held_as, shape
            weight = dequantised(codes, scales, held_as, shape, given.dtype)
            return torch.nn.functional.linear(given, weight, bias)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            codes, scales = ctx.saved_tensors
            held_as, shape = ctx.form
            return gradient @ dequantised(codes, scales, held_as, shape, gradient.dtype), *[None] * 5

    monkeypatch.setattr(frozen, "_linear", Plain.apply)
    filled = runs.fill_model(inputs)
    held = frozen_layers(filled.model)
    elements = sum(layer.in_features * layer.out_features for layer in held.values())
    rows = sum(layer.out_features for layer in held.values())
    by_hand = elements / 2 + elements / 64 * 4 if held_as == "nf4" else elements + 4 * rows
    assert sum(layer.codes.nbytes + layer.scales.nbytes for layer in held.values()) == by_hand
    everything = [*filled.model.parameters(), *filled.model.buffers()]
    assert estimate.parameters == sum(tensor.nbytes for tensor in everything)
    assert estimate.peak == pytest.approx(measured_step(inputs, filled, tensors).peak, rel=0.02)


def test_parameters_and_operations_are_counted_as_ever(tiny: Path, clips: Path, tmp_path: Path) -> None:
    sizes, operations = [], []
    for held_as in ("null", "float8"):
        inputs = _inputs(tiny, "wan2.1-t2v-1.3b", clips, tmp_path / held_as, f"model.frozen_dtype={held_as}")
        meta = build_on_meta(inputs).model
        sizes.append(model_size(meta, inputs.family.blocks(meta)).whole.elements)
        loss_of = loss_function(inputs.family, dtype=torch.float32, device=CPU)
        operations.append(count_flops(meta, loss_of, batch()))
        timeline = PlannedModel(inputs, meta, batch(), accelerator=False).timeline(
            ulysses=1, ring=1, policies=["keep"] * 3
        )
        operations.append(timeline.flops)
    assert sizes[0] == sizes[1]
    assert operations == [operations[0]] * 4


def test_a_model_is_loaded_layer_by_layer(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """At no time there is more than what stays and one layer; the file, which is mapped, apart."""
    inputs = _inputs(tiny, "wan2.1-t2v-1.3b", clips, tmp_path / "run", "model.frozen_dtype=int8")
    build = build_on_meta(inputs)
    strategy = Single(CPU, clip_norm=None, loss_scale=LossScale(dynamic=False))
    storages = Storages()
    with storages:
        fill(build, inputs, strategy)
    layers = frozen_layers(build.model).values()
    everything = [*build.model.parameters(), *build.model.buffers()]
    stays = sum(one.nbytes for one in everything if one.untyped_storage().filename is None)
    assert storages.peak < stays + 3 * max(layer.place.nbytes for layer in layers)
    assert sum(layer.place.nbytes for layer in layers) > storages.peak  # so a copy of them all was never there


def test_a_run_saves_and_goes_on_as_ever_with_the_same_form(
    tiny: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def config(folder: str, *overrides: str) -> Any:
        return runs.config(tiny, clips, tmp_path / folder, "train.global_batch=1", "lora.targets=[q]", *overrides)

    int8 = ("model.frozen_dtype=int8", "train.learning_rate=0.01")
    checkpoint = runs.run(config("run", *int8))
    printed = capsys.readouterr().out
    assert "float32 with 30 frozen layers in int8 on cpu" in printed
    assert ", 30 held as int8" in printed
    saved = load_file(checkpoint / "lora.safetensors")
    plain = load_file(runs.run(config("plain", "train.learning_rate=0.01")) / "lora.safetensors")
    assert 1e-6 < runs.distance(saved, plain) < 0.1  # the same tensors, with slightly other values
    assert load_config(tmp_path / "run/config.yaml").model.frozen_dtype == "int8"

    runs.run(config("short", *int8, "save.every=2"))
    second = tmp_path / "short/checkpoints/step-00000002"
    again = runs.run(config("again", *int8, f"resume={second}"))
    assert load_file(again / "lora.safetensors").keys() == saved.keys()
    assert runs.distance(load_file(again / "lora.safetensors"), saved) == 0.0
    with pytest.raises(UserError, match=r"model\.frozen_dtype was 'int8' and is None; set it back, or begin anew"):
        check_inputs(config("other", f"resume={second}"))
    check_inputs(config("weights", f"resume=weights:{second}"))

    file = checkpoint / "lora.safetensors"
    fused = runs.fill_model(check_inputs(config("fused", *int8, f"lora.preset=[{file}]")))
    name = "blocks.0.attn1.to_q"
    a, b = (saved[f"transformer.{name}.lora_{factor}.weight"] for factor in "AB")
    base = load_file(tiny / "transformer/diffusion_pytorch_model.safetensors")[f"{name}.weight"]
    layer = frozen_layers(fused.model)[f"{name}.base_layer"]
    assert float((b @ a).norm()) > 0
    left = dequantised(layer.codes, layer.scales, "int8", base.shape, torch.float32)
    assert runs.relative_error(left.double(), _by_hand(base + b @ a, "int8")) < 1e-3


def test_what_is_trained_keeps_its_bits(tiny: Path, clips: Path, tmp_path: Path) -> None:
    own = ("model.frozen_dtype=int8", "train.modules=[blocks.0.ffn, blocks.1.attn2.to_out.0.bias]", "lora.targets=[q]")
    held = frozen_layers(build_on_meta(_inputs(tiny, "wan2.1-t2v-1.3b", clips, tmp_path / "run", *own)).model)
    assert not any(name.startswith(("blocks.0.ffn", "blocks.1.attn2.to_out")) for name in held)
    assert {"blocks.1.ffn.net.2", "blocks.0.attn1.to_q.base_layer", "blocks.0.attn1.to_k"} < held.keys()


SHARED = ["single", "ddp:2,micro_batch=2", "sp:2,activations=recompute", "zero2:2,activations=selective"]
MORE = ["zero1:2,activations=offload", "ddp:2,sequence=2,ring=2", "single,micro_batch=4", "zero2:2,activations=auto"]


@NEEDS_LIBRARY
def test_layouts_agree(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parity(options(tiny, SHARED, "lora.targets=[q, ffn.0]", "lora.rank=8", "model.frozen_dtype=nf4"))
    assert "all layouts agree" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["wan2.1-t2v-1.3b", "qwen-image", "flux.1-dev"])
@pytest.mark.parametrize("held_as", FORMS)
def test_all_layouts_agree_in_every_form(tiny_models: TinyModels, variant: str, held_as: str) -> None:
    own = (*OWN["lora"], *PICTURE) if not variant.startswith("wan") else ("lora.targets=[q, ffn.0]", "lora.rank=8")
    own = (*own, f"model.variant={variant}")
    parity(options(tiny_models(variant), SHARED + MORE, *own, f"model.frozen_dtype={held_as}"))


@pytest.mark.slow
@pytest.mark.parametrize("held_as", FORMS)
@pytest.mark.parametrize("policy", ["keep", "selective"])
def test_compiled_blocks_compute_the_same(tiny: Path, clips: Path, tmp_path: Path, held_as: str, policy: str) -> None:
    own = (f"model.frozen_dtype={held_as}", f"memory.activations={policy}")
    inputs = _inputs(tiny, "wan2.1-t2v-1.3b", clips, tmp_path / "run", *own)
    samples = next(runs.batches(inputs).micro_batches(0)).tensors()
    gradients: list[Mapping[str, torch.Tensor]] = []
    losses = []
    for compiling in (None, CompileChoice(True, "a test")):
        model = runs.fill_model(inputs, compiling).model
        _start(model)
        loss, found = _gradients(model, inputs, samples)
        losses.append(loss)
        gradients.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert runs.distance(gradients[1], gradients[0]) < 1e-5


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        (["train.method=full"], 1, "'int8' is for weights that are not trained; use train.method=lora"),
        (["layout.strategy=zero3"], 2, ".* and zero3 divides weights; use layout.strategy=ddp, zero1 or zero2"),
        (["layout.strategy=fsdp2"], 2, ".* and fsdp2 divides weights; use layout.strategy=ddp, zero1 or zero2"),
        (["model.frozen_dtype=int4"], 1, "'int4' is not 'float8', 'int8' or 'nf4'"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny: Path, clips: Path, tmp_path: Path, overrides: list[str], processes: int, message: str
) -> None:
    with pytest.raises(UserError, match=f"model.frozen_dtype: {message}"):
        config = runs.config(tiny, clips, tmp_path / "run", "model.frozen_dtype=int8", *overrides)
        check_inputs(config, {"WORLD_SIZE": str(processes)})


def test_nf4_without_its_library_names_what_to_install(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_inputs, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs bitsandbytes, .* run `pip install 'flowshard\[nf4\]'`, or use int8"):
        _inputs(tiny, "wan2.1-t2v-1.3b", clips, tmp_path / "run", "model.frozen_dtype=nf4")


def test_an_npu_has_int8_alone() -> None:
    check_frozen_dtype("npu", None)
    check_frozen_dtype("npu", "int8")
    for held_as in ("float8", "nf4"):
        with pytest.raises(UserError, match=f"model.frozen_dtype: '{held_as}' is not for NPUs"):
            check_frozen_dtype("npu", held_as)
        check_frozen_dtype("cpu", held_as)
