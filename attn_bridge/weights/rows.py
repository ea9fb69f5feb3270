"""One row of a layout: which of our tensors an outside tensor contains, and the position of each of their elements.

A row yields one `Placement` per tensor of ours: an offset and strides into the outside tensor. Splitting, fusing,
transposing and stacking are therefore the same operation, read from either side, and no direction is written twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from .placements import Change, LayoutError, Placement, SettingError, Shape
from .templates import KINDS, fill, match, placeholders

Check = Callable[[Shape, int, np.ndarray], bool]
"""Returns whether elements of a tensor of that shape, from an index on in C order, match the reason of its drop."""

_AXIS = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
_SIDE = re.compile(r"\s*(?:(?:[a-zA-Z]\w*|\((?:\s*[a-zA-Z]\w*)+\s*\)|\.\.\.)\s*)*")


@functools.cache
def _axes_of(pattern: str, extra: frozenset[str]) -> tuple[frozenset[str], str]:
    """Return the outside tensor's axes in a pattern, and the rule that the pattern breaks; "" for none.

    Tables have few patterns, so that each is parsed once.

    Args:
        pattern: axes of ours ``->`` axes of theirs.
        extra: axes that only theirs have.
    """
    left, arrow, right = pattern.partition("->")
    if not arrow or "->" in right or not _SIDE.fullmatch(left) or not _SIDE.fullmatch(right):
        return frozenset(), "must read 'axes of ours -> axes of theirs'"
    ours, theirs = _AXIS.findall(left), _AXIS.findall(right)
    if ("..." in left) != ("..." in right) or len(set(theirs)) != len(theirs) or len(set(ours)) != len(ours):
        return frozenset(), "must hold each axis once on each side"
    if set(theirs) - set(ours) != extra or set(ours) - set(theirs):
        further = f", and {' and '.join(sorted(extra))} in theirs" if extra else ""
        return frozenset(), f"must hold the same axes on both sides{further}"
    return frozenset(theirs), ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One outside tensor in terms of ours.

    Attributes:
        theirs: its name, with placeholders.
        ours: our names; several are parts of it; empty for a tensor that is dropped, with a `reason`.
        pattern: axes of each of ours ``->`` axes of theirs, as in einops; "..." is any axes, unchanged.
        part: the axis of theirs that counts the parts, if they have equal sizes.
        along: the axis along which parts of different sizes are concatenated.
        split: their sizes along it: numbers, names of settings, or products of these (``heads*head_dim``); "..." is an
            equal share of the rest.
        shares: relative sizes of the parts along the axis, if only these are fixed: numbers or names of settings (heads
            of query, key and value in one projection).
        stack: the axis of theirs that counts ``{i}`` or ``{j}``, which only our names contain.
        sizes: axis -> its size, a number or the name of a setting.
        tied: names of ours with the same numbers as the first.
        optional: whether a model is complete without it in any block.
        last: whether the last block alone has it.
        sparse: whether each block may have it or lack it; checks of our names then find missing tensors.
        branch: ``choice/alternative`` (or ``choice/one|other``), if a block is complete with one alternative of each
            choice. A tensor of ours in several alternatives goes to the one that a setting of its name selects, or else
            to the largest that a block has completely.
        reason: why it is dropped.
        check: function that checks a dropped tensor's numbers against `reason`; None without a check.
        copy_of: name of the tensor whose numbers a dropped one must repeat bit for bit; "" if it repeats none.
        change: change from our numbers to theirs; None: they are the same.
        lengths: our names, of which each has as many rows as a part of ours: several outside tensors are then one of
            ours, row behind row. A file may be cut elsewhere; written parts have these lengths.
        piece: which of these parts it is.
        even: setting that cuts equal parts instead, the last of which may be shorter.
        place: its position in a user's rules file, for messages, such as ``rules.toml, line 5``; "" for none.
    """

    theirs: str
    ours: tuple[str, ...] = ()
    pattern: str = "... -> ..."
    part: str = ""
    along: str = ""
    split: tuple[int | str, ...] = ()
    stack: str = ""
    sizes: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    tied: tuple[str, ...] = ()
    optional: bool = False
    last: bool = False
    branch: str = ""
    reason: str = ""
    check: Check | None = None
    copy_of: str = ""
    shares: tuple[int | str, ...] = ()
    change: Change | None = None
    sparse: bool = False
    lengths: tuple[str, ...] = ()
    piece: int = 0
    even: str = ""
    place: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if bool(self.ours) == bool(self.reason):
            raise LayoutError(f"{self.theirs}: a row names either tensors of ours or a reason to drop theirs")
        for name in (self.theirs, *self.ours, *self.tied):
            for placeholder in sorted(placeholders(name)):
                if placeholder not in ("prefix", *KINDS):
                    raise LayoutError(
                        f"{name}: a placeholder is {{i}}, {{j}}, {{path}} or {{rest}}, not {{{placeholder}}}"
                    )
        counted = {self.counter} if self.stack else set()
        wanted = placeholders(self.theirs) - {"prefix"}
        if "" in counted or any(placeholders(name) != wanted | counted for name in (*self.ours, *self.tied)):
            rest = f", but for the {{{self.counter or 'i'}}} that stack counts" if counted else ""
            raise LayoutError(f"{self.theirs}: names on both sides must hold the same placeholders{rest}")
        if any(isinstance(size, bool) or (isinstance(size, int) and size < 0) for size in self.split):
            raise LayoutError(f"{self.theirs}: split must hold sizes or names of settings")
        extra = frozenset(letter for letter in (self.part, self.stack) if letter)
        theirs, wrong = _axes_of(self.pattern, extra)
        if wrong:
            raise LayoutError(f"{self.theirs}: pattern {self.pattern!r} {wrong}")
        if self.along and self.along not in theirs:
            raise LayoutError(f"{self.theirs}: {self.along!r} is no axis of the pattern {self.pattern!r}")
        if len(self.ours) > 1 and bool(self.part) == bool(self.along):
            raise LayoutError(
                f"{self.theirs}: several parts need either the axis that counts them or one they lie along"
            )
        if (self.part and not self.ours) or (self.along and len(self.ours) <= 1):
            raise LayoutError(f"{self.theirs}: {self.part or self.along!r} counts parts, and there are no several")
        if self.along and len(self.split) not in (0, len(self.ours)):
            raise LayoutError(f"{self.theirs}: {len(self.split)} sizes for {len(self.ours)} parts")
        if self.shares and (not self.along or self.split or len(self.shares) != len(self.ours)):
            raise LayoutError(f"{self.theirs}: shares are one of each part along an axis, and take the place of split")
        if self.lengths and (len(self.ours) != 1 or self.stack or self.change or self.tied):
            raise LayoutError(f"{self.theirs}: a piece is one of a single tensor of ours, with its numbers")
        for axis in self.sizes:
            if axis not in theirs:
                raise LayoutError(f"{self.theirs}: size given for {axis!r}, which is no axis of the pattern")
            if axis in extra:
                raise LayoutError(f"{self.theirs}: size given for {axis!r}, which is counted")

    @property
    def where(self) -> str:
        """The beginning of a message about it: its position in a rules file."""
        return f"{self.place}: " if self.place else ""

    @property
    def choice(self) -> str:
        """The choice of its branch; "" without a branch."""
        return self.branch.partition("/")[0]

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Which alternatives it belongs to."""
        return tuple(self.branch.partition("/")[2].split("|"))

    @property
    def counter(self) -> str:
        """The placeholder that `stack` counts; "" without a stack."""
        mine = placeholders(self.ours[0]) - placeholders(self.theirs) if self.stack and self.ours else set()
        return next((name for name in ("j", "i") if name in mine), "")

    def places_like(self, other: Row) -> bool:
        """Return whether it maps the same tensor to the same elements of ours; only one of both may require it."""
        return self == dataclasses.replace(other, optional=self.optional, branch=self.branch)

    def match_theirs(self, name: str, prefixes: Sequence[str]) -> dict[str, str] | None:
        """Return the values of the placeholders in an outside name, or None if it does not match."""
        return match(self.theirs, name, tuple(prefixes))

    def match_ours(self, name: str) -> tuple[int, dict[str, str]] | None:
        """Return the part number of a name of ours, and the values of the placeholders; None without a match."""
        for number, template in enumerate((*self.ours, *self.tied)):
            values = match(template, name, ("",))
            if values is not None:
                return number, values
        return None

    def decode(
        self, theirs: str, shape: Shape, values: Mapping[str, str], settings: Mapping[str, int]
    ) -> dict[str, Placement]:
        """Return our name -> its placement in one outside tensor of that shape.

        Raises:
            LayoutError: the shape does not fit.
            SettingError: a size that the shape does not determine.
        """
        sizes = self._known(settings)
        # The axis of the parts is as long as there are names: `(3 h d) e` of a fused query, key and value.
        if self.part:
            sizes[self.part] = len(self.ours)
        left, right = self._sides(len(shape), of_theirs=True)
        sizes = _solve(right, shape, sizes, f"{self.where}{theirs} {shape}", self._settings())
        splits = self._splits(sizes, settings, f"{self.where}{theirs}")
        placements = {}
        for number, template in enumerate(self.ours):
            start = sum(splits[:number]) if self.along else 0
            for position in range(sizes[self.stack] if self.stack else 1):
                bound = {**values, self.counter: str(position)} if self.stack else dict(values)
                # Parts of different sizes, such as grouped keys behind queries, differ along this axis alone.
                mine = {**sizes, self.along: splits[number]} if self.along else sizes
                placements[fill(template, bound)] = _place(
                    theirs,
                    left,
                    right,
                    sizes,
                    mine,
                    self._index(number, position),
                    {self.along: start} if self.along else {},
                    self.change,
                )
        return placements

    def encode(
        self,
        theirs: str,
        shapes: Mapping[tuple[int, int], Shape],
        names: Mapping[tuple[int, int], str],
        settings: Mapping[str, int],
    ) -> tuple[Shape, dict[str, Placement]]:
        """Return the shape of an outside tensor, and the placement of each of ours in it.

        Args:
            theirs: its name.
            shapes: (number of the part, position in the stack) -> shape of ours.
            names: the same -> its name.
            settings: settings by name.

        Raises:
            LayoutError: the shapes do not fit the pattern or one another.
            SettingError: a size that the shapes do not determine.
        """
        rank = len(next(iter(shapes.values())))
        left, right = self._sides(rank, of_theirs=False)
        solved: dict[tuple[int, int], dict[str, int]] = {}
        for key, shape in shapes.items():
            solved[key] = _solve(
                left, shape, self._known(settings), f"{self.where}{names[key]} {shape}", self._settings()
            )
        first = next(iter(solved))
        for key, sizes in solved.items():
            # All other axes are shared, or the parts would not fill one tensor without gaps.
            unlike = [axis for axis in sizes if axis != self.along and sizes[axis] != solved[first][axis]]
            if unlike:
                raise LayoutError(
                    f"{self.where}{names[first]} {shapes[first]} and {names[key]} {shapes[key]} are no parts of one "
                    f"tensor {theirs}"
                )
        splits = [solved[number, 0][self.along] for number in range(len(self.ours))] if self.along else []
        counts = [settings.get(size, 0) if isinstance(size, str) else size for size in self.shares]
        if all(counts) and any(
            # Compared crosswise, as a ratio of whole numbers need not be one.
            splits[0] * one != counts[0] * split
            for one, split in zip(counts, splits, strict=False)
        ):
            raise LayoutError(
                f"{self.where}{theirs}: parts of {' + '.join(map(str, splits))} rows are not "
                f"{' + '.join(map(str, counts))} equal shares"
            )
        total = dict(solved[first])
        if self.along:
            total[self.along] = sum(splits)
        if self.part:
            total[self.part] = len(self.ours)
        if self.stack:
            total[self.stack] = 1 + max(position for _, position in shapes)
        shape = tuple(math.prod(total[axis] for axis in group) for group in right)
        placed = {}
        for (number, position), sizes in solved.items():
            start = {self.along: sum(splits[:number])} if self.along else {}
            placed[names[number, position]] = _place(
                theirs, left, right, total, sizes, self._index(number, position), start, self.change
            )
        return shape, placed

    def rows_of(
        self, shapes: Mapping[str, Shape], values: Mapping[str, str], settings: Mapping[str, int]
    ) -> tuple[int, int]:
        """Return the first row of ours that a piece holds, and the row behind its last.

        Raises:
            LayoutError: a tensor whose rows the pieces have is absent, or the rows are not those of ours.
        """
        ours, number = fill(self.ours[0], values), self.piece
        rows = shapes[ours][0]
        if settings.get(self.even):
            length = -(-rows // len(self.lengths))
            return min(number * length, rows), min((number + 1) * length, rows)
        names = [fill(one, values) for one in self.lengths]
        absent = [name for name in names if name not in shapes]
        if absent:
            raise LayoutError(f"{self.theirs}: {ours} is cut as {absent[0]} says, which is not there")
        lengths = [shapes[name][0] for name in names]
        if sum(lengths) != rows:
            raise LayoutError(f"{self.theirs}: {ours} has {rows} rows, {' + '.join(names)} {sum(lengths)}")
        return sum(lengths[:number]), sum(lengths[: number + 1])

    def settings_of(self, shape: Shape, settings: Mapping[str, int]) -> dict[str, int]:
        """Return the settings that the shape of an outside tensor determines."""
        named = self._settings()
        if not named:
            return {}
        sizes = {**self._known(settings), **({self.part: len(self.ours)} if self.part else {})}
        solved = _solve(self._sides(len(shape), of_theirs=True)[1], shape, sizes, self.theirs, named)
        return {setting: solved[axis] for axis, setting in named.items()}

    def _index(self, number: int, position: int) -> dict[str, int]:
        return {axis: at for axis, at in ((self.part, number), (self.stack, position)) if axis}

    def _known(self, settings: Mapping[str, int]) -> dict[str, int]:
        return {
            axis: settings[size] if isinstance(size, str) else size
            for axis, size in self.sizes.items()
            if not isinstance(size, str) or size in settings
        }

    def _settings(self) -> dict[str, str]:
        return {axis: size for axis, size in self.sizes.items() if isinstance(size, str)}

    def _splits(self, sizes: Mapping[str, int], settings: Mapping[str, int], theirs: str) -> list[int]:
        if not self.along:
            return []
        total = sizes[self.along]
        if self.shares:
            missing = [size for size in self.shares if isinstance(size, str) and size not in settings]
            if missing:
                raise SettingError(f"{theirs}: the shares of its parts need {_wanted(missing)}")
            counts = [settings[size] if isinstance(size, str) else size for size in self.shares]
            if sum(counts) < 1 or total % sum(counts):
                raise LayoutError(f"{theirs}: {total} rows are not {' + '.join(map(str, counts))} equal shares")
            return [total // sum(counts) * count for count in counts]
        if not self.split:
            if total % len(self.ours):
                raise LayoutError(f"{theirs}: {total} is not {len(self.ours)} equal parts")
            return [total // len(self.ours)] * len(self.ours)
        # "..." is an equal share of the rows that the named sizes leave.
        shares = self.split.count("...")
        named = [size for size in self.split if isinstance(size, str) and size != "..."]
        missing = [factor for size in named for factor in size.split("*") if factor not in settings]
        if missing:
            raise SettingError(f"{theirs}: the sizes of its parts need {_wanted(missing)}")
        split_sizes = [
            size
            if isinstance(size, int)
            else 0
            if size == "..."
            else math.prod(map(settings.__getitem__, size.split("*")))
            for size in self.split
        ]
        rest = total - sum(split_sizes)
        if shares and (rest < 0 or rest % shares):
            raise LayoutError(f"{theirs}: {rest} of {total} rows are not {shares} equal parts")
        part_sizes = [
            rest // shares if size == "..." else one for size, one in zip(self.split, split_sizes, strict=True)
        ]
        if sum(part_sizes) != total:
            raise LayoutError(f"{theirs}: parts of {' + '.join(map(str, part_sizes))} rows are not its {total}")
        return part_sizes

    def _sides(self, rank: int, *, of_theirs: bool) -> tuple[list[list[str]], list[list[str]]]:
        left, _, right = self.pattern.partition("->")
        own_side = right if of_theirs else left
        free = rank - len(_groups(own_side.replace("...", " ")))
        # Axes beyond the named ones have names only where the pattern says `...`; else the rank is an error later.
        if "..." not in own_side:
            free = 0
        rest = " ".join(f"rest{number}" for number in range(max(free, 0)))
        return _groups(left.replace("...", rest)), _groups(right.replace("...", rest))


def _groups(side: str) -> list[list[str]]:
    return [_AXIS.findall(group) for group in re.findall(r"\([^()]*\)|[a-zA-Z]\w*", side)]


def _solve(
    groups: list[list[str]], shape: Shape, bound_sizes: dict[str, int], what: str, settings: Mapping[str, str]
) -> dict[str, int]:
    """Return the size of every axis of a pattern, each unknown one from the shape and the known sizes.

    Raises:
        LayoutError: the shape does not fit.
        SettingError: a group has several unknown axes.
    """
    if len(groups) != len(shape):
        raise LayoutError(f"{what} has {len(shape)} axes, expected {len(groups)}")
    sizes = dict(bound_sizes)
    for group, size in zip(groups, shape, strict=True):
        unknown = [axis for axis in group if axis not in sizes]
        rest = math.prod(sizes[axis] for axis in group if axis in sizes)
        if len(unknown) > 1:
            wanted = [settings[axis] for axis in unknown if axis in settings]
            raise SettingError(f"{what}: {size} = {' x '.join(group)} needs {_wanted(wanted or unknown)}")
        # An axis of a group follows from the others; `rest` is 0 where one of them is, and then nothing follows.
        if unknown and rest and size % rest == 0:
            sizes[unknown[0]] = size // rest
        elif unknown or rest != size:
            product = " x ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in group)
            raise LayoutError(f"{what}: {size} is not {product}")
    return sizes


def _wanted(names: Iterable[str]) -> str:
    return " and ".join(f"--set {name}=N" for name in dict.fromkeys(names))


def _place(
    theirs: str,
    left: list[list[str]],
    right: list[list[str]],
    total: Mapping[str, int],
    mine: Mapping[str, int],
    index: Mapping[str, int],
    start: Mapping[str, int],
    change: Change | None,
) -> Placement:
    # Strides of the whole tensor in C order, by axis: a part lies in it at an offset, with these strides.
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed([axis for group in right for axis in group]):
        strides[axis] = step
        step *= total[axis]
    offset = sum(strides[axis] * at for at_of in (index, start) for axis, at in at_of.items())
    axes = tuple(tuple((mine[axis], strides[axis]) for axis in group) for group in left)
    return Placement(theirs, offset, axes, change)
