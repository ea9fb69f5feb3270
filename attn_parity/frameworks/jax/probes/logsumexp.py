"""The probe ``logsumexp``: every softmax becomes exp(score - logsumexp(score)), as fused attention computes it.

FlashAttention (arXiv 2205.14135) keeps one number per row, the log-sum-exp, and its backward pass recomputes the
weights from it; the rounding of a large log-sum-exp affects every weight of the row. The probe recognises a softmax in
the program by its operations: exponentials divided by their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.typing import ArrayLike

from .numpy_interpreter import bind, scan_sizes

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_SAME = ("convert_element_type", "stop_gradient", "copy", "optimization_barrier", "reduce_precision")
_SHAPED = ("reshape", "squeeze", "expand_dims")


_Program: TypeAlias = core.ClosedJaxpr | core.Jaxpr
Params: TypeAlias = dict[str, Any]
_Run: TypeAlias = Callable[[_Program, Sequence[ArrayLike]], list[ArrayLike]]


def with_logsumexp(function: Callable[..., object], softmaxes: dict[int, core.JaxprEqn]) -> Callable[..., Any]:
    """Return a function that computes its softmaxes from their log-sum-exp.

    A softmax in a lower precision than all that the function gets is left alone: kernels compute in no lower one.

    Args:
        function: of trees of arrays.
        softmaxes: gets each division that was replaced, by its id, when the function is traced.
    """

    def rewritten(*args: object) -> object:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        units = [unit for one in leaves if (unit := _unit(jnp.result_type(one)))]
        outputs = _Rewriter(softmaxes, max(units, default=1.0)).run(closed, leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return rewritten


def _unit(dtype: object) -> float:
    """Return the unit in the last place of a dtype, 0 of one that has none."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


@dataclasses.dataclass(frozen=True)
class _Made:
    """How a value came about; `value` is kept, so that its id stays its own."""

    value: ArrayLike
    name: str
    params: Params
    operands: list[ArrayLike]


@dataclasses.dataclass(frozen=True)
class _Softmax:
    """One softmax: its scores, which of them it returns and which it sums over (None is all), and its axes."""

    scores: ArrayLike
    returned: ArrayLike | None
    counted: ArrayLike | None
    axes: tuple[int, ...]


class _Rewriter:
    """Runs a jaxpr and replaces its softmaxes on the way."""

    def __init__(self, softmaxes: dict[int, core.JaxprEqn], coarsest: float):
        self._found, self._coarsest = softmaxes, coarsest
        self._made: dict[int, _Made] = {}

    def run(self, closed: _Program, args: Sequence[ArrayLike]) -> list[ArrayLike]:
        """Return the outputs of a closed jaxpr."""
        jaxpr = closed.jaxpr if hasattr(closed, "consts") else closed
        consts = closed.consts if hasattr(closed, "consts") else ()
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for equation in jaxpr.eqns:
            operands = [atom.val if hasattr(atom, "val") else values[atom] for atom in equation.invars]
            values.update(zip(equation.outvars, self._apply(equation, operands), strict=True))
        return [atom.val if hasattr(atom, "val") else values[atom] for atom in jaxpr.outvars]

    def _apply(self, equation: core.JaxprEqn, operands: list[ArrayLike]) -> list[ArrayLike]:
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            return self.run(params[_CALLS[name]], operands)
        if name == "custom_jvp_call" and _may_hold(params["call_jaxpr"]):
            before = len(self._found)
            results = self.run(params["call_jaxpr"], operands)
            if len(self._found) > before:
                return results  # its own rule of differentiation is that of a plain softmax
        if name in _NESTED and any(_may_hold(value) for value in _jaxprs(params)):
            return list(_NESTED[name](self.run, operands, params))
        if name == "div" and _unit(equation.outvars[0].aval.dtype) <= self._coarsest:
            softmax = self._softmax(*operands)
            if softmax is not None:
                self._found[id(equation)] = equation
                return [_weights(softmax).astype(equation.outvars[0].aval.dtype)]
        results = bind(equation, operands)
        if len(results) == 1:
            self._made[id(results[0])] = _Made(results[0], name, params, operands)
        return results

    def _of(self, value: object) -> _Made | None:
        """Return the operation that made a value, looking through operations that keep numbers and places."""
        made = self._made.get(id(value))
        while made is not None and made.name in _SAME:
            value = made.operands[0]
            made = self._made.get(id(value))
        return made

    def _softmax(self, above: object, below: object) -> _Softmax | None:
        """Return the softmax, if the dividend consists of exponentials and the divisor is their sum; else None."""
        positions: list[int | None] = list(range(jnp.ndim(below)))
        made = self._of(below)
        while made is not None and made.name in (*_SHAPED, "broadcast_in_dim"):
            positions = _operand_axes(made, positions)
            made = self._of(made.operands[0])
        if made is None or made.name != "reduce_sum":
            return None
        axes = tuple(int(axis) for axis in made.params["axes"])
        kept = [axis for axis in range(jnp.ndim(above)) if axis not in axes]
        of_sum: dict[int, int] = {}
        for position, axis in enumerate(positions):
            if axis is not None and axis >= 0:
                of_sum[axis] = position
        shape = jnp.shape(above)
        for number, axis in enumerate(kept):
            if shape[axis] > 1 and of_sum.get(number) != axis:
                return None  # divided by the sums of other rows
        exponentials, summed = self._of(above), self._of(made.operands[0])
        if exponentials is None or summed is None:
            return None
        division, mask = self._unmasked(exponentials)
        inner, counted = self._unmasked(summed)
        if division is None or division is not inner or (mask is not None and exponentials is not summed):
            return None
        scores = division.operands[0]
        shifted = self._of(scores)
        if shifted is not None and shifted.name == "sub" and self._is_maximum(shifted.operands[1], axes):
            scores = shifted.operands[0]
        return _Softmax(scores, mask, counted, axes)

    def _unmasked(self, made: _Made) -> tuple[_Made | None, ArrayLike | None]:
        """Return the exponentials, and the mask outside of which there is something else in their place."""
        if made.name == "exp":
            return made, None
        if made.name == "select_n" and len(made.operands) == 3 and jnp.result_type(made.operands[0]) == jnp.bool_:
            which, off, on = made.operands
            for mask, branch in ((which, on), (jnp.logical_not(which), off)):
                inner = self._of(branch)
                if inner is not None and inner.name == "exp":
                    return inner, mask
        return None, None

    def _is_maximum(self, value: object, axes: tuple[int, ...]) -> bool:
        """Return whether a value is the largest of each row, perhaps bounded."""
        made = self._of(value)
        for _ in range(12):
            if made is None or made.name == "reduce_max":
                break
            if made.name in (*_SHAPED, "broadcast_in_dim"):
                made = self._of(made.operands[0])
            elif made.name in ("max", "select_n"):
                made = next((one for one in map(self._of, made.operands[-2:]) if one is not None), None)
            else:
                return False
        return made is not None and made.name == "reduce_max" and set(axes) <= set(map(int, made.params["axes"]))


def _operand_axes(made: _Made, axes: list[int | None]) -> list[int | None]:
    """Return, per axis of the first operand, its axis in a later result, given those of this operation's result.

    None is an axis of size 1, or one that a reshape takes apart.
    """
    before, after = jnp.shape(made.operands[0]), jnp.shape(made.value)
    if made.name == "broadcast_in_dim":
        return [
            axes[axis] if before[number] > 1 else None
            for number, axis in enumerate(made.params["broadcast_dimensions"])
        ]
    large = [axes[axis] for axis, size in enumerate(after) if size > 1]
    if [size for size in before if size > 1] != [size for size in after if size > 1]:
        return [None] * len(before)
    rest = iter(large)
    return [next(rest) if size > 1 else None for size in before]


def _weights(softmax: _Softmax) -> Array:
    """Return exp(score - logsumexp(score)), computed in float32 or in the scores' wider dtype."""
    axes, mask, counted = softmax.axes, softmax.returned, softmax.counted

    def _value(scores: Array) -> Array:
        summed = scores if counted is None else jnp.where(counted, scores, -jnp.inf)
        largest = summed.max(axes, keepdims=True)
        largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
        total = largest + jnp.log(jnp.exp(summed - largest).sum(axes, keepdims=True))
        weights = jnp.exp(scores - total)
        return weights if mask is None else jnp.where(mask, weights, 0.0)

    weights = jax.custom_jvp(_value)

    @weights.defjvp
    def _tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        value, tangent = weights(*primals), tangents[0]
        each = value * tangent if counted is None else jnp.where(counted, value * tangent, 0.0)
        return value, value * (tangent - each.sum(axes, keepdims=True))

    scores = jnp.asarray(softmax.scores)
    return weights(scores.astype(jnp.promote_types(scores.dtype, jnp.float32)))


def _jaxprs(params: Params) -> list[_Program]:
    programs = []
    for value in params.values():
        for element in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(element, "eqns") or hasattr(element, "jaxpr"):
                programs.append(element)
    return programs


def _may_hold(closed: _Program) -> bool:
    """Return whether a jaxpr has all that a softmax is made of."""
    return {"exp", "reduce_sum", "div"} <= _names(closed)


def _names(closed: _Program) -> set[str]:
    jaxpr = getattr(closed, "jaxpr", closed)
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for inner in _jaxprs(equation.params):
            names |= _names(inner)
    return names


# ---- parts of a program that are traced by themselves


def _checkpoint(run: _Run, operands: list[ArrayLike], params: Params) -> list[ArrayLike]:
    again = jax.checkpoint(
        lambda *args: run(params["jaxpr"], args), policy=params["policy"], prevent_cse=params["prevent_cse"]
    )
    return list(again(*operands))


def _scan(run: _Run, operands: list[ArrayLike], params: Params) -> list[ArrayLike]:
    first, carries = scan_sizes(params)
    constant, carry, sequences = operands[:first], operands[first : first + carries], operands[first + carries :]

    def step(state: Sequence[Array], row: Sequence[Array]) -> tuple[list[ArrayLike], list[ArrayLike]]:
        results = run(params["jaxpr"], [*constant, *state, *row])
        return results[:carries], results[carries:]

    state, rows = jax.lax.scan(
        step, carry, sequences, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*state, *rows]


def _cond(run: _Run, operands: list[ArrayLike], params: Params) -> list[ArrayLike]:
    branches = [lambda *args, branch=branch: run(branch, args) for branch in params["branches"]]
    return list(jax.lax.switch(operands[0], branches, *operands[1:]))


def _while(run: _Run, operands: list[ArrayLike], params: Params) -> list[ArrayLike]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_condition, of_body = operands[:first], operands[first : first + second]
    return list(
        jax.lax.while_loop(
            lambda state: run(params["cond_jaxpr"], [*of_condition, *state])[0],
            lambda state: run(params["body_jaxpr"], [*of_body, *state]),
            operands[first + second :],
        )
    )


_NESTED: dict[str, Callable[[_Run, list[ArrayLike], Params], list[ArrayLike]]] = {
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
}
