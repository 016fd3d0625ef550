"""Compiles the repeated blocks of a model: once for each kind of block, however many blocks there are.

Blocks of one list run the same code on parameters of the same shapes, which are inputs of the compiled code. Hooks of a
block (of engines, of sequence parallelism) run around it, uncompiled.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flowshard.config import ActivationPolicy
from flowshard.errors import UserError
from flowshard.memory.activations import is_attention
from flowshard.parallel.layout import Layout
from flowshard.parallel.processes import Processes

RECOMPILE_LIMIT = 32
"""Compilations of one kind of block after which torch leaves it uncompiled. Torch's own limit, 8, is for one function;
here several blocks with inputs of several lengths, some with and some without a gradient, are one."""


@dataclass(frozen=True)
class CompileChoice:
    """Whether blocks are compiled."""

    enabled: bool
    reason: str
    """Why, as a part of a sentence."""
    fall_back: bool = False
    """Whether a block that cannot be compiled runs as it is, rather than ending the run."""


def choose_compile(
    asked: bool | Literal["auto"], layout: Layout, processes: Processes, *, host_parameters: bool = False
) -> CompileChoice:
    """Decide for all processes alike, by trying. Collective.

    Args:
        asked: `memory.compile`.
        layout: of the run; `check_inputs` has refused what is asked for and cannot be.
        processes: that have to agree.
        host_parameters: whether blocks get other weights at every step, from host memory.

    Raises:
        UserError: it is asked for, and a process cannot compile.
    """
    kind = processes.device.type
    if asked is False:
        return CompileChoice(False, "memory.compile=false")
    if host_parameters:
        return CompileChoice(False, "memory.parameters=host gives the blocks other weights at every step")
    if layout.strategy == "zero3":
        return CompileChoice(False, "zero3 gathers parameters between the layers of a block")
    if asked == "auto" and kind != "cuda":
        doubt = "takes longer than short runs gain" if kind == "cpu" else f"has not been tried on {kind}"
        return CompileChoice(False, f"it {doubt}; memory.compile=true does it all the same")
    why = _failure(processes)
    if why is None:
        reason = "memory.compile=true" if asked is True else f"auto on {kind}"
        return CompileChoice(True, reason, fall_back=asked == "auto")
    if asked is True:
        raise UserError(
            f"memory.compile: torch.compile does not work on {kind} here ({why}); install what it needs (a C++ compiler; "
            "on CUDA also triton), or set memory.compile=false"
        )
    return CompileChoice(False, f"torch.compile does not work here ({why})")


def _failure(processes: Processes) -> str | None:
    """Let every process compile something small; what went wrong on this one or on another."""
    failure = None
    try:
        _set_up(fall_back=False)
        value = torch.ones(16, device=processes.device, requires_grad=True)
        torch.compile(_probe)(value).backward()
    except Exception as error:  # compilers and what calls them raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        failure = " ".join(lines[:3]) or type(error).__name__
    failed = processes.sum(torch.tensor(float(failure is not None), device=processes.device))
    return failure or ("another process cannot compile" if float(failed) else None)


def _probe(value: torch.Tensor) -> torch.Tensor:
    return (2 * value).sin().sum()


def _set_up(*, fall_back: bool) -> None:
    """Settings of the compiler, which are private names of torch; `tests/test_compile.py` fails when they change."""
    config: Any = torch._dynamo.config
    config.suppress_errors = fall_back
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    # It would cut a block where a bucket of DDP is full; blocks are parts of a model already.
    config.optimize_ddp = False
    # It warns of writing in place, once, to whoever chooses what is kept; nothing writes into what attention returns.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def compile_blocks(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    policies: Sequence[ActivationPolicy],
    *,
    fall_back: bool,
) -> None:
    """Let every block run compiled code in training; in evaluation it runs as it is.

    Nothing is compiled before the first step. Code is compiled for the lengths of the first sample, and again, for any
    length, when another one comes; and apart for a first block whose inputs have no gradient.

    Args:
        model: that the blocks belong to.
        blocks: all of them; their parameters may be on the meta device.
        policies: as many. `selective` becomes a part of the compiled code, others act around it.
        fall_back: see `CompileChoice`.
    """
    _set_up(fall_back=fall_back)
    lists = {id(module): name.rpartition(".")[0] for name, module in model.named_modules()}
    kinds: dict[tuple[object, ...], Callable[..., Any]] = {}
    for block, policy in zip(blocks, policies, strict=True):
        own = vars(block).get("forward")  # of a block that somebody changed
        kind = (lists[id(block)], type(block), policy == "selective", id(own))
        if kind not in kinds:
            name = f"{lists[id(block)]}_{len(kinds)}"
            kinds[kind] = _compiled(_forward_of(block), name, selective=policy == "selective")
        block.forward = _in_training(block, block.forward, kinds[kind])


@contextmanager
def compiled_alone(
    block: torch.nn.Module, name: str, *, fall_back: bool
) -> Iterator[Callable[[ActivationPolicy], None]]:
    """While active, a block runs compiled code; it is given what makes it run that of a policy.

    Args:
        block: for measuring it; it must be in training mode.
        name: that no other block is measured by.
        fall_back: see `CompileChoice`.
    """
    _set_up(fall_back=fall_back)
    own = vars(block).get("forward")
    forward = _forward_of(block)
    both = {selective: _compiled(forward, f"{name}_{selective}", selective=selective) for selective in (False, True)}

    def use(policy: ActivationPolicy) -> None:
        block.forward = partial(both[policy == "selective"], block)

    try:
        yield use
    finally:
        if own is None:
            vars(block).pop("forward", None)
        else:
            block.forward = own


def _forward_of(block: torch.nn.Module) -> Callable[..., Any]:
    """A block's computation as a function of the block."""
    own = vars(block).get("forward")
    return type(block).forward if own is None else _without_self(own)


def _without_self(bound: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: bound(*args, **kwargs)


def _in_training(block: torch.nn.Module, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(block, *args, **kwargs) if block.training else plain(*args, **kwargs)

    return forward


def _compiled(forward: Callable[..., Any], name: str, *, selective: bool) -> Callable[..., Any]:
    def run(block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(block, *args, **kwargs)

    def run_selective(block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            lambda *inputs, **named: forward(block, *inputs, **named),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=_KEEP_ATTENTION,
            **kwargs,
        )

    function = run_selective if selective else run
    # torch keeps what it has compiled, and which lengths it has seen, by the code of a function; so each kind has its own.
    code = function.__code__.replace(co_name=name.replace(".", "_"))
    compiled: Callable[..., Any] = torch.compile(
        FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    )
    return compiled


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del args, kwargs
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


_KEEP_ATTENTION = partial(create_selective_checkpoint_contexts, _policy)
