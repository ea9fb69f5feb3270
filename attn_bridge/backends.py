"""Imports a backend by name on first use, and determines the framework of a module.

A backend is the module ``backend.py`` of ``torch_attn`` or ``jax_attn``; both offer the same functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

Framework = Literal["torch", "flax"]

FRAMEWORKS: tuple[Framework, Framework] = ("torch", "flax")
"""Both, in the order of the two sides."""

PACKAGES: dict[Framework, tuple[str, str]] = {"torch": ("torch_attn", "torch"), "flax": ("jax_attn", "jax")}
"""Framework -> our package for it, and the extra that installs it."""

_BASE_CLASSES: dict[tuple[str, str], Framework] = {
    ("torch.nn.modules.module", "Module"): "torch",
    ("flax.nnx.module", "Module"): "flax",
}

_LINEN = ("flax.linen.module", "Module")
_FUNCTION = ("attn_parity.sides.function", "Function")

_ARRAY_HOMES: dict[str, Framework] = {"torch": "torch", "jax": "flax", "jaxlib": "flax"}
"""Library that defines a class of arrays -> framework. `jax.Array` is not a base class of JAX's arrays."""


class MissingBackendError(ImportError):
    """A framework that the call needs cannot be imported; the message names the extra that installs it."""


def require(framework: Framework, *packages: str) -> None:
    """Check that a framework's packages are installed; otherwise name the extra that installs them.

    Raises:
        MissingBackendError: a package is not installed.
    """
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            raise _missing(framework, f"No module named {package!r}")


def _missing(framework: Framework, reason: str) -> MissingBackendError:
    _, extra = PACKAGES[framework]
    return MissingBackendError(
        f"the {framework} backend cannot be imported ({reason}); install it with: pip install 'attn-bridge[{extra}]'"
    )


def load(framework: Framework, module: str = "backend") -> ModuleType:
    """Import the backend of a framework, or another module that both packages have.

    Raises:
        MissingBackendError: the framework is not installed.
    """
    return import_for(framework, f"{PACKAGES[framework][0]}.{module}")


def import_for(framework: Framework, name: str) -> ModuleType:
    """Import a module that needs a framework.

    Raises:
        MissingBackendError: the framework is not installed.
    """
    try:
        return importlib.import_module(name)
    except MissingBackendError:
        raise
    except ImportError as error:
        raise _missing(framework, str(error)) from error


def framework_of(module: Any) -> Framework | None:
    """Return the framework of a side from its base classes, importing nothing; None for any other object.

    Args:
        module: a module; ``(module, variables)`` of Linen; or a function with its weights.
    """
    if isinstance(module, tuple):
        is_linen = len(module) == 2 and isinstance(module[1], Mapping) and _has_base(module[0], *_LINEN)
        return "flax" if is_linen else None
    if _has_base(module, *_FUNCTION):
        own_framework: Framework = module.framework
        return own_framework
    for base in type(module).__mro__:
        framework = _BASE_CLASSES.get((base.__module__, base.__qualname__))
        if framework is not None:
            return framework
    return None


def _has_base(value: object, module: str, name: str) -> bool:
    return any((base.__module__, base.__qualname__) == (module, name) for base in type(value).__mro__)


def as_numpy(value: object) -> Any:
    """Return an array of torch or JAX as a NumPy array, bit for bit, and any other value unchanged."""
    homes = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    framework = next((_ARRAY_HOMES[home] for home in homes if home in _ARRAY_HOMES), None)
    return value if framework is None else load(framework).to_numpy(value)


def explain_attention(query: object, key: object, value: object, **options: object) -> dict[str, str | None]:
    """Return which implementation serves a call of ``functional.dot_product_attention``, and why not the others.

    Args:
        query: an array ``(B, T, H, D)`` of torch or JAX, which selects the backend.
        key: ``(B, S, K, D)``.
        value: ``(B, S, K, Dv)``.
        **options: other arguments of the call, such as ``mask`` or ``dropout``; ``implementation`` does not change the
            result.

    Returns:
        Name -> the reason why it can't serve the call, or None, fastest first: the first with None serves it.

    Raises:
        TypeError: `query` is neither torch's nor JAX's, or arguments of kinds that do not fit.
        ValueError: arguments that do not fit.
        MissingBackendError: the framework is not installed.
    """
    homes = [base.__module__.partition(".")[0] for base in type(query).__mro__]
    framework = next((_ARRAY_HOMES[home] for home in homes if home in _ARRAY_HOMES), None)
    if framework is None:
        raise TypeError(f"query must be a torch.Tensor or a jax.Array, got {type(query).__name__}")
    options.pop("implementation", None)
    reasons: dict[str, str | None] = load(framework, "functional").explain(query, key, value, **options)
    return reasons


def usable_cores() -> int:
    """Return the number of processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
