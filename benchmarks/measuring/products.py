"""The matrix products of a function, to be timed alone: a bound of the speed of layers that consist of them.

A triangular system is solved by products of blocks, and counts as one.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
import torch
from jax.extend import core as jax_core
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_IN_TORCH = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
    _aten.linalg_solve_triangular.default,
}
_IN_JAX = {"dot_general", "triangular_solve"}


class Recorder(TorchDispatchMode):
    """Keep the calls of matrix products, with their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], Sequence[object], Mapping[str, object]]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        if func in _IN_TORCH:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})


def of_torch(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that repeats the matrix products of a call, gradients included, with the same operands."""
    with Recorder() as recorder:
        function()
    calls = recorder.calls

    def repeat() -> None:
        with torch.no_grad():
            for product, operands, options in calls:
                product(*operands, **options)

    return repeat


def of_jax(function: Callable[..., object], *arrays: jax.Array) -> Callable[[], object]:
    """Return a function that computes the matrix products of a traced call, those of one shape side by side.

    Side by side, they cost no dispatching, which a compiled program does not have either.
    """
    random = np.random.default_rng(0)
    counts: dict[str, int] = collections.Counter()
    equations = {}
    for equation, times in _products(jax.make_jaxpr(function)(*arrays).jaxpr, 1):
        alike = repr((equation.primitive.name, [variable.aval for variable in equation.invars], equation.params))
        counts[alike] += times
        equations[alike] = equation
    programs = []
    for alike, equation in equations.items():
        shapes = [(counts[alike], *variable.aval.shape) for variable in equation.invars]
        operands = [jax.numpy.asarray(random.standard_normal(shape), np.float32) for shape in shapes]
        if equation.primitive.name == "triangular_solve":  # of a unit triangle: random ones overflow
            operands[0] = operands[0] * 1e-3 + np.eye(shapes[0][-1], dtype=np.float32)
        single = jax.vmap(lambda *each, equation=equation: equation.primitive.bind(*each, **equation.params))
        programs.append((jax.jit(single), operands))

    def repeat() -> object:
        return jax.block_until_ready([program(*operands) for program, operands in programs])

    return repeat


def _products(program: jax_core.Jaxpr, times: int) -> Iterator[tuple[jax_core.JaxprEqn, int]]:
    """Yield the products of a program, and how often each runs."""
    for equation in program.eqns:
        if equation.primitive.name in _IN_JAX:
            yield equation, times
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(part):
                yield from _products(getattr(part, "jaxpr", part), inner)


def _is_program(value: object) -> bool:
    return isinstance(value, jax_core.Jaxpr | jax_core.ClosedJaxpr)
