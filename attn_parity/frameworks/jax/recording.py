"""Record inputs and outputs of submodules: each array passes through an operation that records it and its gradient.

The operation is part of the traced program, so calls inside `jax.checkpoint` or a branch are recorded as well. Calls
that run per element (`jax.vmap`) or repeatedly (a loop) are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core
from jax.interpreters import ad, batching

from ...sides.subject import Arguments, Call, DtypeCall, ModuleFailedError, Substitute
from ...sides.trees import flatten, replace
from .probes.numpy_interpreter import NOTE, is_jax_array

recording = jax.make_user_context(0)
"""JAX user context with the number of the running tape: keeps programs traced for a tape apart in JAX's caches."""

_note = core.Primitive(NOTE)


class _Slot:
    """Stands for an array in the arguments of a recorded call."""


_SLOT = _Slot()


@dataclasses.dataclass
class _Entry:
    """One call that was traced; arrays that are known already stand among the inputs and outputs.

    `end` is the number of calls that began before it ended; 0 is one that has not ended.
    """

    path: str
    skeleton: object
    inputs: list[Array | np.ndarray]
    outputs: list[Array | np.ndarray] = dataclasses.field(default_factory=list)
    end: int = 0


class Tape:
    """Notes the calls of submodules while a program is traced, and their numbers when it runs."""

    def __init__(self, substitutes: Mapping[str, Sequence[Substitute]] | None = None) -> None:
        self.substitutes = substitutes or {}
        self.entries: list[_Entry] = []
        self.running: list[str] = []
        self.notes: dict[tuple[int, str, int], np.ndarray] = {}

    def clear(self) -> None:
        """Discard all entries before the program is traced again."""
        self.entries.clear()
        self.notes.clear()

    def call(
        self,
        path: str,
        original: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        method: str = "__call__",
    ) -> object:
        """Call a submodule and record its inputs and outputs."""
        if path in self.running:
            return original(*args, **kwargs)
        number = len(self.entries)
        leaves = [leaf for _, leaf in flatten((args, dict(kwargs)), is_jax_array)]
        extra = {} if method == "__call__" else {"method": method}
        skeleton = replace((args, {**kwargs, **extra}), is_jax_array, [_SLOT] * len(leaves))
        entry = _Entry(path, skeleton, list(leaves))
        self.entries.append(entry)
        noted = [self._noted(leaf, number, "input", position) for position, leaf in enumerate(leaves)]
        args, kwargs = replace((args, dict(kwargs)), is_jax_array, noted)
        substitute = self._substitute(path, len(noted))
        if substitute is not None:
            pairs = zip(noted, substitute.added, strict=True)
            args, kwargs = replace((args, kwargs), is_jax_array, [_with_gradient(one, added) for one, added in pairs])
        self.running.append(path)
        try:
            result = original(*args, **kwargs)
        finally:
            self.running.pop()
        if substitute is not None:
            result = _with_values(path, result, substitute)
        entry.outputs = [leaf for _, leaf in flatten(result, is_jax_array)]
        entry.end = len(self.entries)
        after = [self._noted(leaf, number, "output", position) for position, leaf in enumerate(entry.outputs)]
        return replace(result, is_jax_array, after)

    def _substitute(self, path: str, count: int) -> Substitute | None:
        if path not in self.substitutes:
            return None
        number = sum(one.path == path for one in self.entries) - 1
        if number >= len(self.substitutes[path]):
            raise ModuleFailedError(f"{path} is called more often than it was before")
        substitute = self.substitutes[path][number]
        if len(substitute.added) != count:
            raise ModuleFailedError(f"{path} is called with other arrays than before")
        return substitute

    def _noted(self, leaf: Array | np.ndarray, number: int, kind: str, position: int) -> Array | np.ndarray:
        if not isinstance(leaf, Array):  # known, and perhaps needed as it is
            self.notes[number, kind, position] = np.asarray(leaf)
            return leaf
        return _note.bind(leaf, tape=_Held(self), key=(number, kind, position))

    def calls(self) -> list[Call]:
        """Return the calls that were run, in the order in which they began."""
        calls: list[Call] = []
        numbers: dict[str, int] = {}
        for order, entry in enumerate(self.entries):
            inputs = self._values(order, "input", len(entry.inputs))
            outputs = self._values(order, "output", len(entry.outputs))
            if inputs is None or outputs is None or not outputs:
                continue  # a branch that was not taken, or a loop's body that was only looked at
            number = numbers.get(entry.path, 0)
            numbers[entry.path] = number + 1
            cotangents = [
                self.notes.get((order, "gradient", position), np.zeros(one.shape)) if one.dtype.kind == "f" else None
                for position, one in enumerate(outputs)
            ]
            args, kwargs = replace(entry.skeleton, _is_slot, inputs)
            calls.append(Call(entry.path, number, order, Arguments(args, kwargs), outputs, cotangents))
        return calls

    def dtypes(self) -> list[DtypeCall]:
        """Return the dtypes of the calls that were traced, in the order in which they began."""
        return [
            DtypeCall(entry.path, start, entry.end, _names(entry.inputs), _names(entry.outputs))
            for start, entry in enumerate(self.entries)
            if entry.end
        ]

    def _values(self, order: int, kind: str, count: int) -> list[np.ndarray] | None:
        keys = [(order, kind, position) for position in range(count)]
        return [self.notes[key] for key in keys] if all(key in self.notes for key in keys) else None


def _names(arrays: Sequence[Array]) -> tuple[str, ...]:
    return tuple(array.dtype.name for array in arrays)


@jax.custom_vjp
def _added(x: Array, added: Array) -> Array:
    """Hand an array on, and add something to the gradient that comes back."""
    return x


def _added_forward(x: Array, added: Array) -> tuple[Array, Array]:
    return x, added


def _added_backward(added: Array, gradient: Array) -> tuple[Array, Array]:
    return gradient + added, jnp.zeros_like(added)


_added.defvjp(_added_forward, _added_backward)


def _with_gradient(leaf: Array | np.ndarray, added: np.ndarray | None) -> Array | np.ndarray:
    if added is None or not isinstance(leaf, Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return _added(leaf, jnp.asarray(added, leaf.dtype))


def _with_values(path: str, result: object, substitute: Substitute) -> object:
    leaves = [leaf for _, leaf in flatten(result, is_jax_array)]
    if len(leaves) != len(substitute.outputs):
        raise ModuleFailedError(f"{path} returns other arrays than before")
    after = []
    for leaf, array in zip(leaves, substitute.outputs, strict=True):
        if array is not None and leaf.shape != array.shape:
            raise ModuleFailedError(f"{path} returns other arrays than before")
        if array is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            after.append(leaf if array is None else jnp.asarray(array, leaf.dtype))
        else:
            after.append(jnp.asarray(array, leaf.dtype) + (leaf - jax.lax.stop_gradient(leaf)))
    return replace(result, is_jax_array, after)


class _Held:
    """Carries a tape through the parameters of an operation, which compares and prints them."""

    def __init__(self, tape: Tape):
        self.tape = tape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.tape is self.tape

    def __hash__(self) -> int:
        return id(self.tape)

    def __repr__(self) -> str:
        return "tape"


def note(value: Array, *, tape: _Held, key: tuple[int, str, int]) -> Array:
    """Run the operation: keep the first value, as `jax.checkpoint` runs a call again for its gradient."""
    if key[1] != "tangent":
        tape.tape.notes.setdefault(key, np.array(value))
    return value


def _tangent(
    primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, tape: _Held, key: tuple[int, str, int]
) -> tuple[Array, Array | ad.Zero]:
    (value,), (tangent,) = primals, tangents
    after = _note.bind(value, tape=tape, key=key)
    if type(tangent) is ad.Zero or key[1] != "output" or not jnp.issubdtype(value.dtype, jnp.floating):
        return after, tangent
    return after, _note.bind(tangent, tape=tape, key=(key[0], "tangent", key[2]))


def _transposed(
    cotangent: Array | ad.Zero, _value: object, *, tape: _Held, key: tuple[int, str, int]
) -> list[Array | ad.Zero]:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    return [_note.bind(cotangent, tape=tape, key=(key[0], "gradient", key[2]))]


def _batched(values: Sequence[Array], axes: Sequence[int], **_: object) -> tuple[Array, int]:
    return values[0], axes[0]


_note.def_impl(note)
_note.def_abstract_eval(lambda value, **_: value)
ad.primitive_jvps[_note] = _tangent
ad.primitive_transposes[_note] = _transposed
batching.primitive_batchers[_note] = _batched


def _is_slot(value: object) -> bool:
    return value is _SLOT
