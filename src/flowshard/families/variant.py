"""What the registry says of a published model. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Sampling:
    """How the publisher samples a model: the defaults of `flowshard generate`."""

    height: int
    width: int
    frames: int
    steps: int
    guidance: float
    guidance_low: float | None = None
    """Of the transformer for low noise of a model with two; None is the same."""


@dataclass(frozen=True)
class Input:
    """What a model gets besides the prompt, from a column of the metadata."""

    column: str
    kind: Literal["image", "images", "video"]
    """One picture or a clip, at the size of the run; or pictures of any size."""
    from_clip: Literal["first", "last"] | None = None
    """Which frame of the sample's own clip it is for rows that name no file."""
    required: bool = True
    """Whether a row without it is refused, if the clip does not give it."""
    several: bool = False
    """Whether a sample can have more than one of `images`."""


class Size(NamedTuple):
    """Of a sample in pixels and frames."""

    height: int
    width: int
    frames: int


Inputs = Mapping[str, Any]
"""By column: a picture or a clip as uint8 RGB of shape (frames, height, width, 3); `images` as a list of PIL images."""


@dataclass(frozen=True)
class Variant:
    """A published model."""

    name: str
    hub_id: str
    """Repository of the diffusers-format weights."""
    heads: int
    """Attention heads of the transformer."""
    scheduler: Mapping[str, Any]
    """Sigma shift of the publisher's scheduler in diffusers' terms, for models that come without their scheduler."""
    sampling: Sampling
    known_by: Mapping[str, Any] = field(default_factory=dict)
    """Settings of pipeline, transformer or scheduler that tell it from its siblings; one that is not there is false."""
    experts: Mapping[str, tuple[float, float]] | None = None
    """Of a model with two transformers: `high` and `low` to the range of sigma that each is for."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """The transformer's published `config.json`, as far as it differs from the defaults of its class in diffusers; to plan
    without files."""
