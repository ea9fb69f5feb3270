"""One rule: the names of a tensor on two sides and the pattern of its axes; or a single tensor and its parts."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import einops
import numpy as np

from ..printable import printable
from . import joint
from .templates import PLACEHOLDER, adjacent, match, placeholders

Side = Literal["torch", "flax"]
AnySide = Literal["torch", "flax", "first", "second"]

_AXIS = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
# A proof numbers all elements of axes of 2 and 3 in turn: 6**6 = 46,656 of 12 axes.
_MAX_AXES = 12


class Rule:
    """One tensor's two names and the einops pattern from its torch axes to its Flax axes.

    ``Rule("h.{i}.attn.q.weight", "h.{i}.attn.q.kernel", "(h d) e -> e h d", h=8)``: ``{i}`` matches an integer, the
    same on both sides, in ``stages{i}{j}`` one digit each; sizes that a pattern needs are keywords. One of the two
    names may be a list, whose tensors are the parts of the other one: ``Rule(["gate.weight", "up.weight"],
    "mlp.kernel", "o i -> i (part o)", part="part")``.

    Args:
        torch: dotted torch name, or a list of parts.
        flax: dotted Flax name, with the same placeholders, or a list of parts.
        pattern: einops pattern, torch axes first; the default leaves every axis unchanged.
        first: the name on the first side, for sides of any framework; replaces `torch`.
        second: the name on the second side; replaces `flax`.
        part: axis of the single tensor that counts the parts, all of one size.
        along: axis along which the parts are concatenated.
        split: their sizes along it; "..." is an equal share of the rest; by default all are equal.
        stack: axis of the single tensor that counts ``{i}`` or ``{j}``, which then is in the other names alone.
        drop: why the tensor of the one given name has no counterpart.
        place: position of the rule in its file, for messages.
        **sizes: size of an axis of the pattern.

    Raises:
        TypeError: a name, the pattern or a size has the wrong type.
        ValueError: the two sides have different axes or placeholders, or a size is missing.

    Example:
        >>> rule = Rule("h.{i}.attn.q.weight", "h.{i}.attn.q.kernel", "(h d) e -> e h d", h=8)
        >>> rule.convert_shape((64, 32), "torch")
        (32, 8, 8)
        >>> rule.convert_shape((32, 8, 8), "flax")
        (64, 32)
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
        words: dict[str, object] = {
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
            raise TypeError(f"split must be a list of sizes, got {printable(repr(split))}")
        self.split = tuple(split)
        if self.drop:
            self._check_drop()
        elif self.is_joint:
            self._check_joint()
        else:
            self._check_plain()

    def _check_plain(self) -> None:
        for name in (self.torch, self.flax):
            words = PLACEHOLDER.findall(name)
            if len(set(words)) != len(words) or not all(re.fullmatch(r"[a-z][a-z0-9_]*", one) for one in words):
                raise ValueError(f"{name!r}: placeholders are distinct lower-case names such as {{i}}")
        if placeholders(self.torch) != placeholders(self.flax):
            raise ValueError(f"{self}: both names must hold the same placeholders")
        for name in (self.torch, self.flax):
            bare = PLACEHOLDER.sub("", name)
            if "{" in bare or "}" in bare or re.search(r"[0-9]\{|\}[0-9]", name):
                raise ValueError(f"{self}: a placeholder in {name!r} must not touch a digit or a brace")
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
            joint.row_of(self)
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
        words: dict[str, object] = {"part": self.part, "along": self.along, "split": [*self.split], "stack": self.stack}
        more = "".join(f", {key}={value!r}" for key, value in words.items() if value)
        if self.drop:
            return f"Rule({names[0]!r}, {names[1]!r}, drop={self.drop!r})"
        return f"Rule({names[0]!r}, {names[1]!r}, {self.pattern!r}{more}{sizes})"

    def __str__(self) -> str:
        """Return the rule's form in messages."""
        return printable(repr(self), 400)

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
        """The beginning of a message about it: its position in a file; "" without one."""
        return f"{self.place}: " if self.place else ""

    def values(self, name: str, source: AnySide) -> dict[str, str] | None:
        """Return the values of the placeholders in a name of one side; None if the rule does not cover it."""
        values = match(self.name(source), name)
        if not values:
            return values
        digits = adjacent(self.torch) | adjacent(self.flax)
        return values if all(len(values[word]) == 1 for word in digits) else None

    def name(self, side: AnySide) -> str:
        """Return the name on one side; ``first`` is torch's, ``second`` Flax's."""
        return self.torch if side in ("torch", "first") else self.flax

    def convert(self, array: np.ndarray, source: AnySide) -> np.ndarray:
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

    def region(self, region: Sequence[tuple[int, int]], source: AnySide) -> tuple[tuple[int, int], ...] | None:
        """Return the region of the other side for one of the `source` side; None if axes are not only moved."""
        pattern = self.pattern if source in ("torch", "first") else _reversed(self.pattern)
        ours, theirs = (side.split() for side in pattern.split("->"))
        if ours == theirs == ["..."]:
            return tuple(region)
        if self.sizes or sorted(ours) != sorted(theirs) or not all(map(_AXIS.fullmatch, ours)):
            return None
        bounds = dict(zip(theirs, region, strict=True))
        return tuple(bounds[axis] for axis in ours)

    def prefixed(self, torch: str, flax: str) -> Rule:
        """Return the rule for the same tensors inside a larger module, below dotted prefixes (empty = none)."""
        names = [
            tuple(_join(prefix, name) for name in some)
            for prefix, some in ((torch, self.torch_names), (flax, self.flax_names))
        ]
        if self.is_joint or not {"{", "}"}.isdisjoint(f"{torch}{flax}"):
            return self._renamed(names[0], names[1], self.pattern)
        rule = copy.copy(self)  # a dot follows the prefix: what was proved of the names and the pattern still holds
        rule.torch_names, rule.flax_names, rule.sizes = names[0], names[1], dict(self.sizes)
        (rule.torch,), (rule.flax,) = names
        return rule

    def turned(self) -> Rule:
        """Return the rule with its two sides swapped."""
        return self._renamed(self.flax_names, self.torch_names, _reversed(self.pattern))

    def _renamed(self, torch: tuple[str, ...], flax: tuple[str, ...], pattern: str) -> Rule:
        """Return the rule between other names, with another pattern and all other settings."""
        names = [some[0] if len(some) == 1 else some for some in (torch, flax)]
        rule = Rule(
            names[0],
            names[1],
            pattern,
            part=self.part,
            along=self.along,
            split=self.split,
            stack=self.stack,
            drop=self.drop,
            place=self.place,
            **self.sizes,
        )
        rule.by_side = self.by_side
        return rule

    def _prove(self) -> None:
        """Prove that the rule is a bijection: push an array of unique ids through the pattern and back.

        Proofs are cached: a model of experts has tens of thousands of rules with the same pattern.
        """
        is_plain = all(type(size) is int for size in self.sizes.values())
        proof = (self.pattern, tuple(sorted(self.sizes.items()))) if is_plain else None
        if proof in _proved:
            return
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
        if len(axes) > _MAX_AXES:
            raise ValueError(f"{self}: {len(axes)} axes, more than {_MAX_AXES}")
        # The permutation of axes does not depend on the sizes, so small sizes replace the real ones.
        sizes = {axis: 2 + position % 2 for position, axis in enumerate(axes)}
        axis_sizes = {axis: sizes[axis] for axis in self.sizes}
        atoms = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        try:
            ids = einops.rearrange(atoms, f"{' '.join(axes)} -> {left}")
            forward = einops.rearrange(ids, f"{left} -> {right}", **axis_sizes)
            back = einops.rearrange(forward, f"{right} -> {left}", **axis_sizes)
        except einops.EinopsError as error:
            raise ValueError(f"{self}: pattern is not a bijection of axes") from error
        if (
            back.shape != ids.shape or not np.array_equal(back, ids) or len({*forward.flat}) != ids.size
        ):  # np.unique imports numpy.ma
            raise ValueError(f"{self}: pattern is not a bijection of axes")
        if proof is not None and len(_proved) < _MAX_PROVED:
            _proved.add(proof)


_proved: set[tuple[str, tuple[tuple[str, int], ...]]] = set()

_MAX_PROVED = 10_000
"""Proofs that are remembered: the set lives as long as the process."""


def rule_from(table: Mapping[str, Any], location: str = "") -> Rule:
    """Return the rule in a ``[[rule]]`` table.

    Raises:
        ValueError: the table is not a rule; the message begins with the place.
    """
    try:
        keys = ("torch", "flax") if not {"first", "second"} & table.keys() else ("first", "second")
        if "drop" not in table and not set(keys) <= table.keys():
            needed = " and ".join(keys)
            raise ValueError(f"a rule needs the keys {needed}, got {printable(', '.join(map(str, table))) or 'none'}")
        return Rule(**{**table, "place": location})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{location}: {error}" if location else str(error)) from error


def _names(label: str, names: object) -> tuple[str, ...]:
    """Return the names on one side; () if missing."""
    texts = (names,) if isinstance(names, str) else names
    if not isinstance(texts, (list, tuple)):
        raise TypeError(f"{label} must be a string, got {type(names).__name__}")
    wrong = next((name for name in texts if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"{label} must be a string or a list of strings, got a list with {type(wrong).__name__}")
    return tuple(texts)


def _reversed(pattern: str) -> str:
    left, _, right = pattern.partition("->")
    return f"{right.strip()} -> {left.strip()}"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
