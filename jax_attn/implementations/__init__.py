"""The ways to compute attention: one file each, which declares its limits.

An implementation is a module with ``unsupported(call)``, the reason why it can't serve a call or None, and
``attend(call)``. If some machines can't run it, it has ``unavailable()``, the reason why this one can't, or None; if it
is slower for some calls that it supports, it has ``unprofitable(call)``, the reason why it isn't picked, or None. The
twin is `torch_attn.implementations`.
"""

from __future__ import annotations

from types import ModuleType

import jax
from jax import Array
from jax.interpreters import ad

from . import blocked, cpu_flash, cudnn, few_queries, reference, tpu_flash
from .call import KernelCall

__all__ = ["IMPLEMENTATIONS", "KernelCall", "choose", "choose_with_sums", "explain", "unavailable"]

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "cudnn": cudnn,
    "tpu_flash": tpu_flash,
    "cpu_flash": cpu_flash,
    "few_queries": few_queries,
    "blocked": blocked,
    "reference": reference,
}
"""Fastest first: the first that supports a call, and pays, serves it."""


def choose(call: KernelCall, name: str | None = None) -> ModuleType:
    """Return the implementation of that name, or the first that supports the call.

    Raises:
        NotImplementedError: the named one does not support the call; gives the reason.
    """
    if name is None:
        return next(one for one in IMPLEMENTATIONS.values() if _against(one, call) is None)
    reason = _unsupported(IMPLEMENTATIONS[name], call)
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


def _against(implementation: ModuleType, call: KernelCall) -> str | None:
    reason = _unsupported(implementation, call)
    if reason is None and hasattr(implementation, "unprofitable"):
        reason = implementation.unprofitable(call)
    return reason


def _unsupported(implementation: ModuleType, call: KernelCall) -> str | None:
    """Return why it can't serve a call, None if it can; all but the reference have limits in common."""
    if implementation is not reference:
        if not all(isinstance(size, int) for size in call.scores_shape[2:]):
            return "a symbolic length (jax.export) does not say how many blocks there are"
        operands = (call.query, call.key, call.value, call.bias, call.sinks)
        has_gradients_alone = implementation in (cudnn, tpu_flash)
        if has_gradients_alone and jax.config.jax_use_direct_linearize and any(map(_has_tangent, operands)):
            return "it has no forward-mode derivatives (jax.jvp, jax.jacfwd)"
    reason: str | None = implementation.unsupported(call)
    return reason


def _has_tangent(array: Array) -> bool:
    """Return whether derivatives go forward with a value, as far as that is seen while the program is traced."""
    while isinstance(array, jax.core.Tracer):
        if isinstance(array, ad.JVPTracer):
            return True
        array = getattr(array, "primal", getattr(array, "val", None))
    return False


def unavailable() -> dict[str, str | None]:
    """Return, fastest first, why each implementation can't run on this machine; None for those that can."""
    return {name: getattr(one, "unavailable", lambda: None)() for name, one in IMPLEMENTATIONS.items()}
