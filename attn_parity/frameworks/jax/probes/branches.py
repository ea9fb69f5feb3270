"""The branches that a program takes in a run: those of `jnp.where`, `jnp.clip` and their like, and `lax.cond`.

The twin is `frameworks.torch.probes.branches`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.extend import core

from ....sides.tables import Branches
from ....stack import CallSite, call_site
from .numpy_interpreter import Interpreter, Operand, Value, inline, lines_of

_NAMES = {"select_n": "where", "max": "maximum", "min": "minimum", "clamp": "clamp", "cond": "cond"}
"""Operation that chooses between numbers -> the function that code calls for it."""

_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
"""Comparison -> its sign in code."""

_CALLED = {
    "select_n": ("select", "select_n", "_where"),
    "max": ("max", "clip", "ufunc.__call__"),
    "min": ("min", "clip", "ufunc.__call__"),
    "clamp": ("clamp",),
    "cond": ("cond", "switch"),
}
"""Operation -> functions of JAX, one of which must have made it: derivatives make more."""

_FUNCTIONS = ("lax_numpy", "util", "ufuncs", "ufunc_api", "array_methods", "lax", "conditionals")
_MACHINERY = (
    *("source_info_util", "partial_eval", "core", "pjit", "traceback_util", "api", "api_util", "linear_util", "ad"),
    *("patching", "promotion"),  # ours, which stand for functions of JAX
)
_FILES = frozenset(f"{name}.py" for name in (*_FUNCTIONS, *_MACHINERY))
"""Files of JAX between a choice and the code that asks for it; a choice behind others belongs to a library."""

_OTHERS = ("_balanced_eq", "tangent_fun", "mod", "remainder", "floor_divide")
"""Functions of JAX that choose between numbers for derivatives, or as a part of another operation."""


class BranchInterpreter(Interpreter):
    """Evaluates a program, and notes the branches that it takes.

    Attributes:
        branches: those of the latest run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()
        self._callers: list[core.JaxprEqn] = []
        self._sites: dict[tuple[int, ...], CallSite | None] = {}

    def noted(self, closed: core.ClosedJaxpr, *args: Operand) -> tuple[list[Value], Branches]:
        """Return the outputs of a closed jaxpr, and the branches that it took."""
        self.branches = Branches()
        return self.evaluate(closed, *args), self.branches

    def apply(self, equation: core.JaxprEqn, args: list[Operand]) -> list[Value]:
        """Return the results of one operation, which may call a program."""
        if equation.primitive.name in _NAMES:
            self._note(equation, args)
        if inline(equation) is None:
            results = super().apply(equation, args)
            if equation.primitive.name in _COMPARED:
                self._note_comparison(equation, args, results)
            return results
        self._callers.append(equation)
        try:
            return super().apply(equation, args)
        finally:
            self._callers.pop()

    def _note(self, equation: core.JaxprEqn, args: Sequence[Operand]) -> None:
        kind = equation.primitive.name
        wanted = 1 if kind == "cond" else len(args)
        numbers = [one for one in args[:wanted] if isinstance(one, np.ndarray) and one.size]
        site = self._site_of(equation)
        if site is None or len(numbers) < wanted:
            return
        first, *others = numbers
        is_clip = any(caller.params.get("name") == "clip" for caller in self._callers[-1:])
        name = "clip" if is_clip else _NAMES[kind]
        if kind == "select_n" and len(others) == 2 and first.dtype == bool:
            self.branches.choose(name, site.where, first, others[1], others[0])
        elif kind == "cond" and len(equation.params["branches"]) == 2:
            self.branches.choose(name, site.where, first != 0, None, None)
        elif kind == "clamp":
            self.branches.limit(name, site.where, others[0], first, upper=False)
            self.branches.limit(name, site.where, others[0], others[1], upper=True)
        elif kind in ("max", "min"):
            self.branches.extreme(name, site.where, first, others[0], larger=kind == "max")

    def _note_comparison(
        self, equation: core.JaxprEqn, operands: Sequence[Operand], results: Sequence[Operand]
    ) -> None:
        arrays = [array for array in (*operands, *results) if isinstance(array, np.ndarray) and array.size]
        if len(arrays) == 3 and (site := self._site_of(equation)) is not None:
            *numbers, outcome = arrays
            self.branches.compare(_COMPARED[equation.primitive.name], site.where, numbers, outcome)

    def _site_of(self, equation: core.JaxprEqn) -> CallSite | None:
        key = (id(equation), *map(id, self._callers))
        if key not in self._sites:
            self._sites[key] = _site(equation, self._callers)
        return self._sites[key]


def _site(equation: core.JaxprEqn, callers: Sequence[core.JaxprEqn]) -> CallSite | None:
    """Return the place in the user's code that asks for a choice; None for those of libraries and derivatives."""
    lines = [line for one in (equation, *reversed(callers)) for line in lines_of(one)]
    site = call_site(lines)
    if site is None or any("transpose" in str(one.source_info.name_stack) for one in (equation, *callers)):
        return None
    below = lines[: len(site.below) - 1]
    functions = {line.function.rpartition(".<locals>.")[2] for line in below}
    called = _CALLED.get(equation.primitive.name)  # comparisons are made by any function of JAX, or by none
    is_asked = (called is None or bool(functions & {*called})) and not functions & {*_OTHERS}
    return site if is_asked and all(line.file.rpartition("/")[2] in _FILES for line in below) else None
