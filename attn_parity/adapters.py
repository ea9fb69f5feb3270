"""How the judge runs code of each framework: the twin rooms of `frameworks`, imported by name."""

from __future__ import annotations

from types import ModuleType

from attn_bridge import backends
from attn_bridge.backends import Framework

_ROOMS: dict[Framework, str] = {"torch": "torch", "flax": "jax"}


def load_adapter(framework: Framework, module: str = "subject") -> ModuleType:
    """Import a module that the rooms of both frameworks have.

    Args:
        framework: whose.
        module: its name; `subject` makes subjects of modules and functions.

    Raises:
        MissingBackendError: the framework is not installed.
    """
    return backends.import_for(framework, f"{__package__}.frameworks.{_ROOMS[framework]}.{module}")
