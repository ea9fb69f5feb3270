"""Let the compilations of a thread share an MLIR context and its lowered operations, where XLA doesn't optimize either.

JAX makes a context for each program that it lowers, and loads all dialects into it: 3 ms, for an eager operation as
much as all of its tracing and lowering. Programs don't see the context that they are lowered in. Neither do they see
where the body of an operation was lowered first: JAX copies it into each program that has the operation with the same
types and arguments, and here also from programs of the same context.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any

PROGRAMS = 2000
"""Programs after which a thread gets a new context: a context keeps every type and location that it has seen."""

OF_A_MODULE = ("custom_call", "partition_id", "replica_id", "all_", "collective_", "reduce_scatter", "send", "recv")
"""Starts of the names of StableHLO's operations that depend on the program around them, or on objects that it keeps."""


class Lowerings(dict[Any, Any]):
    """The lowered operations of a program; missing ones are taken from other programs of its context."""

    def __init__(self, shared: dict[Any, Any]):
        super().__init__()
        self.shared = shared

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what ``key`` was lowered to, here or in another program."""
        return super().get(key) or self.shared.get(key, default)

    def __setitem__(self, key: Any, lowered: Any) -> None:
        """Keep what ``key`` was lowered to, for other programs as well if it depends on nothing of this one."""
        super().__setitem__(key, lowered)
        if lowered.inline and not lowered.const_args and not key.effects and _is_alone(lowered.func.operation):
            self.shared[key] = lowered


def _is_alone(operation: Any) -> bool:
    """Return whether all inside of a function are pure operations of StableHLO, which no other function is part of."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                dialect, _, name = inner.operation.name.partition(".")
                if name != "return" and (dialect not in ("stablehlo", "chlo") or name.startswith(OF_A_MODULE)):
                    return False
                if not _is_alone(inner.operation):
                    return False
    return True


class Contexts(threading.local):
    """The context of a thread, how many programs it may still serve, and what they share beside it."""

    def __init__(self) -> None:
        self.left = 0
        self.current: Any = None
        self.lowered: dict[Any, dict[Any, Any]] = {}

    def get(self, make: Any) -> Any:
        """Return the context of this thread; ``make`` makes one."""
        if not self.left:
            self.current, self.left, self.lowered = make(), PROGRAMS, {}
        self.left -= 1
        return self.current


def is_unoptimized() -> bool:
    """Return whether XLA's flags have it leave out optimizations."""
    return "--xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", "")


def share_where_unoptimized() -> None:
    """Have the programs of this process share contexts, if it has imported JAX and XLA doesn't optimize."""
    if is_unoptimized() and (mlir := sys.modules.get("jax._src.interpreters.mlir")):
        share(mlir)


def share(mlir: Any) -> None:
    """Have `jax._src.interpreters.mlir` take a thread's context for each program that is given none.

    A program shares what it lowers with those lowered under the same settings and parameters, unless sizes are open.
    """
    construct, contexts = mlir.ModuleContext.__init__, Contexts()
    # From 0.12 on JAX gives ten programs a context itself, which ends with none of ours.
    make = getattr(mlir, "_create_ir_context", mlir.make_ir_context)

    @functools.wraps(construct)
    def constructed(self: Any, *arguments: Any, context: Any = None, **options: Any) -> None:
        if context is None:
            context = contexts.get(make)
            if not (sizes := options.get("shape_poly_state")) or not sizes.dim_vars:
                settings = (mlir.config.trace_context(), options["lowering_parameters"])
                options.setdefault("lowering_cache", Lowerings(contexts.lowered.setdefault(settings, {})))
        construct(self, *arguments, context=context, **options)

    mlir.ModuleContext.__init__ = constructed
