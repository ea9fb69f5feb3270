"""Weights that cross between torch and Flax: one rule per tensor, both directions derived from it.

A `Rule` holds the two names of a tensor and one einops pattern from the torch axes to the Flax axes; the way back is
the pattern read from right to left. A `Rules` set proves itself a bijection when it is made, before any data moves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import einops
import ml_dtypes
import numpy as np

from . import joint_rules
from .printable import printable
from .rules_toml import read_tables

Arrays = dict[str, np.ndarray[Any, Any]]
Side = Literal["torch", "flax"]
AnySide = Literal["torch", "flax", "first", "second"]

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
    same on both sides; sizes that a pattern needs are keywords. One of the two names may be a list, whose tensors are
    the parts of the other one:
    ``Rule(["gate.weight", "up.weight"], "mlp.kernel", "o i -> i (part o)", part="part")``.

    Args:
        torch: dotted torch name, or a list of parts.
        flax: dotted Flax name, with the same placeholders, or a list of parts.
        pattern: einops pattern, torch axes first; the default leaves every axis where it is.
        first: the name on the first side, in place of `torch`, whatever its framework.
        second: the name on the second side, in place of `flax`.
        part: axis of the single tensor that counts the parts, all of one size.
        along: axis along which the parts lie one after the other.
        split: their sizes along it; "..." is an equal share of the rest; none: all are equal.
        stack: axis of the single tensor that counts ``{i}`` or ``{j}``, which then is in the other names alone.
        drop: why the tensor of the one given name has no counterpart.
        place: where the rule stands, for messages.
        **sizes: size of an axis of the pattern.

    Raises:
        TypeError: a name, the pattern or a size has the wrong type.
        ValueError: the two sides do not hold the same axes or placeholders, or a size is missing.
    """

    __slots__ = (
        "along", "by_side", "drop", "flax", "flax_names", "part", "pattern", "place", "sizes", "split", "stack",
        "torch", "torch_names",
    )  # fmt: skip

    torch: str
    flax: str
    pattern: str
    sizes: dict[str, int]

    def __init__(
        self,
        torch: str | Sequence[str] = (),
        flax: str | Sequence[str] = (),
        pattern: str = "... -> ...",
        *,
        first: Any = (),  # these may hold an int, the size of an axis of that name
        second: Any = (),
        part: str | int = "",
        along: str | int = "",
        split: Any = (),
        stack: str | int = "",
        drop: str | int = "",
        place: Any = "",
        **sizes: int,
    ):
        words: dict[str, Any] = {
            "part": part,
            "along": along,
            "split": split,
            "stack": stack,
            "drop": drop,
            "place": place,
        }
        words |= {"first": first, "second": second}
        sizes |= {key: value for key, value in words.items() if isinstance(value, int)}
        first, second, split = (() if isinstance(value, int) else value for value in (first, second, split))
        self.part, self.along, self.stack, self.drop = (
            word if isinstance(word, str) else "" for word in (part, along, stack, drop)
        )
        self.by_side = bool(first or second)
        if self.by_side and (torch or flax):
            raise ValueError("a rule has the keys torch and flax, or first and second, not some of both")
        if self.by_side:
            torch, flax = first, second
        self.place = place if isinstance(place, str) else ""
        self.torch_names, self.flax_names = _names("torch", torch), _names("flax", flax)
        self.torch, self.flax = ", ".join(self.torch_names), ", ".join(self.flax_names)
        if not isinstance(pattern, str):
            raise TypeError(f"pattern must be a string, got {type(pattern).__name__}")
        self.pattern, self.sizes = pattern, dict(sizes)
        if isinstance(split, str) or not all(isinstance(size, (int, str)) for size in split):
            raise TypeError(f"split must be a list of sizes, got {split!r}")
        self.split = tuple(split)
        if self.drop:
            self._check_drop()
        elif self.is_joint:
            self._check_joint()
        else:
            self._check_plain()

    def _check_plain(self) -> None:
        if _placeholders(self.torch) != _placeholders(self.flax):
            raise ValueError(f"{self}: both names must hold the same placeholders")
        for name in (self.torch, self.flax):
            bare = _PLACEHOLDER.sub("", name)
            if "{" in bare or "}" in bare or re.search(r"(\}|[0-9])\{|\}[0-9]", name):
                raise ValueError(f"{self}: a placeholder in {name!r} must not touch a digit, a brace or another one")
        self._prove()

    def _check_joint(self) -> None:
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{self}: size of {axis!r} must be an integer, got {type(size).__name__}")
            if size < 1:
                raise ValueError(f"{self}: size of {axis!r} ({size}) must be at least 1")
        if not self.torch_names or not self.flax_names:
            raise ValueError(f"{self}: a rule needs a name on both sides")
        named = [size for size in self.split if isinstance(size, str) and size != "..."]
        if named:
            raise ValueError(f"{self}: split must hold whole numbers or '...', got {named[0]!r}")
        try:
            joint_rules.row_of(self)
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from error

    def _check_drop(self) -> None:
        if bool(self.torch_names) == bool(self.flax_names) or self.sizes or self.part or self.along or self.stack:
            raise ValueError("a rule that drops has one name, torch or flax, and the reason")

    def __repr__(self) -> str:
        sizes = "".join(f", {axis}={size!r}" for axis, size in self.sizes.items())
        if not self.is_joint:
            return f"Rule({self.torch!r}, {self.flax!r}, {self.pattern!r}{sizes})"
        names = [some[0] if len(some) == 1 else list(some) for some in (self.torch_names, self.flax_names)]
        words: dict[str, Any] = {"part": self.part, "along": self.along, "split": [*self.split], "stack": self.stack}
        more = "".join(f", {key}={value!r}" for key, value in words.items() if value)
        if self.drop:
            return f"Rule({names[0]!r}, {names[1]!r}, drop={self.drop!r})"
        return f"Rule({names[0]!r}, {names[1]!r}, {self.pattern!r}{more}{sizes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        joint = (self.torch_names, self.flax_names, self.part, self.along, self.split, self.stack, self.drop)
        return (*joint, self.pattern, tuple(sorted(self.sizes.items())))

    @property
    def is_joint(self) -> bool:
        """Whether it is between one tensor and several, or leaves one out."""
        lists = len(self.torch_names) != 1 or len(self.flax_names) != 1
        return bool(lists or self.part or self.along or self.split or self.stack or self.drop)

    @property
    def where(self) -> str:
        """Where it stands, to begin a message with; "" where nobody said."""
        return f"{self.place}: " if self.place else ""

    def name(self, side: AnySide) -> str:
        """Return the name on one side; ``first`` is torch's, ``second`` Flax's."""
        return self.torch if side in ("torch", "first") else self.flax

    def convert(self, array: np.ndarray[Any, Any], source: AnySide) -> np.ndarray[Any, Any]:
        """Rearrange one array from the `source` side to the other; the bits of its elements stay as they are.

        Returns a view where einops can give one. Raises ValueError if the shape does not fit the pattern.
        """
        if self.is_joint:
            raise ValueError(f"{self}: is between several tensors; convert them by Rules([...])")
        pattern = self.pattern if source in ("torch", "first") else _reversed(self.pattern)
        try:
            return einops.rearrange(array, pattern, **self.sizes)
        except einops.EinopsError as error:
            sizes = "".join(f", {axis}={size}" for axis, size in self.sizes.items())
            raise ValueError(f"shape {array.shape} does not fit {pattern!r}{sizes}") from error

    def convert_shape(self, shape: tuple[int, ...], source: AnySide) -> tuple[int, ...]:
        """Return the shape that an array of `shape` has on the other side, without making one."""
        result: tuple[int, ...] = self.convert(np.broadcast_to(np.empty((), np.bool_), shape), source).shape
        return result

    def prefixed(self, torch: str, flax: str) -> Rule:
        """Return the rule for the same tensors inside a larger module, below dotted prefixes (empty = none)."""
        names = [
            tuple(_join(prefix, name) for name in some)
            for prefix, some in ((torch, self.torch_names), (flax, self.flax_names))
        ]
        return self._renamed(names[0], names[1], self.pattern)

    def turned(self) -> Rule:
        """Return the rule with its two sides exchanged."""
        return self._renamed(self.flax_names, self.torch_names, _reversed(self.pattern))

    def _renamed(self, torch: tuple[str, ...], flax: tuple[str, ...], pattern: str) -> Rule:
        joint = {"part": self.part, "along": self.along, "split": self.split, "stack": self.stack, "drop": self.drop}
        names = [some[0] if len(some) == 1 else some for some in (torch, flax)]
        found = Rule(names[0], names[1], pattern, **joint, place=self.place, **self.sizes)  # type: ignore[arg-type]
        found.by_side = self.by_side
        return found

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
        self._plain = tuple(rule for rule in self._rules if not rule.is_joint)
        self._check_distinct("torch")
        self._check_distinct("flax")

    @classmethod
    def from_toml(cls, path: str | Path) -> Rules:
        """Load rules from a TOML file of ``[[rule]]`` tables: keys are the arguments of `Rule`, and sizes by letter.

        Raises:
            ValueError: not TOML, an unknown key, or a rule that is none; the message names the line.
            OSError: the file cannot be read.
        """
        rules: list[Rule] = []
        for place, table in read_tables(path):
            rules.append(rule_from(table, place))
            try:
                cls(rules)
            except ValueError as error:
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
        joint, used, missing, misshapen = self._convert_joint(arrays, source)
        plain = Rules(rule for rule in self._rules if not rule.is_joint) if len(self._plain) < len(self) else self
        pairs, lacking, unexpected = plain.pair([name for name in arrays if name not in used], source)
        converted, wrong = convert_pairs(pairs, arrays, source)
        missing, misshapen = missing + lacking, misshapen + wrong
        converted |= joint
        if missing or unexpected or misshapen:
            raise WeightsMismatchError(missing, unexpected, misshapen)
        return converted

    def _convert_joint(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], source: Side
    ) -> tuple[Arrays, set[str], list[str], list[str]]:
        """Convert what the rules between one tensor and several cover."""
        converted: Arrays = {}
        used: set[str] = set()
        missing: list[str] = []
        misshapen: list[str] = []
        for rule in self._rules:
            if rule.is_joint:
                made, names, lacking, wrong = joint_rules.convert(rule, arrays, source)
                twice = [*used & names, *converted.keys() & made.keys()]
                if twice:
                    raise ValueError(f"{printable(twice[0])} must be covered by exactly one rule")
                converted |= made
                used |= names
                missing += lacking
                misshapen += wrong
        return converted, used, missing, misshapen

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
        joint = [name for rule in self._rules if rule.is_joint for name in _names_of(rule, side)]
        shared = {name for name in joint if joint.count(name) > 1} | {rule.name(side) for rule in self._plain} & {
            *joint
        }
        if shared:
            raise ValueError(f"two rules share the {side} name {min(shared)}")
        alike: dict[str, list[Rule]] = {}
        for rule in self._plain:
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


def rule_from(table: Mapping[str, Any], place: str = "") -> Rule:
    """Return the rule that a ``[[rule]]`` table says.

    Raises:
        ValueError: it is none; the message begins with the place.
    """
    try:
        keys = ("torch", "flax") if not {"first", "second"} & table.keys() else ("first", "second")
        if "drop" not in table and not set(keys) <= table.keys():
            needed = " and ".join(keys)
            raise ValueError(f"a rule needs the keys {needed}, got {', '.join(map(str, table)) or 'none'}")
        return Rule(**{**table, "place": place})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}" if place else str(error)) from error


def _names(label: str, names: Any) -> tuple[str, ...]:
    """Return the names on one side; none is ()."""
    found = (names,) if isinstance(names, str) else names
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"{label} must be a string, got {type(names).__name__}")
    wrong = next((name for name in found if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"{label} must be a string or a list of strings, got a list with {type(wrong).__name__}")
    return tuple(found)


def _names_of(rule: Rule, side: Side) -> tuple[str, ...]:
    return rule.torch_names if side == "torch" else rule.flax_names


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
