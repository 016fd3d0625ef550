"""What sequence parallelism gains and sends: two processes of one thread that share a sample, against one.

Blocks of the size of Wan 2.1 1.3B, forward and backward for the gradients of all weights, without an optimizer. One process and
two take turns in one launch, so that a change in the machine's speed hits both. Printed, by heads (ulysses) and round
the ring:

- the ratio of the median times;
- bytes sent over the least that the method can send;
- bytes kept for the backward pass on one process, over those without sharing.

    python benchmarks/sequence.py [--repeats 5] [--dtype bfloat16]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

from flowshard.families import get_family
from flowshard.libraries import quiet_libraries
from flowshard.memory.storages import storage_id
from flowshard.parallel.layout import Layout
from flowshard.parallel.plan import apply_sequence_plan
from flowshard.parallel.sequence import SequenceGroup

HEADS, HEAD_SIZE, FEED_FORWARD, LAYERS = 12, 128, 8960, 2
"""Blocks of the size of Wan 2.1 1.3B."""
FRAMES, SIDE, TEXT = 5, 32, 64
"""Latents of 5 x 32 x 32: 1280 tokens of video, 20 for each of text."""
TOKENS = FRAMES * (SIDE // 2) ** 2
DEGREE = 2


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default: float32")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _measure(options.repeats, getattr(torch, options.dtype))
        return
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={DEGREE}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = ["--repeats", str(options.repeats), "--dtype", options.dtype]
    sys.exit(subprocess.run([sys.executable, "-m", *launch, *given], env=environment, check=False).returncode)  # noqa: S603


def _measure(repeats: int, dtype: torch.dtype) -> None:
    quiet_libraries()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole = _model(dtype, None)
    step = _step(dtype)
    for ulysses in (DEGREE, 1):
        layout = Layout("ddp", DEGREE, rank, rank, DEGREE, "", 1, 1, DEGREE, ulysses, DEGREE // ulysses, None)
        group = SequenceGroup(layout, torch.device("cpu"))
        divided = _model(dtype, group)
        alone: list[float] = []
        shared: list[float] = []
        for number in range(repeats + 1):  # the first warms up
            dist.barrier()
            if rank == 0:
                _time(step, whole, alone, counted=number > 0)
            dist.barrier()
            _time(step, divided, shared, counted=number > 0)
        group.traffic.bytes = 0
        step(divided)
        ratio = group.traffic.bytes / _least_bytes(group, dtype)
        kept = torch.tensor([_kept_bytes(divided, step)], dtype=torch.float64)
        dist.all_reduce(kept, op=dist.ReduceOp.MAX)
        if rank == 0:
            name = "ulysses" if ulysses > 1 else "ring"
            one, two = statistics.median(alone), statistics.median(shared)
            print(f"{name:<8} one process {one:.3f} s, two {two:.3f} s   speed-up {one / two:.2f}")
            print(f"{'':<8} sent / least {ratio:.3f}")
            print(f"{'':<8} kept / kept without sharing {float(kept) / _kept_bytes(whole, step):.3f}")
    dist.destroy_process_group()


def _model(dtype: torch.dtype, group: SequenceGroup | None) -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_SIZE,
        text_dim=64,
        ffn_dim=FEED_FORWARD,
        num_layers=LAYERS,
    )
    if group is not None:
        apply_sequence_plan(model, get_family("wan").sequence_plan, group)
    return model.to(dtype)


def _step(dtype: torch.dtype) -> Callable[[WanTransformer3DModel], None]:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, FRAMES, SIDE, SIDE, generator=generator).to(dtype)
    text = torch.randn(1, TEXT, 64, generator=generator).to(dtype)

    def step(model: WanTransformer3DModel) -> None:
        output = model(
            hidden_states=latents, timestep=torch.tensor([500.0]), encoder_hidden_states=text, return_dict=False
        )[0]
        output.float().square().mean().backward()
        model.zero_grad()

    return step


def _time(
    step: Callable[[WanTransformer3DModel], None], model: WanTransformer3DModel, times: list[float], *, counted: bool
) -> None:
    start = time.perf_counter()
    step(model)
    if counted:
        times.append(time.perf_counter() - start)


def _least_bytes(group: SequenceGroup, dtype: torch.dtype) -> float:
    """What one process has to send in a step.

    By heads: of query, key, value and output all but the own share of the heads, and the same of their gradients. Round
    the ring: keys and values to each of the others in turn, twice, and the sums of their gradients once. And the own part
    of the last projection's output to all others.
    """
    tensor = TOKENS / DEGREE * HEADS * HEAD_SIZE * dtype.itemsize
    heads = 8 * tensor * (group.ulysses - 1) / group.ulysses
    ring = 6 * tensor * (group.ring - 1)
    projected = TOKENS / DEGREE * 16 * 4 * dtype.itemsize * (DEGREE - 1)
    return LAYERS * (heads + ring) + projected


def _kept_bytes(model: WanTransformer3DModel, step: Callable[[WanTransformer3DModel], None]) -> int:
    """Bytes of the distinct storages, without the weights, that autograd holds when the forward pass is done."""
    weights = {storage_id(parameter) for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no storage is mistaken for an earlier one

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_id(tensor) not in weights:
            alive.append(tensor)
            sizes[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model)
    return sum(sizes.values())


if __name__ == "__main__":
    main()
