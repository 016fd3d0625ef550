"""What a process sends to others in a step. See `docs/plan.md`.

Counted is what leaves one process: an operation in a ring of n sends (n - 1) / n of what is gathered or reduced.
"""

from dataclasses import dataclass

from flowshard.memory.estimate import Engine, zero3_kept
from flowshard.memory.sizes import MASTER, ModelSize


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends in a step."""

    gradients: int
    parameters: int
    """Gathered to be used, and after an update."""
    sequence: int
    """Of processes that share a sample."""
    host: int
    """Between device and host memory, both ways."""

    @property
    def between(self) -> int:
        """Between processes."""
        return self.gradients + self.parameters + self.sequence


def step_traffic(size: ModelSize, engine: Engine, *, world: int, sequence: int, offloaded: int) -> Traffic:
    """The traffic of a step.

    Args:
        size: of the model.
        engine: the strategy.
        world: processes.
        sequence: bytes that a micro-batch sends for sequence parallelism.
        offloaded: bytes of activations of a micro-batch in host memory.
    """
    whole, shard, micro = size.whole, engine.shard, engine.accumulation
    made = MASTER * whole.trained
    ring = (shard - 1) / shard
    gradients = parameters = 0.0
    host = 2.0 * micro * offloaded
    if engine.strategy == "ddp":
        gradients = 2 * made * (world - 1) / world
    elif engine.strategy in ("zero1", "zero2"):
        gradients = made * ring * (micro if engine.strategy == "zero2" else 1)
        parameters = made * ring
    elif engine.strategy in ("zero3", "fsdp2"):
        gathered = whole.bytes
        if engine.gather_bytes is not None:
            gathered = min(gathered, engine.gather_bytes * whole.elements)
        # In the forward pass and again in the backward pass, unless ZeRO-3 has not let go of it.
        times = 1 if engine.strategy == "zero3" and whole.elements <= zero3_kept(engine.zero) else 2
        parameters = times * micro * gathered * ring
        copies = world // shard
        gradients = made * ring * (micro if engine.strategy == "zero3" else 1)
        gradients += 2 * made / shard * (copies - 1) / copies
    if engine.offload_optimizer:
        host += 2 * made / shard  # the gradient, and the updated parameters
    if engine.offload_parameters:
        host += 2 * micro * whole.bytes / shard + made / shard
    if engine.host_parameters:
        host += 2.0 * micro * size.hosted  # to the device, in each pass
    return Traffic(round(gradients), round(parameters), micro * sequence, round(host))
