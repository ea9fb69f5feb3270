"""Evaluates a jaxpr with NumPy, operation by operation, compiling nothing.

A float64 result of a module is needed once or twice, so compiling its operations (50 ms each) would take longer than
everything else. What NumPy has no counterpart for is run by JAX itself.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from ....sides.large import LargeWeight, spilled
from ....sides.subject import CannotPromoteError

Value: TypeAlias = ArrayLike
"""A value of a program: an array of NumPy, or of JAX where NumPy has no such dtype; a subclass may add a kind."""

Operand: TypeAlias = Value | LargeWeight
"""A value, or a weight that is promoted where it is read."""

OPAQUE = ("pallas_call", "pure_callback", "io_callback", "ffi_call", "custom_call")
"""Operations whose precision is their own: they can't be run in another one."""

NOTE = "attn_bridge_note"
"""Name of the operation that records a value as it passes: it runs though nothing may read its result."""

_INLINED = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
}


def evaluate(closed: core.ClosedJaxpr, *args: Operand) -> list[Value]:
    """Return the outputs of a closed jaxpr for NumPy arrays.

    Raises:
        CannotPromoteError: it contains an operation with a fixed precision.
    """
    return Interpreter().evaluate(closed, *args)


def inline(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Return the closed jaxpr that an equation only calls, or None."""
    key = _INLINED.get(equation.primitive.name)
    program = equation.params.get(key) if key else None
    if program is None:
        return None
    return program if hasattr(program, "consts") else core.ClosedJaxpr(program, ())


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values among a scan's operands, in JAX 0.10 to 0.12."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constant, carried, _ = params["ft_in"].unpack()
    return len(list(constant)), len(list(carried))


class Interpreter:
    """Evaluates jaxprs. A class that watches the values as they pass overrides what handles one."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[frozenset[int], dict[int, list[core.Var]]]] = {}

    def evaluate(self, closed: core.ClosedJaxpr, *args: Operand) -> list[Value]:
        """Return the outputs of a closed jaxpr."""
        with np.errstate(all="ignore"):
            return self._run(closed, args, spills=True)

    def constant(self, value: ArrayLike) -> Value:
        """Return a constant of the program as a value."""
        return _to_numpy(value)

    def plain(self, value: Value) -> Value:
        """Return the array that control flow depends on."""
        return value

    def stack(self, column: Sequence[Value]) -> Value:
        """Stack the results of a loop's steps."""
        return np.stack(column) if isinstance(column[0], np.ndarray) else jnp.stack(column)

    def choose(self, going: Value, new: Value, old: Value) -> Value:
        """Return the new state of those loops, batched by vmap, that go on, and the old one of those that ended."""
        select = np.where if isinstance(new, np.ndarray) else jnp.where
        return select(going.reshape(going.shape + (1,) * (new.ndim - going.ndim)), new, old)

    def compute(self, equation: core.JaxprEqn, args: list[Value]) -> list[Value]:
        """Run one operation that calls no other."""
        name, params = equation.primitive.name, equation.params
        if name == NOTE:
            return [equation.primitive.impl(*args, **params)]
        if name in _OPERATIONS and all(isinstance(arg, np.ndarray) for arg in args):
            result = _OPERATIONS[name](*args, **params)
            if result is not NotImplemented:
                results = result if equation.primitive.multiple_results else [result]
                return [
                    _as_declared(value, variable.aval)
                    for value, variable in zip(results, equation.outvars, strict=True)
                ]
        return _bind(equation, args)

    def _run(self, closed: core.ClosedJaxpr, args: Sequence[Operand], *, spills: bool = False) -> list[Value]:
        jaxpr = closed.jaxpr
        consts = [self.constant(const) for const in closed.consts]
        values: dict[core.Var, Operand] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        if id(jaxpr) not in self._read:  # that of a loop is run many times
            unread = _unread(jaxpr)
            self._read[id(jaxpr)] = unread, last_uses(jaxpr)
        unread, last = self._read[id(jaxpr)]

        def read(atom: core.Var | core.Literal) -> Operand:
            return self.constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

        wanted = {id(atom) for atom in jaxpr.outvars} if spills else set()
        for position, equation in enumerate(jaxpr.eqns):
            if position in unread:
                continue
            results = self.apply(equation, [read(atom) for atom in equation.invars])
            for variable, result in zip(equation.outvars, results, strict=True):
                is_kept = id(variable) in wanted and isinstance(result, np.ndarray)
                values[variable] = spilled(result) if is_kept else result
            del results
            for variable in last.get(position, ()):
                values.pop(variable, None)
        return [_read(read(atom)) for atom in jaxpr.outvars]

    def apply(self, equation: core.JaxprEqn, args: list[Operand]) -> list[Any]:
        """Return the results of one operation, which may call a program."""
        name = equation.primitive.name
        called = inline(equation)
        if called is not None:
            return self._run(called, args)
        if any(isinstance(arg, LargeWeight) for arg in args):
            if name in _TURNS and len(args) == 1:  # it is promoted where it is read
                return [LargeWeight(_OPERATIONS[name](args[0].array, **equation.params))]
            args = list(map(_read, args))
        # Of a program in float64 the bits are those of its numbers: JAX 0.12 splits them in derivatives of erf.
        if name == "bitcast_convert_type" and _is_float(equation.invars[0].aval) and not _is_double(equation.invars[0]):
            raise CannotPromoteError("the bits of floating-point numbers are read")
        if name in OPAQUE and any(_is_float(variable.aval) for variable in (*equation.invars, *equation.outvars)):
            raise CannotPromoteError(f"the operation {name} has a precision of its own")
        if name == "scan":
            return self._scan(args, *scan_sizes(equation.params), **equation.params)
        if name == "while":
            return self._while(args, **equation.params)
        if name == "cond":
            branches = equation.params["branches"]
            return self._run(branches[int(np.clip(int(self.plain(args[0])), 0, len(branches) - 1))], args[1:])
        return self.compute(equation, args)

    def _scan(
        self,
        args: list[Value],
        first: int,
        carries: int,
        *,
        jaxpr: core.ClosedJaxpr,
        length: int,
        reverse: bool,
        **_: object,
    ) -> list[Value]:
        constant, carry, sequences = args[:first], args[first : first + carries], args[first + carries :]
        stacked: list[list[Value]] = []
        for step in reversed(range(length)) if reverse else range(length):
            results = self._run(
                jaxpr, [*constant, *carry, *(one[step, ...] for one in sequences)]
            )  # arrays, not numbers
            carry, outputs = results[:carries], results[carries:]
            stacked.append(outputs)
        if reverse:
            stacked.reverse()
        if not stacked:
            avals = [variable.aval for variable in jaxpr.jaxpr.outvars[carries:]]
            return [*carry, *(np.zeros((0, *aval.shape), aval.dtype) for aval in avals)]
        return [*carry, *(self.stack(column) for column in zip(*stacked, strict=True))]

    def _while(
        self,
        args: list[Value],
        *,
        cond_jaxpr: core.ClosedJaxpr,
        body_jaxpr: core.ClosedJaxpr,
        cond_nconsts: int,
        body_nconsts: int,
        **_: object,
    ) -> list[Value]:
        first, second = args[:cond_nconsts], args[cond_nconsts : cond_nconsts + body_nconsts]
        state = args[cond_nconsts + body_nconsts :]
        while True:
            going = self.plain(self._run(cond_jaxpr, [*first, *state])[0])
            if not np.any(going):
                return state
            results = self._run(body_jaxpr, [*second, *state])
            pairs = zip(results, state, strict=True)
            state = [self.choose(going, new, old) for new, old in pairs] if np.ndim(going) else results


_TURNS = ("transpose", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient", "slice")
"""Operations that only change the layout of an array."""


def _read(value: Operand) -> Value:
    return value.promoted() if isinstance(value, LargeWeight) else value


def _unread(jaxpr: core.Jaxpr) -> frozenset[int]:
    """Return the positions of operations whose results nothing reads, such as the keys that Linen derives in vain.

    Operations that call a program may record values in it.
    """
    read = {id(atom) for atom in jaxpr.outvars}
    unread = []
    for position in range(len(jaxpr.eqns) - 1, -1, -1):
        equation = jaxpr.eqns[position]
        is_kept = equation.primitive.name == NOTE or equation.effects or _calls(equation)
        if is_kept or any(id(variable) in read for variable in equation.outvars):
            read.update(id(atom) for atom in equation.invars)
        else:
            unread.append(position)
    return frozenset(unread)


def _calls(equation: core.JaxprEqn) -> bool:
    values = equation.params.values()
    parts = (part for value in values for part in (value if isinstance(value, tuple) else (value,)))
    return any(hasattr(part, "eqns") or hasattr(part, "jaxpr") for part in parts)


def last_uses(jaxpr: core.Jaxpr) -> dict[int, list[core.Var]]:
    """Return equation -> variables that nothing reads after it, so that large ones are freed."""
    kept = {id(atom) for atom in jaxpr.outvars}
    last = {
        atom: position
        for position, equation in enumerate(jaxpr.eqns)
        for atom in (*equation.outvars, *equation.invars)
        if not isinstance(atom, core.Literal)
    }
    freed: dict[int, list[core.Var]] = {}
    for variable, position in last.items():
        if id(variable) not in kept:
            freed.setdefault(position, []).append(variable)
    return freed


def _as_declared(value: np.ndarray, aval: jax.core.ShapedArray) -> np.ndarray:
    array = np.asarray(value)
    return array if array.dtype == aval.dtype else array.astype(aval.dtype)


def _bind(equation: core.JaxprEqn, args: list[Value]) -> list[Value]:
    """Let JAX run an operation that is not in the table."""
    with jax.enable_x64(True):
        arrays = [jnp.asarray(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        return [_to_numpy(value) for value in bind(equation, arrays)]


def bind(equation: core.JaxprEqn, operands: Sequence[ArrayLike]) -> list[Value]:
    """Run one operation of a program in JAX, including operations that contain a program.

    The program of a `jax.shard_map` is compiled, once: run operation by operation on its devices it takes a second.
    """
    if equation.primitive.name == "shard_map" and not any(isinstance(one, jax.core.Tracer) for one in operands):
        key = (id(equation), *(operand.dtype for operand in operands))
        if key not in _COMPILED:
            if len(_COMPILED) >= MAX_COMPILED:
                _COMPILED.pop(next(iter(_COMPILED)))
            _COMPILED[key] = equation, jax.jit(functools.partial(_bind_itself, equation))
        return list(_COMPILED[key][1](*operands))
    return _bind_itself(equation, *operands)


_COMPILED: dict[tuple[Hashable, ...], tuple[core.JaxprEqn, Callable[..., list[ArrayLike]]]] = {}
"""Identity of an equation, and dtypes -> the equation (kept alive: its id must stay unique) and its compiled form."""

MAX_COMPILED = 64
"""Most of them that are kept."""


def _bind_itself(equation: core.JaxprEqn, *operands: ArrayLike) -> list[Value]:
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # as JAX before 0.10 has it
    result = equation.primitive.bind(*functions, *operands, **params)
    return list(result) if equation.primitive.multiple_results else [result]


def _to_numpy(value: ArrayLike) -> np.ndarray | Array:
    if isinstance(value, np.ndarray):
        return value
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended):
        return value
    return np.asarray(value)


def _is_double(atom: core.Atom) -> bool:
    """Return whether a program has an array, or a number, in float64."""
    return bool(atom.aval.dtype == np.float64)


def _is_float(aval: object) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)


# ---- operations


def _plain(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Make an operation of a NumPy function of the operands alone."""
    return lambda *operands, **_: function(*operands)


def _special(name: str) -> Callable[..., np.ndarray]:
    """Make an operation of a function of `scipy.special`, which few programs need and which takes long to import."""
    return _plain(lambda *operands: getattr(importlib.import_module("scipy.special"), name)(*operands))


def _divide(dividend: np.ndarray, divisor: np.ndarray, **_: object) -> np.ndarray:
    if dividend.dtype.kind == "f":
        return dividend / divisor
    if dividend.dtype.kind not in "iu" or not divisor.all():
        return NotImplemented
    quotient, rest = np.divmod(dividend, divisor)
    return quotient + ((rest != 0) & ((dividend < 0) != (divisor < 0)))  # towards zero, where NumPy rounds down


def _remainder(dividend: np.ndarray, divisor: np.ndarray, **_: object) -> np.ndarray:
    return (
        np.fmod(dividend, divisor)
        if dividend.dtype.kind == "f" or (dividend.dtype.kind in "iu" and divisor.all())
        else NotImplemented
    )


def _select(which: np.ndarray, *cases: np.ndarray, **_: object) -> np.ndarray:
    if which.dtype == np.bool_:
        return np.where(which, cases[1], cases[0])
    return NotImplemented


def _broadcast_in_dim(
    operand: np.ndarray, *dynamic: object, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: object
) -> np.ndarray:
    if dynamic:
        return NotImplemented
    sizes = [1] * len(shape)
    for axis, dimension in enumerate(broadcast_dimensions):
        sizes[dimension] = operand.shape[axis]
    return np.broadcast_to(operand.reshape(sizes), shape)


def _reshape(
    operand: np.ndarray,
    *dynamic: object,
    new_sizes: Sequence[int],
    dimensions: Sequence[int] | None = None,
    **_: object,
) -> np.ndarray:
    if dynamic:
        return NotImplemented
    return (operand if dimensions is None else operand.transpose(dimensions)).reshape(new_sizes)


def _pad(
    operand: np.ndarray, value: np.ndarray, *, padding_config: Sequence[tuple[int, int, int]], **_: object
) -> np.ndarray:
    if any(low < 0 or high < 0 or inner for low, high, inner in padding_config):
        return NotImplemented
    return np.pad(operand, [(low, high) for low, high, _ in padding_config], constant_values=value)


def _slice(
    operand: np.ndarray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
    **_: object,
) -> np.ndarray:
    steps = strides or [1] * operand.ndim
    return operand[tuple(map(slice, start_indices, limit_indices, steps))]


def _clamped(starts: Sequence[np.ndarray], sizes: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    begins = [min(max(int(start), 0), whole - size) for start, size, whole in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(begins, sizes, strict=True))


def _dynamic_slice(operand: np.ndarray, *starts: np.ndarray, slice_sizes: Sequence[int], **_: object) -> np.ndarray:
    return operand[_clamped(starts[: operand.ndim], slice_sizes, operand.shape)]


def _dynamic_update_slice(operand: np.ndarray, update: np.ndarray, *starts: np.ndarray, **_: object) -> np.ndarray:
    result = np.array(operand, copy=True)
    result[_clamped(starts, update.shape, operand.shape)] = update
    return result


def _gather(
    operand: np.ndarray,
    indices: np.ndarray,
    *,
    dimension_numbers: jax.lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: jax.lax.GatherScatterMode,
    fill_value: object = None,
    **_: object,
) -> np.ndarray:
    """Return one slice of the operand per row of indices; indices out of bounds are clipped, or give the fill value."""
    numbers = dimension_numbers
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if 0 in operand.shape or mode == jax.lax.GatherScatterMode.ONE_HOT:
        return NotImplemented
    batch = indices.shape[:-1]
    window = [axis for axis in range(operand.ndim) if axis not in (*numbers.collapsed_slice_dims, *batching)]
    shape = (*batch, *[1] * len(window))
    is_inside = np.ones(batch, bool)
    chosen = []
    for axis, size in enumerate(slice_sizes):
        start = np.zeros(batch, np.int64)
        if axis in numbers.start_index_map:
            start = indices[..., numbers.start_index_map.index(axis)].astype(np.int64)
            is_inside &= (start >= 0) & (start <= operand.shape[axis] - size)
            start = np.clip(start, 0, operand.shape[axis] - size)
        elif axis in batching:
            start = np.indices(batch, sparse=True)[batching[axis]] + start
        index = start.reshape(shape)
        if axis in window:
            steps = [1] * len(shape)
            steps[len(batch) + window.index(axis)] = size
            index = index + np.arange(size).reshape(steps)
        chosen.append(index)
    made = operand[tuple(chosen)]
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP and not is_inside.all():
        if operand.dtype.kind != "f":
            return NotImplemented  # what fills depends on the dtype
        filling = np.asarray(np.nan if fill_value is None else fill_value)
        made = np.where(is_inside.reshape(shape), made, filling)
    return np.moveaxis(made, range(len(batch), made.ndim), numbers.offset_dims)


def _iota(*dynamic: object, dtype: DTypeLike, shape: Sequence[int], dimension: int, **_: object) -> np.ndarray:
    if dynamic:
        return NotImplemented
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _convert(operand: np.ndarray, *, new_dtype: DTypeLike, **_: object) -> np.ndarray:
    if operand.dtype.kind == "f" and np.dtype(new_dtype).kind in "iu":
        return NotImplemented  # JAX saturates where NumPy wraps
    if operand.dtype.kind == "c" and np.dtype(new_dtype).kind != "c":
        return NotImplemented  # JAX takes the real part, NumPy warns
    return operand.astype(new_dtype)


def _dot_general(
    left: np.ndarray, right: np.ndarray, *, dimension_numbers: Sequence[Sequence[Sequence[int]]], **_: object
) -> np.ndarray:
    if left.dtype.kind != "f" or right.dtype.kind != "f":
        return NotImplemented
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    left_free = [axis for axis in range(left.ndim) if axis not in (*left_sum, *left_batch)]
    right_free = [axis for axis in range(right.ndim) if axis not in (*right_sum, *right_batch)]
    batch = [left.shape[axis] for axis in left_batch]
    rows, columns = [left.shape[axis] for axis in left_free], [right.shape[axis] for axis in right_free]
    inner = int(np.prod([left.shape[axis] for axis in left_sum], dtype=np.int64))
    size = functools.partial(np.prod, dtype=np.int64)
    first = left.transpose([*left_batch, *left_free, *left_sum]).reshape([*batch, int(size(rows)), inner])
    second = right.transpose([*right_batch, *right_sum, *right_free]).reshape([*batch, inner, int(size(columns))])
    return np.matmul(first, second).reshape([*batch, *rows, *columns])


def _reduce(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda operand, *, axes, **_: function(operand, axis=tuple(int(axis) for axis in axes))


def _extreme(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def reduce(operand: np.ndarray, *, axes: Sequence[int], **_: object) -> np.ndarray:
        if 0 in operand.shape:
            return NotImplemented
        return function(operand, axis=tuple(int(axis) for axis in axes))

    return reduce


def _index_of(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda operand, *, axes, index_dtype, **_: function(operand, axis=int(axes[0])).astype(index_dtype)


def _cumulative(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def accumulate(operand: np.ndarray, *, axis: int, reverse: bool, **_: object) -> np.ndarray:
        turned = np.flip(operand, axis) if reverse else operand
        result = function(turned, axis=axis)
        return np.flip(result, axis) if reverse else result

    return accumulate


def _split(operand: np.ndarray, *, sizes: Sequence[int], axis: int, **_: object) -> list[np.ndarray]:
    return np.split(operand, np.cumsum(sizes)[:-1], axis=axis)


def _floating(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Make an operation that is left to JAX for other than floating-point operands."""
    return lambda *operands, **_: function(*operands) if operands[0].dtype.kind == "f" else NotImplemented


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _plain(getattr(np, name)) for name in ("exp", "exp2", "log", "log1p", "expm1", "sin", "cos", "tan")},
    **{name: _plain(getattr(np, name)) for name in ("tanh", "sinh", "cosh", "sqrt", "cbrt", "floor", "ceil", "abs")},
    **{name: _plain(getattr(np, f"arc{name[1:]}")) for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
    **{name: _plain(getattr(np, name)) for name in ("square", "sign")},
    **{name: _plain(function) for name, function in (("max", np.maximum), ("min", np.minimum), ("atan2", np.arctan2))},
    **{name: _plain(function) for name, function in (("add", np.add), ("add_any", np.add), ("sub", np.subtract))},
    **{name: _plain(function) for name, function in (("mul", np.multiply), ("neg", np.negative))},
    **{name: _plain(function) for name, function in (("eq", np.equal), ("ne", np.not_equal), ("lt", np.less))},
    **{name: _plain(function) for name, function in (("le", np.less_equal), ("gt", np.greater))},
    "ge": _plain(np.greater_equal),
    **{name: _plain(function) for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or))},
    "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert),
    "div": _divide,
    "pow": _floating(np.power),
    "rem": _remainder,
    "integer_pow": lambda operand, *, y, **_: operand**y if operand.dtype.kind == "f" else NotImplemented,
    "rsqrt": _plain(lambda operand: 1.0 / np.sqrt(operand)),
    "logistic": _special("expit"),
    "erf": _special("erf"),
    "erfc": _special("erfc"),
    "erf_inv": _special("erfinv"),
    "lgamma": _special("gammaln"),
    "digamma": _special("digamma"),
    "is_finite": _plain(np.isfinite),
    "clamp": _plain(lambda low, operand, high: np.minimum(np.maximum(operand, low), high)),
    "select_n": _select,
    **{name: _plain(lambda operand: operand) for name in ("stop_gradient", "copy", "copy_p", "reduce_precision")},
    "optimization_barrier": lambda *operands, **_: list(operands),
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": lambda operand, *, dimensions, **_: np.squeeze(operand, tuple(int(axis) for axis in dimensions)),
    "expand_dims": lambda operand, *, dimensions, **_: np.expand_dims(operand, tuple(dimensions)),
    "transpose": lambda operand, *, permutation, **_: operand.transpose(permutation),
    "rev": lambda operand, *, dimensions, **_: np.flip(operand, tuple(dimensions)),
    "concatenate": lambda *operands, dimension, **_: np.concatenate(operands, axis=dimension),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "split": _split,
    "stack": lambda *operands, axis, **_: np.stack(operands, axis),
    "tile": lambda operand, *, reps, **_: np.tile(operand, reps),
    "iota": _iota,
    "convert_element_type": _convert,
    "dot_general": _dot_general,
    "reduce_sum": _reduce(np.sum),
    "reduce_prod": _reduce(np.prod),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "reduce_max": _extreme(np.max),
    "reduce_min": _extreme(np.min),
    "argmax": _index_of(np.argmax),
    "argmin": _index_of(np.argmin),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "cummax": _cumulative(np.maximum.accumulate),
    "cummin": _cumulative(np.minimum.accumulate),
}
"""Operation -> NumPy function of its operands and parameters; NotImplemented leaves the call to JAX."""
