"""Selects and renames the source tensors to convert: wrappers of torch, a prefix, patterns and random state.

Parts that wrappers add to names (``_orig_mod``, ``module``) are removed at any position. ``LayerNorm.gamma`` and
``LayerNorm.beta``, as BERT's first files have them, become ``weight`` and ``bias``, as `transformers` loads them.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..models import layouts
from ..models.parts import OmittedPart
from ..models.unknown_names.beginnings import MODULE, WRAPPERS
from ..printable import printable
from ..whole_files import JsonObject
from . import quantised
from .containers.base import CheckpointError, Reader, TensorInfo
from .manifest import Manifest
from .readers import Filtered, Renamed, Stripped

RANDOM_STATE = "it is the state of a random stream"
"""Reason for leaving out keys and counts of Flax NNX's random streams."""

SLASH = "/"
"""Separator of the parts of names in flattened trees of JAX."""

VALUE, COUNT, KEY = ".value", ".count", ".key"
"""Endings of their names."""


NORM, NORM_ENDINGS = "LayerNorm", {"gamma": "weight", "beta": "bias"}
"""Name of BERT's norms, and the endings of TensorFlow's variables, which its first files have -> those of torch."""


def random_state_names(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of keys and counts of random streams: a whole number ``X.count`` next to a key ``X.key``."""
    names = []
    for name, info in tensors.items():
        bare = name.removesuffix(VALUE)
        if not bare.endswith(COUNT) or info.dtype != "uint32" or info.shape:
            continue
        key = tensors.get(bare.removesuffix(COUNT) + KEY + name[len(bare) :])
        if key is not None and key.dtype == "uint32" and len(key.shape) == 1 and key.shape[0] in (2, 4):
            names += [name, key.name]
    return names


def unwrap(reader: Reader) -> tuple[Reader, dict[str, int]]:
    """Return a source with wrapper parts removed from names, and the number of names that lost each part.

    Raises:
        CheckpointError: two names are equal without wrappers.
    """
    bare = without_wrappers(reader.tensors)
    counts = counted(bare)
    if not counts:
        return reader, {}
    names: dict[str, str] = {}
    for name, own in bare.items():
        if own in names:
            raise CheckpointError(
                f"{printable(names[own])} and {printable(name)} of {printable(str(reader.path), 400)} are one name, "
                f"{printable(own)}, without wrappers; --strip takes one of them, --drop leaves one out"
            )
        names[own] = name
    return Renamed(reader, names), counts


def counted(bare: Mapping[str, str]) -> dict[str, int]:
    """Return removed part -> number of names that lost it.

    Args:
        bare: name -> the name without wrappers.
    """
    lost: collections.Counter[str] = collections.Counter()
    for name, own in bare.items():
        if SLASH in name and SLASH not in own:
            lost[SLASH] += 1
        elif name != own:
            lost.update((collections.Counter(name.split(".")) - collections.Counter(own.split("."))).keys())
    return dict(lost)


def without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Return name -> the name with dots, without wrappers, and with torch's names of a norm's parameters."""
    dotted = _dotted(names)
    bare = _unwrapped(dotted.values())
    return {name: _of_torch(bare[own]) for name, own in dotted.items()}


def _dotted(names: Collection[str]) -> dict[str, str]:
    """Return name -> the name with dots for slashes, as trees are flattened by ``flatten_dict(tree, sep="/")``.

    Names stay where one of them has a dot, and where a layout has names with slashes.
    """
    if not any(SLASH in name for name in names) or any("." in name for name in names) or _fit(names):
        return dict(zip(names, names, strict=True))
    return {name: name.replace(SLASH, ".") for name in names}


def _of_torch(name: str) -> str:
    above, _, ending = name.rpartition(".")
    if ending not in NORM_ENDINGS or above.rpartition(".")[2] != NORM:
        return name
    return f"{above}.{NORM_ENDINGS[ending]}"


def _unwrapped(names: Collection[str]) -> dict[str, str]:
    """Return name -> the name without wrappers.

    ``module`` may be a part of a user's own model. It is removed in front of all names; deeper in a name it is removed
    only if it has no siblings and the names match a whole model of some library only without it.
    """
    if not any(
        "module" in name or "_mod" in name for name in names
    ):  # as all wrappers are called; most files have none
        return dict(zip(names, names, strict=True))
    bare = {name: _without(name.split("."), WRAPPERS) for name in names}
    while bare and all(own[0] == MODULE and len(own) > 1 for own in bare.values()):
        bare = {name: own[1:] for name, own in bare.items()}
    bare_names = {name: ".".join(own) for name, own in bare.items()}
    if not any(MODULE in own[:-1] for own in bare.values()):
        return bare_names
    inner = {name: ".".join(own) for name, own in _without_lone_modules(bare).items()}
    is_model = (
        inner != bare_names
        and len({*inner.values()}) == len(inner)
        and _fit(inner.values()) > _fit(bare_names.values())
    )
    return inner if is_model else bare_names


def _without(parts: list[str], gone: Collection[str]) -> list[str]:
    return [part for part in parts[:-1] if part not in gone] + parts[-1:]


def _without_lone_modules(bare: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return names without each ``module`` that has no siblings."""
    below: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)
    for own in bare.values():
        for depth, part in enumerate(own):
            below[tuple(own[:depth])].add(part)
    return {
        name: [
            part
            for depth, part in enumerate(own)
            if part != MODULE or depth == len(own) - 1 or below[tuple(own[:depth])] != {MODULE}
        ]
        for name, own in bare.items()
    }


def _fit(names: Iterable[str]) -> int:
    """Return how many names the whole model has that most of them fit."""
    names = list(names)
    whole = [layout for layout in map(layouts.find, layouts.names()) if layout.whole]
    return max(len(layout.match(names)[1]) for layout in whole)


SHOWN, KINDS, MAX_PATTERN = 3, 8, 1000
"""Names of each kind, and kinds, that a line names at most; characters of a pattern."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The tensors of a source that are converted, and those that are left out.

    Attributes:
        names: all names of the source; those that are taken, without wrappers.
        prefix: prefix removed from the names that are taken; "" if none.
        dropped: pattern of ``--drop`` -> the names that it leaves out.
        left_out: names without the prefix, except those that are dropped.
        unwrapped: wrapper part that is removed from names, ending that is renamed, or slash -> number of names.
        parts: reason why a recognised part is left out -> its names.
        chosen: the step and the item that are read from an Orbax run.
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
        part_names = {name for some in self.parts.values() for name in some}
        return len(self.left_out) + len({name for some in self.dropped.values() for name in some}) + len(part_names)

    def without(self, left_out: Mapping[str, OmittedPart]) -> Selection:
        """Return the selection without tensors that a layout leaves out: name -> the part it belongs to."""
        parts = dict(self.parts)
        for name, part in left_out.items():
            parts[part.reason] = (*parts.get(part.reason, ()), name)
        return dataclasses.replace(self, parts=parts)

    def outside(self, name: str) -> str:
        """Return the full source name of a tensor outside the prefix that `name` refers to; "" if none.

        The tensor must be in a parent of the prefix: for ``model.model.``, below ``model.`` or at the top.
        """
        fronts = [whole.removesuffix(name) for whole in self.left_out if whole.endswith(name)]
        fronts = [front for front in fronts if self.prefix.startswith(front) and (not front or front.endswith("."))]
        return max(fronts, key=len) + name if fronts else ""

    def in_manifest(self) -> JsonObject:
        """Return the manifest's keys ``stripped``, ``unwrapped``, ``dropped`` (pattern -> names) and ``left_out``.

        The last has reason -> names.
        """
        dropped = {pattern: sorted(names) for pattern, names in self.dropped.items()}
        parts = {reason: sorted(names) for reason, names in self.parts.items()}
        entries = {
            "stripped": self.prefix, "unwrapped": sorted(self.unwrapped), "dropped": dropped, "left_out": parts
        }  # fmt: skip
        return {**{key: value for key, value in entries.items() if value}, **self.chosen}

    def notes(self) -> list[str]:
        """Return lines on the tensors left out: their number, and the first few names of each kind."""
        lost = {part: f"({count} tensors)" for part, count in self.unwrapped.items()}
        renamed = [f"{NORM}.{part} to {NORM_ENDINGS[part]} {lost.pop(part)}" for part in NORM_ENDINGS if part in lost]
        dotted = [f"read with dots for slashes {lost.pop(SLASH)}"] if SLASH in lost else []
        gone = ", ".join(f"{printable(part)} {count}" for part, count in lost.items())
        notes = dotted + ([f"removed from names, as wrappers add them: {gone}"] if gone else [])
        notes += [f"renamed, as transformers does: {', '.join(renamed)}"] if renamed else []
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
    """Return a source without the tensors left out and with wrapper parts removed, and the selection.

    Args:
        reader: the open source.
        strip: prefix to remove from names, with wrappers or without; tensors without it are left out.
        drop: patterns of names, with wrappers or without, that are left out.
        keep_wrappers: whether names keep the parts that wrappers added.

    State of random streams is left out if names lose their wrappers.

    Raises:
        CheckpointError: a pattern or a prefix matches no name, no tensor is left, a selected tensor can't be read, or
            two names are equal without wrappers.
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
    streams = () if keep_wrappers else tuple(random_state_names(reader.tensors))
    if streams and len(streams) < len(reader.tensors):
        reader = Filtered(reader, streams, ())
    prefix = strip or ""
    names = (*(prefix + name for name in (*reader.tensors, *streams)), *left_out, *gone)
    parts = {RANDOM_STATE: streams} if streams else {}
    return reader, Selection(names, prefix, dropped, left_out, unwrapped, parts, reader.chosen)


def _below(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def check_patterns(drop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the patterns of ``drop``; a string counts as a single pattern.

    Raises:
        CheckpointError: a pattern is empty, too long, or not a string.
    """
    patterns = (drop,) if isinstance(drop, str) else tuple(drop or ())
    for pattern in patterns:
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
            raise CheckpointError(
                f"--drop ({printable(pattern)}) must be a pattern of names, of 1 to {MAX_PATTERN} characters"
            )
    return patterns


def patterns_in(reader: Reader, manifest: Manifest | None) -> tuple[str, ...]:
    """Return the manifest's patterns of dropped tensors that match a name of the source."""
    patterns = {} if manifest is None else manifest.source.get("dropped", {})
    names = {*reader.tensors, *reader.unread, *without_wrappers(reader.tensors).values()}
    return tuple(one for one in patterns if any(map(re.compile(fnmatch.translate(one)).match, names)))


def _matching(reader: Reader, pattern: str, bare: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names that a pattern matches, as they are or without wrappers."""
    matches = re.compile(fnmatch.translate(pattern)).match
    matching_names = tuple(name for name, own in bare.items() if matches(name) or matches(own))
    if not matching_names:
        first = printable(next(iter(reader.tensors), ""))
        raise CheckpointError(f"--drop ({printable(pattern)}) fits no name of {reader.path}; its first is {first}")
    return matching_names


def _above(pattern: str) -> str:
    """Return the path above the last complete part of a pattern's literal start."""
    return "".join(f"{part}." for part in re.split(r"[*?\[]", pattern)[0].split(".")[:-2])


def _listed(names: Sequence[str], prefix: str) -> str:
    """Return the number of names, and the first few of each kind (the next part after a prefix)."""
    if len(names) == 1:
        return printable(names[0])
    kinds: dict[str, list[str]] = {}
    for name in names:
        parts, front = name.split("."), prefix.split(".")
        shared = next((at for at, part in enumerate(parts) if front[at : at + 1] != [part]), 0)
        kinds.setdefault(".".join(parts[: shared + 1]), []).append(name)
    descriptions = []
    for begin, some in list(kinds.items())[:KINDS]:
        first = ", ".join(map(printable, some[:SHOWN])) + (
            f" and {len(some) - SHOWN} more" if len(some) > SHOWN else ""
        )
        descriptions.append(f"{len(some)} of {printable(begin)} ({first})" if len(some) > 1 else first)
    more = [f"{len(kinds) - KINDS} more kinds"] if len(kinds) > KINDS else []
    return f"{len(names)} tensors: {'; '.join([*descriptions, *more])}"
