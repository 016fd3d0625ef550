"""Memory that loading takes: the peak of a process's own (anonymous) memory over its share of the model.

A Wan-shaped model of several hundred MB in float32 is written once and loaded under each strategy by 2 and 4 processes,
as `flowshard train` does it. Pages of the mapped file are shared by all processes and do not count. The constant is what
the same takes for a model of 6 MB: engines, buffers, the process group.

    python benchmarks/loading.py [--layers 12]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from diffusers import WanTransformer3DModel

from flowshard.config_file import load_config
from flowshard.families.tiny import write_tiny_pipeline
from flowshard.libraries import quiet_libraries
from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.strategies import make_strategy
from flowshard.train.build import build_on_meta, fill
from flowshard.train.inputs import check_inputs
from flowshard.train.optimizer import optimizer_factory

_REPOSITORY = Path(__file__).resolve().parents[1]
CASES = tuple((strategy, count) for strategy in ("zero3", "fsdp2") for count in (2, 4))
MB = 10**6


def main() -> None:
    """Write the models and measure, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="blocks of 38 MB (default: 12)")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet_libraries()
    if options.model is not None:
        _load(options.model, options.strategy)
        return
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name, "small"), Path(name, "large")
        for folder in (small, large):
            write_tiny_pipeline("wan2.1-t2v-1.3b", folder, seed=0)
        WanTransformer3DModel(
            num_attention_heads=12, attention_head_dim=64, text_dim=64, ffn_dim=3072, num_layers=options.layers
        ).save_pretrained(large / "transformer")
        size = sum(file.stat().st_size for file in (large / "transformer").glob("*.safetensors"))
        print(f"model {size / MB:.0f} MB in float32")
        for strategy, count in CASES:
            constant, peak = (_measure(folder, strategy, count) for folder in (small, large))
            share = size / count
            print(
                f"{strategy} {count} processes   peak {peak / MB:6.1f} MB   share {share / MB:6.1f} MB   constant "
                f"{constant / MB:5.1f} MB   (peak - constant) / share {(peak - constant) / share:.2f}"
            )


def _measure(model: Path, strategy: str, count: int) -> int:
    """The highest peak of all processes."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", __file__]
    given = ["--model", str(model), "--strategy", strategy]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", *launch, *given],
        # The C library keeps freed memory for later; here it gives it back, so that what is counted is in use.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    return max(json.loads(line)["peak"] for line in done.stdout.splitlines() if line.startswith('{"peak"'))


def _load(model: Path, strategy: str) -> None:
    """Load in this process and print the growth of its own memory at its highest."""
    overrides = [
        f"model.path={model}",
        f"data.metadata={_REPOSITORY / 'examples/data/bunny/metadata.csv'}",
        "model.dtype=float32",
        "train.global_batch=4",
        f"layout.strategy={strategy}",
        "device=cpu",
    ]
    inputs = check_inputs(load_config(_REPOSITORY / "examples/wan_lora.yaml", overrides))

    def work(processes: Processes) -> None:
        build = build_on_meta(inputs)
        made = make_strategy(inputs.config, processes)
        processes.wait_for_all("ready")
        peak = PeakMemory()
        fill(build, inputs, made)
        growth = peak.stop()
        made.start(build.model, build.settings, optimizer_factory(inputs.config))  # it was right
        sys.stdout.write(json.dumps({"peak": growth}) + "\n")

    run_together(inputs.layout, work, device_name="cpu")


class PeakMemory:
    """Watches the anonymous memory of this process from now on, in a thread."""

    def __init__(self) -> None:
        self._before = self._peak = _anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._peak = max(self._peak, _anonymous())

    def stop(self) -> int:
        """Bytes above what there was at the beginning."""
        self._done.set()
        self._thread.join()
        return max(self._peak, _anonymous()) - self._before


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this needs Linux, which says how much memory is a process's own")


if __name__ == "__main__":
    main()
