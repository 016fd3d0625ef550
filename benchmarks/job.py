"""A whole job, 5 clips for 10 epochs with the encoders: with the cache against encoding at every step.

Each run is a process of its own, on the same tiny Wan pipeline. Its time is that of training from checked input to saved
weights, imports left out. The first run with a cache encodes every sample once before its first step; the second finds
all of them and never loads an encoder. "Other weights" are parameters in the process at the last step that are not the
transformer's: those of the encoders, if they are there.

    python benchmarks/job.py [--page docs/performance.md] [--epochs 10] [--height 176] [--width 320] [--frames 25]
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from flowshard.config_file import load_config
from flowshard.families.tiny import write_tiny_pipeline
from flowshard.libraries import quiet_libraries
from flowshard.parallel.processes import run_together
from flowshard.parallel.strategies import Strategy
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer
from results import measured_with, put, table

_REPOSITORY = Path(__file__).resolve().parents[1]
_CASES = (("encoding at every step", "off"), ("cached, first run", "cache"), ("cached, again", "cache"))


def main() -> None:
    """Run the jobs and compare them, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="Markdown page to put the table into (default: print it)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the 5 clips (default: 10)")
    parser.add_argument("--height", type=int, default=176, help="in pixels (default: 176)")
    parser.add_argument("--width", type=int, default=320, help="in pixels (default: 320)")
    parser.add_argument("--frames", type=int, default=25, help="of a clip (default: 25)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(options.threads)
    if options.run is not None:
        _run(options.run)
        return
    settings = [
        f"data.metadata={_REPOSITORY / 'examples/data/bunny/metadata.csv'}",
        f"data.height={options.height}",
        f"data.width={options.width}",
        f"data.frames={options.frames}",
        "train.steps=null",
        f"train.epochs={options.epochs}",
        "train.global_batch=1",
        "device=cpu",
    ]
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_pipeline("wan2.1-t2v-1.3b", folder / "model", seed=0)
        for number, (label, cache) in enumerate(_CASES):
            place = cache if cache == "off" else str(folder / cache)
            own = [f"model.path={folder / 'model'}", f"data.cache={place}", f"output={folder / str(number)}"]
            found.append(_measure([*settings, *own], options.threads))
            print(f"{label}: {found[-1]['seconds']:.1f} s")
    rows = [
        [
            label,
            f"{one['seconds']:.1f}",
            f"{found[0]['seconds'] / one['seconds']:.2f}",
            f"{one['others'] / 2**20:.1f}",
        ]
        for (label, _), one in zip(_CASES, found, strict=True)
    ]
    text = (
        f"tiny wan2.1-t2v-1.3b, 5 clips x {options.epochs} epochs of {options.width}x{options.height}, {options.frames} "
        "frames, LoRA"
    )
    line = measured_with(torch.device("cpu"), text)
    put("job", f"{line}\n\n{table(['', 's', 'speed-up', 'other weights, MiB'], rows)}", options.page)


def _measure(overrides: list[str], threads: int) -> dict[str, float]:
    done = subprocess.run(  # noqa: S603
        [sys.executable, __file__, "--threads", str(threads), "--run", *overrides],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _run(overrides: list[str]) -> None:
    """Train in this process and print what it took as JSON."""
    inputs = check_inputs(load_config(_REPOSITORY / "examples/wan_lora.yaml", overrides))
    weights = _OtherWeights(inputs.steps)
    start = time.perf_counter()
    run_together(inputs.layout, lambda processes: train(inputs, processes, weights), device_name="cpu")
    seconds = time.perf_counter() - start
    sys.stdout.write(json.dumps({"seconds": seconds, "others": weights.bytes}) + "\n")


class _OtherWeights(Observer):
    """Counts the parameters in this process, those of the trained model left out."""

    def __init__(self, steps: int) -> None:
        self._last = steps - 1
        self._own: set[int] = set()
        self.bytes = 0

    def started(self, model: torch.nn.Module) -> None:
        self._own = {id(parameter) for parameter in model.parameters()}

    def step_done(self, step: int, loss: float, gradient_norm: float, strategy: Strategy) -> None:
        del loss, gradient_norm, strategy
        if step == self._last:
            gc.collect()
            # The plan's model is fake: it has shapes and no memory.
            found = [one for one in gc.get_objects() if type(one) is torch.nn.Parameter and not one.is_meta]
            self.bytes = sum(one.nbytes for one in found if id(one) not in self._own)


if __name__ == "__main__":
    main()
