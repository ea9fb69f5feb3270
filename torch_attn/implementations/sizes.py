"""Conditions on sizes that may be open: those of a graph for many sizes, or of a program that is exported for them.

A compiler guards each answer and compiles again for other sizes. A program in a file cannot: a guard refuses the sizes.
"""

from __future__ import annotations

import torch

# The functions import from torch.fx themselves, which takes long and which eager code does without.


def is_surely(condition: torch.SymBool | bool) -> bool:
    """Return whether a condition is true of all sizes that a graph is made for."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def is_true(condition: torch.SymBool | bool) -> bool:
    """Return whether a condition is true: of a program that is exported, for all of its sizes."""
    return is_surely(condition) if torch.compiler.is_exporting() else bool(condition)


def is_open(size: torch.SymInt | int) -> bool:
    """Return whether a program that is exported takes other sizes, too."""
    if not torch.compiler.is_exporting():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(size)
