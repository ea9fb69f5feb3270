"""The order in which a program uses its weights: the first operation of each that depends on the inputs.

Only the traced program is read and nothing is computed, so modules and functions are treated alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend import core

from .numpy_interpreter import inline, scan_sizes


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The sources of a value: positions of weights that have not met the inputs yet; whether inputs are among them."""

    weights: frozenset[int] = frozenset()
    is_data: bool = False


def first_uses(closed: core.ClosedJaxpr, kinds: Sequence[bool]) -> dict[int, int]:
    """Return position of a weight among the arguments -> when it is used first.

    Args:
        closed: the jaxpr.
        kinds: for each argument whether it is a weight; the others are inputs.
    """
    uses: dict[int, int] = {}
    clock = [0]
    origins = [_Origin(frozenset([i])) if kind else _Origin(is_data=True) for i, kind in enumerate(kinds)]
    _follow(closed.jaxpr, origins, uses, clock)
    return uses


def _follow(jaxpr: core.Jaxpr, origins: Sequence[_Origin], uses: dict[int, int], clock: list[int]) -> list[_Origin]:
    origin_of: dict[core.Var, _Origin] = dict(zip(jaxpr.invars, origins, strict=True))

    def read(atom: object) -> _Origin:
        return _Origin() if isinstance(atom, core.Literal) else origin_of.get(atom, _Origin())

    for equation in jaxpr.eqns:
        args = [read(atom) for atom in equation.invars]
        results = _called(equation, args, uses, clock)
        if results is None:
            clock[0] += 1
            met = frozenset[int]().union(*(one.weights for one in args))
            is_data = any(one.is_data for one in args)
            if is_data:
                for weight in met:
                    uses.setdefault(weight, clock[0])
            results = [_Origin(frozenset() if is_data else met, is_data)] * len(equation.outvars)
        origin_of.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(
    equation: core.JaxprEqn, args: list[_Origin], uses: dict[int, int], clock: list[int]
) -> list[_Origin] | None:
    """Follow a program that an equation calls or repeats; None where it calls none, or in a way that is not known."""
    called = inline(equation)
    if called is not None and len(called.jaxpr.invars) == len(args):
        return _follow(called.jaxpr, args, uses, clock)
    if equation.primitive.name != "scan":
        return None
    body = equation.params["jaxpr"].jaxpr
    constant, carried = scan_sizes(equation.params)
    carry = slice(constant, constant + carried)
    results = _follow(body, args, uses, clock)
    # A carry that starts as a weight or a constant may depend on the inputs from the second step on.
    merged = [
        _Origin(frozenset() if old.is_data or new.is_data else old.weights | new.weights, old.is_data or new.is_data)
        for old, new in zip(args[carry], results[:carried], strict=True)
    ]
    return _follow(body, [*args[:constant], *merged, *args[constant + carried :]], uses, clock)
