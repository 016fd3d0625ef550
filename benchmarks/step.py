"""One training step of Wan-, Qwen-Image- and FLUX-shaped transformers: Flowshard against stock diffusers.

Stock diffusers is its transformer with peft's adapters, float32 trained weights under autocast, clipping and torch's AdamW;
with its gradient checkpointing, as most trainers use it, and without. Flowshard is what `flowshard train` runs, under each
activation policy. All start from the same weights and see the same samples; they take turns in one process, so that a
change of the machine's speed meets all, and medians are given with their ratios.

    python benchmarks/step.py [--page docs/performance.md] [--family wan] [--dim 512] [--layers 6] [--tokens 1280]
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from flowshard.config_file import load_config
from flowshard.device import resolve_device, synchronize
from flowshard.errors import UserError
from flowshard.families.tiny import write_tiny_pipeline
from flowshard.libraries import quiet_libraries
from flowshard.memory.compiled import choose_compile
from flowshard.memory.live import LiveBytes
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import make_strategy
from flowshard.train.build import build_on_meta, fill, loss_function
from flowshard.train.inputs import RunInputs, check_inputs
from flowshard.train.optimizer import optimizer_factory
from results import measured_with, put, table

_REPOSITORY = Path(__file__).resolve().parents[1]
_POLICIES = ("keep", "selective", "offload", "recompute")
_BASE = "diffusers, checkpointing"
_SMALL, _BATCHES = 256, (1, 8)
"""Tokens of a small sample, and micro-batches of such."""
_ATTENTION = ("scaled_dot_product", "attention", "flash", "fmha")
_PRODUCTS = ("::mm", "::addmm", "::bmm", "::baddbmm", "linear", "gemm", "convolution", "cutlass", "cublas", "nvjet")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A kind of transformer at some size."""

    variant: str
    make: Callable[[int, int], torch.nn.Module]
    """From width and layers."""
    latents: Callable[[int, int], tuple[int, ...]]
    """From height and width in tokens."""
    conditions: Callable[[int], dict[str, tuple[int, ...]]]
    """From the number of text tokens."""


def _wan(dim: int, layers: int) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    # Head size and the width of the feed-forward layers, in proportion, are those of Wan 2.1 14B.
    model: torch.nn.Module = WanTransformer3DModel(
        num_attention_heads=dim // 128, attention_head_dim=128, num_layers=layers, ffn_dim=dim * 27 // 10
    )
    return model


def _qwen(dim: int, layers: int) -> torch.nn.Module:
    from diffusers import QwenImageTransformer2DModel

    model: torch.nn.Module = QwenImageTransformer2DModel(
        num_attention_heads=dim // 128, attention_head_dim=128, num_layers=layers
    )
    return model


def _flux(dim: int, layers: int) -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    double = max(layers // 3, 1)
    model: torch.nn.Module = FluxTransformer2DModel(
        num_attention_heads=dim // 128,
        attention_head_dim=128,
        num_layers=double,
        num_single_layers=max(layers - double, 1),
        guidance_embeds=True,
    )
    return model


_SHAPES = {
    "wan": Shape(
        "wan2.1-t2v-1.3b",
        _wan,
        lambda height, width: (16, 1, 2 * height, 2 * width),
        lambda text: {"prompt_embeds": (text, 4096)},
    ),
    "qwen": Shape(
        "qwen-image",
        _qwen,
        lambda height, width: (64, height, width),
        lambda text: {"prompt_embeds": (text, 3584)},
    ),
    "flux": Shape(
        "flux.1-dev",
        _flux,
        lambda height, width: (64, height, width),
        lambda text: {"prompt_embeds": (text, 4096), "pooled_prompt_embeds": (768,)},
    ),
}


@dataclass
class Contestant:
    """Something that can make a step."""

    name: str
    step: Callable[[Tensors], None]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    visible: bool = True
    """Whether its operators can be seen; compiled code allocates by itself."""


class Bench:
    """The runs of one shape under one method of training."""

    def __init__(self, shape: Shape, method: str, folder: Path, options: argparse.Namespace) -> None:
        """Write a pipeline with a transformer of that shape to `folder`."""
        self.shape, self.method, self.folder, self.options = shape, method, folder, options
        self.device = resolve_device(options.device)
        write_tiny_pipeline(shape.variant, folder / "model", seed=0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            shape.make(options.dim, options.layers).save_pretrained(folder / "model" / "transformer")  # type: ignore[operator]

    def inputs(self, *more: str) -> RunInputs:
        """Of a run of Flowshard; data are not read, as steps get random samples."""
        overrides = [
            f"model.path={self.folder / 'model'}",
            f"model.variant={self.shape.variant}",
            f"data.metadata={_REPOSITORY / 'examples/data/bunny/metadata.csv'}",
            "data.frames=1",
            f"output={self.folder / 'run'}",
            f"device={self.options.device}",
            f"train.method={self.method}",
            "train.global_batch=1",
            "train.micro_batch=1",
            "train.steps=1",
            f"model.dtype={self.options.dtype}",
            "memory.compile=false",
        ]
        return check_inputs(load_config(_REPOSITORY / "examples/wan_lora.yaml", [*overrides, *more]))

    def compiles(self) -> bool:
        """Whether torch.compile works here."""
        inputs = self.inputs("memory.compile=true")
        try:
            return choose_compile(True, inputs.layout, self._processes(inputs)).enabled
        except UserError:
            return False

    def _processes(self, inputs: RunInputs) -> Processes:
        return Processes(inputs.layout, self.options.device, timeout_minutes=1)

    def samples(self, tokens: int, batch: int) -> Tensors:
        """A micro-batch of random samples, on the device."""
        height = next(side for side in range(int(tokens**0.5), 0, -1) if tokens % side == 0)
        generator = torch.Generator().manual_seed(0)

        def random(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        shape = self.shape.latents(height, tokens // height)
        family = self.inputs().family
        conditions = family.batch_conditions(
            [
                {name: random(size) for name, size in self.shape.conditions(self.options.text_tokens).items()}
                for _ in range(batch)
            ]
        )
        if self.inputs().guidance is not None:
            conditions["guidance"] = torch.ones(batch)
        own = {"latents": random((batch, *shape)), "noise": random((batch, *shape))}
        sigma = {"sigma": torch.linspace(0.2, 0.8, batch), "weight": torch.ones(batch)}
        return {name: tensor.to(self.device) for name, tensor in {**conditions, **own, **sigma}.items()}

    def ours(self, name: str, *more: str) -> Contestant:
        """Flowshard with these options."""
        inputs = self.inputs(*more)
        processes = self._processes(inputs)
        compiling = choose_compile(inputs.config.memory.compile, inputs.layout, processes)
        build = build_on_meta(inputs, device=self.device, compiling=compiling)
        strategy = make_strategy(inputs.config, processes)
        fill(build, inputs, strategy)
        made: list[torch.optim.Optimizer] = []
        factory = optimizer_factory(inputs.config)

        def make(groups: Any) -> torch.optim.Optimizer:
            made.append(factory(groups))
            return made[-1]

        strategy.start(build.model, build.settings, make)
        loss_of = self._loss(inputs)

        def step(tensors: Tensors) -> None:
            strategy.backward(loss_of(strategy.model, tensors))
            strategy.step(1.0)

        return Contestant(name, step, build.model, made[0], visible=not compiling.enabled)

    def stock(self, name: str, *, checkpointing: bool) -> Contestant:
        """diffusers, peft and torch."""
        import diffusers
        from peft import LoraConfig, inject_adapter_in_model

        inputs = self.inputs()
        train, rank = inputs.config.train, inputs.config.lora.rank
        dtype = torch.float32 if self.method == "full" else getattr(torch, self.options.dtype)
        transformer_class: Any = getattr(diffusers, inputs.family.transformer_class)
        model = transformer_class.from_pretrained(self.folder / "model" / "transformer", torch_dtype=dtype)
        if self.method == "lora":
            model.requires_grad_(False)
            inject_adapter_in_model(
                LoraConfig(r=rank, lora_alpha=inputs.config.lora.alpha, target_modules=inputs.adapted), model
            )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.data = parameter.data.float()
        model.to(self.device).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        optimizer = torch.optim.AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay)
        loss_of = self._loss(inputs)

        def step(tensors: Tensors) -> None:
            loss_of(model, tensors).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return Contestant(name, step, model, optimizer)

    def _loss(self, inputs: RunInputs) -> Callable[[torch.nn.Module, Tensors], torch.Tensor]:
        return loss_function(inputs.family, dtype=getattr(torch, self.options.dtype), device=self.device)

    def contestants(self) -> list[Contestant]:
        """Everything that is compared, the base of the ratios first."""
        entries = [
            self.stock(_BASE, checkpointing=True),
            self.stock("diffusers", checkpointing=False),
            *(self.ours(f"flowshard, {policy}", f"memory.activations={policy}") for policy in _POLICIES),
        ]
        if self.compiles():
            entries += [
                self.ours(f"flowshard, {policy}, compiled", f"memory.activations={policy}", "memory.compile=true")
                for policy in _POLICIES
            ]
        return entries

    def seconds(self, one: Contestant, tensors: Tensors) -> float:
        """Of a step."""
        synchronize(self.device)
        start = time.perf_counter()
        one.step(tensors)
        synchronize(self.device)
        return time.perf_counter() - start

    def peak(self, one: Contestant, tensors: Tensors) -> int | None:
        """The most bytes of its tensors that are alive in a step; None where they cannot be seen."""
        state = [value for values in one.optimizer.state.values() for value in values.values()]
        always = [*one.model.parameters(), *one.model.buffers(), *(v for v in state if isinstance(v, torch.Tensor))]
        fixed = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in always}.values())
        if self.device.type != "cpu":
            backend: Any = getattr(torch, self.device.type)
            backend.reset_peak_memory_stats(self.device)
            before = backend.memory_allocated(self.device)
            one.step(tensors)
            return fixed + int(backend.max_memory_allocated(self.device) - before)
        if not one.visible:
            return None
        live = LiveBytes()
        for tensor in [*always, *tensors.values()]:
            live.leave_out(tensor)
        with live:
            one.step(tensors)
        return fixed + live.highest

    def share(self, one: Contestant, tensors: Tensors) -> tuple[float, float]:
        """Parts of a step's time in matrix products (and convolutions), and in attention."""
        on_cpu = self.device.type == "cpu"
        activities = [ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities) as profiler:
            whole = self.seconds(one, tensors)
        found = {"attention": 0.0, "products": 0.0}
        for event in profiler.key_averages():
            # Kernels on an accelerator have events of their own.
            if (event.device_type.name == "CPU") != on_cpu:
                continue
            spent = event.self_cpu_time_total if on_cpu else event.self_device_time_total
            name = event.key.lower()
            if any(word in name for word in _ATTENTION):
                found["attention"] += spent / 1e6
            elif any(word in name for word in _PRODUCTS):
                found["products"] += spent / 1e6
        return found["products"] / whole, found["attention"] / whole


def _compare(bench: Bench, rounds: int) -> list[list[str]]:
    entries = bench.contestants()
    tensors = bench.samples(bench.options.tokens, 1)
    times: dict[str, list[float]] = {one.name: [] for one in entries}
    for number in range(rounds + 2):
        for one in entries:
            spent = bench.seconds(one, tensors)
            if number > 1:  # the first two of each warm up, make optimizer state and compile
                times[one.name].append(spent)
    if any(not one.visible for one in entries) and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        raise SystemExit("nothing was compiled, though memory.compile=true")
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for one in entries:
        products, attention = bench.share(one, tensors)
        peak = bench.peak(one, tensors)
        rows.append(
            [
                one.name,
                f"{1000 * medians[one.name]:.1f}",
                f"{medians[_BASE] / medians[one.name]:.2f}",
                f"{products:.2f}",
                f"{attention:.2f}",
                "" if peak is None else f"{peak / 2**20:.0f}",
            ]
        )
        print(f"  {' '.join(rows[-1])}")
    return rows


def _small(bench: Bench, rounds: int) -> list[list[str]]:
    """Samples a second of small samples, one by one and eight at once."""
    entries = [bench.stock(_BASE, checkpointing=True), bench.ours("flowshard, keep", "memory.activations=keep")]
    tensors = {batch: bench.samples(_SMALL, batch) for batch in _BATCHES}
    cases = [(one, batch) for one in entries for batch in _BATCHES]
    times: dict[tuple[str, int], list[float]] = {(one.name, batch): [] for one, batch in cases}
    for number in range(rounds + 1):
        for one, batch in cases:
            spent = bench.seconds(one, tensors[batch])
            if number:
                times[one.name, batch].append(spent)
    rate = {(name, batch): batch / statistics.median(spent) for (name, batch), spent in times.items()}
    first, most = _BATCHES
    return [
        [name, f"{rate[name, first]:.2f}", f"{rate[name, most]:.2f}", f"{rate[name, most] / rate[name, first]:.2f}"]
        for name in (one.name for one in entries)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="Markdown page to put the tables into (default: print them)")
    parser.add_argument("--family", choices=_SHAPES, action="append", help="only this one; may be given several times")
    parser.add_argument("--method", choices=["lora", "full"], action="append", help="only this one")
    parser.add_argument("--dim", type=int, default=512, help="width, a multiple of 128 (default: 512)")
    parser.add_argument("--layers", type=int, default=6, help="blocks (default: 6)")
    parser.add_argument("--tokens", type=int, default=1280, help="image or video tokens of a sample (default: 1280)")
    parser.add_argument("--text-tokens", type=int, default=512, help="text tokens of a sample (default: 512)")
    parser.add_argument("--dtype", default="bfloat16", help="type of frozen weights and autocast (default: bfloat16)")
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each (default: 7)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    options = parser.parse_args(arguments)
    quiet_libraries()
    torch.set_num_threads(options.threads)
    sections, small = [], []
    for family in options.family or _SHAPES:
        for method in options.method or ("lora", "full"):
            print(f"{family}, {method}")
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(_SHAPES[family], method, Path(folder), options)
                head = ["", "ms/step", "speed-up", "matrix products", "attention", "peak MiB"]
                sections.append(f"### {family}, {method}\n\n{table(head, _compare(bench, options.rounds))}")
                if method == "lora":
                    small += [[f"{family}: {row[0]}", *row[1:]] for row in _small(bench, options.rounds)]
                del bench
            gc.collect()
    settings = (
        f"dim {options.dim}, {options.layers} layers, {options.tokens} tokens, {options.text_tokens} text tokens, "
        f"{options.dtype}, median of {options.rounds}"
    )
    line = measured_with(resolve_device(options.device), settings)
    if small:
        head = ["samples/s", *(f"micro-batch {batch}" for batch in _BATCHES), "ratio"]
        sections.append(f"### LoRA at {_SMALL} tokens\n\n{table(head, small)}")
    put("step", "\n\n".join([line, *sections]), options.page)


if __name__ == "__main__":
    main()
