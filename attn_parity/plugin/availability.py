"""Check that this machine has the packages and devices that a test compares."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from .settings import Device

PACKAGES = {"torch": "torch", "jax": "jax", "flax": "jax"}
"""Package that a comparison imports -> the extra that installs it."""


def skip_if_not_installed() -> None:
    """Skip the test if this environment lacks a framework."""
    __tracebackhide__ = True
    missing = [package for package in PACKAGES if not _is_installed(package)]
    if missing:
        extras = ",".join(dict.fromkeys(PACKAGES[package] for package in missing))
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'attn-bridge[{extras}]'")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # made unimportable
        return False


def skip_if_absent(device: Device | None) -> None:
    """Skip the test if this machine lacks a device that it names."""
    __tracebackhide__ = True
    if device is None:
        return
    kinds = (device, device) if isinstance(device, str) else device
    for framework, kind in zip(("torch", "flax"), kinds, strict=True):
        reason = _why_absent(framework, kind)
        if reason:
            pytest.skip(f"no {kind}: {reason}")


def _why_absent(framework: str, kind: str) -> str:
    """Return why a framework cannot compute on a kind of device here, "" if it can."""
    if framework == "torch":
        if kind == "gpu" and not importlib.import_module("torch").cuda.is_available():
            return "torch.cuda.is_available() is False"
        return "torch has none; name a pair for torch and Flax, such as cpu,tpu" if kind == "tpu" else ""
    try:
        importlib.import_module("jax").devices(kind)
    except RuntimeError as error:
        return f"jax says: {' '.join(str(error).split())}"
    return ""
