"""The matrix products of a function, to be timed alone: a bound of the speed of layers that consist of them.

A triangular system is solved by products of blocks, and counts as one.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
import torch
from jax.extend import core as jax_core
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_IN_TORCH = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
    _aten.linalg_solve_triangular.default,
}
_IN_JAX = {"dot_general", "triangular_solve"}


class Recorder(TorchDispatchMode):
    """Keep the calls of matrix products, with their operands, and count the bytes that all other operations move.

    Attributes:
        calls: product, operands and options of each call.
        moved: bytes that the other operations read and write; views move none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], Sequence[object], Mapping[str, object]]] = []
        self.moved = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        result = func(*args, **kwargs or {})
        if func in _IN_TORCH:
            self.calls.append((func, args, kwargs or {}))
        elif not getattr(func, "is_view", False):
            arrays = [item for item in tree_leaves((args, result)) if isinstance(item, torch.Tensor)]
            self.moved += sum(array.numel() * array.element_size() for array in arrays)
        return result


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


def moved_by_torch(function: Callable[[], object]) -> int:
    """Return the bytes that the operations of a call other than its products read and write."""
    with Recorder() as recorder:
        function()
    return recorder.moved


def rate_of_copies(size: int = 1 << 28, rounds: int = 5) -> float:
    """Return how many bytes torch reads and writes in a second when it copies an array of `size` bytes."""
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return 2 * size / statistics.median(seconds)


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
