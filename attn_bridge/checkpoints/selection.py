"""Which tensors of a source are converted: those below a prefix (--strip), without those of some names (--drop)."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..models.parts import Part
from ..printable import printable
from . import quantised, random_state
from .containers.base import CheckpointError, Reader
from .manifest import Manifest
from .unwrapping import unwrap, without_wrappers
from .wrapped import Filtered, Stripped

SHOWN, KINDS, MAX_PATTERN = 3, 8, 1000
"""Names of each kind, and kinds, that a line names at most; characters of a pattern."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which tensors of a source are taken.

    Attributes:
        names: all names of the source, those that are taken without wrappers.
        prefix: what the names that are taken lose; "" is nothing.
        dropped: pattern of ``--drop`` -> the names that it leaves out.
        left_out: names that do not begin with the prefix, but for those that are dropped.
        unwrapped: part of names that a wrapper added and that is removed -> number of names.
        parts: why parts that are known are left out -> their names.
        chosen: the step and the item of a run of Orbax that are read.
    """

    names: tuple[str, ...] = ()
    prefix: str = ""
    dropped: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    unwrapped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    chosen: Mapping[str, int | str] = dataclasses.field(default_factory=dict)

    @property
    def count_left_out(self) -> int:
        """Number of tensors that are not taken."""
        known = {name for some in self.parts.values() for name in some}
        return len(self.left_out) + len({name for some in self.dropped.values() for name in some}) + len(known)

    def without(self, left_out: Mapping[str, Part]) -> Selection:
        """Return the selection without tensors that a layout leaves out: name -> the part it belongs to."""
        parts = dict(self.parts)
        for name, part in left_out.items():
            parts[part.reason] = (*parts.get(part.reason, ()), name)
        return dataclasses.replace(self, parts=parts)

    def outside(self, name: str) -> str:
        """Return the name, as the source has it, of a tensor that the prefix leaves out; "" where it has none.

        It stands on the way to what is taken: of ``model.model.``, below ``model.`` or at the top.
        """
        fronts = [whole.removesuffix(name) for whole in self.left_out if whole.endswith(name)]
        fronts = [front for front in fronts if self.prefix.startswith(front) and (not front or front.endswith("."))]
        return max(fronts, key=len) + name if fronts else ""

    def in_manifest(self) -> dict[str, Any]:
        """Return the manifest's keys ``stripped``, ``unwrapped``, ``dropped`` (pattern -> names) and ``left_out``.

        The last has reason -> names.
        """
        dropped = {pattern: sorted(names) for pattern, names in self.dropped.items()}
        parts = {reason: sorted(names) for reason, names in self.parts.items()}
        said = {
            "stripped": self.prefix, "unwrapped": sorted(self.unwrapped), "dropped": dropped, "left_out": parts
        }  # fmt: skip
        return {**{key: value for key, value in said.items() if value}, **self.chosen}

    def notes(self) -> list[str]:
        """Return what is left out, counted and named, the first few of each kind."""
        lost = ", ".join(f"{printable(part)} ({count} tensors)" for part, count in self.unwrapped.items())
        notes = [f"removed from names, as wrappers add them: {lost}"] if lost else []
        notes += [
            f"left out by --drop {printable(pattern)}: {_listed(names, _above(pattern))}"
            for pattern, names in self.dropped.items()
        ]
        notes += [f"left out, as {reason}: {_listed(names, '')}" for reason, names in self.parts.items()]
        if self.left_out:
            notes.append(
                f"left out, as their names do not begin with {printable(self.prefix)}: "
                + _listed(self.left_out, self.prefix)
            )
        return notes


def select(
    reader: Reader, strip: str | None, drop: Iterable[str], *, keep_wrappers: bool = False
) -> tuple[Reader, Selection]:
    """Return a source without what is left out of it and by names without wrappers, and what that is.

    Args:
        reader: the open source.
        strip: what its names lose, with wrappers or without; what has it not is left out.
        drop: patterns of names, with wrappers or without, that are left out.
        keep_wrappers: whether names keep what wrappers added to them.

    State of random streams is left out where names lose their wrappers.

    Raises:
        CheckpointError: a pattern or a prefix fits no name, nothing is left, a tensor that is taken can't be read, or
            two names are one without wrappers.
    """
    unread = reader.unread
    bare = {name: name for name in (*reader.tensors, *unread)}
    bare |= {} if keep_wrappers else without_wrappers(reader.tensors)
    dropped = {pattern: _matching(reader, pattern, bare) for pattern in dict.fromkeys(drop)}
    gone = {name for some in dropped.values() for name in some}
    if gone:
        if gone >= reader.tensors.keys():
            raise CheckpointError(f"--drop leaves nothing of {reader.path}, which has {len(reader.tensors)} tensors")
        quantised.check_dropped(reader.tensors, gone)
        reader = Filtered(reader, gone, tuple(dropped))
    reader.check_read(unread.keys() - gone if strip is None else {*_below(unread, strip)} - gone)
    unwrapped: dict[str, int] = {}
    if strip is not None and not keep_wrappers and not _below(reader.tensors, strip) and _below(bare.values(), strip):
        reader, unwrapped = unwrap(reader)
    left_out: tuple[str, ...] = ()
    if strip is not None:
        others = [name for name in (*reader.tensors, *unread) if name not in gone]
        left_out = tuple(name for name in others if not name.startswith(strip))
        reader = Stripped(reader, strip)
    if not keep_wrappers:
        reader, more = unwrap(reader)
        unwrapped = {**unwrapped, **more}
    streams = () if keep_wrappers else tuple(random_state.names_of(reader.tensors))
    if streams and len(streams) < len(reader.tensors):
        reader = Filtered(reader, streams, ())
    prefix = strip or ""
    names = (*(prefix + name for name in (*reader.tensors, *streams)), *left_out, *gone)
    parts = {random_state.REASON: streams} if streams else {}
    return reader, Selection(names, prefix, dropped, left_out, unwrapped, parts, reader.chosen)


def _below(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def check_patterns(drop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the patterns that ``drop`` gives: a text is one of them.

    Raises:
        CheckpointError: one is no text, or empty.
    """
    patterns = (drop,) if isinstance(drop, str) else tuple(drop or ())
    for pattern in patterns:
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
            raise CheckpointError(
                f"--drop ({printable(pattern)}) must be a pattern of names, of 1 to {MAX_PATTERN} characters"
            )
    return patterns


def patterns_in(reader: Reader, known: Manifest | None) -> tuple[str, ...]:
    """Return the patterns that a manifest says to have left tensors out by, those that fit names of its source."""
    said = {} if known is None else known.source.get("dropped", {})
    names = {*reader.tensors, *reader.unread, *without_wrappers(reader.tensors).values()}
    return tuple(one for one in said if any(map(re.compile(fnmatch.translate(one)).match, names)))


def _matching(reader: Reader, pattern: str, bare: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names that a pattern fits, as they are or without wrappers."""
    matches = re.compile(fnmatch.translate(pattern)).match
    found = tuple(name for name, own in bare.items() if matches(name) or matches(own))
    if not found:
        first = printable(next(iter(reader.tensors), ""))
        raise CheckpointError(f"--drop ({printable(pattern)}) fits no name of {reader.path}; its first is {first}")
    return found


def _above(pattern: str) -> str:
    """Return what stands above the last whole part that a pattern begins with."""
    return "".join(f"{part}." for part in re.split(r"[*?\[]", pattern)[0].split(".")[:-2])


def _listed(names: Sequence[str], prefix: str) -> str:
    """Return names with their number, the first few of each kind: what begins with the same part behind a prefix."""
    if len(names) == 1:
        return printable(names[0])
    kinds: dict[str, list[str]] = {}
    for name in names:
        parts, front = name.split("."), prefix.split(".")
        shared = next((at for at, part in enumerate(parts) if front[at : at + 1] != [part]), 0)
        kinds.setdefault(".".join(parts[: shared + 1]), []).append(name)
    shown = []
    for begin, some in list(kinds.items())[:KINDS]:
        first = ", ".join(map(printable, some[:SHOWN])) + (
            f" and {len(some) - SHOWN} more" if len(some) > SHOWN else ""
        )
        shown.append(f"{len(some)} of {printable(begin)} ({first})" if len(some) > 1 else first)
    more = [f"{len(kinds) - KINDS} more kinds"] if len(kinds) > KINDS else []
    return f"{len(names)} tensors: {'; '.join([*shown, *more])}"
