"""The blocks that faults are planted in: the twin rooms of `frameworks`, imported by name."""

from __future__ import annotations

from types import ModuleType

from attn_bridge import backends
from attn_bridge.backends import Framework

_ROOMS: dict[Framework, str] = {"torch": "torch", "flax": "jax"}


def load_mutants(framework: Framework, module: str = "mutants") -> ModuleType:
    """Import a module that the rooms of both frameworks have.

    Args:
        framework: whose.
        module: its name.

    Raises:
        MissingBackendError: the framework is not installed.
    """
    return backends.import_for(framework, f"{__package__}.frameworks.{_ROOMS[framework]}.{module}")
