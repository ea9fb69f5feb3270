"""Run traced programs operation by operation: unchanged, with random moves, or compiled as one with barriers.

A run is one forward and backward pass as a function. Programs that cannot be traced run directly. Values that a probe
moves and operations that it replaces are counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core
from jax.typing import ArrayLike

from ....sides.arrays import LargeWeight, lends
from ....sides.dropout_masks import MaskPlan, Masks
from ....sides.entries import picked
from ....sides.subject import WHOLE, Arguments, ModuleFailedError, Returned
from ....sides.tables import Branches, Tables
from ....sides.trees import flatten
from ..probes.branches import BranchInterpreter
from ..probes.literals import evaluate_literals
from ..probes.logsumexp import with_logsumexp
from ..probes.numpy_interpreter import bind, inline, is_jax_array, last_uses
from ..probes.tables import evaluate_tables
from ..recording import Tape
from ..sides.adapter import JaxPart, Setting, is_jax_float
from .promotion import promoted

_MOVES = (
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims"),
    *("slice", "concatenate", "iota", "copy", "top_k"),
)
"""Operations that round nothing, so that fusing them changes no result.

`top_k` must be among them: XLA ends the process where a barrier follows it.
"""

_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")

UNTRACEABLE = (jax.errors.TracerBoolConversionError, jax.errors.ConcretizationTypeError)
"""Errors that JAX raises where a traced program reads values."""


_QUICK_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


_Gradients: TypeAlias = Mapping[str, Array]


class After(Protocol):
    """Receives the results of each operation, and returns their replacements."""

    def moved(self, name: str, results: Sequence[ArrayLike]) -> list[ArrayLike]:
        """Return the replacements of the results of the operation `name`."""


def quick_options() -> dict[str, int | bool] | None:
    """Return options that compile a program ten times as fast; how fast it runs matters to no one.

    They change what LLVM makes of the program (it rounds more often, as no two operations become one), not what XLA
    makes of the code before.
    """
    return _known_options() if jax.default_backend() == "cpu" else None


@functools.cache
def _known_options() -> dict[str, int | bool]:
    """Return those of `_QUICK_TO_COMPILE` that this XLA knows; they come and go between its versions."""
    options: dict[str, int | bool] = {}
    for name, value in _QUICK_TO_COMPILE.items():
        try:
            jax.jit(lambda: 0, compiler_options={name: value})()
        except jax.errors.JaxRuntimeError:
            continue
        options[name] = value
    return options


def trace(function: Callable[..., object], operands: object) -> tuple[core.ClosedJaxpr, jax.tree_util.PyTreeDef]:
    """Return the jaxpr of a function and the structure of its result."""
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_lent(leaf) else leaf, operands
    )
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*shapes)
    return closed, jax.tree.structure(shape)


def read(operands: object) -> Any:
    """Return operands with the weights promoted that are lent."""
    return jax.tree.map(lambda leaf: leaf.promoted() if _is_lent(leaf) else leaf, operands)


def _is_lent(value: object) -> bool:
    return isinstance(value, LargeWeight)


def op_by_op(closed: core.ClosedJaxpr) -> Callable[..., list[ArrayLike]]:
    """Return a function that runs each operation separately, unfused.

    Compiling one program per operation costs 50 ms each, compiling all of them as one, with barriers in between, 4 ms
    each: the cheaper way is taken.
    """
    equations, distinct = _count(closed.jaxpr)

    def run(*args: ArrayLike) -> list[ArrayLike]:
        return walk(closed.jaxpr, closed.consts, args)

    return run if 50 * len(distinct) < 200 + 4 * equations else jax.jit(barred(closed))


def barred(closed: core.ClosedJaxpr) -> Callable[..., list[ArrayLike]]:
    """Return a function that runs a program with barriers between its operations, to be compiled as one."""

    def run(*args: ArrayLike) -> list[ArrayLike]:
        return walk(closed.jaxpr, closed.consts, args, _Barrier())

    return run


class _Barrier:
    """Keeps the compiler from fusing one operation with the next.

    Products pass a barrier flat: a barrier passes the layout that later operations want on to earlier ones, and XLA
    aborts the process if those are a batched product that can't have it.
    """

    def moved(self, name: str, results: Sequence[ArrayLike]) -> list[ArrayLike]:
        """Return the results of the operation `name`, as they are."""
        if name in _MOVES or not all(isinstance(one, Array) for one in results):
            return list(results)
        if name not in _PRODUCTS:
            return list(jax.lax.optimization_barrier(tuple(results)))
        flat = jax.lax.optimization_barrier(tuple(one.reshape(-1) for one in results))
        return [one.reshape(shaped.shape) for one, shaped in zip(flat, results, strict=True)]


def walk(
    jaxpr: core.Jaxpr, consts: Sequence[ArrayLike], args: Sequence[ArrayLike], after: After | None = None
) -> list[ArrayLike]:
    """Run a jaxpr operation by operation; `after` receives the results of each."""
    values: dict[core.Var, ArrayLike] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: core.Var | core.Literal) -> ArrayLike:
        return atom.val if hasattr(atom, "val") else values[atom]

    last = last_uses(jaxpr)
    for position, equation in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in equation.invars]
        called = inline(equation)
        if called is not None:
            results = walk(called.jaxpr, called.consts, operands, after)
        else:
            results = bind(equation, operands)
            if after is not None:
                results = after.moved(equation.primitive.name, results)
        values.update(zip(equation.outvars, results, strict=True))
        for variable in last.get(position, ()):
            values.pop(variable, None)
    return [read(atom) for atom in jaxpr.outvars]


def _count(jaxpr: core.Jaxpr) -> tuple[int, set[tuple[str, str, str]]]:
    """Return how many operations there are, and the distinct ones."""
    total, distinct = 0, set()
    for equation in jaxpr.eqns:
        called = inline(equation)
        if called is None:
            total += 1
            distinct.add((equation.primitive.name, str(equation.params), str([one.aval for one in equation.invars])))
        else:
            more, inner = _count(called.jaxpr)
            total += more
            distinct |= inner
    return total, distinct


def is_probe(mode: str) -> bool:
    """Return whether a run is compared with the plain one, and makes the same draws: one program serves all seeds."""
    return mode in ("jitter", "logsumexp", "tables", "flash", "literals")


def counted(run: Callable[..., object], replaced: Mapping[int, object]) -> Callable[..., ProgramResults]:
    """Return a function that gives the results, and the number of values moved or operations replaced."""

    def run_and_count(operands: object, seed: int) -> ProgramResults:
        outputs = run(operands, seed)
        return outputs if isinstance(outputs, ProgramResults) else ProgramResults(outputs, len(replaced))

    return run_and_count


@dataclasses.dataclass(frozen=True)
class ProgramResults:
    """Results of a run, how many values it moved or operations it replaced, and the tables and branches that it met."""

    results: Any
    count: int
    tables: Tables | None = None
    branches: Branches | None = None


def noting_branches(closed: core.ClosedJaxpr, tree: jax.tree_util.PyTreeDef) -> Callable[..., ProgramResults]:
    """Return a function that runs a float64 program and notes the branches that it takes."""
    interpreter = BranchInterpreter()

    def run(operands: object, seed: int) -> ProgramResults:
        outputs, branches = interpreter.noted(closed, *jax.tree.leaves(operands))
        return ProgramResults(jax.tree.unflatten(tree, outputs), 0, None, branches)

    return run


def moving_tables(
    closed: core.ClosedJaxpr, tree: jax.tree_util.PyTreeDef, tables: Collection[int]
) -> Callable[..., ProgramResults]:
    """Return a function that runs a float64 program and moves its tables; the arguments at `tables` are such."""

    def run(operands: Sequence[Any], seed: int) -> ProgramResults:
        weights, leaves, cotangents, masks = operands
        of_leaves = [
            "table" if position in tables else "weight" if is_jax_float(leaf) else "free"
            for position, leaf in enumerate(leaves)
        ]
        kinds = (
            jax.tree.map(lambda _: "weight", weights),
            of_leaves,
            jax.tree.map(lambda _: "weight", cotangents),
            jax.tree.map(lambda _: "free", masks),
        )
        outputs, count, tables_of_program = evaluate_tables(
            closed, jax.tree.leaves(operands), jax.tree.leaves(kinds), seed
        )
        return ProgramResults(jax.tree.unflatten(tree, outputs), count, tables_of_program)

    return run


def moving_literals(closed: core.ClosedJaxpr, tree: jax.tree_util.PyTreeDef) -> Callable[..., ProgramResults]:
    """Return a function that runs a float64 program, moves its float32 literals and exchanges close branches."""

    def run(operands: object, seed: int) -> ProgramResults:
        outputs, count, literals = evaluate_literals(closed, jax.tree.leaves(read(operands)), seed)
        return ProgramResults(jax.tree.unflatten(tree, outputs), count, literals)

    return run


def directly(function: Callable[..., object], *, promote: bool) -> Callable[..., Any]:
    """Run a function that can't be traced, because it looks at values."""

    def run(operands: object, seed: int = 0) -> object:
        with promoted() if promote else contextlib.nullcontext():
            result = function(*jax.tree.map(jnp.asarray, read(operands)))
            return jax.tree.map(np.asarray, result)

    return run


def precise(dtype: str | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a program is traced in a precision."""
    return promoted() if dtype == "float64" else contextlib.nullcontext()


def is_double(operands: Sequence[Any]) -> bool:
    """Return whether a side works in float64, by its weights, or its inputs where it has none."""
    weights, leaves, *_ = operands
    floats = [one for one in weights.values() if is_jax_float(one)] or [one for one in leaves if is_jax_float(one)]
    return bool(floats) and all(one.dtype == np.float64 for one in floats)


def kept_wide(weights: Mapping[str, object], leaves: Sequence[object]) -> contextlib.AbstractContextManager[None]:
    """Return the context in which JAX does not cut float64 operands down to float32."""
    wide: contextlib.AbstractContextManager[None] = jax.enable_x64(True)
    return wide if is_double((weights, leaves)) else contextlib.nullcontext()


def weight_in(array: np.ndarray, dtype: str | None) -> np.ndarray | LargeWeight:
    """Return a weight in a precision; a large one is promoted where it is read."""
    return LargeWeight(array) if lends(array, dtype) else cast(array, dtype)


def cast(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """Return a floating-point array in a precision, if one is given, and other arrays as they are."""
    return array.astype(jnp.dtype(dtype), copy=False) if dtype is not None and is_jax_float(array) else array


class Differentiated:
    """One forward and backward pass as a function of weights, inputs, cotangents and masks.

    Attributes:
        structure: path of each output in the return value, filled by tracing.
        replaced: the softmaxes that were replaced.
    """

    def __init__(
        self,
        name: str,
        train: bool,
        part: JaxPart,
        arguments: Arguments,
        dtype: str | None,
        seed: int,
        mode: str,
        tape: Tape | None = None,
        returned: Returned = WHOLE,
    ):
        self.structure: list[str] = []
        self.replaced: dict[int, core.JaxprEqn] = {}
        self._name, self._part, self._arguments, self._mode = name, part, arguments, mode
        self._returned = returned
        self._setting = Setting(dtype, seed, train, None, tape)

    def function(self, source: MaskPlan | Masks | None) -> Callable[..., tuple[list[Array], _Gradients, _Gradients]]:
        """Return the function; a `MaskPlan` as source receives its masks as the function's last argument."""
        setting = dataclasses.replace(self._setting, source=source)
        kinds: list[bool] = []

        def differentiate(
            weights: dict[str, ArrayLike],
            leaves: list[ArrayLike],
            cotangents: Sequence[ArrayLike | None] | None,
            masks: Sequence[Array] | None,
        ) -> tuple[list[Array], _Gradients, _Gradients]:
            if isinstance(source, MaskPlan):
                source.start(masks)
            if setting.tape is not None:
                setting.tape.clear()
            mine, others = _divide(weights, self._part.trainable)
            floats = {str(i): leaf for i, leaf in enumerate(leaves) if is_jax_float(leaf)}

            def forward(mine: dict[str, ArrayLike], floats: dict[str, ArrayLike]) -> tuple[list[Array], list[Array]]:
                call = self._arguments.with_leaves([floats.get(str(i), leaf) for i, leaf in enumerate(leaves)])
                result = self._part.call({**others, **mine}, call, setting)
                self.structure[:], outputs = outputs_of(result, self._name, self._returned)
                kinds[:] = map(is_jax_float, outputs)
                return _split(outputs)

            run = with_logsumexp(forward, self.replaced) if self._mode == "logsumexp" else forward
            if cotangents is None:
                outputs, rest = run(mine, floats)
                return _joined(outputs, rest, kinds), {}, {}
            outputs, pull, rest = jax.vjp(run, mine, floats, has_aux=True)
            return _joined(outputs, rest, kinds), *pull(_cotangents(cotangents, outputs, kinds))

        return differentiate


def outputs_of(result: object, name: str, returned: Returned = WHOLE) -> tuple[list[str], list[Array]]:
    """Return the path of each array in the return value, and the arrays.

    Args:
        result: the return value of a call.
        name: the side's, for messages.
        returned: the part that is judged.

    Raises:
        ModuleFailedError: the result holds no array.
    """
    leaves = flatten(result, is_jax_array)
    if not leaves:
        raise ModuleFailedError(f"the Flax module {name} returned {type(result).__name__}, which holds no array")
    leaves = leaves if returned.entry is None else picked(leaves, returned.entry, f"the Flax module {name}")
    axes, arrays = returned.axes, [(path, jnp.asarray(array)) for path, array in leaves]
    return [path for path, _ in arrays], [one.transpose(axes[path]) if path in axes else one for path, one in arrays]


def _split(outputs: list[Array]) -> tuple[list[Array], list[Array]]:
    """Return the outputs that can be differentiated, and the others."""
    return [one for one in outputs if is_jax_float(one)], [one for one in outputs if not is_jax_float(one)]


def _joined(outputs: list[Array], rest: list[Array], kinds: list[bool]) -> list[Array]:
    first, second = iter(outputs), iter(rest)
    return [next(first) if kind else next(second) for kind in kinds]


def _cotangents(cotangents: Sequence[ArrayLike | None], outputs: list[Array], kinds: list[bool]) -> list[Array]:
    wanted = [one for one, kind in zip(cotangents, kinds, strict=True) if kind]
    return [
        jnp.zeros_like(output) if one is None else jnp.asarray(one, output.dtype)
        for one, output in zip(wanted, outputs, strict=True)
    ]


def _divide(weights: Mapping[str, ArrayLike], names: set[str]) -> tuple[dict[str, ArrayLike], dict[str, ArrayLike]]:
    return (
        {name: array for name, array in weights.items() if name in names},
        {name: array for name, array in weights.items() if name not in names},
    )
