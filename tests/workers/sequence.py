"""Distributed attention against torch's own on one process, for every split of the group.

    torchrun --nproc-per-node N -m tests.workers.sequence

Prints a line for every split that held.
"""

import os
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from flowshard.libraries import quiet_libraries
from flowshard.parallel import kernels
from flowshard.parallel.layout import Layout
from flowshard.parallel.plan import GroupTokens
from flowshard.parallel.sequence import SequenceGroup
from tests.workers.npu import FAKES

HEADS, SIZE, WIDTH, BATCH = 12, 8, 10, 2
VIDEO, TEXT = (13, 16, 5), (1, 0, 6)
"""Tokens of the streams, case by case: prime, even, few; and text shorter than the group, or none."""


def make_group(ulysses: int, ring: int) -> SequenceGroup:
    world, rank = dist.get_world_size(), dist.get_rank()
    layout = Layout("ddp", world, rank, rank, world, "", 1, 1, ulysses * ring, ulysses, ring, None)
    return SequenceGroup(layout, torch.device("cpu"))


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def project(x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    return [(x @ weight).unflatten(2, (HEADS, SIZE)) for weight in weights]


def whole_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    keep = None if mask is None else mask[:, None, None]
    output: torch.Tensor = scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=keep
    ).transpose(1, 2)
    return output


def check(group: SequenceGroup, video: int, text: int, masked: bool, dtype: torch.dtype = torch.float32) -> None:
    """Output, and the gradients of input and of the q, k and v weights.

    In float32 within 1e-5; in a shorter type, within twice what torch's attention loses on one process.
    """
    tokens = video + text
    x, after = draw(BATCH, tokens, WIDTH, seed=tokens), draw(BATCH, tokens, HEADS, SIZE, seed=1)
    weights = draw(3, WIDTH, HEADS * SIZE, seed=2)
    mask = None
    if masked:  # of the second sample, all keys but the last ones: whole parts have none
        mask = torch.ones(BATCH, tokens, dtype=torch.bool)
        mask[1, : tokens - 2] = False

    def on_one(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        a, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        query, key, value = (t.to(dtype) for t in project(a, w))
        output = whole_attention(query, key, value, mask)
        (output.float() * after).sum().backward()
        assert a.grad is not None
        assert w.grad is not None
        return output.detach(), a.grad, *w.grad

    streams = GroupTokens(group)
    parts = (text, video)

    def part(whole: torch.Tensor) -> torch.Tensor:
        pieces = whole.split(parts, dim=1)
        own = [streams.split(piece, 1, stream=name) for piece, name in zip(pieces, ("text", "video"), strict=True)]
        return torch.cat(own, dim=1)

    a, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
    query, key, value = (t.to(dtype) for t in project(part(a), w))
    own = streams.attention(query, key, value, streams=("text", "video"), mask=mask)
    lengths = [streams.sizes(name)[group.rank] for name in ("text", "video")]
    gathered = [
        streams.gather(piece, 1, stream=name)
        for piece, name in zip(own.split(lengths, dim=1), ("text", "video"), strict=True)
    ]
    output = torch.cat(gathered, dim=1)
    (output.float() * after).sum().backward()
    assert a.grad is not None
    assert w.grad is not None
    for gradient in (a.grad, w.grad):  # each process has its part of the sum
        dist.all_reduce(gradient)
    found = (output.detach(), a.grad, *w.grad)
    names = ("output", "input", "q weight", "k weight", "v weight")
    for name, ours, exact, theirs in zip(names, found, on_one(torch.float32), on_one(dtype), strict=True):
        bound = max(1e-5, 2 * error(theirs, exact))
        assert error(ours, exact) <= bound, (name, error(ours, exact), bound, video, text, masked, dtype)


def check_traffic(group: SequenceGroup) -> None:
    """As many operations as the method needs, forward and backward, and as many bytes."""
    streams = GroupTokens(group)
    x = streams.split(draw(1, 4 * group.degree, HEADS, SIZE, seed=0), 1, stream="video").requires_grad_()
    output = streams.attention(x, x, x, streams=("video",))
    forward = (group.traffic.exchanges, group.traffic.rotations)
    assert forward == (2 * (group.ulysses > 1), group.ring - 1), forward
    output.sum().backward()
    both = (group.traffic.exchanges, group.traffic.rotations)
    assert both == (4 * (group.ulysses > 1), 3 * (group.ring - 1)), both
    part = x.nbytes  # of one of query, key, value and output, the same on every process
    exchanged = 8 * part * (group.ulysses - 1) // group.ulysses  # three and one forward, one and three backward
    rotated = 3 * 2 * part * (group.ring - 1)  # keys and values twice, their gradients once
    assert group.traffic.bytes == exchanged + rotated, (group.traffic, exchanged, rotated)


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    for ulysses in (number for number in range(1, world + 1) if world % number == HEADS % number == 0):
        group = make_group(ulysses, world // ulysses)
        check_traffic(make_group(ulysses, world // ulysses))
        for video in VIDEO:
            for text in TEXT:
                for masked in (False, True):
                    check(group, max(video, world), text, masked)
        for masked in (False, True):
            check(group, 13, 6, masked, torch.bfloat16)
        for masked in (False, True):
            with_kernel("plain", partial(check, group, 13, 6, masked))
            with_kernel("npu", partial(check, group, 13, 6, masked))
        if dist.get_rank() == 0:
            sys.stdout.write(f"ulysses {ulysses} x ring {world // ulysses}\n")
    dist.destroy_process_group()


def with_kernel(name: str, work: Callable[[], None]) -> None:
    """With the attention for another device."""
    chosen, block = kernels._kernel, kernels._QUERY_BLOCK
    kernels._kernel, kernels._QUERY_BLOCK = lambda *_: name, 3
    try:
        work()
    finally:
        kernels._kernel, kernels._QUERY_BLOCK = chosen, block


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet_libraries()
    sys.path.insert(0, str(FAKES))
    main()
