"""Find the pairing of a pair: parameters alone, then with state added and parameters set aside.

In: a pair and the caller's rules. Out: a `Pairing`, or an error with the rules that would settle it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from attn_bridge import backends
from attn_bridge.module_weights import check_same_meaning, own_rules
from attn_bridge.printable import listed
from attn_bridge.weights import Rules, WeightsMismatchError

from ..pair import SIDES, Pair, weights_held, widened
from ..pairing import (
    AGREE,
    Match,
    Pairing,
    Partial,
    Suited,
    Tensor,
    UnpairedError,
    folding,
    from_rules,
    names,
    partial,
    propose,
    rule_of,
    rules_for,
    suited,
    whole,
)
from ..pairing.patterns import Way
from ..results.findings import Side
from ..samples import calls
from ..sides.folded import FoldedSubject, folds
from . import state
from .outputs import Trials
from .state import Carrying

NEARER = 0.5
"""Share of their distance that outputs may keep when state that fits by shape alone is carried next to a fault."""

LEAVES = ("weight", "bias", "kernel", "scale", "embedding", "w", "b", "gamma", "beta", "offset")
"""Usual last words of the tensors of a layer."""

OTHER: dict[Side, Side] = {"first": "second", "second": "first"}


def complete(
    pair: Pair, sides: tuple[object, object], rules: object, *, fold: bool = False, trials: Trials | None = None
) -> None:
    """Pair the weights of a pair, and add notes on the pairing.

    Args:
        pair: the pair; state that is carried, and recurrent biases that are added, become its parameters.
        sides: the sides as the caller gave them; None for a recorded side.
        rules: the caller's rules; a `Pairing` is used unchanged.
        fold: whether the biases of recurrent layers may be added.
        trials: tries pairings; None runs both sides.

    Raises:
        WeightsMismatchError: no bijection exists; names the leftover tensors and the rules that would settle them.
        ValueError: names and runs leave several pairings open, or two rules claim one parameter.
    """
    pair.pairing = (
        rules if isinstance(rules, Pairing) else _found(pair, sides, rules, trials or Trials(pair), fold=fold)
    )
    pair.kept = state.kept(pair.pairing, pair.first.parameters())
    pair.notes += state.dropped_notes(pair)
    pair.notes += [pair.pairing.doubt] if pair.pairing.doubt else []
    pair.notes += state.frozen_notes(pair)


def _found(pair: Pair, sides: tuple[object, object], rules: object, trials: Trials, *, fold: bool) -> Pairing:
    """Return the pairing that rules, names and runs give, and note how it was found."""
    matcher = Matcher(pair, rules, trials)
    pairing = _by_configs(pair, sides, matcher) if rules is None else None
    if pairing is None:
        matcher, pairing = _by_names(pair, rules, matcher, fold=fold)
        pairing = matcher.with_state(pairing)
    pair.notes += _renamed(pairing, matcher.trials)
    pair.notes += state.notes(pair, matcher.carrying.state, pairing)
    pairing, on_squares = _squares(pair, pairing)
    pair.notes += on_squares
    return pairing


def _renamed(pairing: Pairing, trials: Trials) -> Iterator[str]:
    """Yield a note on layers that only trial runs distinguish, though a side has words for them: they may be exchanged.

    So are those whose names have no word in common, and those that share a word with several layers, as `wi_0` and
    `wi_1` do with `wi_gate` and `wi_up`.
    """
    probed = [match for match in pairing.matches if match.how == "probe"]
    first, second = (names.read([match.tensor(side) for match in probed]) for side in SIDES)
    groups: dict[tuple[tuple[int, ...], frozenset[str]], list[tuple[names.Name, names.Name, Match]]] = {}
    for ours, theirs, match in zip(first, second, probed, strict=True):
        key = match.first.shape, frozenset(ours.words) & frozenset(theirs.words)
        groups.setdefault(key, []).append((ours, theirs, match))
    layers: dict[str, str] = {}
    many = collections.Counter(math.prod(match.first.shape) for match in probed)
    for (shape, shared), rows in groups.items():
        words = {frozenset(ours.words) for ours, *_ in rows}, {frozenset(theirs.words) for _, theirs, _ in rows}
        is_worded = max(map(len, words)) > 1
        crossed = set[str]() if is_worded or shared else _crossed([match for *_, match in rows], trials)
        for ours, theirs, match in rows:
            are_words = (
                many[math.prod(shape)] > 1 and not shared and _is_word(ours.spelled) and _is_word(theirs.spelled)
            )
            if is_worded or are_words or match.first.name in crossed:
                layers.setdefault(_layer_of(match.first), _layer_of(match.second))
    if layers:
        pairs = listed([f"{ours} = {theirs}" for ours, theirs in layers.items()], 2)  # longer ones are left to --full
        yield f"paired by trial runs alone, as names do not: {pairs}; rules settle it where they may be exchanged"


SQUARES = ("... -> ...", "a b -> b a")
"""The ways that a square matrix can lie."""


def _squares(pair: Pair, pairing: Pairing) -> tuple[Pairing, list[str]]:
    """Orient bare square matrices that trial runs alone transposed, and return notes on them.

    Trial runs do not distinguish a conversion that transposes from code that transposes. If the second side holds the
    first's numbers, their orientation is that of the user's conversion. Otherwise a note names the evidence.
    """
    notes, matches = [], []
    for match in pairing.matches:
        matches.append(match)
        if match.how != "probe" or not _is_bare_square(match):
            continue
        first, second = (match.tensor(side).take(pair.own_weights[side]) for side in SIDES)
        fits = [array.shape == second.shape and np.array_equal(array, second) for array in (first, first.T)]
        is_turned = not np.array_equal(match.carry(first, "first"), first)
        name, other, label = match.first.name, match.second.name, pair.shown["second"]
        if fits[0] != fits[1] and fits[1] != is_turned:
            pattern = SQUARES[fits[1]]
            matches[-1] = Way(pattern).match(match.first, match.second, match.how)
            notes.append(
                f"{label} holds {name} {'transposed' if fits[1] else 'as it is'} as {other}, and is judged so, "
                f"although the outputs agree {'as it is' if fits[1] else 'transposed'}"
            )
        elif is_turned and fits[0] == fits[1]:
            notes.append(
                f"{name} goes into {other} of {label} transposed: trial runs alone support that, and as it is the "
                f"sides differ; if your conversion copies it, give rules=, --rules: {rule_of(name, other)}"
            )
    return dataclasses.replace(pairing, matches=tuple(matches)), notes


def _is_bare_square(match: Match) -> bool:
    """Return whether two whole square matrices are bare parameters, not weights of a layer."""
    first, second = match.first, match.second
    is_square = first.shape == second.shape and len(first.shape) == 2 and first.shape[0] == first.shape[1]
    words = {re.split(r"[./]", one.source)[-1] for one in (first, second)}
    return is_square and first.cut is None and second.cut is None and not words & set(LEAVES)


def _layer_of(tensor: Tensor) -> str:
    """Return the path of a tensor's layer; a tensor whose last word is unusual, such as `mu`, counts as a layer."""
    at = max(tensor.name.rfind("."), tensor.name.rfind("/"))  # Keras separates by "/"
    path, last = tensor.name[: max(at, 0)], tensor.name[at + 1 :]
    return path if path and last in LEAVES else tensor.name


def _crossed(matches: Sequence[Match], trials: Trials) -> set[str]:
    """Return the first names of the tensors of one shape that the two sides use in another order."""
    by_shape: dict[tuple[int, ...], list[Match]] = collections.defaultdict(list)
    for match in matches:
        by_shape[match.first.shape].append(match)
    groups = [group for group in by_shape.values() if len(group) > 1]
    uses = trials.orders() if groups else ({}, {})
    crossed: set[str] = set()
    for left, right in (pair for group in groups for pair in itertools.combinations(group, 2)):
        first = uses[0].get(left.first.source, 0) - uses[0].get(right.first.source, 0)
        second = uses[1].get(left.second.source, 0) - uses[1].get(right.second.source, 0)
        if first * second < 0:
            crossed |= {left.first.name, right.first.name}
    return crossed


def _is_word(spelled: str) -> bool:
    """Return whether a layer has a proper name, not a number or a class with a number."""
    return spelled.replace("_", "").isalpha()


def _by_configs(pair: Pair, sides: tuple[object, object], matcher: Matcher) -> Pairing | None:
    own = _rules_of_configs(pair, sides)
    if own is not None:
        with contextlib.suppress(ValueError):
            parameters = matcher.carrying.parameters
            return from_rules(own, parameters["first"], parameters["second"])
    return None


def _by_names(pair: Pair, rules: object, matcher: Matcher, *, fold: bool) -> tuple[Matcher, Pairing]:
    """Return the pairing that rules and names give, and the matcher of the parameters that it is of."""
    try:
        return matcher, matcher.proposed()
    except UnpairedError as error:
        folded = _folded(pair, rules) if fold else None
        return folded or (matcher, matcher.completed(error))


def _folded(pair: Pair, rules: object) -> tuple[Matcher, Pairing] | None:
    """Pair the parameters with the biases of one side's recurrent layers added, if that gives a bijection."""
    for side in SIDES:
        subject, weights = pair.subject(side), pair.own_weights[side]
        added = folds(subject.parameters())
        if not added:
            continue
        folded = FoldedSubject(subject, added)
        setattr(pair, side, folded)
        pair.own_weights[side] = widened(weights_held(folded, pair.shown[side]), folded, calls.common_dtype(weights))
        with contextlib.suppress(WeightsMismatchError):
            matcher = Matcher(pair, rules, Trials(pair))
            pairing = matcher.proposed()
            names = ", ".join(f"{one.folded} to {one.kept}" for one in added)
            pair.notes.append(
                f"{pair.shown[side]} adds two biases of a recurrent layer and the other side holds one: they are "
                f"judged as their sum ({names})"
            )
            return matcher, pairing
        setattr(pair, side, subject)
        pair.own_weights[side] = weights
    return None


def _rules_of_configs(pair: Pair, sides: tuple[object, object]) -> Rules | None:
    """Return the rules of our own modules inside both sides, None if they have no such modules or those differ."""
    if (pair.first.kind, pair.second.kind) != ("torch module", "NNX module"):
        return None
    readers = [backends.load(pair.subject(side).framework) for side in SIDES]
    configs = [reader.find_configs(module) for reader, module in zip(readers, sides, strict=True)]
    if not configs[0] or configs[0].keys() != configs[1].keys():
        return None
    with contextlib.suppress(ValueError):
        check_same_meaning(*configs)
        return own_rules(readers[0], sides[0])
    return None


class Matcher:
    """Tries pairings of a pair's weights, and records which state takes part and which is set aside.

    Args:
        pair: the pair.
        rules: the caller's rules; they apply to state as they do to parameters.
        trials: tries pairings.
    """

    def __init__(self, pair: Pair, rules: Any, trials: Trials):
        self._pair = pair
        self.carrying, self.trials = Carrying(pair), trials
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
                self._given = partial(rules, ours, theirs, labels=self._labels)
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
        settled = Partial(self._given.matches, self._left_out)
        ours, theirs = (self.carrying.taking_part(side) for side in SIDES)
        trials = self.trials
        pairing = propose(ours, theirs, trials.distance, settled, self._labels, trials.orders, trials.limit)
        return _doubted(pairing, *self._doubts)

    def completed(self, error: UnpairedError) -> Pairing:
        """Return a pairing with state added and parameters set aside until there is a bijection.

        Raises:
            UnpairedError: there is still none.
        """
        # The surest step first: an equal name, then weights that change nothing. Shapes decide only on what these
        # leave, and a frozen weight is given up last.
        steps: tuple[Callable[[UnpairedError], bool], ...] = (self._by_name, self._idle, self._fitting, self._frozen)
        before_fitting: UnpairedError | None = None
        while True:
            step = next((step for step in steps if step(error)), None)
            if step is None:
                raise self.refused(before_fitting or error)
            # A refusal names what was left over before shapes were tried: what is left after them may follow from a
            # wrong guess.
            if step == self._fitting:
                before_fitting = before_fitting or error
            try:
                pairing = self.proposed()
            except UnpairedError as following:
                error = following
                continue
            if before_fitting is None:
                return pairing
            if self.trials.distance(pairing) < AGREE:
                return _by_run(pairing, self._fitted)
            if not self._is_only:
                raise self.refused(before_fitting)
            return _doubted(pairing, _on_fit(self._fitted))

    def with_state(self, pairing: Pairing) -> Pairing:
        """Return a pairing with the state that both sides hold, where the outputs differ without it."""
        if not self._pair.transfer:
            return pairing
        frozen = [name for side, name, why in pairing.dropped if side == "first" and why.startswith(state.FROZEN)]
        parameters = self.carrying.parameters["first"]
        ours = [*self._free("first"), *(whole(name, parameters[name]) for name in frozen)]
        theirs = self._free("second")
        if not ours or not theirs:
            return pairing
        pairs = [one for one in suited(ours, theirs) if not self.carrying.are_same(one)]
        if not pairs or self.trials.largest_distance(pairing) < AGREE:
            return pairing
        # Named pairs first: the distances that decide on pairs by shape are then measured with them.
        for are_named in (True, False):
            some = [one for one in pairs if one.is_named == are_named and self.carrying.may_carry(one)]
            pairing = self._added(pairing, some) if some else pairing
        tables = [one for one in pairs if one.is_named and not self.carrying.may_carry(one)]
        return _doubted(pairing, *map(self._on_table, tables))

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
            leftovers = (({one.source for one in error.first}, first), ({one.source for one in error.second}, second))
            advice = "; ".join(filter(None, (folding(names, of_side) for names, of_side in leftovers)))
            if not advice:
                rules = rules_for(error, (first, second), (self._free("first"), self._free("second")))
                advice = f"rules that would settle it (rules=, --rules): {rules}"
            text += f"; {advice}"
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
                used = self.trials.uses(side)
                unused = [name for name in self.carrying.taking_part(side) if used and name not in used]
                idle += [(side, name) for name in self._without_effect(side, unused)]
        self._dropped += [(side, name, state.IDLE) for side, name in idle]
        return bool(idle)

    def _without_effect(self, side: Side, names: Iterable[str]) -> list[str]:
        done = {name for where, name, _ in self._left_out if where == side}
        return self.trials.without_effect(side, [name for name in names if name not in done])

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

    def _settled(self, suited: Suited, side: Side) -> bool:
        """Carry the state of a pair, or set the other tensor aside where code computes one of them."""
        own, other = (suited.first, suited.second) if side == "first" else (suited.second, suited.first)
        are_same = self.carrying.are_same(suited)
        if self.carrying.may_carry(suited) or (own.parameter.persistent and are_same):
            return self.carrying.add(side, [own.source])
        if (OTHER[side], other.source) in {(where, name) for where, name, _ in self._dropped}:
            return False
        why = (
            f"{own.name} of {self._pair.shown[side]} is a table that code computes, so each side keeps its own numbers"
        )
        self._dropped.append((OTHER[side], other.source, why))
        self._doubts += [] if are_same else [self._on_table(suited)]
        return True

    # ---- state

    @property
    def _left_out(self) -> tuple[tuple[str, str, str], ...]:
        return (*self._given.dropped, *self._dropped)

    def _free(self, side: Side) -> list[Tensor]:
        return self.carrying.free(side, self._left_out)

    def _on_table(self, suited: Suited) -> str:
        first, second = (f"{tensor.name} of {label}" for tensor, label in zip(_both(suited), self._labels, strict=True))
        return (
            f"{first} and {second} differ and are not carried, as code seems to compute them; a rule carries them: "
            f"{rule_of(suited.first.source, suited.second.source)}"
        )

    def _added(self, pairing: Pairing, pairs: list[Suited]) -> Pairing:
        """Return a pairing with state added; without equal names, only if the outputs agree, or come nearer, by it."""
        names = self.carrying.names
        first, second = ({_both(one)[at].source: _both(one)[at].parameter for one in pairs} for at in (0, 1))
        self.carrying.add("first", first)
        self.carrying.add("second", second)
        dropped = tuple(row for row in pairing.dropped if row[0] == "second" or row[1] not in first)

        def together(more: Pairing) -> Pairing:
            return dataclasses.replace(pairing, matches=(*pairing.matches, *more.matches), dropped=dropped)

        def distance(more: Pairing) -> float:
            return self.trials.distance(together(more))

        with contextlib.suppress(ValueError):
            joint = together(propose(first, second, distance, labels=self._labels))
            if all(one.is_named for one in pairs):
                return joint
            reached = self.trials.largest_distance(joint)
            if reached < AGREE:
                return _by_run(joint, pairs)
            if all(one.is_only for one in pairs) and reached < NEARER * self.trials.largest_distance(pairing):
                return _doubted(joint, _on_fit(pairs))
        for side in SIDES:
            self.carrying.set(side, names[side])
        return pairing


def _by_run(pairing: Pairing, pairs: Iterable[Suited]) -> Pairing:
    """Return a pairing in which pairs of equal shapes alone are confirmed by a run."""
    names = {one.first.source for one in pairs}
    matches = (
        dataclasses.replace(match, how="probe") if match.first.source in names else match for match in pairing.matches
    )
    return dataclasses.replace(pairing, matches=tuple(matches))


def _on_fit(pairs: Iterable[Suited]) -> str:
    names = listed([f"{one.first.name} = {one.second.name}" for one in pairs])
    return f"paired by shape alone, as one of the two is state: {names}; rules of your own settle it"


def _both(suited: Suited) -> tuple[Tensor, Tensor]:
    return suited.first, suited.second


def _doubted(pairing: Pairing, *doubts: str) -> Pairing:
    return dataclasses.replace(pairing, doubt="; ".join(dict.fromkeys(filter(None, [pairing.doubt, *doubts]))))


def _sources(error: UnpairedError) -> dict[Side, list[str]]:
    """Return the names of the parameters that are left over, by side."""
    return {
        "first": list(dict.fromkeys(tensor.source for tensor in error.first)),
        "second": list(dict.fromkeys(tensor.source for tensor in error.second)),
    }
