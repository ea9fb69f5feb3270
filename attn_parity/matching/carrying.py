"""The parameters and the state of both sides, and which state takes part in the pairing.

Comes in: a pair. Goes out: names and numbers. State that is carried counts among the parameters of its side, in the
subject as in the weights that the pair holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from .. import pairing as pairings
from ..pair import SIDES, Pair, weights_held
from ..pairing import Suited, Tensor
from ..results.findings import Side
from ..samples import inputs as calls
from ..sides.dtypes import class_of, is_float, wide
from ..sides.subject import Array, Arrays, Parameter, Subject
from . import state

Named = dict[str, Parameter]


class Carrying:
    """Keeps which state of a pair is carried.

    Args:
        pair: the pair.

    Attributes:
        parameters: the parameters of each side.
        state: the state of each side.
    """

    def __init__(self, pair: Pair):
        self._pair = pair
        self.parameters, self.state = _parted(pair)
        self._names: dict[Side, frozenset[str]] = {"first": frozenset(), "second": frozenset()}
        self._numbers: dict[Side, Arrays] = {}

    @property
    def names(self) -> dict[Side, frozenset[str]]:
        """Names of the state that is carried, by side."""
        return dict(self._names)

    def taking_part(self, side: Side) -> Named:
        """Return the parameters of a side and its state that is carried."""
        carried = {name: one for name, one in self.state[side].items() if name in self._names[side]}
        return {**self.parameters[side], **carried}

    def free(self, side: Side, dropped: Iterable[tuple[str, str, str]]) -> list[Tensor]:
        """Return the state of a side that is neither carried nor dropped."""
        taken = self._names[side] | {name for where, name, _ in dropped if where == side}
        return [pairings.whole(name, one, one.framework) for name, one in self.state[side].items() if name not in taken]

    def add(self, side: Side, names: Iterable[str]) -> bool:
        """Carry more state, as far as the names are state; return whether any is new."""
        new = self.state[side].keys() & set(names) - self._names[side]
        self.set(side, self._names[side] | new)
        return bool(new)

    def set(self, side: Side, names: frozenset[str]) -> None:
        """Carry the state of these names and no other."""
        if names == self._names[side]:
            return
        subject, held, numbers = self._pair.subject(side), self._pair.held[side], self.numbers(side)
        self._names[side] = names
        subject.carry(names)
        self._pair.held[side] = {name: held[name] if name in held else numbers[name] for name in subject.parameters()}

    def numbers(self, side: Side) -> Arrays:
        """Return the numbers of all state of a side, in float64 where its parameters were widened."""
        if side not in self._numbers:
            subject, held = self._pair.subject(side), self._pair.held[side]
            subject.carry(self.state[side])
            found = weights_held(subject, self._pair.shown[side])
            subject.carry(self._names[side])
            is_widened = calls.common_dtype(held) == "float64" and not subject.holds_float64
            own = {name: found[name] for name in self.state[side]}
            self._numbers[side] = {name: wide(one) for name, one in own.items()} if is_widened else own
        return self._numbers[side]

    def are_same(self, one: Suited) -> bool:
        """Tell whether two tensors hold the same numbers, in whatever order of axes."""
        first, second = (np.sort(wide(array), axis=None) for array in self._arrays(one))
        return bool(np.array_equal(first, second, equal_nan=is_float(first)))

    def may_carry(self, one: Suited) -> bool:
        """Tell whether the first side's numbers may replace the second's: none of the two is computed by code."""
        persistent = one.first.parameter.persistent and one.second.parameter.persistent
        first, second = self._arrays(one)
        return persistent and state.waits_for_data(second, wide(first)) and not state.are_two_constants(first, second)

    def _arrays(self, one: Suited) -> tuple[Array, Array]:
        first, second = ({**self._pair.held[side], **self.numbers(side)} for side in SIDES)
        return one.first.take(first), one.second.take(second)


def _parted(pair: Pair) -> tuple[dict[Side, Named], dict[Side, Named]]:
    """Return the parameters and the state of both sides.

    Whole numbers and bools in a function's tree are parameters where the other side has a parameter of that name, else
    state.
    """
    every: dict[Side, Mapping[str, Parameter]] = {side: pair.subject(side).parameters() for side in SIDES}
    parameters: dict[Side, Named] = {}
    others: dict[Side, Named] = {}
    for side, other in zip(SIDES, reversed(SIDES), strict=True):
        subject: Subject = pair.subject(side)
        is_tree = subject.kind.endswith("function")
        parameters[side] = {
            name: one
            for name, one in every[side].items()
            if not is_tree or class_of(one.dtype) == "float" or name in every[other]
        }
        rest = {name: one for name, one in every[side].items() if name not in parameters[side]}
        leaves = {name: dataclasses.replace(one, role="state") for name, one in rest.items()}
        others[side] = {**subject.state(), **leaves}
    return parameters, others
