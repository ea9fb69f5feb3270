"""Conditions on sizes that may be open: those of a graph for many sizes, or of a program that is exported for them.

A compiler guards each answer and compiles again for other sizes. A program in a file cannot: in one of `torch.export` a
guard refuses the sizes, and one of `torch.jit.trace`, which takes sizes for tensors, keeps the answer for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The functions import from torch.fx themselves, which takes long and which eager code does without.


def takes_other_sizes() -> bool:
    """Return whether the program that is being made, if any, may run at sizes that differ from those of its inputs."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_surely(condition: torch.SymBool | Tensor | bool) -> bool:
    """Return whether a condition is true of all sizes that a graph is made for."""
    if isinstance(condition, Tensor):
        return False
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def is_true(condition: torch.SymBool | Tensor | bool) -> bool:
    """Return whether a condition is true: of a program that is exported, for all of its sizes."""
    return is_surely(condition) if takes_other_sizes() else bool(condition)


def is_open(size: torch.SymInt | Tensor | int) -> bool:
    """Return whether a program that is exported takes other sizes, too."""
    if not takes_other_sizes() or isinstance(size, Tensor):
        return isinstance(size, Tensor)
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(size)
