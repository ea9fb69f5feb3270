"""The tensors that a pairing leaves over: which state suits them, and the rules that would settle them.

Comes in: tensors of both sides. Goes out: pairs of names, or rules as text. Nothing here runs a side.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from attn_bridge.weights import WeightsMismatchError

from ..sides.arrays import class_of
from .assignment import TensorSides, equals, template
from .tensors import Match, Tensor, unstacked

DROP = "REASON"
"""Stands for the reason that a user has to give for a rule that drops."""

_LETTERS = "ijklmn"


class UnpairedError(WeightsMismatchError):
    """Raised when the parameters of both sides have no bijection.

    Attributes:
        first: unpaired tensors of the first side.
        second: unpaired tensors of the second side.
    """

    def __init__(
        self,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        misshapen: Iterable[str] = (),
        first: Sequence[Tensor] = (),
        second: Sequence[Tensor] = (),
    ):
        super().__init__(missing, unexpected, misshapen)
        self.first, self.second = tuple(first), tuple(second)


@dataclasses.dataclass(frozen=True)
class Suited:
    """Two tensors that may be the same.

    Attributes:
        first: the tensor of the first side.
        second: the tensor of the second side.
        is_named: whether their names agree; otherwise only their shapes and dtypes fit.
        is_only: whether every other tensor that fits either differs from its counterpart in numbers alone.
    """

    first: Tensor
    second: Tensor
    is_named: bool
    is_only: bool


def suited(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Suited]:
    """Return the tensors of two lists that suit each other: by equal names, then by shapes as names speak for them.

    Stacks are taken apart where the other list has their layers. A last word of a name that is equal counts as an
    equal name where nothing else of that word suits, because modules of two libraries are rarely called the same.
    """
    from scipy.optimize import linear_sum_assignment  # JAX brings scipy

    if not first or not second:
        return []
    first, second = unstacked(first, second), unstacked(second, first)
    sides = TensorSides(first, second)
    kinds = [np.array([class_of(one.parameter.dtype) for one in side], dtype=object) for side in (first, second)]
    scores = np.where(kinds[0][:, None] == kinds[1][None, :], sides.likeness(), -np.inf)
    named = [(i, j) for i, j in equals(sides) if math.isfinite(scores[i, j])]
    rest = scores.copy()
    rest[[i for i, _ in named], :], rest[:, [j for _, j in named]] = -np.inf, -np.inf
    # Forbidden pairs have a large finite cost, as in `assignment.best`, and are left out behind.
    rows, columns = linear_sum_assignment(np.where(np.isfinite(rest), -rest, 1e6))
    fitting = [(int(i), int(j)) for i, j in zip(rows, columns, strict=True) if math.isfinite(rest[i, j])]
    names = [[template(one.spelled) for one in side] for side in (first, second)]

    def is_only(i: int, j: int) -> bool:
        others = {names[1][k] for k in np.flatnonzero(np.isfinite(rest[i]))}
        # Two templates at most: one name per side, but for its numbers.
        return len(others | {names[0][k] for k in np.flatnonzero(np.isfinite(rest[:, j]))}) <= 2 and len(others) == 1

    lasts = [[one.spelled.rpartition(".")[2] for one in side] for side in (first, second)]

    def is_named(i: int, j: int) -> bool:
        word = lasts[0][i]
        if word != lasts[1][j] or _numbers(first[i].spelled) != _numbers(second[j].spelled):
            return False
        theirs = {names[1][k] for k in np.flatnonzero(np.isfinite(rest[i])) if lasts[1][k] == word}
        ours = {names[0][k] for k in np.flatnonzero(np.isfinite(rest[:, j])) if lasts[0][k] == word}
        return len(theirs) == len(ours) == 1

    pairs = [Suited(first[i], second[j], is_named=True, is_only=True) for i, j in named]
    for i, j in fitting:
        alone = is_only(i, j)
        pairs.append(Suited(first[i], second[j], is_named(i, j), alone))
    return pairs


# ---- advice, and rules that a user may paste

_PARAMETRISED = re.compile(r"(?:(.*)\.)?parametrizations\.(\w+)\.original\d*")
_NORMED = re.compile(r"(?:(.*)\.)?(\w+)_[gv]")


def folding(leftover: Iterable[str], names: Collection[str]) -> str:
    """Return the call that folds a weight which torch computes from leftover tensors; "" where it computes none.

    The other side has the weight itself, which no rule makes of them.

    Args:
        leftover: names of the tensors that a side has left over.
        names: of all its tensors.
    """
    for name in sorted(leftover):
        hit, call = _PARAMETRISED.fullmatch(name), "torch.nn.utils.parametrize.remove_parametrizations"
        if hit is None and {f"{name[:-1]}g", f"{name[:-1]}v"} <= {*names}:
            hit, call = _NORMED.fullmatch(name), "torch.nn.utils.remove_weight_norm"
        if hit is not None:
            module, weight = f"module.{hit[1]}" if hit[1] else "module", hit[2]
            return f"the module computes {weight} from {name}, so fold it first: {call}({module}, {weight!r})"
    return ""


def rules_for(
    error: UnpairedError,
    parameters: tuple[Mapping[str, object], Mapping[str, object]],
    state: tuple[list[Tensor], list[Tensor]],
) -> str:
    """Return the smallest set of rules that settles the leftover tensors, as a line of TOML.

    Args:
        error: lists the leftover tensors.
        parameters: the parameters of both sides by name; a pattern must cover only the parameters it is meant for.
        state: tensors of the state of both sides, which a rule may pair with leftover tensors.
    """
    first, second = (list({one.source: one for one in side}.values()) for side in (error.first, error.second))
    pairs = [*suited(state[0], second), *suited(first, state[1])]
    pairs = [one for one in pairs if _pattern(one) is not None and one.first.cut is None and one.second.cut is None]
    done = {one.first.source for one in pairs}, {one.second.source for one in pairs}
    rules = _paired_rules(pairs, (parameters[0].keys() | {one.name for one in state[0]}))
    for key, side, names in (("first", first, done[0]), ("second", second, done[1])):
        own = parameters[0 if key == "first" else 1]
        rules += _dropping_rules(key, [one.source for one in side if one.source not in names], own)
    return f"rule = [{', '.join(rules)}]"


def rules_of(matches: Sequence[Match], names: Collection[str]) -> str:
    """Return rules for some of the pairs as a line of TOML; "" if a rule cannot express one of them.

    A rule cannot express a part of a tensor, or a flipped axis.

    Args:
        matches: all pairs; a pattern must not contradict any of the others.
        names: first-side names of the pairs to write rules for.
    """
    patterns: dict[str, set[tuple[str, str]]] = collections.defaultdict(set)
    for match in matches:
        patterns[_lettered(match.first.source)].add(_lettered_pair(match))
    rules: dict[str, None] = {}
    for match in matches:
        if match.first.name not in names:
            continue
        if match.first.cut is not None or match.second.cut is not None or match.text:
            return ""
        first, second = _lettered_pair(match)
        if len(patterns[first]) > 1:
            first, second = match.first.source, match.second.source
        pattern: dict[str, str | int] = {"pattern": match.rule.pattern} if match.rule.pattern != "... -> ..." else {}
        rules[_table({"first": first, "second": second, **pattern, **match.rule.sizes})] = None
    return f"rule = [{', '.join(rules)}]"


def _lettered_pair(match: Match) -> tuple[str, str]:
    """Return the names of a pair with a placeholder for each number, as they are where their numbers differ."""
    names = match.first.source, match.second.source
    return (_lettered(names[0]), _lettered(names[1])) if _numbers(names[0]) == _numbers(names[1]) else names


def rule_of(first: str, second: str) -> str:
    """Return the rule that pairs two tensors, as a line of TOML."""
    return f"rule = [{_table({'first': first, 'second': second})}]"


def _pattern(suited_pair: Suited) -> str | None:
    """Return the axis pattern between two tensors, "" for equal axes; None where a short rule cannot express it."""
    ways = TensorSides([suited_pair.first], [suited_pair.second]).options(0, 0).ways
    if not ways or ways[0].flips or ways[0].sizes:
        return None
    return "" if ways[0].pattern == "... -> ..." else ways[0].pattern


def _paired_rules(pairs: Sequence[Suited], names: Iterable[str]) -> list[str]:
    groups: dict[tuple[str, str, str], list[Suited]] = collections.defaultdict(list)
    for suited_pair in pairs:
        key = (_lettered(suited_pair.first.source), _lettered(suited_pair.second.source), _pattern(suited_pair) or "")
        same = _numbers(suited_pair.first.source) == _numbers(suited_pair.second.source)
        groups[key if same else (suited_pair.first.source, suited_pair.second.source, key[2])].append(suited_pair)
    every = collections.Counter(map(_lettered, names))
    rules = []
    for (first, second, pattern), some in groups.items():
        more = {"pattern": pattern} if pattern else {}
        is_whole = len(some) > 1 and every[first] == len(some)
        name_pairs = [(first, second)] if is_whole else [(one.first.source, one.second.source) for one in some]
        rules += [_table({"first": one, "second": two} | more) for one, two in name_pairs]
    return rules


def _dropping_rules(key: str, names: Sequence[str], names_of_side: Iterable[str]) -> list[str]:
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        groups[_lettered(name)].append(name)
    every = collections.Counter(map(_lettered, names_of_side))
    listed_names: list[str] = []
    for lettered, some in groups.items():
        listed_names += [lettered] if len(some) > 1 and every[lettered] == len(some) else some
    return [_table({key: name, "drop": DROP}) for name in listed_names]


def _table(entries: Mapping[str, str | int]) -> str:
    return "{" + ", ".join(f"{key} = {_value(value)}" for key, value in entries.items()) + "}"


def _value(value: str | int) -> str:
    """Return an integer as it is, and text quoted with backslashes and quotes escaped."""
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _numbers(name: str) -> list[str]:
    return re.findall(r"[0-9]+", name)


def _lettered(name: str) -> str:
    """Return a name with a placeholder for each of its numbers; unchanged where there are too many."""
    if len(_numbers(name)) > len(_LETTERS):
        return name
    letters = iter(_LETTERS)
    return re.sub(r"[0-9]+", lambda hit: f"{{{next(letters)}}}", name)
