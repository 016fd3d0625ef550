"""Laying one run out over devices."""
