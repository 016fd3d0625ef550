"""Devices as their makers describe them, and how long a step takes on them. Needs no torch."""

from dataclasses import dataclass

from flowshard.errors import UserError
from flowshard.units import parse_amount

GIB = 2**30
USABLE = 0.92
"""Of a device's memory: the rest is for its context, the communication library, workspaces and fragmentation."""
_EFFICIENCY = 0.5
"""Of the peak that matrix products and attention reach in a whole step."""
_HOST_UPDATE = 20e9
"""Bytes a second at which a host updates parameters, gradients and state."""


@dataclass(frozen=True)
class Hardware:
    """One device and what it is connected to; bytes a second in one direction."""

    name: str
    product: str
    """By which `device.known_peak` knows it."""
    memory: float
    """Bytes that a process can allocate."""
    memory_speed: float
    inside: float
    """To devices of the same machine."""
    outside: float
    """To other machines, a device's share."""
    host: float
    """To host memory."""

    @property
    def kind(self) -> str:
        """As torch names it."""
        return "npu" if self.product.startswith("910") else "cuda"


HARDWARE = {
    # Memory and speeds from the makers' data sheets; `outside` is what the makers' own systems have for each device (DGX,
    # Atlas 800T A2), and a shared network of 100 Gbit/s for the two that come in servers of many kinds.
    one.name: one
    for one in (
        Hardware("a100-40gb", "A100", 39.4 * GIB, 1555e9, 300e9, 25e9, 25e9),
        Hardware("a100", "A100", 79.1 * GIB, 2039e9, 300e9, 25e9, 25e9),
        Hardware("h100", "H100", 79.1 * GIB, 3350e9, 450e9, 50e9, 50e9),
        Hardware("h200", "H200", 139.8 * GIB, 4800e9, 450e9, 50e9, 50e9),
        Hardware("b200", "B200", 178.0 * GIB, 8000e9, 900e9, 50e9, 50e9),
        Hardware("l40s", "L40S", 44.4 * GIB, 864e9, 25e9, 3e9, 25e9),
        Hardware("rtx4090", "RTX 4090", 23.5 * GIB, 1008e9, 25e9, 3e9, 25e9),
        Hardware("910b2", "910B2", 61.0 * GIB, 1600e9, 196e9, 25e9, 25e9),
        Hardware("910b3", "910B3", 61.0 * GIB, 1600e9, 196e9, 25e9, 25e9),
        Hardware("910b4", "910B4", 30.0 * GIB, 800e9, 196e9, 25e9, 25e9),
    )
}
DEFAULT = "h100"


def find_hardware(name: str) -> Hardware:
    """The row of the table.

    Raises:
        UserError: there is none of that name.
    """
    if name.lower() not in HARDWARE:
        raise UserError(
            f"--device: unknown device {name!r}; use one of {', '.join(HARDWARE)}, with --device-memory for others"
        )
    return HARDWARE[name.lower()]


def parse_bytes(text: str, *, option: str) -> int:
    """A number of bytes such as `80GB` (10^9) or `64GiB` (2^30).

    Raises:
        UserError: it is none.
    """
    number = parse_amount(text)
    if number is None:
        raise UserError(f"{option}: {text!r} is no amount of memory; use for example 80GB or 64GiB")
    return number


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, estimated."""

    compute: float
    """Matrix products and attention."""
    overlapped: float
    """Communication and copies that run beside them, and count as far as they take longer."""
    waited: float
    """Communication and copies that are waited for."""
    update: float

    @property
    def total(self) -> float:
        """Of the step."""
        return max(self.compute, self.overlapped) + self.waited + self.update


@dataclass(frozen=True)
class Work:
    """What one process does in a step."""

    flops: int
    gradients: int
    """Bytes sent."""
    parameters: int
    """Bytes sent."""
    sequence: int
    """Bytes sent."""
    host: int
    """Bytes to and from host memory."""
    updated: int
    """Bytes that an update reads and writes."""
    updated_on_host: bool
    gradients_overlap: bool
    """Whether gradients are sent during the backward pass."""
    state_crosses: bool
    """Whether processes of several machines exchange parameters and gradients."""
    sequence_crosses: bool
    """Whether processes of several machines share a sample."""


def step_time(work: Work, hardware: Hardware, peak_flops: float) -> StepTime:
    """How long a step takes, about: `docs/plan.md` says what is left out.

    Args:
        work: of one process.
        hardware: of all.
        peak_flops: of the device, a second.
    """
    link = hardware.outside if work.state_crosses else hardware.inside
    gradients, parameters = work.gradients / link, work.parameters / link
    shared = work.sequence / (hardware.outside if work.sequence_crosses else hardware.inside)
    speed = _HOST_UPDATE if work.updated_on_host else hardware.memory_speed
    return StepTime(
        compute=work.flops / (_EFFICIENCY * peak_flops),
        overlapped=parameters + work.host / hardware.host + (gradients if work.gradients_overlap else 0.0),
        waited=shared + (0.0 if work.gradients_overlap else gradients),
        update=work.updated / speed,
    )
