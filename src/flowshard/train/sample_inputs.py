"""Checks `validation.prompts` before torch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flowshard.config import Config
from flowshard.data.given import check_files
from flowshard.data.sizes import run_size
from flowshard.errors import UserError
from flowshard.families import Family, Variant
from flowshard.families.variant import Sampling
from flowshard.parallel.layout import Layout


@dataclass(frozen=True)
class SampleInput:
    """One sample to make."""

    prompt: str
    negative_prompt: str
    seed: int
    inputs: Mapping[str, tuple[Path, ...]]
    """Files of what the model gets besides the prompt, by column."""


@dataclass(frozen=True)
class SampleInputs:
    """The samples of a run."""

    every: int
    """Steps between them."""
    sampling: Sampling
    samples: tuple[SampleInput, ...]


def check_samples(config: Config, family: Family, variant: Variant, layout: Layout) -> SampleInputs | None:
    """What is to be made during training; None if nothing is.

    Raises:
        UserError: naming the option, the value and the fix.
    """
    asked = config.validation
    if not asked.prompts:
        return None
    if variant.experts is not None:
        raise UserError(
            f"validation.prompts: {variant.name} has two transformers, and a run has only the one that it trains; set "
            "validation.prompts=[], and make samples of checkpoints with `flowshard generate`"
        )
    height, width = run_size(config.data, family)
    sizes = {
        "height": asked.height or height,
        "width": asked.width or width,
        "frames": asked.frames or config.data.frames,
    }
    family.check_size(**sizes, where="validation.")
    guidance = variant.sampling.guidance if asked.guidance is None else asked.guidance
    sampling = replace(variant.sampling, **sizes, steps=asked.steps, guidance=guidance)
    tokens = family.token_count(**sizes)
    if tokens < layout.sequence:
        raise UserError(
            f"layout.sequence: {layout.sequence} processes cannot share a sample of {tokens} tokens (validation.prompts "
            f"at {sizes['width']}x{sizes['height']}); use at most {tokens}"
        )
    samples = []
    for number, one in enumerate(asked.prompts):
        where = f"validation.prompts.{number}"
        if one.negative_prompt and not family.takes_negative_prompt:
            raise UserError(f"{where}.negative_prompt: {variant.name} takes none; remove it")
        files = {
            column: tuple(Path(name) for name in ([given] if isinstance(given, str) else given))
            for column, given in one.inputs.items()
        }
        check_files(
            files,
            family,
            variant,
            place=lambda column, where=where: f"{where}.inputs.{column}",  # type: ignore[misc]
            where=f"{where}.inputs: ",
        )
        samples.append(SampleInput(one.prompt, one.negative_prompt, one.seed, files))
    return SampleInputs(asked.every, sampling, tuple(samples)) if asked.every else None
