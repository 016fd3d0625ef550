"""What data costs: reading encoded samples, decoding clips, memory over many samples, and the step of a training run.

Each figure is a ratio against the least that the same work takes, measured in turns in one process; memory is the growth of
the process's own (anonymous) pages.

    python benchmarks/data.py [--samples 400] [--steps 15]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from flowshard.config import Config
from flowshard.config_file import load_config
from flowshard.data.cache import EncodedCache
from flowshard.data.dataset import CachedDataset, Dataset, Encoder, open_datasets
from flowshard.data.metadata import Metadata, Row
from flowshard.data.samples import decode
from flowshard.families.tiny import write_tiny_pipeline
from flowshard.libraries import quiet_libraries
from flowshard.objective.sigmas import NoiseLevels
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import make_strategy
from flowshard.train.batches import StepBatches, stream
from flowshard.train.build import build_on_meta, fill, loss_function
from flowshard.train.inputs import RunInputs, check_inputs
from flowshard.train.optimizer import optimizer_factory

_REPOSITORY = Path(__file__).resolve().parents[1]
_FETCHES = 2000


class _Noise:
    """Encodes rows as noise of the shapes of a clip of 25 frames of 176 x 320 pixels and a prompt of 60 tokens."""

    def media(self, row: Row) -> dict[str, torch.Tensor]:
        return {"latents": torch.randn(16, 7, 22, 40, generator=torch.Generator().manual_seed(row.number))}

    def text(self, row: Row, caption: str) -> dict[str, torch.Tensor]:
        del caption
        generator = torch.Generator().manual_seed(row.number)
        return {"prompt_embeds": torch.randn(60, 4096, generator=generator).bfloat16()}

    def check(self, reason: str) -> None:
        del reason


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400, help="encoded samples that are read (default: 400)")
    parser.add_argument("--steps", type=int, default=15, help="steps of each loop (default: 15)")
    options = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_pipeline("wan2.1-t2v-1.3b", folder / "model", seed=0)
        inputs = check_inputs(_config(folder))
        processes = Processes(inputs.layout, "cpu", timeout_minutes=1)
        dataset = _filled(folder, inputs, processes, options.samples)
        files = list((folder / "cache").rglob("*.safetensors"))
        ours, bare = _in_turns(lambda: _read(dataset), lambda: _read_bare(files))
        print(f"cached samples   {options.samples / ours:9.0f} a second, {bare / ours:.2f} of bare safetensors reads")
        rows = inputs.data.training.rows
        ours, bare = _in_turns(
            lambda: [decode(row, inputs.config.data, inputs.family, seed=0) for row in rows],
            lambda: [_decode_bare(row.media, inputs.config) for row in rows],
        )
        print(f"decoded clips    {len(rows) / ours:9.1f} a second, {bare / ours:.2f} of bare PyAV and Pillow")
        grown = _growth(inputs, dataset)
        print(f"memory           {grown / 1e6:9.1f} MB more after {_FETCHES} samples than after {_FETCHES // 4}")
        ours, bare = _steps(inputs, processes, options.steps)
        print(f"step from cache  {ours:9.3f} s, {100 * (ours / bare - 1):.1f} % more than with one batch in memory")


def _config(folder: Path) -> Config:
    return load_config(
        _REPOSITORY / "examples/wan_lora.yaml",
        [
            f"model.path={folder / 'model'}",
            f"data.metadata={_REPOSITORY / 'examples/data/bunny/metadata.csv'}",
            f"output={folder / 'run'}",
            "model.dtype=float32",
            "train.global_batch=1",
        ],
    )


def _filled(folder: Path, inputs: RunInputs, processes: Processes, count: int) -> CachedDataset:
    """A cache of noise."""
    media = folder / "noise"
    media.mkdir()
    rows = []
    for number in range(count):
        file = media / f"{number}.png"
        file.write_bytes(str(number).encode())
        rows.append(Row(number, media, file, (f"prompt {number}",)))
    cache = EncodedCache(folder / "cache", inputs.config, inputs.family, inputs.source, torch.float32)
    cache.fill(rows, _Noise(), processes)
    metadata = Metadata("noise", tuple(rows), (), range(count))
    return CachedDataset(cache, metadata, inputs.config.data)


def _read(dataset: Dataset) -> None:
    for index in range(len(dataset)):
        sample = dataset[index]
        for tensor in (sample.latents, *sample.conditions.values()):
            tensor.clone()  # what is mapped has not been read yet


def _read_bare(files: list[Path]) -> None:
    for file in files:
        for tensor in load_file(file).values():
            tensor.clone()


def _decode_bare(path: Path, config: Config) -> np.ndarray:
    """The same pixels, by hand."""
    height, width = config.data.height, config.data.width
    pictures = []
    with av.open(str(path)) as container:
        container.streams.video[0].thread_type = "AUTO"
        for frame in container.decode(video=0):
            image = frame.to_image()
            scale = max(width / image.width, height / image.height)
            left, top = (image.width - width / scale) / 2, (image.height - height / scale) / 2
            box = (left, top, image.width - left, image.height - top)
            pictures.append(np.asarray(image.resize((width, height), Image.Resampling.LANCZOS, box=box)))
            if len(pictures) == config.data.frames:
                break
    return np.stack(pictures)


def _in_turns(ours: Callable[[], object], bare: Callable[[], object], rounds: int = 7) -> tuple[float, float]:
    """Median seconds of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for run, taken in zip((ours, bare), times, strict=True):
            start = time.perf_counter()
            run()
            if number:  # the first of each warms up
                taken.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def _growth(inputs: RunInputs, dataset: Dataset) -> int:
    """Bytes that the process's own memory grows by between the first quarter of many samples and the last."""
    levels = NoiseLevels(inputs.config.objective, inputs.shift)
    batches = StepBatches(dataset, inputs.family, inputs.config, inputs.layout, levels, guidance=None)
    after = {}
    for number, _ in enumerate(stream(batches, range(_FETCHES), ahead=True, pinned=False), start=1):
        if number in (_FETCHES // 4, _FETCHES):
            after[number] = _own_memory()
    return after[_FETCHES] - after[_FETCHES // 4]


def _own_memory() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _steps(inputs: RunInputs, processes: Processes, steps: int) -> tuple[float, float]:
    """Median seconds of a step that takes its samples from a cache, and of one that has them."""
    config, device = inputs.config, torch.device("cpu")
    encoder = Encoder(config, inputs.family, inputs.source, inputs.data.training, torch.float32, device)
    dataset, _ = open_datasets(encoder, inputs.data, config.cache_folder, processes=processes)
    encoder.release()
    levels = NoiseLevels(config.objective, inputs.shift)
    batches = StepBatches(dataset, inputs.family, config, inputs.layout, levels, guidance=None)
    build = build_on_meta(inputs)
    strategy = make_strategy(config, processes)
    fill(build, inputs, strategy)
    strategy.start(build.model, build.settings, optimizer_factory(config))
    loss_of = loss_function(inputs.family, dtype=torch.float32, device=device)
    constant = batches.largest_micro_batch().tensors()
    micro_batches = stream(batches, range(steps + 1), ahead=True, pinned=False)

    def step(tensors: dict[str, torch.Tensor]) -> None:
        strategy.backward(loss_of(strategy.model, tensors))
        strategy.step(1.0)

    return _in_turns(lambda: step(next(micro_batches).tensors()), lambda: step(constant), rounds=steps)


if __name__ == "__main__":
    main()
