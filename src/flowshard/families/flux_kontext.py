"""FLUX.1 Kontext (https://arxiv.org/abs/2506.15742): FLUX.1 with a reference picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowshard.families.flux import DISTILLED, SCHEDULER, Flux
from flowshard.families.variant import Input, Sampling, Variant

if TYPE_CHECKING:
    import numpy as np

SIZES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
)
"""Width and height of the pictures that the model was trained on."""


class FluxKontext(Flux):
    """FLUX.1 Kontext."""

    variants = {
        "flux.1-kontext-dev": Variant(
            "flux.1-kontext-dev",
            "black-forest-labs/FLUX.1-Kontext-dev",
            heads=24,
            scheduler=SCHEDULER,
            sampling=Sampling(height=1024, width=1024, frames=1, steps=30, guidance=2.5),
            transformer=DISTILLED,
        )
    }
    pipeline_class = "FluxKontextPipeline"
    inputs = (Input("kontext_images", "images"),)

    def input_shape(self, size: tuple[int, int]) -> tuple[int, int]:
        """That of the sizes whose aspect ratio is nearest."""
        ratio = size[0] / size[1]
        _, width, height = min((abs(ratio - width / height), width, height) for width, height in SIZES)
        return height, width

    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        picture = arguments["inputs"]["kontext_images"][0]
        # The pipeline would scale the size that is asked for to an area of its own.
        area = arguments["height"] * arguments["width"]
        return self.sample_flux(pipeline, arguments, image=picture, max_area=area)
