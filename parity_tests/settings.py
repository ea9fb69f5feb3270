"""The process-wide settings of both frameworks on which numbers depend; a test leaves them as it found them."""

from __future__ import annotations

import sys
from typing import Any

JAX = (
    "jax_enable_x64",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_disable_jit",
    "jax_debug_nans",
)
"""Names of JAX's settings. Under 64 bits, or with another generator, JAX draws other numbers from the same key."""


def read() -> dict[str, Any]:
    """Return the settings of the frameworks that are imported."""
    settings: dict[str, Any] = {}
    if (jax := sys.modules.get("jax")) is not None and hasattr(jax, "config"):
        settings |= {name: getattr(jax.config, name) for name in JAX}
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_dtype"):
        settings["default dtype of torch"] = torch.get_default_dtype()
        settings["gradients of torch"] = torch.is_grad_enabled()
        settings["deterministic algorithms of torch"] = torch.are_deterministic_algorithms_enabled()
    return settings


def restore(settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Set every setting in ``settings`` that changed; return its name with both values, before and after."""
    after = read()
    changed = {name: (value, after[name]) for name, value in settings.items() if after[name] != value}
    for name, (value, _) in changed.items():
        if name in JAX:
            sys.modules["jax"].config.update(name, value)
        elif name == "default dtype of torch":
            sys.modules["torch"].set_default_dtype(value)
        elif name == "gradients of torch":
            sys.modules["torch"].set_grad_enabled(value)
        else:
            sys.modules["torch"].use_deterministic_algorithms(value)
    return changed
