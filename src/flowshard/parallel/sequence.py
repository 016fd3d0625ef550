"""Sequence parallelism: attention over tokens that several processes hold, and the gathering of tokens.

A group of `ulysses * ring` processes works on one sample. Process r of the group holds the r-th part of the tokens.
Attention has two stages: processes next to each other (ulysses) exchange tokens for heads, so that each has all their
tokens for its share of the heads; then keys and values go round the ring of those at equal places
(https://arxiv.org/abs/2309.14509, https://arxiv.org/abs/2310.01889, https://arxiv.org/abs/2405.07719).

All of it is one operator with a backward pass of its own, so that activation policies and compilers see one unit.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

from flowshard.device import synchronize
from flowshard.parallel.kernels import attention_backward, attention_forward, key_bias
from flowshard.parallel.layout import Layout

Tensor = torch.Tensor
dist: Any = torch.distributed
"""Typed loosely, as torch does not declare what it exports here."""


@dataclass
class Traffic:
    """What a process has sent for sequence parallelism so far."""

    exchanges: int = 0
    """Ulysses: all-to-all operations."""
    rotations: int = 0
    """Ring: hops of keys and values, or of their gradients."""
    gathers: int = 0
    """Of tokens, and the sums of their gradients."""
    bytes: int = 0
    """Sent to other processes."""
    seconds: float = 0.0
    """Spent in all of them, if timed."""


class GroupShape:
    """The degrees of the processes that share the tokens of a sample, and the place of one of them."""

    def __init__(self, *, ulysses: int, ring: int, rank: int) -> None:
        """Register it, as operators find it by its name.

        Args:
            ulysses: processes next to each other, that exchange heads.
            ring: processes that pass keys and values round.
            rank: place in the group.
        """
        self.degree, self.ulysses, self.ring, self.rank = ulysses * ring, ulysses, ring, rank
        self.name = f"{next(_numbers)}"
        _groups[self.name] = self

    @property
    def ring_rank(self) -> int:
        """Place in the ring."""
        return self.rank // self.ulysses

    @property
    def ulysses_rank(self) -> int:
        """Place among those that exchange heads."""
        return self.rank % self.ulysses

    def column(self, sizes: Sequence[int], ring_rank: int) -> list[int]:
        """Of the tokens of each process, those of the ones that exchange heads at a place in the ring."""
        return list(sizes[ring_rank * self.ulysses : (ring_rank + 1) * self.ulysses])


class SequenceGroup(GroupShape):
    """The processes that share the tokens of a sample, as this one sees them."""

    def __init__(self, layout: Layout, device: torch.device, *, timed: bool = False) -> None:
        """Make the groups. Collective over all processes.

        Args:
            layout: with `sequence`, `ulysses` and `ring`.
            device: of this process.
            timed: whether to measure the seconds of communication, which makes an accelerator wait at each operation.
        """
        super().__init__(ulysses=layout.ulysses, ring=layout.ring, rank=layout.rank % layout.sequence)
        self.traffic = Traffic()
        self._device, self._timed = device, timed
        data = layout.world // layout.sequence
        mesh = init_device_mesh(
            device.type, (data, layout.ring, layout.ulysses), mesh_dim_names=("data", "ring", "ulysses")
        )
        whole = init_device_mesh(device.type, (data, layout.sequence), mesh_dim_names=("data", "sequence"))
        self._ring_group, self._ulysses_group = mesh.get_group("ring"), mesh.get_group("ulysses")
        self._group = whole.get_group("sequence")
        self._ring_ranks = dist.get_process_group_ranks(self._ring_group)

    @contextmanager
    def _sending(self, kind: str, number: int) -> Iterator[None]:
        setattr(self.traffic, kind, getattr(self.traffic, kind) + 1)
        self.traffic.bytes += number
        if not self._timed:
            yield
            return
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self.traffic.seconds += time.perf_counter() - start

    def to_heads(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """Exchange all heads of own tokens for own heads of all tokens.

        Args:
            tensors: T of them, each (batch, own tokens, heads, size).
            counts: tokens of each process.

        Returns:
            (T, batch, all tokens, heads / ulysses, size).
        """
        number, (batch, own, heads, size) = len(tensors), tensors[0].shape
        share = heads // self.ulysses
        sent = tensors[0].new_empty(self.ulysses, number, batch, own, share, size)
        for index, tensor in enumerate(tensors):
            sent[:, index].copy_(tensor.unflatten(2, (self.ulysses, share)).permute(2, 0, 1, 3, 4))
        unit = number * batch * share * size
        received = self._exchange(sent.view(-1), [own * unit] * self.ulysses, [n * unit for n in counts])
        parts = received.split([n * unit for n in counts])
        return torch.cat([part.view(number, batch, -1, share, size) for part in parts], dim=2)

    def to_tokens(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """The opposite of `to_heads`.

        Args:
            tensors: T of them, each (batch, all tokens, heads / ulysses, size).
            counts: tokens of each process.

        Returns:
            (T, batch, own tokens, heads, size).
        """
        number, (batch, tokens, share, size) = len(tensors), tensors[0].shape
        own, unit = counts[self.ulysses_rank], number * batch * share * size
        if number * batch == 1 and tensors[0].is_contiguous():  # is in the order of the processes as it is
            sent = tensors[0].view(-1)
        else:
            sent = tensors[0].new_empty(tokens * unit)
            for place, n, part in zip(_starts(counts), counts, sent.split([n * unit for n in counts]), strict=True):
                for tensor, into in zip(tensors, part.view(number, batch, n, share, size), strict=True):
                    into.copy_(tensor.narrow(1, place, n))
        received = self._exchange(sent, [n * unit for n in counts], [own * unit] * self.ulysses)
        parts = received.view(self.ulysses, number, batch, own, share, size)
        return parts.permute(1, 2, 3, 0, 4, 5).reshape(number, batch, own, self.ulysses * share, size)

    def _exchange(self, sent: Tensor, out: list[int], into: list[int]) -> Tensor:
        received = sent.new_empty(sum(into))
        others = sum(out) - out[self.ulysses_rank]
        with self._sending("exchanges", others * sent.element_size()):
            dist.all_to_all_single(received, sent, into, out, group=self._ulysses_group)
        return received

    def rotate(self, tensor: Tensor, received: Tensor) -> list[Any]:
        """Begin to send a tensor to the next process of the ring and to receive the previous one's; see `wait`."""
        following = self._ring_ranks[(self.ring_rank + 1) % self.ring]
        previous = self._ring_ranks[(self.ring_rank - 1) % self.ring]
        with self._sending("rotations", tensor.nbytes):
            works: list[Any] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, following, group=self._ring_group),
                    dist.P2POp(dist.irecv, received, previous, group=self._ring_group),
                ]
            )
            if self._timed:
                self.wait(works)
        return works

    @staticmethod
    def wait(works: list[Any]) -> None:
        """Until what `rotate` began is done."""
        for work in works:
            work.wait()

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """The parts of all processes, joined along the first dimension, of which they have `sizes`."""
        longest = max(sizes)  # the parts differ by a token at most
        padded = torch.nn.functional.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, longest - tensor.shape[0]])
        parts = [torch.empty_like(padded) for _ in sizes]
        with self._sending("gathers", tensor.nbytes * (self.degree - 1)):
            dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Own part, along the first dimension, of the sum over all processes; added up in float32."""
        own, unit = sizes[self.rank], tensor[:1].numel()
        received = tensor.new_empty(self.degree, own, *tensor.shape[1:])
        with self._sending("gathers", (len(tensor) - own) * unit * tensor.element_size()):
            dist.all_to_all_single(
                received.view(-1),
                tensor.view(-1),
                [own * unit] * self.degree,
                [size * unit for size in sizes],
                group=self._group,
            )
        return received.float().sum(0).to(tensor.dtype)


_numbers = count()
_groups: dict[str, GroupShape] = {}
"""By name, as operators take no Python objects."""


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:index]) for index in range(len(counts))]


def find_shape(name: str) -> GroupShape:
    """The degrees of the group of that name, which may not exist."""
    return _groups[name]


def find_group(name: str) -> SequenceGroup:
    """The group of that name."""
    group = _groups[name]
    assert isinstance(group, SequenceGroup)  # noqa: S101
    return group


def ring_forward(group: SequenceGroup, qkv: Tensor, mask: Tensor | None, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attention of own queries to the keys of the whole ring: output like the queries, and the log-sum-exp."""
    query, pair = qkv[0].transpose(1, 2), qkv[1:].contiguous()
    output: Tensor | None = None
    lse = query.new_empty(0)
    for step in range(group.ring):
        holder = (group.ring_rank - step) % group.ring
        works, following = _pass_on(group, pair, sizes, step)
        key, value = pair.transpose(2, 3)
        part, part_lse = attention_forward(query, key, value, _bias(group, mask, sizes, holder, query))
        if output is None:
            output, lse = part, part_lse
            if group.ring > 1:
                output = output.float()
        else:
            joined = torch.logaddexp(lse, part_lse)
            output = output * (lse - joined).exp()[..., None] + part.float() * (part_lse - joined).exp()[..., None]
            lse = joined
        group.wait(works)
        pair = following
    assert output is not None  # noqa: S101
    return output.to(query.dtype).transpose(1, 2).contiguous(), lse.contiguous()


def _pass_on(group: SequenceGroup, pair: Tensor, sizes: Sequence[int], step: int) -> tuple[list[Any], Tensor]:
    """Begin to send keys and values on, and to receive the next ones; at the last step there are none."""
    if step + 1 == group.ring:
        return [], pair
    tokens = sum(group.column(sizes, (group.ring_rank - step - 1) % group.ring))
    following = pair.new_empty(2, pair.shape[1], tokens, *pair.shape[3:])
    return group.rotate(pair, following), following


def ring_backward(
    group: SequenceGroup,
    gradient: Tensor,
    qkv: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each like them.

    Keys and values go round as in the forward pass. The gradient of a part's keys and values follows them: each process
    adds its share and sends the sum on, the last one to the part's holder, who adds the share that it kept.
    """
    query, pair = qkv[0].transpose(1, 2), qkv[1:].contiguous()
    gradient, output = gradient.transpose(1, 2), output.transpose(1, 2)
    query_gradient = own = incoming = None
    arriving: list[Any] = []
    leaving = gradient  # held until it has been sent
    for step in range(group.ring):
        holder = (group.ring_rank - step) % group.ring
        works, following = _pass_on(group, pair, sizes, step)
        bias = _bias(group, mask, sizes, holder, query)
        key, value = pair.transpose(2, 3)
        dq, dk, dv = attention_backward(gradient, query, key, value, output, lse, bias)
        if group.ring == 1:
            return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        shares = torch.stack([dk, dv])
        query_gradient = dq.float() if query_gradient is None else query_gradient + dq.float()
        if step == 0:
            own = shares.float()
        else:
            shares = shares.float()
            if incoming is not None:
                group.wait(arriving)
                shares += incoming
            # What comes in belongs to the part that comes next, and in the end to our own.
            tokens = sum(group.column(sizes, (holder - 1) % group.ring))
            incoming = pair.new_empty(*shares.shape[:3], tokens, shares.shape[4])
            leaving = shares.to(pair.dtype, memory_format=torch.contiguous_format)
            arriving = group.rotate(leaving, incoming)
        group.wait(works)
        pair = following
    assert query_gradient is not None and own is not None and incoming is not None  # noqa: S101
    group.wait(arriving)
    dk, dv = (own + incoming).to(qkv.dtype).transpose(2, 3)
    return query_gradient.to(qkv.dtype).transpose(1, 2), dk, dv


def _bias(group: SequenceGroup, mask: Tensor | None, sizes: Sequence[int], holder: int, query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    start = sum(sizes[: holder * group.ulysses])
    return key_bias(mask[:, start : start + sum(group.column(sizes, holder))], query.dtype)
