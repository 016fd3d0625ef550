"""Runs every strategy with compiled blocks and counts what is compiled, without compiling it.

    torchrun --nproc-per-node 2 -m tests.workers.compiled TINY CLIPS FOLDER

Prints a line for every case.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from flowshard.libraries import quiet_libraries
from flowshard.parallel.processes import run_together
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from tests import runs

CASES = [
    ("layout.strategy=ddp", "memory.activations=selective"),
    ("layout.strategy=ddp", "layout.sequence=2", "layout.ring=2"),
    ("layout.strategy=zero1", "memory.activations=offload"),
    ("layout.strategy=zero2", "memory.activations=recompute"),
    ("layout.strategy=fsdp2",),
    ("layout.strategy=fsdp2", "memory.activations=selective"),
    ("layout.strategy=fsdp2", "memory.activations=recompute", "layout.sequence=2"),
    ("layout.strategy=zero2", "memory.activations=selective", "layout.sequence=2"),
]


def main(tiny: Path, clips: Path, folder: Path) -> None:
    """Two kinds are expected with LoRA: the first block, whose input has no gradient, and the others."""
    quiet_libraries()
    numbers: list[int] = []
    module: Any = torch
    original = torch.compile

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        del inputs
        numbers.append(1)
        return graph.forward

    module.compile = lambda function: original(function, backend=count)
    inputs = [
        check_inputs(runs.config(tiny, clips, folder / str(number), "memory.compile=true", *case))
        for number, case in enumerate(CASES)
    ]

    def run(processes: Any) -> None:
        for case, one in zip(CASES, inputs, strict=True):
            numbers.clear()
            torch.compiler.reset()
            train(one, processes.with_layout(one.layout))
            assert len(numbers) == 1 + 2, (case, len(numbers))
            processes.say(f"compiled: {' '.join(case)}")

    run_together(inputs[0].layout, run, device_name="cpu", timeout_minutes=5)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
