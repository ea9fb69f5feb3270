"""Loads a backend by name, only when it is needed, and tells which framework a module belongs to.

A backend is the module ``backend.py`` of ``torch_attn`` or ``jax_attn``; both offer the same functions.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal

Framework = Literal["torch", "flax"]

PACKAGES: dict[Framework, tuple[str, str]] = {"torch": ("torch_attn", "torch"), "flax": ("jax_attn", "jax")}
"""Framework -> our package that speaks it, and the extra that installs it."""

_BASE_CLASSES: dict[tuple[str, str], Framework] = {
    ("torch.nn.modules.module", "Module"): "torch",
    ("flax.nnx.module", "Module"): "flax",
}


class MissingBackendError(ImportError):
    """A framework that the call needs cannot be imported; the message names the extra that installs it."""


def load(framework: Framework, module: str = "backend") -> ModuleType:
    """Import the backend of a framework, or another module that both packages have.

    Raises:
        MissingBackendError: the framework is not installed.
    """
    package, extra = PACKAGES[framework]
    try:
        return importlib.import_module(f"{package}.{module}")
    except ImportError as error:
        raise MissingBackendError(
            f"the {framework} backend cannot be imported ({error}); install it with: pip install 'attn-bridge[{extra}]'"
        ) from error


def load_harness(framework: Framework) -> ModuleType:
    """Import the harness of a framework, which runs any module of it.

    Raises:
        MissingBackendError: the framework is not installed.
    """
    load(framework)
    package, _ = PACKAGES[framework]
    return importlib.import_module(f"{package}.harness")


def framework_of(module: Any) -> Framework | None:
    """Tell the framework of a module from its base classes, importing nothing; None if it is neither's."""
    for base in type(module).__mro__:
        framework = _BASE_CLASSES.get((base.__module__, base.__qualname__))
        if framework is not None:
            return framework
    return None
