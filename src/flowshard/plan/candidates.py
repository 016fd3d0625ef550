"""Every layout of a config on a number of devices that is legal, with what it needs and how long a step takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from flowshard.config import ActivationPolicy, Config
from flowshard.errors import UserError
from flowshard.memory.estimate import MemoryEstimate, estimate_memory
from flowshard.memory.sizes import MASTER
from flowshard.memory.timeline import Timeline
from flowshard.memory.traffic import Traffic, step_traffic
from flowshard.parallel.layout import SHARDED, Layout, divisors, first_process, resolve_layout
from flowshard.plan.hardware import Hardware, StepTime, Work, step_time
from flowshard.plan.model import PlannedModel, engine_of

STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp2", "zero3")
"""From the simplest on."""
POLICIES: tuple[ActivationPolicy, ...] = get_args(ActivationPolicy)
_OFFLOADS: dict[str, tuple[dict[str, bool], ...]] = {
    "zero1": ({"offload_optimizer": True},),
    "zero2": ({"offload_optimizer": True},),
    "zero3": (
        {"offload_optimizer": True},
        {"offload_parameters": True},
        {"offload_optimizer": True, "offload_parameters": True},
    ),
    "fsdp2": ({"offload_parameters": True},),
}
_OFF = {"offload_optimizer": False, "offload_parameters": False}


@dataclass(frozen=True)
class Candidate:
    """A legal layout."""

    config: Config
    layout: Layout
    policies: tuple[ActivationPolicy, ...]
    """Of each block."""
    configured: bool
    """Whether it is what the config says."""
    resets: tuple[str, ...] = ()
    """Overrides that take back what the config says."""

    @property
    def host_parameters(self) -> bool:
        """Whether the frozen weights of blocks are in host memory."""
        return self.config.memory.parameters == "host"

    @property
    def activations(self) -> str:
        """For the user."""
        kinds = dict.fromkeys(self.policies)
        return "+".join(kinds)

    @property
    def options(self) -> list[str]:
        """What makes a config take it, as overrides."""
        layout, memory = self.config.layout, self.config.memory
        found = [f"layout.strategy={self.layout.strategy}"]
        found += [f"layout.sequence={layout.sequence}"] if layout.sequence > 1 else []
        found += [f"layout.shard={layout.shard}"] if layout.shard != "auto" else []
        found += [f"layout.{name}=true" for name in _OFF if getattr(layout, name)]
        found += ["memory.parameters=host"] if self.host_parameters else self.resets
        if isinstance(memory.activations, str):
            found.append(f"memory.activations={memory.activations}")
            found += ["memory.budget=null"] if memory.budget is not None else []  # which belongs to `auto`
            overlapped = memory.offload_overlap and memory.activations != "offload"
            found += ["memory.offload_overlap=false"] if overlapped else []
        return found

    @property
    def name(self) -> str:
        """For the user."""
        layout = self.layout
        parts = [layout.strategy]
        parts += [f"shard {layout.shard}"] if layout.strategy in SHARDED and layout.shard < layout.world else []
        parts += [f"sequence {layout.sequence}"] if layout.sequence > 1 else []
        parts += [name.replace("_", " ") for name in _OFF if getattr(self.config.layout, name)]
        parts += ["host parameters"] if self.host_parameters else []
        return ", ".join(parts)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Smaller for layouts in which less can go wrong."""
        offloads = sum(getattr(self.config.layout, name) for name in _OFF) + self.host_parameters
        return (
            offloads,
            STRATEGIES.index(self.layout.strategy),
            int(self.layout.shard < self.layout.world),
            self.layout.sequence,
        )


@dataclass(frozen=True)
class Assessed:
    """A layout with its numbers, all of one process."""

    candidate: Candidate
    memory: MemoryEstimate
    traffic: Traffic
    flops: int
    """Of a step, with what is recomputed."""
    time: StepTime


def candidates(config: Config, *, devices: int, nodes: int, tokens: int, blocks: int) -> Iterator[Candidate]:
    """All legal layouts.

    Args:
        config: with its variant.
        devices: of the run, one a process.
        nodes: machines that they are on.
        tokens: of a sample, which at most so many processes share.
        blocks: of the model.
    """
    own = legal_layout(config, devices, nodes)
    resets = ("memory.parameters=device",) if config.memory.parameters == "host" else ()
    for strategy in STRATEGIES:
        if (strategy == "single") != (devices == 1) and strategy not in _OFFLOADS:
            continue
        plain: list[dict[str, bool]] = [{}] if devices > 1 or strategy == "single" else []
        for base, offload in product(_bases(config, strategy), (*plain, *_OFFLOADS.get(strategy, ()))):
            for shard in _shards(strategy, devices, nodes):
                for sequence in divisors(devices):
                    changed = _changed(
                        base,
                        strategy=strategy,
                        sequence=sequence,
                        shard=shard,
                        deepspeed=config.layout.deepspeed if strategy.startswith("zero") else None,
                        gather_dtype=config.layout.gather_dtype if strategy == "fsdp2" else "auto",
                        **_degrees(config, sequence),
                        **_OFF,
                    )
                    changed = _changed(changed, **offload)
                    layout = legal_layout(changed, devices, nodes)
                    if layout is None or sequence > tokens:
                        continue
                    for policy in POLICIES:
                        memory = changed.memory.model_copy(update={"activations": policy})
                        one = changed.model_copy(update={"memory": memory})
                        same = own is not None and _same(own, layout, changed, config)
                        same = same and config.memory.activations == policy
                        yield Candidate(one, layout, (policy,) * blocks, same, resets)


def _bases(config: Config, strategy: str) -> list[Config]:
    """The config with each place that the weights can have."""
    streams = config.memory.compile is not True and config.model.frozen_dtype is None
    hosts = strategy == "single" and config.train.method == "lora" and streams
    places = ["device", "host"] if hosts else ["device"]
    return [
        config.model_copy(update={"memory": config.memory.model_copy(update={"parameters": place})}) for place in places
    ]


def _same(own: Layout, layout: Layout, changed: Config, config: Config) -> bool:
    """Whether a layout is what the config says."""
    places = ("strategy", "sequence", "ulysses", "shard")
    offloads = all(getattr(changed.layout, name) == getattr(config.layout, name) for name in _OFF)
    offloads = offloads and changed.memory.parameters == config.memory.parameters
    return offloads and all(getattr(own, name) == getattr(layout, name) for name in places)


def _degrees(config: Config, sequence: int) -> dict[str, Any]:
    """`ulysses` and `ring` of the config where they belong to the degree."""
    asked = sequence == config.layout.sequence
    return {name: getattr(config.layout, name) if asked else "auto" for name in ("ulysses", "ring")}


def _changed(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"layout": config.layout.model_copy(update=changes)})


def _shards(strategy: str, devices: int, nodes: int) -> list[Any]:
    """fsdp2 can divide a model within each machine."""
    return ["auto", devices // nodes] if strategy == "fsdp2" and 1 < devices // nodes < devices else ["auto"]


def legal_layout(config: Config, devices: int, nodes: int) -> Layout | None:
    """The layout of a config; None if it has none on so many devices."""
    try:
        return resolve_layout(config, first_process(devices, devices // nodes))
    except UserError:
        return None


def assess(model: PlannedModel, found: Sequence[Candidate], *, hardware: Hardware, peak_flops: float) -> list[Assessed]:
    """The numbers of each layout."""
    model.expect((one.layout.ulysses, one.layout.ring) for one in found)
    return [_assess(model, candidate, hardware, peak_flops) for candidate in found]


def _assess(model: PlannedModel, candidate: Candidate, hardware: Hardware, peak_flops: float) -> Assessed:
    layout = candidate.layout
    engine = engine_of(candidate.config, layout)
    timeline: Timeline = model.timeline(ulysses=layout.ulysses, ring=layout.ring, policies=candidate.policies)
    memory = estimate_memory(timeline, model.size, engine, model.optimizer)
    traffic = step_traffic(
        model.size,
        engine,
        world=layout.world,
        sequence=timeline.sent(ulysses=layout.ulysses, ring=layout.ring),
        offloaded=timeline.offloaded,
    )
    flops = timeline.flops * layout.accumulation
    elements = model.size.whole.trained / (layout.shard if layout.strategy in SHARDED else 1)
    work = Work(
        flops=flops,
        gradients=traffic.gradients,
        parameters=traffic.parameters,
        sequence=traffic.sequence,
        host=traffic.host,
        # Weight, gradient and state are read, weight and state are written.
        updated=round(elements * (3 * MASTER + 2 * model.optimizer.state)),
        updated_on_host=engine.offload_optimizer or (layout.strategy == "fsdp2" and engine.offload_parameters),
        gradients_overlap=layout.strategy not in ("zero1", "zero2"),
        state_crosses=layout.world > layout.local_world and layout.shard in (1, layout.world),
        sequence_crosses=layout.sequence > layout.local_world,
    )
    return Assessed(candidate, memory, traffic, flops, step_time(work, hardware, peak_flops))
