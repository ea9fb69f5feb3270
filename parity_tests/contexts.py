"""Let the compilations of a thread share one MLIR context, where XLA doesn't optimize either.

JAX makes a context for each program that it lowers, and loads all dialects into it: 3 ms, for an eager operation as
much as all of its tracing and lowering. Programs don't see the context that they are lowered in.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any

PROGRAMS = 500
"""Programs after which a thread gets a new context: a context keeps every type and location that it has seen."""


class Contexts(threading.local):
    """The context of a thread, and how many programs it may still serve."""

    def __init__(self) -> None:
        self.left = 0
        self.current: Any = None

    def get(self, make: Any) -> Any:
        """Return the context of this thread; ``make`` makes one."""
        if not self.left:
            self.current, self.left = make(), PROGRAMS
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
    """Have `jax._src.interpreters.mlir` take a thread's context for each program that is given none."""
    construct, contexts = mlir.ModuleContext.__init__, Contexts()

    @functools.wraps(construct)
    def constructed(self: Any, *arguments: Any, context: Any = None, **options: Any) -> None:
        construct(self, *arguments, context=context or contexts.get(mlir.make_ir_context), **options)

    mlir.ModuleContext.__init__ = constructed
