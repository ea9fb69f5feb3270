"""Pairs the weights of both sides, and the state that belongs to them, by rules, names and trial runs.

Comes in: a `Pair` without a pairing. Goes out: the `Pairing`; state that takes part in it counts among the parameters
of its side from then on. In this order: rules; parameters alone; biases of recurrent layers added; where some are left
over, state of the same name, parameters that no output depends on, state that fits, and frozen parameters. State is
paired with state only if the outputs differ without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from attn_bridge import backends
from attn_bridge.module_weights import check_same_meaning, own_rules
from attn_bridge.weights import Rules, WeightsMismatchError

from .. import pairing as pairings
from ..pair import SIDES, Pair, weights_held, widened
from ..pairing import Pairing, UnpairedError, names
from ..samples import inputs as calls
from ..sides.folded import FoldedSubject, folds
from . import state
from .matcher import Matcher
from .trials import Trials


def complete(
    pair: Pair, sides: tuple[Any, Any], rules: Any, *, fold: bool = False, trials: Trials | None = None
) -> None:
    """Pair the weights of a pair, and note what a reader has to know of it.

    Args:
        pair: the pair; state that is carried, and recurrent biases that are added, become its parameters.
        sides: what the caller gave; None for a side that was recorded.
        rules: what the caller knows.
        fold: whether the biases of recurrent layers may be added.
        trials: tries pairings out; None runs both sides.

    Raises:
        WeightsMismatchError: there is no bijection; names what is left over and the rules that would settle it.
        ValueError: names and runs leave several pairings open, or two rules claim one parameter.
    """
    matcher = Matcher(pair, rules, trials or Trials(pair))
    found = _by_configs(pair, sides, matcher) if rules is None else None
    if found is None:
        matcher, found = _by_names(pair, rules, matcher, fold=fold)
        found = matcher.with_state(found)
    pair.pairing = found
    pair.kept = state.kept(found, pair.first.parameters())
    pair.notes += state.notes(pair, matcher.carrying.state, found)
    pair.notes += _renamed(found)
    pair.notes += state.dropped_notes(pair)
    pair.notes += [found.doubt] if found.doubt else []
    pair.notes += state.frozen_notes(pair)


def _renamed(pairing: Pairing) -> Iterator[str]:
    """Name the layers with names of their own that trial runs alone paired: they may be exchanged, not renamed."""
    probed = [match for match in pairing.matches if match.how == "probe"]
    first, second = (names.read([match.tensor(side) for match in probed]) for side in SIDES)
    layers = {
        one.layer: two.layer
        for one, two in zip(first, second, strict=True)
        if _is_word(one.spelled) and _is_word(two.spelled) and not {*one.words} & {*two.words}
    }
    if layers:
        pairs = state.listed([f"{one} = {two}" for one, two in layers.items()])
        yield f"paired by trial runs alone, as names do not: {pairs}; rules settle it where they may be exchanged"


def _is_word(spelled: str) -> bool:
    """Tell whether a layer has a name of its own, not a number or a class with a number."""
    return spelled.replace("_", "").isalpha()


def _by_configs(pair: Pair, sides: tuple[Any, Any], matcher: Matcher) -> Pairing | None:
    own = _rules_of_configs(pair, sides)
    if own is not None:
        with contextlib.suppress(ValueError):
            parameters = matcher.carrying.parameters
            return pairings.from_rules(own, parameters["first"], parameters["second"], how="rule")
    return None


def _by_names(pair: Pair, rules: Any, matcher: Matcher, *, fold: bool) -> tuple[Matcher, Pairing]:
    """Return the pairing that rules and names give, and the matcher of the parameters that it is of."""
    try:
        return matcher, matcher.proposed()
    except UnpairedError as error:
        folded = _folded(pair, rules) if fold else None
        return folded or (matcher, matcher.completed(error))


def _folded(pair: Pair, rules: Any) -> tuple[Matcher, Pairing] | None:
    """Pair the parameters with the biases of one side's recurrent layers added, if that gives a bijection."""
    for side in SIDES:
        subject, held = pair.subject(side), pair.held[side]
        added = folds(subject.parameters())
        if not added:
            continue
        folded = FoldedSubject(subject, added)
        setattr(pair, side, folded)
        pair.held[side] = widened(weights_held(folded, pair.shown[side]), folded, calls.common_dtype(held))
        with contextlib.suppress(WeightsMismatchError):
            matcher = Matcher(pair, rules, Trials(pair))
            found = matcher.proposed()
            names = ", ".join(f"{one.folded} to {one.kept}" for one in added)
            pair.notes.append(
                f"{pair.shown[side]} adds two biases of a recurrent layer and the other side holds one: they are "
                f"judged as their sum ({names})"
            )
            return matcher, found
        setattr(pair, side, subject)
        pair.held[side] = held
    return None


def _rules_of_configs(pair: Pair, sides: tuple[Any, Any]) -> Rules | None:
    """Return the rules of our own modules inside both, if there are any."""
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
