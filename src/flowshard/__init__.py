"""Flowshard trains diffusion transformers: one run, any layout, one loss curve."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`load` and `load_pipeline`, imported when they are asked for: torch takes seconds."""
    if name in ("load", "load_pipeline"):
        from flowshard import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
