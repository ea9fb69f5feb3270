"""Finds the pairing of a pair: parameters alone, then with state added and parameters set aside.

Comes in: a pair and what the caller knows. Goes out: a `Pairing`, or a refusal with the rules that would settle it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from attn_bridge.weights import WeightsMismatchError

from .. import pairing as pairings
from ..pair import SIDES, Pair
from ..pairing import Pairing, Partial, Suited, Tensor, UnpairedError, suited
from ..results.findings import Side
from . import state
from .carrying import Carrying
from .trials import Trials

NEARER = 0.5
"""Share of their distance that outputs may keep when state that fits by shape alone is carried next to a fault."""

OTHER: dict[Side, Side] = {"first": "second", "second": "first"}


class Matcher:
    """Tries pairings of a pair's weights, and keeps which state takes part and what is set aside.

    Args:
        pair: the pair.
        rules: what the caller knows; rules reach state as they reach parameters.
        trials: tries pairings out.
    """

    def __init__(self, pair: Pair, rules: Any, trials: Trials):
        self._pair = pair
        self.carrying, self._trials = Carrying(pair), trials
        self._labels = pair.shown["first"], pair.shown["second"]
        self._dropped: list[tuple[str, str, str]] = []
        self._doubts: list[str] = []
        self._fitted: list[Suited] = []
        self._is_only = True
        self._looked_for_idle = False
        self._given = Partial()
        if rules is not None:
            parameters, others = self.carrying.parameters, self.carrying.state
            ours, theirs = ({**parameters[side], **others[side]} for side in SIDES)
            try:
                self._given = pairings.partial(rules, ours, theirs, labels=self._labels)
            except WeightsMismatchError as error:
                raise self.refused(error) from None
            self.carrying.add("first", (match.first.source for match in self._given.matches))
            self.carrying.add("second", (match.second.source for match in self._given.matches))

    def proposed(self) -> Pairing:
        """Return the pairing of the parameters and of the state that is carried so far.

        Raises:
            UnpairedError: there is no bijection.
            ValueError: several are left open.
        """
        given = Partial(self._given.matches, self._left_out)
        ours, theirs = (self.carrying.taking_part(side) for side in SIDES)
        trials = self._trials
        found = pairings.propose(ours, theirs, trials.distance, given, self._labels, trials.orders, trials.limit)
        return _doubted(found, *self._doubts)

    def completed(self, error: UnpairedError) -> Pairing:
        """Return a pairing with state added and parameters set aside until there is a bijection.

        Raises:
            UnpairedError: there is still none.
        """
        steps: tuple[Callable[[UnpairedError], bool], ...] = (self._by_name, self._idle, self._fitting, self._frozen)
        before_fitting: UnpairedError | None = None
        while True:
            step = next((step for step in steps if step(error)), None)
            if step is None:
                raise self.refused(before_fitting or error)
            if step == self._fitting:
                before_fitting = before_fitting or error
            try:
                found = self.proposed()
            except UnpairedError as following:
                error = following
                continue
            if before_fitting is None:
                return found
            if self._trials.distance(found) < pairings.AGREE:
                return _by_run(found, self._fitted)
            if not self._is_only:
                raise self.refused(before_fitting)
            return _doubted(found, _on_fit(self._fitted))

    def with_state(self, found: Pairing) -> Pairing:
        """Return a pairing with the state that both sides hold, where the outputs differ without it."""
        if not self._pair.transfer:
            return found
        frozen = [name for side, name, why in found.dropped if side == "first" and why.startswith(state.FROZEN)]
        parameters = self.carrying.parameters["first"]
        ours = [*self._free("first"), *(pairings.whole(name, parameters[name]) for name in frozen)]
        pairs = [one for one in suited(ours, self._free("second")) if not self.carrying.are_same(one)]
        if not pairs or self._trials.distance(found) < pairings.AGREE:
            return found
        for are_named in (True, False):
            some = [one for one in pairs if one.is_named == are_named and self.carrying.may_carry(one)]
            found = self._added(found, some) if some else found
        tables = [one for one in pairs if one.is_named and not self.carrying.may_carry(one)]
        return _doubted(found, *map(self._on_table, tables))

    def refused(self, error: WeightsMismatchError) -> WeightsMismatchError:
        """Return a refusal that names the rules that would settle it and tied weights."""
        tied = [
            f"in {self._pair.shown[side]} {name} is {own}"
            for side in SIDES
            for name, own in self._pair.subject(side).tied().items()
        ]
        text = str(error)
        if isinstance(error, UnpairedError):
            first, second = (self.carrying.taking_part(side) for side in SIDES)
            rules = pairings.rules_for(error, (first, second), (self._free("first"), self._free("second")))
            text += f"; rules that would settle it (rules=, --rules): {rules}"
        error.args = (f"{text}; tied: {', '.join(tied)}" if tied else text,)
        return error

    # ---- steps towards a bijection: each returns whether it changed anything

    def _by_name(self, error: UnpairedError) -> bool:
        settled = [self._settled(one, side) for one, side in self._suited(error) if one.is_named]
        return any(settled)

    def _fitting(self, error: UnpairedError) -> bool:
        some = [(one, side) for one, side in self._suited(error) if not one.is_named]
        self._fitted += [one for one, _ in some]
        self._is_only = all(one.is_only for one in self._fitted)
        settled = [self._settled(one, side) for one, side in some]
        return any(settled)

    def _idle(self, error: UnpairedError) -> bool:
        """Set aside parameters that no output depends on: of those that are left over, else of all."""
        idle = [(side, name) for side, names in _sources(error).items() for name in self._without_effect(side, names)]
        if not idle and not self._looked_for_idle:
            self._looked_for_idle = True
            for side in SIDES:
                used = self._trials.uses(side)
                unused = [name for name in self.carrying.taking_part(side) if used and name not in used]
                idle += [(side, name) for name in self._without_effect(side, unused)]
        self._dropped += [(side, name, state.IDLE) for side, name in idle]
        return bool(idle)

    def _without_effect(self, side: Side, names: Iterable[str]) -> list[str]:
        done = {name for where, name, _ in self._left_out if where == side}
        return self._trials.without_effect(side, [name for name in names if name not in done])

    def _frozen(self, error: UnpairedError) -> bool:
        frozen = [
            (side, name, f"{state.FROZEN}, and {self._pair.shown[OTHER[side]]} has nothing for it")
            for side, names in _sources(error).items()
            for name in names
            if self.carrying.taking_part(side)[name].frozen
        ]
        self._dropped += frozen
        return bool(frozen)

    def _suited(self, error: UnpairedError) -> list[tuple[Suited, Side]]:
        """Return the pairs of a tensor that is left over and state, with the side of the state."""
        first, second = suited(self._free("first"), error.second), suited(error.first, self._free("second"))
        return [*((one, SIDES[0]) for one in first), *((one, SIDES[1]) for one in second)]

    def _settled(self, one: Suited, side: Side) -> bool:
        """Carry the state of a pair, or set the other tensor aside where code computes one of them."""
        own, other = (one.first, one.second) if side == "first" else (one.second, one.first)
        are_same = self.carrying.are_same(one)
        if self.carrying.may_carry(one) or (own.parameter.persistent and are_same):
            return self.carrying.add(side, [own.source])
        if (OTHER[side], other.source) in {(where, name) for where, name, _ in self._dropped}:
            return False
        why = (
            f"{own.name} of {self._pair.shown[side]} is a table that code computes, so each side keeps its own numbers"
        )
        self._dropped.append((OTHER[side], other.source, why))
        self._doubts += [] if are_same else [self._on_table(one)]
        return True

    # ---- state

    @property
    def _left_out(self) -> tuple[tuple[str, str, str], ...]:
        return (*self._given.dropped, *self._dropped)

    def _free(self, side: Side) -> list[Tensor]:
        return self.carrying.free(side, self._left_out)

    def _on_table(self, one: Suited) -> str:
        first, second = (f"{tensor.name} of {label}" for tensor, label in zip(_both(one), self._labels, strict=True))
        return (
            f"{first} and {second} differ and are not carried, as code seems to compute them; a rule carries them: "
            f"{pairings.rule_of(one.first.source, one.second.source)}"
        )

    def _added(self, found: Pairing, pairs: list[Suited]) -> Pairing:
        """Return a pairing with state added; without equal names, only if the outputs agree, or come nearer, by it."""
        before = self.carrying.names
        first, second = ({_both(one)[at].source: _both(one)[at].parameter for one in pairs} for at in (0, 1))
        self.carrying.add("first", first)
        self.carrying.add("second", second)
        dropped = tuple(row for row in found.dropped if row[0] == "second" or row[1] not in first)

        def together(more: Pairing) -> Pairing:
            return dataclasses.replace(found, matches=(*found.matches, *more.matches), dropped=dropped)

        def distance(more: Pairing) -> float:
            return self._trials.distance(together(more))

        with contextlib.suppress(ValueError):
            whole = together(pairings.propose(first, second, distance, labels=self._labels))
            if all(one.is_named for one in pairs):
                return whole
            reached = self._trials.distance(whole)
            if reached < pairings.AGREE:
                return _by_run(whole, pairs)
            if all(one.is_only for one in pairs) and reached < NEARER * self._trials.distance(found):
                return _doubted(whole, _on_fit(pairs))
        for side in SIDES:
            self.carrying.set(side, before[side])
        return found


def _by_run(pairing: Pairing, pairs: Iterable[Suited]) -> Pairing:
    """Return a pairing in which pairs of equal shapes alone are confirmed by a run."""
    names = {one.first.source for one in pairs}
    matches = (
        dataclasses.replace(match, how="probe") if match.first.source in names else match for match in pairing.matches
    )
    return dataclasses.replace(pairing, matches=tuple(matches))


def _on_fit(pairs: Iterable[Suited]) -> str:
    names = state.listed([f"{one.first.name} = {one.second.name}" for one in pairs])
    return f"paired by shape alone, as one of the two is state: {names}; rules of your own settle it"


def _both(one: Suited) -> tuple[Tensor, Tensor]:
    return one.first, one.second


def _doubted(pairing: Pairing, *doubts: str) -> Pairing:
    return dataclasses.replace(pairing, doubt="; ".join(dict.fromkeys(filter(None, [pairing.doubt, *doubts]))))


def _sources(error: UnpairedError) -> dict[Side, list[str]]:
    """Return the names of the parameters that are left over, by side."""
    return {
        "first": list(dict.fromkeys(tensor.source for tensor in error.first)),
        "second": list(dict.fromkeys(tensor.source for tensor in error.second)),
    }
