"""Versions, processor and platform, for the head of a report."""

from __future__ import annotations

import importlib.metadata
import os
import platform

PACKAGES = ("attn-bridge", "torch", "jax", "flax", "numpy")


def environment() -> dict[str, str]:
    """Return versions, processor and platform, for the head of a report."""
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
