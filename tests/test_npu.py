"""Ascend NPU: what reaches the device, which kernels run and what they compute, on a stand-in for torch_npu.

Nothing here ran on hardware. `tests/fakes/torch_npu.py` says what the stand-in refuses.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from flowshard import device
from flowshard.config import Config
from flowshard.config_file import dump_config
from flowshard.device import resolve_device
from flowshard.errors import UserError
from flowshard.families import all_families, find_variant
from flowshard.families.rotary import real_tables, rotate_complex
from flowshard.families.wan import CrossAttention, SelfAttention
from flowshard.parallel.plan import apply_plans
from flowshard.parallel.strategies.deepspeed import DeepSpeed
from flowshard.parallel.strategies.scaling import LossScale
from tests import runs
from tests.conftest import REPOSITORY
from tests.launch import python, torchrun
from tests.pictures import PICTURES, run_config, shrink_references
from tests.test_families import BASES
from tests.wan_variants import open_case, write_data

TinyModels = Callable[[str], Path]
ATTENTION, ATTENTION_GRAD, NORM, ROTARY = KERNELS = (
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_rms_norm",
    "npu_rotary_mul",
)
ATTENTIONS = {"wan2.1-t2v-1.3b": 6, "qwen-image": 3, "flux.1-dev": 4, "flux.2-dev": 3, "z-image-turbo": 6}
"""Of each tiny model; of those of Wan half are to the text, which is not divided."""
KINDS: dict[str, tuple[str, ...]] = {
    "wan2.1-t2v-1.3b": ("memory.activations=selective", "train.micro_batch=2"),
    "wan2.1-i2v-14b-480p": ("train.method=full",),
    "wan2.1-flf2v-14b-720p": ("memory.activations=offload",),
    "wan2.2-i2v-a14b": ("memory.activations=recompute",),
    "wan2.2-ti2v-5b": ("memory.activations=recompute",),
    "wan2.1-vace-1.3b": ("train.method=full", "memory.activations=offload"),
    "wan2.2-t2v-a14b": (),
    "wan2.2-vace-fun-a14b": ("train.method=full", "train.modules=[vace_blocks]"),
    "qwen-image": ("train.method=full", "train.micro_batch=2"),
    "qwen-image-edit": (),
    "qwen-image-edit-2509": ("memory.activations=offload",),
    "qwen-image-edit-2511": ("memory.activations=selective",),
    "flux.1-dev": ("train.method=full", "memory.activations=recompute"),
    "flux.1-kontext-dev": (),
    "flux.2-dev": ("memory.activations=offload",),
    "flux.2-klein-9b": ("train.method=full",),
    "z-image-turbo": ("train.method=full", "train.micro_batch=2", "memory.activations=selective"),
}
"""Every kind of variant, each with a way to train."""


FORWARD_PASSES = {"wan2.1-t2v-1.3b": 1, "wan2.2-i2v-a14b": 2, "wan2.2-ti2v-5b": 2}
"""How often attention runs forward for once backward: `selective` keeps what the kernel gave, `recompute` does not."""


def _npu(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """What the worker says about each case, in one process."""
    done = python(["-m", "tests.workers.npu", *arguments], timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return _lines(done.stdout)


def _lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, clips)
    return folder


@pytest.fixture(autouse=True)
def _small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_references(monkeypatch)


def _config(variant: str, tiny_models: TinyModels, data: Path, folder: Path, kind: str, *more: str) -> Config:
    """A short run on that kind of device, which encodes its samples itself."""
    size = ("train.steps=2", "train.global_batch=2", "train.learning_rate=1e-5", f"device={kind}", *more)
    folder = folder / kind
    folder.mkdir(parents=True, exist_ok=True)
    if variant.startswith("wan"):
        return open_case(variant, tiny_models, data).config(folder / "run", *size)
    own = {"qwen-image": "edit_image", "flux.1": "kontext_images", "flux.2": "edit_image"}
    column = next((name for start, name in own.items() if variant.startswith(start)), "")
    pictures = ["clip_1.mp4", "clip_2.mp4"][: PICTURES.get(variant, 0)]
    given = {column: pictures} if pictures else {}
    rows: list[dict[str, Any]] = [given, {**given, "prompt": "two rabbits in a meadow of flowers"}]
    return run_config(tiny_models(variant), variant, folder, rows, *size)


def _assert_same_run(found: Config, expected: Config) -> None:
    """Within the bounds of the type: losses, gradient norms, and in float32 what is saved."""
    exact = expected.model.dtype == "float32"
    lines = [runs.metrics(one) for one in (found, expected)]
    for key, bound in (("loss", 1e-6 if exact else 1e-3), ("grad_norm", 1e-5 if exact else 2e-2)):
        ours, theirs = ([line[key] for line in own] for own in lines)
        assert ours == pytest.approx(theirs, rel=bound), key
    assert all(line["memory_peak_bytes"] == 12_345_678 for line in lines[0]), "what the device reports"
    if exact:
        ends = [runs.weights(next(Path(one.output, "checkpoints").iterdir())) for one in (found, expected)]
        assert runs.distance(*ends) <= 1e-6


def test_models_on_the_device_equal_those_on_the_cpu(tiny_models: TinyModels, data: Path, tmp_path: Path) -> None:
    """Of every family: prediction and gradients with kernels and without; and one whole run, in which nothing that the
    hardware lacks reaches the device. It has weights and inputs of blocks in host memory, and copies them beside the
    computation: the stand-in's second stream does nothing before it is waited for."""
    variant = "z-image-turbo"
    cpu = _config(variant, tiny_models, data, tmp_path, "cpu")
    host = ("memory.parameters=host", "memory.activations={offload: 3}", "memory.offload_overlap=true")
    npu = _config(variant, tiny_models, data, tmp_path, "npu", *host)
    runs.run(cpu)
    file = tmp_path / "npu.yaml"
    file.write_text(dump_config(npu, {}))
    lines = _npu([*(f"{name}={tiny_models(name) / 'transformer'}" for name in BASES), str(file)])
    for name in BASES:
        ran = [line["ran"] for line in lines if line.get("variant") == name and line["without"] == 0]
        assert len(ran) >= 2
        for counts in ran:
            assert counts[ATTENTION] == counts[ATTENTION_GRAD] == ATTENTIONS[name]
            assert set(counts) == set(KERNELS)
        # Without the kernels nothing of them may be called, and the numbers are the same.
        without = [line["ran"] for line in lines if line.get("variant") == name and line["without"]]
        assert without == [{}] * len(ran)
    # What the stand-in is there for: complex tables of the stock models do not get past it.
    refused = {line["family"]: line["refused"] for line in lines if "refused" in line}
    assert set(refused) == {"qwen-image", "z-image"}
    assert all("complex64 would be on the device" in message for message in refused.values())
    assert set(lines[-1]["ran"]) == set(KERNELS)
    assert lines[-1]["beside"] > 0
    _assert_same_run(npu, cpu)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_variant_trains_on_the_device(
    tiny_models: TinyModels, data: Path, tmp_path: Path, dtype: str
) -> None:
    """As on the CPU, encoding included, and nothing that the hardware lacks reaches the device.

    In bfloat16, with autocast, one variant of each family, whose samples are made as well.
    """
    more: tuple[str, ...] = (f"model.dtype={dtype}",)
    if dtype == "bfloat16":
        more += ("validation.prompts=[a rabbit]", "validation.every=2", "validation.steps=2")
    variants = KINDS if dtype == "float32" else {name: KINDS[name] for name in BASES}
    pairs = []
    for variant, options in variants.items():
        made = [
            _config(variant, tiny_models, data, tmp_path / variant, kind, *options, *more) for kind in ("cpu", "npu")
        ]
        runs.run(made[0])
        (tmp_path / f"{variant}.yaml").write_text(dump_config(made[1], {}))
        pairs.append(made)
    files = [str(tmp_path / f"{variant}.yaml") for variant in variants]
    lines = _npu(files)
    assert [line["run"] for line in lines] == files
    for (cpu, npu), line in zip(pairs, lines, strict=True):
        assert set(line["ran"]) == set(KERNELS), line
        again = FORWARD_PASSES.get(str(cpu.model.variant)) if dtype == "float32" else None
        assert again is None or line["ran"][ATTENTION] == again * line["ran"][ATTENTION_GRAD]
        _assert_same_run(npu, cpu)
        samples = [sorted(one.name for one in Path(run.output).glob("samples/step-*/*")) for run in (cpu, npu)]
        assert samples[0] == samples[1]
        assert bool(samples[1]) == (dtype == "bfloat16")


def test_every_family_and_kind_of_conditions_is_among_them() -> None:
    tried = {type(find_variant(name, option="")[0]) for name in KINDS}
    assert tried == {type(family) for family in all_families()}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_tokens_are_divided_among_devices(tiny_models: TinyModels, world: int) -> None:
    """Round a ring, whose parts the kernel joins, and for four processes by heads as well; through HCCL."""
    models = [f"{name}={tiny_models(name) / 'transformer'}" for name in BASES if world == 2 or name != "z-image-turbo"]
    done = torchrun(world, ["tests.workers.npu", *models])
    assert done.returncode == 0, done.stderr[-3000:]
    for line in _lines(done.stdout):
        name = line["variant"]
        whole = ATTENTIONS[name] // 2 if name.startswith("wan") else 0
        parts = whole + 2 * (ATTENTIONS[name] - whole)  # one for each place in the ring
        counts = {ATTENTION: parts, ATTENTION_GRAD: parts}
        assert {key: line["ran"].get(key, 0) for key in counts} == (
            dict.fromkeys(counts, 0) if line["without"] else counts
        )


def test_real_tables_rotate_as_the_complex_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(2, 7, 3, 8, generator=draw)
    for shape in ((7, 4), (2, 7, 4)):
        angles = torch.randn(shape, generator=draw)
        tables = torch.polar(torch.ones(shape), angles)
        found = rotate_complex(states, real_tables(tables))
        assert runs.relative_error(found, rotate_complex(states, tables)) <= 1e-6


def test_processors_of_an_extension_stay(tiny_models: TinyModels) -> None:
    variant = "wan2.1-t2v-1.3b"
    family, _ = find_variant(variant, option="VARIANT")
    model: Any = WanTransformer3DModel.from_pretrained(tiny_models(variant) / "transformer")

    class Own(WanAttnProcessor):
        """Of the user."""

    model.blocks[0].attn1.set_processor(Own())
    model.blocks[1].attn2.set_processor(Own())
    place: Any = SimpleNamespace(type="npu")  # this build of torch knows no such device
    apply_plans(model, family, None, place)
    kinds = [[type(attention.processor) for attention in (block.attn1, block.attn2)] for block in model.blocks]
    assert kinds == [[Own, CrossAttention], [SelfAttention, Own], [SelfAttention, CrossAttention]]


def test_a_machine_without_npu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no npu:0; it has cpu:0. For npu install torch_npu in the version of torch"):
        resolve_device("npu")
    monkeypatch.setattr(device, "find_spec", lambda _: object())
    monkeypatch.setattr(device, "_npu_error", lambda: ImportError("libhccl.so: cannot open shared object file"))
    with pytest.raises(UserError, match=r"cannot be imported \(libhccl.so.*\); source the set_env.sh of the CANN"):
        resolve_device("npu:3")


def test_an_environment_that_deepspeed_cannot_work_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(kind: str) -> None:
        place: Any = SimpleNamespace(type=kind)  # this build of torch knows no npu
        DeepSpeed(
            place,
            clip_norm=None,
            loss_scale=LossScale(dynamic=False),
            config={"zero_optimization": {"stage": 3}},
        )

    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    with pytest.raises(UserError, match=r"DS_ACCELERATOR: is 'npu' in the environment, and the run is on .*; unset it"):
        start("cpu")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    with pytest.raises(UserError, match=r"ASCEND_HOME_PATH: is not set, .* source the set_env.sh"):
        start("npu")


def test_the_launcher_file_is_one_of_accelerate() -> None:
    settings = load_config_from_file(str(REPOSITORY / "configs" / "accelerate" / "npu.yaml"))
    assert settings.distributed_type == DistributedType.MULTI_NPU


def test_the_page_names_every_script_and_kernel() -> None:
    page = (REPOSITORY / "docs" / "npu.md").read_text(encoding="utf-8")
    examples = REPOSITORY / "examples"
    scripts = [str(file.relative_to(examples)) for file in examples.glob("*/model_training/special/npu_training/*.sh")]
    assert scripts
    assert all(f"`{name}`" in page for name in (*scripts, *KERNELS))
