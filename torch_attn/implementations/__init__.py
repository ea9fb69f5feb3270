"""The ways to compute attention: one file each, which declares its limits.

An implementation is a module with ``unsupported(call)``, the reason why it can't serve a call or None, and
``attend(call)``. If some machines can't run it, it has ``unavailable()``, the reason why this one can't, or None; if it
is slower for some calls that it supports, it has ``unprofitable(call)``, the reason why it isn't picked, or None; a
part of that which sizes alone decide may be in ``too_small(call)``. The twin is `jax_attn.implementations`.
"""

from __future__ import annotations

from types import ModuleType

from . import by_rows, cpu_flash, flex, reference, sdpa, windowed
from .call import KernelCall

__all__ = ["IMPLEMENTATIONS", "KernelCall", "choose", "choose_with_sums", "explain", "unavailable"]

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "cpu_flash": cpu_flash,
    "windowed": windowed,
    "sdpa": sdpa,
    "flex": flex,
    "by_rows": by_rows,
    "reference": reference,
}
"""Fastest first: the first that supports a call, and pays, serves it."""


def choose(call: KernelCall, name: str | None = None) -> ModuleType:
    """Return the implementation of that name, or the first that supports the call.

    Raises:
        NotImplementedError: the named one does not support the call; gives the reason.
    """
    if name is None:
        return next(
            implementation
            for implementation in IMPLEMENTATIONS.values()
            if not _is_too_small(implementation, call) and _against(implementation, call) is None
        )
    reason = IMPLEMENTATIONS[name].unsupported(call)
    if reason is not None:
        raise NotImplementedError(f"implementation {name!r} does not support this call: {reason}")
    return IMPLEMENTATIONS[name]


def choose_with_sums(call: KernelCall, name: str | None = None) -> ModuleType:
    """Like `choose`, among implementations with ``attend_with_lse``, which can combine parts of the keys.

    Raises:
        NotImplementedError: the named one does not support the call, or returns no sums of rows; gives the reason.
    """
    if name is None:
        return next(
            one for one in IMPLEMENTATIONS.values() if hasattr(one, "attend_with_lse") and _against(one, call) is None
        )
    if not hasattr(IMPLEMENTATIONS[name], "attend_with_lse"):
        raise NotImplementedError(f"implementation {name!r} does not support this call: it gives no sums of rows")
    return choose(call, name)


def explain(call: KernelCall) -> dict[str, str | None]:
    """Return, fastest first, why each implementation isn't picked for the call; None for those that may be."""
    return {name: _against(one, call) for name, one in IMPLEMENTATIONS.items()}


def _is_too_small(implementation: ModuleType, call: KernelCall) -> bool:
    """Return whether sizes alone rule an implementation out: a small call takes less time than all of its checks."""
    return hasattr(implementation, "too_small") and implementation.too_small(call) is not None


def _against(implementation: ModuleType, call: KernelCall) -> str | None:
    reason: str | None = implementation.unsupported(call)
    if reason is None and hasattr(implementation, "unprofitable"):
        reason = implementation.unprofitable(call)
    return reason


def unavailable() -> dict[str, str | None]:
    """Return, fastest first, why each implementation can't run on this machine; None for those that can."""
    return {name: getattr(one, "unavailable", lambda: None)() for name, one in IMPLEMENTATIONS.items()}
