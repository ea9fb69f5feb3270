"""The probe ``literals``: move literals of float32 accuracy, and exchange branches that float32 cannot distinguish.

`attn_parity/sides/tables.py` derives both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from ....sides.tables import STILL, Collector, close, moved, slack
from ....sides.tables import Tables as Found
from .numpy_interpreter import Interpreter, Operand, Value


class JaxprLiterals(Interpreter):
    """Evaluates a float64 jaxpr with other literals, and with the other of two close branches.

    Args:
        seed: of the moves; `STILL` moves nothing.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._seed = seed
        self._turned: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.met = Collector()
        self.moved = 0

    def constant(self, value: ArrayLike) -> Value:
        """Return a constant of the program; a literal of float32 accuracy is moved."""
        array = super().constant(value)
        if not isinstance(array, np.ndarray) or array.ndim or array.dtype.kind != "f" or not slack(float(array)):
            return array
        self.met.add(array.reshape(1))
        self.moved += 1
        return array if self._seed == STILL else np.asarray(moved(float(array), self._seed))

    def compute(self, equation: core.JaxprEqn, args: list[Value]) -> list[Value]:
        """Run one operation; a choice between close branches takes the other one, its backward pass as well."""
        if equation.primitive.name == "select_n" and len(args) == 3 and _are_floats(args[1:]):
            args = [self._condition(*args), *args[1:]]
        return super().compute(equation, args)

    def _condition(self, condition: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        near = np.asarray(close(first, second))
        if near.any() and condition.shape == near.shape and condition.dtype == bool:
            self.moved += int(near.sum())
            turned = condition if self._seed == STILL else condition ^ near
            self._turned[id(condition)] = condition, turned  # it is kept, so that no other array gets its id
            return turned
        # The gradient of a branch is chosen by the condition of the forward pass, with zeros for the other branch.
        if id(condition) in self._turned and not (np.any(first) and np.any(second)):
            return self._turned[id(condition)][1]
        return condition


def _are_floats(arrays: Sequence[object]) -> bool:
    return all(isinstance(one, np.ndarray) and one.dtype.kind == "f" for one in arrays)


def evaluate_literals(
    closed: core.ClosedJaxpr, args: Sequence[Operand], seed: int
) -> tuple[list[Value], int, Found | None]:
    """Return the outputs of a closed jaxpr with other literals, how much was moved, and the literals as they are.

    Args:
        closed: the program, in float64.
        args: its arguments.
        seed: of the moves; `STILL` moves nothing.
    """
    literals = JaxprLiterals(seed)
    return literals.evaluate(closed, *args), literals.moved, literals.met.found()
