"""Prefixes of names in the files of trainers: wrappers, averages of weights, an optimizer's moments."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable

from ...weights.toml import packaged

_FILE = packaged(__package__, "names.toml")
WRAPPERS, GENERATORS, _MOMENTS = (frozenset(_FILE[kind]) for kind in ("wrappers", "generators", "moments"))

MODULE = "module"
"""Prefix that DataParallel, DistributedDataParallel and AveragedModel add to all names."""

_OF_ADAM, _PAIR = ("mu", "nu"), ("m", "v")
"""Names of both moments of Adam; only a pair is evidence, since single letters above all may be anything."""

DEEPEST = 6
"""Parts of a prefix at most."""

MOST_PATTERNS = 4
"""Patterns of ``--drop`` that a message proposes at most."""

_AVERAGES = re.compile(
    r"(?:^|_)(?:ema|swa|polyak|average|averaged|avg|teacher|shadow|momentum_encoder|target)(?:$|_|[0-9])", re.ASCII
)


def is_moment(begin: str) -> bool:
    """Return whether a part of a prefix, or of a name, is of an optimizer's state; a leaf called ``mu`` is not."""
    parts = begin.split(".")
    return any(part in _MOMENTS or part.lower().startswith("optim") for part in parts) or any(
        part in _OF_ADAM for part in parts[:-1]
    )


def is_average(begin: str) -> bool:
    """Return whether a part of a prefix names another model's weights, or their average."""
    return any(_AVERAGES.search(part.lower()) for part in begin.split("."))


def suspects(begins: Collection[str]) -> set[str]:
    """Return the prefixes whose last part may be the name of a moment: ``mu``, ``nu``, or ``m`` and ``v``."""
    prefixes = set()
    for begin in begins:
        above, _, last = begin[:-1].rpartition(".")
        front = f"{above}." if above else ""
        if last in _OF_ADAM or (last in _PAIR and all(f"{front}{one}." in begins for one in _PAIR)):
            prefixes.add(begin)
    return prefixes


def below(names: Iterable[str]) -> dict[str, set[str]]:
    """Return prefix -> the names below it without the prefix, up to a depth of `DEEPEST`.

    A number ends a prefix, unless it is the first part: of a file that is a list or a tuple.
    """
    inside: dict[str, set[str]] = collections.defaultdict(set)
    for name in names:
        parts = name.split(".")[:-1]
        for count in range(1, min(len(parts), DEEPEST) + 1):
            if count > 1 and parts[count - 1].isdigit():
                break
            begin = ".".join(parts[:count]) + "."
            inside[begin].add(name[len(begin) :])
    return inside


def common(names: Collection[str]) -> str:
    """Return the longest common prefix of all names in whole parts, up to a number; "" if none."""
    if not names:
        return ""
    first, last = min(names).split(".")[:-1], max(names).split(".")[:-1]
    count = 0
    while count < min(len(first), len(last)) and first[count] == last[count] and not first[count].isdigit():
        count += 1
    return ".".join(first[:count]) + "." if count else ""


def patterns_of(rest: Iterable[str], covered: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match `rest` and not `covered`; () if this takes too many, or a block has names of both.

    Args:
        rest: the names to match.
        covered: the names not to match.
    """
    begins = {""}
    for name in covered:
        parts = name.split(".")
        begins |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    patterns = []
    for name in rest:
        parts = name.split(".")
        count = next((count for count in range(1, len(parts) + 1) if ".".join(parts[:count]) not in begins), 0)
        if not count or any(part.isdigit() for part in parts[:count]):
            return ()
        patterns.append(".".join(parts[:count]) + (".*" if count < len(parts) else ""))
    return tuple(dict.fromkeys(patterns)) if len(set(patterns)) <= MOST_PATTERNS else ()
