"""How the kernels are compiled: without the interpreter, and kept on disk where there is room for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic


def _digest() -> str:
    digest = hashlib.sha256(repr(cpu_target.target_context.codegen().magic_tuple()).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


_SOURCES = _digest()
"""What was read when this package was imported: later its files may be others."""

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
"""No rule of arithmetic is relaxed but one: a product may be added without being rounded first."""


@intrinsic
def stay_apart(typing_context: Any) -> Any:
    """Keep the function that calls this from being written into those that call it, each time anew."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


def compiled(function: Callable[..., Any]) -> Any:
    """Return the function as Numba compiles it into what calls it; kernels have no annotations, as it finds types."""
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Return the function as one that is written into its only caller before anything is compiled: that saves time."""
    return numba.njit(inline="always", **OPTIONS)(function)


def entry(function: Callable[[Any], int]) -> Any:
    """Return a function of a pointer, compiled for callers that know its address, or found on disk.

    Numba looks at the function's own file when it asks whether what it kept is stale, so it is kept under a name that
    says what all files were, and the processor.
    """
    function.__qualname__ = f"{function.__name__}_{_SOURCES}"
    signature = numba.types.int64(numba.types.voidptr)
    try:
        return numba.cfunc(signature, cache=True, **OPTIONS)(function)
    except Exception:  # no folder to write to, a full disk, a damaged file; a fault of ours is raised below, too
        return numba.cfunc(signature, **OPTIONS)(function)
