"""Evaluates a jaxpr with NumPy, operation by operation, compiling nothing.

A float64 result of a module is needed once or twice, so compiling its operations (50 ms each) would take longer than
everything else. What NumPy has no counterpart for is run by JAX itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.extend import core
from jax.typing import ArrayLike

from ....sides.arrays import LargeWeight, spilled
from ....sides.subject import CannotPromoteError
from ....stack import StackLine
from .numpy_operations import OPERATIONS

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


def lines_of(equation: core.JaxprEqn) -> Iterator[StackLine]:
    """Yield the lines of the stack of an operation, the innermost first."""
    traceback = equation.source_info.traceback
    if traceback is not None:
        for item, *instruction in zip(traceback.frames, *traceback.raw_frames(), strict=True):
            yield StackLine(item.file_name, item.line_num, item.function_name, None, tuple(instruction))


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
        if name in OPERATIONS and all(isinstance(arg, np.ndarray) for arg in args):
            result = OPERATIONS[name](*args, **params)
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
                return [LargeWeight(OPERATIONS[name](args[0].array, **equation.params))]
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


def is_jax_array(value: object) -> bool:
    """Return whether a leaf is an array that can be handed on as NumPy's."""
    if isinstance(value, nnx.Variable):
        return False
    return isinstance(value, (Array, np.ndarray)) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
