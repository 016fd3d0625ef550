"""The stock Wan transformer against itself with its tokens divided: output and every gradient.

    torchrun --nproc-per-node N -m tests.workers.wan_sequence TRANSFORMER_FOLDER

Prints a line for every case that held.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

from flowshard.families import get_family
from flowshard.libraries import quiet_libraries
from flowshard.parallel.plan import apply_sequence_plan
from tests.workers.sequence import draw, error, make_group

CASES = {
    "clip": (2, 3, 4, 6, False),
    "prime number of tokens": (1, 1, 2, 26, False),
    "a timestep for each token": (2, 3, 4, 6, True),
    "picture": (1, 1, 4, 4, False),
}
"""Batch, frames, height and width of the latents, and whether every token has its own timestep."""


def run(model: WanTransformer3DModel, case: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch, frames, height, width, per_token = CASES[case]
    tokens = frames * (height // 2) * (width // 2)
    timestep = torch.tensor([700.0, 200.0][:batch])
    if per_token:
        timestep = timestep[:, None] * torch.linspace(0, 1, tokens)
    model.zero_grad()
    output = model(
        hidden_states=draw(batch, 16, frames, height, width, seed=1),
        timestep=timestep,
        encoder_hidden_states=draw(batch, 5, model.config.text_dim, seed=2),
        return_dict=False,
    )[0]
    (output * draw(*output.shape, seed=3)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    expected = {case: run(WanTransformer3DModel.from_pretrained(folder), case) for case in CASES}
    for ulysses in (number for number in range(1, world + 1) if world % number == 0):
        model = WanTransformer3DModel.from_pretrained(folder)
        group = make_group(ulysses, world // ulysses)
        apply_sequence_plan(model, get_family("wan").sequence_plan, group)
        for case, (output, gradients) in expected.items():
            before = group.traffic.exchanges, group.traffic.gathers
            found, parts = run(model, case)
            assert error(found, output) <= 1e-5, (case, error(found, output))
            assert parts.keys() == gradients.keys()
            for name, part in parts.items():
                dist.all_reduce(part)  # each process has its part of the sum
                assert error(part, gradients[name]) <= 1e-5, (case, name, error(part, gradients[name]))
            # Two exchanges for every self-attention forward, two backward; none for cross-attention.
            after = group.traffic.exchanges, group.traffic.gathers
            blocks = len(model.blocks)
            assert (after[0] - before[0], after[1] - before[1]) == (4 * blocks * (ulysses > 1), 1), (before, after)
            if dist.get_rank() == 0:
                sys.stdout.write(f"ulysses {ulysses} x ring {world // ulysses}: {case}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    quiet_libraries()
    main(Path(sys.argv[1]))
