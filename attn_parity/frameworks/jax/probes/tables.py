"""The probe ``tables``: move values computed from neither weights nor inputs by a unit of float32.

A port may compute a rotary table in float32 where the other side uses float64, or in another order. The probe measures
the effect on the result in float64, where nothing else is rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from ....sides.arrays import LargeWeight
from ....sides.tables import STILL, Collector
from ....sides.tables import Tables as Found
from .numpy_interpreter import Interpreter, Operand, Value
from .rounding import EXACT

UNIT = 2.0**-23
"""Distance between a float32 and the next, relative."""

MANY_BITS = 16
"""Significant bits above which a scalar that float32 holds was rounded to it; 0.5 and 1024 are meant as they are."""


@dataclasses.dataclass(frozen=True)
class Free:
    """A value that depends on neither weights nor floating-point inputs: as it is, and moved."""

    own: Value
    moved: Value

    def __getitem__(self, index: object) -> Free:
        return Free(self.own[index], self.moved[index])


class JaxprTables(Interpreter):
    """Evaluates a float64 jaxpr while it moves the free values.

    A decision by a free value (a comparison, a bucket, an index) uses the original value.

    Args:
        seed: of the random numbers; `STILL` moves nothing.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._random = np.random.default_rng(max(seed, 0))
        self._unit = 0.0 if seed == STILL else UNIT
        self.met = Collector()
        self._constants: dict[tuple[tuple[int, ...], bytes], Free] = {}
        self.moved = 0

    def table(self, array: ArrayLike) -> Free:
        """Return a given table, moved."""
        value = super().constant(array)
        return Free(value, self._moved(value, value))

    def free(self, array: ArrayLike) -> Free:
        """Return a given value that no unit is missing from, such as whole numbers."""
        value = super().constant(array)
        return Free(value, value)

    def constant(self, value: ArrayLike) -> Free:
        """Return a constant of the program, moved; the same one is moved alike wherever it is read."""
        array = super().constant(value)
        if not _is_table(array):
            return self.free(array)
        key = (array.shape, array.tobytes())
        if key not in self._constants:
            rounded = array.ndim or _was_rounded(float(array))
            self._constants[key] = self.table(array) if rounded else self.free(array)
        return self._constants[key]

    def plain(self, value: Value | Free) -> Value:
        """Return the value that decides, as it is."""
        return value.own if isinstance(value, Free) else value

    def stack(self, column: Sequence[Value | Free]) -> Value | Free:
        """Stack the results of a loop's steps."""
        if all(isinstance(one, Free) for one in column):
            return Free(super().stack([one.own for one in column]), super().stack([one.moved for one in column]))
        return super().stack([_moved_of(one) for one in column])

    def choose(self, going: Value, new: Value | Free, old: Value | Free) -> Value | Free:
        """Return the new state of the loops that go on, and the old one of the others."""
        if isinstance(new, Free) and isinstance(old, Free):
            own = super().choose(going, new.own, old.own)
            return Free(own, super().choose(going, new.moved, old.moved))
        return super().choose(going, _moved_of(new), _moved_of(old))

    def compute(self, equation: core.JaxprEqn, args: list[Value | Free]) -> list[Value | Free]:
        """Run one operation; the results of free values are free, and are moved where they are rounded."""
        if not all(isinstance(arg, Free) for arg in args):
            for arg in args:
                if isinstance(arg, Free) and arg.moved is not arg.own and _is_table(arg.own):
                    self.met.add(arg.own)
            return super().compute(equation, [_moved_of(arg) for arg in args])
        own = super().compute(equation, [arg.own for arg in args])
        name = equation.primitive.name
        if not any(_is_table(one) for one in own) or name in ("floor", "ceil", "round", "sign"):
            return [Free(one, one) for one in own]
        is_unmoved = all(arg.moved is arg.own for arg in args)
        moved = own if is_unmoved else super().compute(equation, [arg.moved for arg in args])
        if name in EXACT or name in ("select_n", "stop_gradient"):
            return [Free(one, other) for one, other in zip(own, moved, strict=True)]
        return [Free(one, self._moved(one, other)) for one, other in zip(own, moved, strict=True)]

    def _moved(self, own: Value, value: Value) -> Value:
        if not _is_table(own):
            return value
        with np.errstate(invalid="ignore"):
            rounded = np.isfinite(own) & (own != np.rint(own))
        if not np.any(rounded):
            return value
        self.moved += 1
        noise = self._random.uniform(-self._unit, self._unit, np.shape(value))
        return np.where(rounded, value * (1.0 + noise), value)


def _moved_of(value: Value | Free) -> Value:
    return value.moved if isinstance(value, Free) else value


def _is_table(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _was_rounded(value: float) -> bool:
    """Return whether a number was rounded to float32, unlike written numbers such as 0.1, 1e-6 or 0.5."""
    if not np.isfinite(value) or value == 0.0 or float(np.float32(value)) != value:
        return False
    mantissa, _ = np.frexp(value)
    return float(mantissa * 2.0**MANY_BITS) % 1.0 != 0.0


def evaluate_tables(
    closed: core.ClosedJaxpr, args: Sequence[Operand], kinds: Sequence[str], seed: int
) -> tuple[list[Value], int, Found | None]:
    """Return the outputs of a closed jaxpr with its tables moved, how many values were, and the tables as they are.

    Args:
        closed: the program, in float64.
        args: its arguments.
        kinds: per argument ``weight`` (what depends on it is left alone), ``table`` (it is moved) or ``free``.
        seed: of the random numbers; `STILL` moves nothing.
    """
    tables = JaxprTables(seed)
    makes = {"weight": lambda value: value, "table": tables.table, "free": tables.free}
    operands = [
        arg if isinstance(arg, LargeWeight) else makes[kind](np.asarray(arg))
        for arg, kind in zip(args, kinds, strict=True)
    ]
    outputs = [_moved_of(one) for one in tables.evaluate(closed, *operands)]
    return outputs, tables.moved, tables.met.found()
