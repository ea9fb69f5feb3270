"""Weights that cross between torch and Flax: one rule per tensor, both directions derived from it.

A `Rule` holds the two names of a tensor and one einops pattern from the torch axes to the Flax axes; the way back is
the pattern read from right to left. A `Rules` set proves itself a bijection when it is made, before any data moves.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import einops
import ml_dtypes
import numpy as np

from .printable import printable

Arrays = dict[str, np.ndarray[Any, Any]]
Side = Literal["torch", "flax"]

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_INDEX = r"(0|[1-9][0-9]*)"
_AXIS = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
_NUMBER = re.compile(r"\{[^{}]*\}|[0-9]+")
_MOST_AXES = 12


class WeightsMismatchError(ValueError):
    """Names or shapes that do not fit, all of them in one message.

    Attributes:
        missing: names that the rules or the target expect and the source lacks.
        unexpected: names that no rule covers or the target lacks.
        misshapen: ``"name: expected (..), got (..)"`` for each wrong shape.
    """

    def __init__(self, missing: Iterable[str] = (), unexpected: Iterable[str] = (), misshapen: Iterable[str] = ()):
        self.missing = sorted(missing)
        self.unexpected = sorted(unexpected)
        self.misshapen = sorted(misshapen)
        shown = {
            "missing": [printable(name) for name in self.missing],
            "unexpected": [printable(name) for name in self.unexpected],
            "misshapen": [printable(text, 500) for text in self.misshapen],  # a name, and what is wrong with its shape
        }
        parts = [f"{kind}: {', '.join(texts)}" for kind, texts in shown.items() if texts]
        super().__init__(f"weights do not match: {'; '.join(parts)}")


class Rule:
    """One tensor's two names and the einops pattern from its torch axes to its Flax axes.

    ``Rule("h.{i}.attn.q.weight", "h.{i}.attn.q.kernel", "(h d) e -> e h d", h=8)``: ``{i}`` stands for an integer, the
    same on both sides; sizes that a pattern needs are keywords.

    Args:
        torch: dotted torch name.
        flax: dotted Flax name, with the same placeholders.
        pattern: einops pattern, torch axes first; the default leaves every axis where it is.
        **sizes: size of an axis of the pattern.

    Raises:
        TypeError: a name, the pattern or a size has the wrong type.
        ValueError: the two sides do not hold the same axes or placeholders, or a size is missing.
    """

    __slots__ = ("flax", "pattern", "sizes", "torch")

    torch: str
    flax: str
    pattern: str
    sizes: dict[str, int]

    def __init__(self, torch: str, flax: str, pattern: str = "... -> ...", **sizes: int):
        for label, value in (("torch", torch), ("flax", flax), ("pattern", pattern)):
            if not isinstance(value, str):
                raise TypeError(f"{label} must be a string, got {type(value).__name__}")
        self.torch, self.flax, self.pattern, self.sizes = torch, flax, pattern, dict(sizes)
        if _placeholders(torch) != _placeholders(flax):
            raise ValueError(f"{self}: both names must hold the same placeholders")
        for name in (torch, flax):
            bare = _PLACEHOLDER.sub("", name)
            if "{" in bare or "}" in bare or re.search(r"(\}|[0-9])\{|\}[0-9]", name):
                raise ValueError(f"{self}: a placeholder in {name!r} must not touch a digit, a brace or another one")
        self._prove()

    def __repr__(self) -> str:
        sizes = "".join(f", {axis}={size!r}" for axis, size in self.sizes.items())
        return f"Rule({self.torch!r}, {self.flax!r}, {self.pattern!r}{sizes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.torch, self.flax, self.pattern, tuple(sorted(self.sizes.items())))

    def name(self, side: Side) -> str:
        """Return the name on one side."""
        return self.torch if side == "torch" else self.flax

    def convert(self, array: np.ndarray[Any, Any], source: Side) -> np.ndarray[Any, Any]:
        """Rearrange one array from the `source` side to the other; the bits of its elements stay as they are.

        Returns a view where einops can give one. Raises ValueError if the shape does not fit the pattern.
        """
        pattern = self.pattern if source == "torch" else _reversed(self.pattern)
        try:
            return einops.rearrange(array, pattern, **self.sizes)
        except einops.EinopsError as error:
            sizes = "".join(f", {axis}={size}" for axis, size in self.sizes.items())
            raise ValueError(f"shape {array.shape} does not fit {pattern!r}{sizes}") from error

    def convert_shape(self, shape: tuple[int, ...], source: Side) -> tuple[int, ...]:
        """Return the shape that an array of `shape` has on the other side, without making one."""
        result: tuple[int, ...] = self.convert(np.broadcast_to(np.empty((), np.bool_), shape), source).shape
        return result

    def prefixed(self, torch: str, flax: str) -> Rule:
        """Return the rule for the same tensor inside a larger module, below dotted prefixes (empty = none)."""
        return Rule(_join(torch, self.torch), _join(flax, self.flax), self.pattern, **self.sizes)

    def _prove(self) -> None:
        """Push an array of unique ids through the pattern and back: the proof that the rule is a bijection."""
        left, arrow, right = self.pattern.partition("->")
        if not arrow or "->" in right:
            raise ValueError(f"{self}: pattern must read 'torch axes -> flax axes'")
        if re.search(r"\([^()]*\.\.\.", self.pattern):
            raise ValueError(f"{self}: ... must not stand in parentheses")
        left, right = (side.replace("...", "first_of_the_rest last_of_the_rest") for side in (left, right))
        axes = _AXIS.findall(left)
        for size_of, size in self.sizes.items():
            if size_of not in axes:
                raise ValueError(f"{self}: size given for {size_of!r}, which is no axis of the pattern")
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{self}: size of {size_of!r} must be an integer, got {type(size).__name__}")
            if size < 1:
                raise ValueError(f"{self}: size of {size_of!r} ({size}) must be at least 1")
        for side in (left, right):
            for group in re.findall(r"\(([^()]*)\)", side):
                unknown = [axis for axis in _AXIS.findall(group) if axis not in self.sizes]
                if len(unknown) > 1:
                    raise ValueError(f"{self}: ({group}) needs the size of {' or '.join(unknown)} as a keyword")
        if len(axes) > _MOST_AXES:
            raise ValueError(f"{self}: {len(axes)} axes, more than {_MOST_AXES}")
        # Which axis goes where does not depend on the sizes, so small ones stand in for the real ones.
        sizes = {axis: 2 + position % 2 for position, axis in enumerate(axes)}
        known = {axis: sizes[axis] for axis in self.sizes}
        atoms = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        try:
            ids = einops.rearrange(atoms, f"{' '.join(axes)} -> {left}")
            there = einops.rearrange(ids, f"{left} -> {right}", **known)
            back = einops.rearrange(there, f"{right} -> {left}", **known)
        except einops.EinopsError as error:
            raise ValueError(f"{self}: pattern is not a bijection of axes") from error
        if back.shape != ids.shape or not np.array_equal(back, ids) or np.unique(there).size != ids.size:
            raise ValueError(f"{self}: pattern is not a bijection of axes")


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
        self._check_distinct("torch")
        self._check_distinct("flax")

    @classmethod
    def from_toml(cls, path: str | Path) -> Rules:
        """Load rules from a TOML file of ``[[rule]]`` tables: ``torch``, ``flax``, ``pattern``, and sizes by letter.

        Raises:
            ValueError: not TOML, an unknown key, or a rule that is none; the message names the line.
            OSError: the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            document = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
        tables = document.pop("rule", [])
        if document:
            raise ValueError(f"{path}: a rules file holds [[rule]] tables and nothing else, got {', '.join(document)}")
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ValueError(f"{path}: rule must be tables, each headed [[rule]]")
        lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
        places = [f"{path}, line {line}" for line in lines] if len(lines) == len(tables) else [str(path)] * len(tables)
        rules: list[Rule] = []
        for table, place in zip(tables, places, strict=True):
            try:
                if not {"torch", "flax"} <= table.keys():
                    raise ValueError(f"a rule needs the keys torch and flax, got {', '.join(table) or 'none'}")
                rules.append(Rule(**table))
                cls(rules)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{place}: {error}") from error
        return cls(rules)

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

    def convert(self, arrays: Mapping[str, np.ndarray[Any, Any]], source: Side) -> Arrays:
        """Convert named arrays from the `source` side to the other; the result shares no memory with `arrays`.

        Raises:
            TypeError: a value is no NumPy array of numbers.
            WeightsMismatchError: missing, unexpected and misshapen names, all at once.
        """
        _check_arrays(arrays)
        pairs, missing, unexpected = self.pair(arrays, source)
        converted, misshapen = convert_pairs(pairs, arrays, source)
        if missing or unexpected or misshapen:
            raise WeightsMismatchError(missing, unexpected, misshapen)
        return converted

    def pair(self, names: Iterable[str], source: Side) -> tuple[dict[str, tuple[Rule, str]], list[str], list[str]]:
        """Pair each name of the `source` side with its rule and its name on the other side.

        Returns:
            The pairs, the names that the rules miss, and the names that no rule covers.

        Raises:
            ValueError: two rules claim one name, or two names map to one.
        """
        target: Side = "flax" if source == "torch" else "torch"
        compiled = [(rule, *_compile(rule.name(source))) for rule in self._rules]
        pairs: dict[str, tuple[Rule, str]] = {}
        unexpected: list[str] = []
        seen: dict[Rule, set[str]] = {rule: set() for rule in self._rules}
        blocks: dict[str, set[str]] = {}
        taken: dict[str, str] = {}
        for name in names:
            hits = [(rule, keys, hit) for rule, keys, expression in compiled if (hit := expression.fullmatch(name))]
            if not hits:
                unexpected.append(name)
                continue
            if len(hits) > 1:
                claims = ", ".join(str(hit[0]) for hit in hits)
                raise ValueError(f"{printable(name)} must be covered by exactly one rule, got {claims}")
            rule, keys, hit = hits[0]
            values = dict(zip(keys, hit.groups(), strict=True))
            other = _fill(rule.name(target), values)
            if other in taken:
                raise ValueError(f"{taken[other]} and {name} both map to {other}")
            taken[other] = name
            pairs[name] = (rule, other)
            for scope in _scopes(rule.torch):
                blocks.setdefault(scope, set()).add(_fill(scope, values))
            seen[rule].add(_fill(_scopes(rule.torch)[-1], values))
        return pairs, self._missing(seen, blocks, source), unexpected

    def _missing(self, seen: dict[Rule, set[str]], blocks: dict[str, set[str]], source: Side) -> list[str]:
        """Names that are not there: a rule must have been seen in every repeated block that anything was seen in."""
        missing = []
        for rule, found in seen.items():
            scope = _scopes(rule.torch)[-1]
            for block in blocks.get(scope, set()) - found:
                values = _compile(scope)[1].fullmatch(block)
                assert values is not None, "a block is its own scope, filled in"
                missing.append(_fill(rule.name(source), dict(zip(_compile(scope)[0], values.groups(), strict=True))))
            if not found and not blocks.get(scope):
                missing.append(rule.name(source))
        return missing

    def _check_distinct(self, side: Side) -> None:
        """Refuse two rules that one name could fall under; names that differ in more than numbers cannot clash."""
        alike: dict[str, list[Rule]] = {}
        for rule in self._rules:
            alike.setdefault(_NUMBER.sub("#", rule.name(side)), []).append(rule)
        for rules in alike.values():
            literal = {rule.name(side): rule for rule in rules if not _placeholders(rule.torch)}
            if len(literal) < sum(not _placeholders(rule.torch) for rule in rules):
                names = [rule.name(side) for rule in rules]
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"two rules share the {side} name {twice}")
            templates = [rule for rule in rules if _placeholders(rule.torch)]
            for position, one in enumerate(templates):
                for other in (*templates[position + 1 :], *literal.values()):
                    if _overlap(one.name(side), other.name(side)):
                        raise ValueError(
                            f"two rules share the {side} name {one.name(side)}"
                            if one.name(side) == other.name(side)
                            else f"two rules cover the same {side} names: {one.name(side)} and {other.name(side)}"
                        )


def torch_to_flax(arrays: Mapping[str, np.ndarray[Any, Any]], rules: Rules | Iterable[Rule]) -> Arrays:
    """Convert torch-named arrays to Flax-named ones, bit for bit.

    Args:
        arrays: dotted torch name -> array, any memory order, any dtype of numbers; NaNs keep their bits.
        rules: the rule set, such as ``module.config.rules()``.

    Returns:
        Dotted Flax name -> C-contiguous array that shares no memory with the input.

    Raises:
        TypeError: a value is no NumPy array of numbers.
        WeightsMismatchError: (a ValueError) lists every missing, unexpected and misshapen name.
    """
    return as_rules(rules).convert(arrays, "torch")


def flax_to_torch(arrays: Mapping[str, np.ndarray[Any, Any]], rules: Rules | Iterable[Rule]) -> Arrays:
    """Convert Flax-named arrays to torch-named ones, bit for bit: `torch_to_flax` read backwards."""
    return as_rules(rules).convert(arrays, "flax")


def _check_arrays(arrays: Mapping[str, Any]) -> None:
    if not isinstance(arrays, Mapping):
        raise TypeError(f"arrays must be a mapping from names to NumPy arrays, got {type(arrays).__name__}")
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"names must be strings, got {name!r}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{printable(name)} must be a NumPy array, got {type(array).__name__}")
        if array.dtype.kind not in "biufc" and not hasattr(ml_dtypes, array.dtype.name):
            raise TypeError(f"{printable(name)} must hold numbers, got dtype {array.dtype}")


def convert_pairs(
    pairs: Mapping[str, tuple[Rule, str]], arrays: Mapping[str, np.ndarray[Any, Any]], source: Side
) -> tuple[Arrays, list[str]]:
    """Convert what fits, into fresh memory, and list what does not."""
    converted: Arrays = {}
    misshapen: list[str] = []
    for name, (rule, other) in pairs.items():
        try:
            converted[other] = np.array(rule.convert(arrays[name], source), order="C", copy=True)
        except ValueError as error:
            misshapen.append(f"{printable(name)}: {error}")
    return converted, misshapen


def as_rules(rules: Rules | Iterable[Rule]) -> Rules:
    """Return rules as a set that has proved itself a bijection."""
    return rules if isinstance(rules, Rules) else Rules(rules)


def _reversed(pattern: str) -> str:
    left, _, right = pattern.partition("->")
    return f"{right.strip()} -> {left.strip()}"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _placeholders(template: str) -> tuple[str, ...]:
    """Names of the placeholders, sorted; a name may stand once."""
    names = _PLACEHOLDER.findall(template)
    if len(set(names)) != len(names) or not all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names):
        raise ValueError(f"{template!r}: placeholders are distinct lower-case names such as {{i}}")
    return tuple(sorted(names))


def _scopes(template: str) -> list[str]:
    """Return a name up to each of its placeholders, "" first: the repeated blocks that it stands in."""
    return ["", *(template[: match.end()] for match in _PLACEHOLDER.finditer(template))]


def _overlap(one: str, two: str) -> bool:
    """Tell whether some name falls under both templates, which differ in numbers and placeholders alone."""
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(two), strict=True)
    return all(a == b or (a[0] == "{" and b[0] == "{") or (a + b).count("{") == 1 for a, b in pairs)


def _fill(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _compile(template: str) -> tuple[list[str], re.Pattern[str]]:
    keys: list[str] = []
    expression = ""
    position = 0
    for match in _PLACEHOLDER.finditer(template):
        expression += re.escape(template[position : match.start()]) + _INDEX
        keys.append(match[1])
        position = match.end()
    return keys, re.compile(expression + re.escape(template[position:]))
