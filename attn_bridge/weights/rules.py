"""Weights that cross between torch and Flax: one rule per tensor, both directions derived from it.

A `Rule` holds the two names of a tensor and one einops pattern from the torch axes to the Flax axes; the way back is
the pattern read from right to left. A `Rules` set proves itself a bijection when it is made, before any data moves.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..printable import printable
from . import joint
from .index import NUMBER, Index
from .rule import Rule, Side, rule_from
from .templates import PLACEHOLDER, fill, match
from .toml import read_tables

Arrays = dict[str, np.ndarray]

END = ""
"""Key of what ends in a tree of numbers."""

_SHORT = 8
"""Names that a message may list in front of its advice."""

_NUMBER = re.compile(r"(?:\{[^{}]*\})+|[0-9]+")


class WeightsMismatchError(ValueError):
    """Names or shapes that do not fit, all of them in one message.

    Attributes:
        missing: names that the rules or the target expect and the source lacks.
        unexpected: names that no rule covers or the target lacks.
        misshapen: ``"name: expected (..), got (..)"`` for each wrong shape.
        advice: what would settle it, or ""; the message has it behind the names, in front of many.
    """

    def __init__(
        self,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        misshapen: Iterable[str] = (),
        advice: str = "",
    ):
        self.missing = sorted(set(missing))
        self.unexpected = sorted(set(unexpected))
        self.misshapen = sorted(misshapen)
        self.advice = advice
        one_sided = set(self.missing) & set(self.unexpected)  # each name once
        listings = {
            "missing": [printable(name) for name in self.missing if name not in one_sided],
            "unexpected": [printable(name) for name in self.unexpected if name not in one_sided],
            "without a rule on both sides": [printable(name) for name in sorted(one_sided)],
            "misshapen": [printable(text, 500) for text in self.misshapen],  # a name, and the error of its shape
        }
        parts = [f"{kind}: {', '.join(texts)}" for kind, texts in listings.items() if texts]
        hint = [advice] if advice else []
        is_long = len(self.missing) + len(self.unexpected) > _SHORT
        super().__init__(f"weights do not match: {'; '.join([*hint, *parts] if is_long else [*parts, *hint])}")

    def __reduce__(self) -> tuple[object, ...]:
        """Return the constructor's arguments, to raise the error in another process."""
        return type(self), (self.missing, self.unexpected, self.misshapen, self.advice)


class Rules:
    """A set of rules that is a bijection between torch and Flax tensors; checked before any data moves.

    Raises:
        TypeError: an element is not a `Rule`.
        ValueError: two rules share a name on either side.
    """

    def __init__(self, rules: Iterable[Rule] = ()):
        self._rules = (rules,) if isinstance(rules, Rule) else tuple(rules)
        for rule in self._rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"Rules takes Rule objects, got {type(rule).__name__}")
        self._plain = tuple(rule for rule in self._rules if not rule.is_joint)
        self._check_distinct("torch")
        self._check_distinct("flax")

    @classmethod
    def from_toml(cls, path: str | Path) -> Rules:
        """Load rules from a TOML file of ``[[rule]]`` tables: keys are the arguments of `Rule`, and sizes by letter.

        Raises:
            ValueError: not TOML, an unknown key, or an invalid rule; the message names the line.
            OSError: the file cannot be read.
        """
        tables = read_tables(path)
        rules = [rule_from(table, place) for place, table in tables]
        try:
            return cls(rules)
        except ValueError:
            least, most = 0, len(rules)  # the first `least` rules are valid, the first `most` are not
            while most - least > 1:
                middle = (least + most) // 2
                least, most = (middle, most) if cls._why_wrong(rules[:middle]) is None else (least, middle)
            error = cls._why_wrong(rules[:most])
            raise ValueError(f"{tables[most - 1][0]}: {error}") from error

    @classmethod
    def _why_wrong(cls, rules: list[Rule]) -> ValueError | None:
        try:
            cls(rules)
        except ValueError as error:
            return error
        return None

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __repr__(self) -> str:
        return f"Rules([{', '.join(map(repr, self._rules))}])"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)

    def prefixed(self, torch: str, flax: str) -> Rules:
        """Return the rules for the same tensors inside a larger module, below dotted prefixes (empty = none)."""
        return Rules(rule.prefixed(torch, flax) for rule in self._rules)

    def convert(self, arrays: Mapping[str, np.ndarray], source: Side) -> Arrays:
        """Convert named arrays from the `source` side to the other; the result shares no memory with `arrays`.

        Raises:
            TypeError: a value is not a NumPy array of numbers.
            WeightsMismatchError: missing, unexpected and misshapen names, all at once.
        """
        _check_arrays(arrays)
        plan = self.plan_joint(arrays, source)
        pairs, lacking, unexpected = self.plain.pair([name for name in arrays if name not in plan.used], source)
        converted, wrong = convert_pairs(pairs, arrays, source)
        missing, misshapen = plan.missing + lacking, plan.misshapen + wrong
        if missing or unexpected or misshapen:
            raise WeightsMismatchError(missing, unexpected, misshapen)
        return converted | {name: made.build(arrays) for name, made in plan.made.items()}

    @property
    def plain(self) -> Rules:
        """The rules between two single tensors."""
        return Rules(self._plain) if len(self._plain) < len(self) else self

    def plan_joint(self, arrays: Mapping[str, joint.Sized], source: Side) -> joint.JointPlan:
        """Plan the arrays that the rules between one tensor and several make, reading no data.

        Raises:
            ValueError: two rules cover one name.
        """
        result = joint.JointPlan()
        for rule, covered in joint.covered(self._rules, arrays, source):
            made = joint.plan(rule, {name: arrays[name] for name in covered}, source)
            twice = sorted(made.used & result.used) or [name for name in made.made if name in result.made]
            if twice:
                raise ValueError(f"{printable(twice[0])} must be covered by exactly one rule")
            result.made |= made.made
            result.used |= made.used
            result.missing += made.missing
            result.misshapen += made.misshapen
        return result

    def pair(self, names: Iterable[str], source: Side) -> tuple[dict[str, tuple[Rule, str]], list[str], list[str]]:
        """Pair each name of the `source` side with its rule and its name on the other side.

        Returns:
            The pairs, the names that the rules miss, and the names that no rule covers.

        Raises:
            ValueError: two rules claim one name, or two names map to one; or a rule is between one tensor and several.
        """
        joint = next((rule for rule in self._rules if rule.is_joint), None)
        if joint is not None:
            raise ValueError(f"{joint.where}{joint}: is between several tensors, which have no pairs of names")
        target: Side = "flax" if source == "torch" else "torch"
        index = Index[Rule](((rule.name(source), rule) for rule in self._rules), integers=None)
        pairs: dict[str, tuple[Rule, str]] = {}
        unexpected: list[str] = []
        seen: dict[Rule, set[str]] = {rule: set() for rule in self._rules}
        blocks: dict[str, set[str]] = {}
        claimed: dict[str, str] = {}
        for name in names:
            hits = [(rule, values) for rule in index.find(name) if (values := rule.values(name, source)) is not None]
            if not hits:
                unexpected.append(name)
                continue
            if len(hits) > 1:
                claims = ", ".join(str(hit[0]) for hit in hits)
                raise ValueError(f"{printable(name)} must be covered by exactly one rule, got {claims}")
            rule, values = hits[0]
            other = fill(rule.name(target), values)
            if other in claimed:
                raise ValueError(f"{claimed[other]} and {name} both map to {other}")
            claimed[other] = name
            pairs[name] = (rule, other)
            for scope in _scopes(rule.torch):
                blocks.setdefault(scope, set()).add(fill(scope, values))
            seen[rule].add(fill(_scopes(rule.torch)[-1], values))
        return pairs, self._missing(seen, blocks, source), unexpected

    def _missing(self, seen: dict[Rule, set[str]], blocks: dict[str, set[str]], source: Side) -> list[str]:
        """Return missing names: a rule must match in every repeated block in which any rule matches."""
        missing = []
        for rule, block_names in seen.items():
            scope = _scopes(rule.torch)[-1]
            for block in blocks.get(scope, set()) - block_names:
                values = match(scope, block)
                assert values is not None, "a block is its own scope, filled in"
                missing.append(fill(rule.name(source), values))
            if not block_names and not blocks.get(scope):
                missing.append(rule.name(source))
        return missing

    def _check_distinct(self, side: Side) -> None:
        """Refuse two rules that may match the same name; names that differ in more than numbers cannot clash."""
        counts = collections.Counter(name for rule in self._rules if rule.is_joint for name in _names_of(rule, side))
        shared = {name for name, count in counts.items() if count > 1}
        shared |= {rule.name(side) for rule in self._plain} & counts.keys()
        if shared:
            raise ValueError(f"two rules share the {side} name {min(shared)}")
        alike: dict[tuple[str, ...], list[str]] = {}
        for rule in self._plain:
            alike.setdefault(tuple(_NUMBER.split(rule.name(side))), []).append(rule.name(side))
        for names in alike.values():
            twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
            if twice is not None:
                raise ValueError(f"two rules share the {side} name {twice}")
            clash = _overlap(names)
            if clash is not None:
                raise ValueError(f"two rules cover the same {side} names: {clash[0]} and {clash[1]}")


def torch_to_flax(arrays: Mapping[str, np.ndarray], rules: Rules | Iterable[Rule]) -> Arrays:
    """Convert torch-named arrays to Flax-named ones, bit for bit.

    Args:
        arrays: dotted torch name -> array, any memory order, any dtype of numbers; NaNs keep their bits.
        rules: the rule set, such as ``module.config.rules()``.

    Returns:
        Dotted Flax name -> C-contiguous array that shares no memory with the input.

    Raises:
        TypeError: a value is not a NumPy array of numbers.
        WeightsMismatchError: (a ValueError) lists every missing, unexpected and misshapen name.

    Example:
        >>> rules = Rules([Rule("fc.{i}.weight", "fc_{i}.kernel", "o i -> i o")])
        >>> kernels = torch_to_flax({"fc.0.weight": np.ones((2, 3))}, rules)
        >>> {name: array.shape for name, array in kernels.items()}
        {'fc_0.kernel': (3, 2)}
        >>> list(flax_to_torch(kernels, rules))
        ['fc.0.weight']
    """
    return as_rules(rules).convert(arrays, "torch")


def flax_to_torch(arrays: Mapping[str, np.ndarray], rules: Rules | Iterable[Rule]) -> Arrays:
    """Convert Flax-named arrays to torch-named ones, bit for bit: `torch_to_flax` read backwards."""
    return as_rules(rules).convert(arrays, "flax")


def _check_arrays(arrays: Mapping[str, object]) -> None:
    if not isinstance(arrays, Mapping):
        raise TypeError(f"arrays must be a mapping from names to NumPy arrays, got {type(arrays).__name__}")
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"names must be strings, got {name!r}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{printable(name)} must be a NumPy array, got {type(array).__name__}")
        # bfloat16 and the float8 types of ml_dtypes have the kind V, as structured dtypes do.
        if array.dtype.kind not in "biufc" and not hasattr(ml_dtypes, array.dtype.name):
            raise TypeError(f"{printable(name)} must hold numbers, got dtype {array.dtype}")


def convert_pairs(
    pairs: Mapping[str, tuple[Rule, str]], arrays: Mapping[str, np.ndarray], source: Side
) -> tuple[Arrays, list[str]]:
    """Convert arrays into fresh memory, and list those that do not fit."""
    converted: Arrays = {}
    misshapen: list[str] = []
    for name, (rule, other) in pairs.items():
        try:
            converted[other] = np.array(rule.convert(arrays[name], source), order="C", copy=True)
        except ValueError as error:
            misshapen.append(f"{printable(name)}: {error}")
    return converted, misshapen


def _names_of(rule: Rule, side: Side) -> tuple[str, ...]:
    return rule.torch_names if side == "torch" else rule.flax_names


def as_rules(rules: Rules | Iterable[Rule]) -> Rules:
    """Return rules as a set that has proved itself a bijection.

    Raises:
        TypeError: they are not rules.
    """
    if not isinstance(rules, Iterable) or isinstance(rules, (str, bytes, Mapping)):
        raise TypeError(f"rules must be Rules or a list of Rule, got {type(rules).__name__}")
    return rules if isinstance(rules, Rules) else Rules(rules)


def _scopes(template: str) -> list[str]:
    """Return a name's prefixes up to each of its placeholders, "" first: the repeated blocks around it."""
    return ["", *(template[: match.end()] for match in PLACEHOLDER.finditer(template))]


def _overlap(names: list[str]) -> tuple[str, str] | None:
    """Return two templates that match a common name, among templates that differ in numbers and placeholders alone.

    They are stored in a tree by their numbers, in the order of the fewest placeholders: the tree branches early, and a
    placeholder, which matches every number, visits little of it.
    """
    if len(names) < 2:
        return None
    numbers = [[NUMBER if token[0] == "{" else token for token in _NUMBER.findall(name)] for name in names]
    order = sorted(range(len(numbers[0])), key=lambda at: sum(tokens[at] is NUMBER for tokens in numbers))
    root: dict[str | None, Any] = {}
    for name, tokens in zip(names, numbers, strict=True):
        nodes = [root]
        for at in order:
            keys = (tokens[at], NUMBER)
            nodes = [node[key] for node in nodes for key in (node if tokens[at] is NUMBER else keys) if key in node]
        if nodes:
            before = str(nodes[0][END])
            return (before, name) if "{" in before else (name, before)
        node = root
        for at in order:
            node = node.setdefault(tokens[at], {})
        node[END] = name
    return None
