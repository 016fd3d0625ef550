"""A plan as a table for people and as plain values."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flowshard.plan.candidates import Assessed
from flowshard.plan.command import Plan
from flowshard.plan.hardware import USABLE
from flowshard.units import amount, count, duration

_HEAD = ("layout", "activations", "peak", "parameters", "gradients", "optimizer", "kept", "buffers", "sent", "step", "")


def as_text(plan: Plan) -> str:
    """The recommended layout, and of every strategy the fastest that fits or else the smallest."""
    question = plan.question
    config, sample = question.config, question.size
    size = plan.model.size.whole
    lines = [
        f"{'model':<11} {question.variant.name}, {question.known_from}",
        f"{'method':<11} {config.train.method}, {count(size.trained)} of {count(size.elements)} parameters are trained",
        f"{'sample':<11} {sample.width}x{sample.height}, {sample.frames} frame{'s' * (sample.frames > 1)}, {plan.tokens:,} tokens",
        f"{'step':<11} {config.train.global_batch} samples, micro-batches of {config.train.micro_batch}",
        f"{'devices':<11} {question.devices} x {amount(question.memory)} ({question.hardware.name}) on {question.nodes} "
        f"machine{'s' * (question.nodes > 1)}, of which tensors may take {USABLE:.0%}: {amount(plan.usable)} each",
        "",
    ]
    shown = _shown(plan)
    lines += _table([_HEAD, *(_row(plan, one) for one in shown)])
    lines += ["", f"{len(plan.layouts)} layouts are legal, {sum(map(plan.fits, plan.layouts))} fit; --json lists all"]
    if plan.recommended is None:
        lines.append(plan.why)
    else:
        lines.append(f"recommended: {' '.join(plan.recommended.candidate.options)}")
        lines.append(f"             {plan.why}")
    return "\n".join(line.rstrip() for line in lines)


def _shown(plan: Plan) -> list[Assessed]:
    first: dict[tuple[Any, ...], Assessed] = {}
    for one in plan.layouts:
        candidate = one.candidate
        offloads = candidate.config.layout.offload_optimizer, candidate.config.layout.offload_parameters
        first.setdefault((candidate.layout.strategy, *offloads, candidate.host_parameters), one)
    chosen = list(first.values())
    own = next((one for one in plan.layouts if one.candidate.configured), None)
    for special in (own, plan.recommended):
        if special is not None:
            chosen = [special, *(one for one in chosen if one is not special)]
    return chosen


def _row(plan: Plan, one: Assessed) -> tuple[str, ...]:
    memory = one.memory
    notes = ["recommended"] * (one is plan.recommended) + ["as configured"] * one.candidate.configured
    notes += [f"does not fit: {amount(memory.peak - plan.usable)} too much"] * (not plan.fits(one))
    return (
        one.candidate.name,
        one.candidate.activations,
        amount(memory.peak),
        amount(memory.parameters),
        amount(memory.gradients),
        amount(memory.optimizer),
        amount(memory.activations),
        amount(memory.buffers),
        amount(one.traffic.between),
        duration(one.time.total),
        "; ".join(notes),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (0, 1, len(widths) - 1)
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """All layouts, as plain values: bytes, seconds, operations."""
    question, size = plan.question, plan.model.size.whole
    return {
        "variant": question.variant.name,
        "sizes_from": question.known_from,
        "parameters": size.elements,
        "trained": size.trained,
        "tokens": plan.tokens,
        "devices": question.devices,
        "nodes": question.nodes,
        "device": question.hardware.name,
        "device_memory": question.memory,
        "usable_memory": plan.usable,
        "recommended": None if plan.recommended is None else _values(plan, plan.recommended),
        "why": plan.why,
        "layouts": [_values(plan, one) for one in plan.layouts],
    }


def _values(plan: Plan, one: Assessed) -> dict[str, Any]:
    layout, options = one.candidate.layout, one.candidate.config.layout
    return {
        "strategy": layout.strategy,
        "data_parallel": layout.data_parallel,
        "sequence": layout.sequence,
        "ulysses": layout.ulysses,
        "ring": layout.ring,
        "shard": layout.shard,
        "accumulation": layout.accumulation,
        "offload_optimizer": options.offload_optimizer,
        "offload_parameters": options.offload_parameters,
        "host_parameters": one.candidate.host_parameters,
        "activations": one.candidate.activations,
        "options": one.candidate.options,
        "configured": one.candidate.configured,
        "fits": plan.fits(one),
        "memory": asdict(one.memory),
        "sent": asdict(one.traffic),
        "flops": one.flops,
        "seconds": {**asdict(one.time), "total": one.time.total},
    }
