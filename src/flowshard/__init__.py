"""Flowshard trains diffusion transformers: one run, any layout, one loss curve."""

__version__ = "0.1.0"
