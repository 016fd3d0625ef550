"""Which strategy runs on how many processes: from the config, and from what the launcher set. Needs no torch."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowshard.config import Config, LayoutConfig
from flowshard.errors import UserError
from flowshard.families import find_variant
from flowshard.parallel.launcher import check_launcher, launcher_deepspeed_file, launcher_strategy

SHARDED = ("zero1", "zero2", "zero3", "fsdp2")
"""Strategies that divide state among processes."""

ELEMENTWISE_OPTIMIZERS = frozenset(
    [
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
        "fusedadam",
        "lion",
    ]
)
"""Optimizers, by class name, whose update of an element depends on that element alone."""


@dataclass(frozen=True)
class Layout:
    """How a run is spread over processes."""

    strategy: str
    world: int
    """Processes."""
    rank: int
    local_rank: int
    """Place of the process on its machine."""
    local_world: int
    """Processes on this machine."""
    reason: str
    """Why this strategy, for the user."""
    accumulation: int
    """Micro-batches of one process in one update."""
    shard: int
    """Processes that divide one copy of the model among them."""
    sequence: int
    """Processes that share the tokens of a sample: `ulysses * ring`. Neighbours share one."""
    ulysses: int
    """Of them, those that exchange heads: neighbours."""
    ring: int
    """Of them, those that pass keys and values round."""
    deepspeed_file: str | None
    """A user's DeepSpeed JSON, from the config or from the launcher's."""

    @property
    def data_parallel(self) -> int:
        """Groups of processes that work on different samples."""
        return self.world // self.sequence

    def positions(self, global_batch: int) -> range:
        """The places in the global batch that this process works on."""
        share = global_batch // self.data_parallel
        group = self.rank // self.sequence
        return range(group * share, (group + 1) * share)

    @property
    def ulysses_crosses_machines(self) -> bool:
        """Whether heads are exchanged between machines."""
        return self.local_world % self.ulysses != 0

    @property
    def text(self) -> str:
        """For the user."""
        if self.world == 1:
            return f"{self.strategy}, one process"
        if self.sequence == 1:
            return f"{self.strategy}, {self.world} processes"
        return (
            f"{self.strategy}, {self.world} processes = {self.data_parallel} x {self.sequence} that share a sample "
            f"(ulysses {self.ulysses} x ring {self.ring})"
        )


def resolve_layout(config: Config, environment: Mapping[str, str] | None = None) -> Layout:
    """The layout of this process.

    Args:
        config: of the run.
        environment: of the process; set by torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`) and, with
            what its own config file says, by `accelerate launch` (`ACCELERATE_...`, `FSDP_...`).

    Raises:
        UserError: config and launcher contradict each other, or the global batch cannot be divided.
    """
    environment = os.environ if environment is None else environment
    world = int(environment.get("WORLD_SIZE", "1"))
    strategy, reason = _strategy(config, environment, world)
    assert config.model.variant is not None  # noqa: S101 - `check_inputs` recognises it
    heads = find_variant(config.model.variant, option="model.variant")[1].heads
    sequence, ulysses, ring = _sequence_degrees(config.layout, world, heads)
    train = config.train
    data = world // sequence
    if train.global_batch % (train.micro_batch * data):
        legal = [number for number in range(1, data + 1) if train.global_batch % (train.micro_batch * number) == 0]
        processes = [number * sequence for number in legal]
        raise UserError(
            f"train.global_batch: {train.global_batch} samples cannot be divided among {data} "
            f"{'processes' if sequence == 1 else 'groups of processes'} with train.micro_batch={train.micro_batch}; use a "
            f"multiple of {train.micro_batch * data}, or {_choices(processes)} processes"
        )
    layout = Layout(
        strategy=strategy,
        world=world,
        rank=int(environment.get("RANK", "0")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world=int(environment.get("LOCAL_WORLD_SIZE", str(world))),
        reason=reason,
        accumulation=train.global_batch // (train.micro_batch * data),
        shard=_shard_degree(config, strategy, world),
        sequence=sequence,
        ulysses=ulysses,
        ring=ring,
        deepspeed_file=config.layout.deepspeed or launcher_deepspeed_file(environment),
    )
    _check_engine_options(config, strategy)
    _check_optimizer(config, strategy)
    check_launcher(config, environment, accumulation=layout.accumulation, data_parallel=layout.data_parallel)
    return layout


def _choices(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers)) or "fewer"


def _strategy(config: Config, environment: Mapping[str, str], world: int) -> tuple[str, str]:
    asked, launcher = config.layout.strategy, launcher_strategy(environment)
    if asked == "auto":
        if launcher is not None:
            return launcher, "the launcher's config asks for it"
        if world == 1:
            return "single", "start several processes with torchrun or accelerate launch"
        return "ddp", "every process holds the whole model; layout.strategy=zero2, zero3 or fsdp2 divides it"
    if launcher not in (None, asked):
        raise UserError(
            f"layout.strategy: the config says {asked!r}, the launcher's config {launcher!r}; change one of them, or set "
            "layout.strategy=auto"
        )
    if asked == "single" and world > 1:
        raise UserError(f"layout.strategy: 'single' is one process, but {world} were started; use 'ddp' or start one")
    if asked == "ddp" and world == 1:
        return "single", "ddp on one process is single"
    return asked, "the config asks for it"


def _shard_degree(config: Config, strategy: str, world: int) -> int:
    asked = config.layout.shard
    if asked == "auto":
        return world if strategy in SHARDED else 1
    if strategy != "fsdp2":
        raise UserError(f"layout.shard: belongs to fsdp2, the strategy is {strategy!r}; set layout.shard=auto")
    if world % asked:
        raise UserError(f"layout.shard: {asked} does not divide {world} processes; use {_choices(divisors(world))}")
    return asked


def generation_layout(sequence: int, heads: int, environment: Mapping[str, str] | None = None) -> Layout:
    """The layout of `flowshard generate`, all of whose processes work on one sample.

    Args:
        sequence: as many as were started.
        heads: of the model.
        environment: of the process, set by torchrun.

    Raises:
        UserError: another number was started.
    """
    environment = os.environ if environment is None else environment
    world = int(environment.get("WORLD_SIZE", "1"))
    if sequence != world:
        raise UserError(
            f"--sequence: {sequence} processes share the work, but {world} were started; give --sequence {world}, or start "
            f"{sequence} with torchrun --nproc-per-node {sequence} -m flowshard generate"
        )
    sequence, ulysses, ring = _sequence_degrees(LayoutConfig(sequence=sequence), world, heads)
    return replace(encoding_layout(environment), sequence=sequence, ulysses=ulysses, ring=ring)


def encoding_layout(environment: Mapping[str, str] | None = None) -> Layout:
    """The layout of `flowshard cache`, each of whose processes encodes samples of its own, whatever engine the launcher
    is configured for."""
    environment = os.environ if environment is None else environment
    world = int(environment.get("WORLD_SIZE", "1"))
    return Layout(
        strategy="single" if world == 1 else "ddp",
        world=world,
        rank=int(environment.get("RANK", "0")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world=int(environment.get("LOCAL_WORLD_SIZE", str(world))),
        reason="",
        accumulation=1,
        shard=1,
        sequence=1,
        ulysses=1,
        ring=1,
        deepspeed_file=None,
    )


def first_process(world: int, local_world: int) -> dict[str, str]:
    """What a launcher sets in the first of so many processes, of which so many are on its machine."""
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local_world)}


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _sequence_degrees(layout: LayoutConfig, world: int, heads: int) -> tuple[int, int, int]:
    """`layout.sequence` and its two factors. By default as much as the heads allow is ulysses, which sends less."""
    sequence = layout.sequence
    if world % sequence:
        raise UserError(
            f"layout.sequence: {sequence} does not divide the {world} processes that were started; use "
            f"{_choices(divisors(world))}"
        )
    legal = divisors(math.gcd(heads, sequence))
    ulysses = layout.ulysses
    if ulysses == "auto":
        ulysses = legal[-1] if layout.ring == "auto" else sequence // layout.ring
    if ulysses not in legal or layout.ring not in ("auto", sequence // ulysses):
        splits = ", ".join(f"{number} x {sequence // number}" for number in legal)
        raise UserError(
            f"layout.ulysses={layout.ulysses} and layout.ring={layout.ring} cannot share a sample among {sequence} "
            f"processes: ulysses * ring is layout.sequence, and ulysses divides the model's {heads} heads; use ulysses x "
            f"ring = {splits}, or auto for both"
        )
    return sequence, ulysses, sequence // ulysses


def check_heads(layout: Layout, heads: int) -> None:
    """Refuse a model with another number of heads than its variant has, if they cannot be exchanged.

    Raises:
        UserError: the degree of ulysses does not divide them.
    """
    if heads % layout.ulysses:
        raise UserError(
            f"layout.ulysses: {layout.ulysses} does not divide the {heads} heads of this model; use a divisor of {heads}"
        )


def _check_engine_options(config: Config, strategy: str) -> None:
    layout = config.layout
    for option, asked, strategies in (
        ("offload_optimizer", layout.offload_optimizer, ("zero1", "zero2", "zero3")),
        ("offload_parameters", layout.offload_parameters, ("zero3", "fsdp2")),
        ("deepspeed", layout.deepspeed, ("zero1", "zero2", "zero3")),
        ("gather_dtype=bfloat16", layout.gather_dtype != "auto", ("fsdp2",)),
    ):
        if asked and strategy not in strategies:
            raise UserError(f"layout.{option}: needs the strategy {' or '.join(strategies)}, not {strategy!r}")
    if config.memory.parameters == "host" and strategy != "single":
        reason = {"ddp": "DistributedDataParallel takes a model on one kind of memory"}.get(
            strategy, f"{strategy} holds and gathers the parameters itself"
        )
        raise UserError(
            f"memory.parameters: host is for one process, and {reason}; set memory.parameters=device, for several processes "
            "layout.strategy=fsdp2 with layout.offload_parameters=true"
        )
    if layout.gather_dtype == "bfloat16" and config.model.dtype != "bfloat16":
        raise UserError(f"layout.gather_dtype: 'bfloat16' needs model.dtype=bfloat16, not {config.model.dtype!r}")
    if config.model.frozen_dtype is not None and strategy in ("zero3", "fsdp2"):
        raise UserError(
            f"model.frozen_dtype: {config.model.frozen_dtype!r} weights are held by every process as a whole, and {strategy} "
            "divides weights; use layout.strategy=ddp, zero1 or zero2, or model.frozen_dtype=null"
        )


def _check_optimizer(config: Config, strategy: str) -> None:
    """Engines flatten or slice parameters, so an update must not look at more than one element."""
    name = config.train.optimizer
    if strategy in SHARDED and name.rpartition(".")[2].lower() not in ELEMENTWISE_OPTIMIZERS:
        raise UserError(
            f"train.optimizer: {name} is not known to work element by element, which {strategy} needs; use adamw or "
            "layout.strategy=ddp"
        )
    if config.train.ema is not None and strategy.startswith("zero") and name.rpartition(".")[2].lower() == "adagrad":
        raise UserError(
            f"train.ema: {strategy} makes an Adagrad of its own, which keeps no average; set train.ema=null or use "
            "layout.strategy=fsdp2"
        )
