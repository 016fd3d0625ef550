"""Pictures as the pipelines of diffusers give them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowshard.errors import RunError

if TYPE_CHECKING:
    import numpy as np


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    """Pixels in [0, 1] as uint8.

    Raises:
        RunError: some are no numbers.
    """
    import numpy as np

    if not np.isfinite(pixels).all():
        raise RunError("the pipeline made pixels that are no numbers; take more denoising steps, or float32")
    return (pixels * 255).round().astype(np.uint8)
