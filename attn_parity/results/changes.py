"""Changes since a stored report, from the plain data of both."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_bridge.whole_files import JsonObject, read_text

from .findings import SEVERITY, between_words

SHARES = (("meaning_used",), ("first_used", "torch_used"), ("second_used", "flax_used"))
"""Keys of the shares of the allowed error, today's name before the former one."""

SHOWN = 3
"""How many tensors are named in a line."""

Data = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Changes:
    """The difference between a baseline and a report.

    Attributes:
        verdict: before and now.
        place: where the two sides first diverged, before and now; "" is nowhere.
        failing: tensors that were equal and are not any more.
        mended: tensors that were not equal, accepted or not, and are now.
        added: tensors that the baseline does not have.
        removed: tensors that only the baseline has.
        share: the tensor whose largest share of the allowed error changed most, before and now; None if none did.
        now_allowed: tensors whose difference is accepted, and was not, or was not there.
        no_longer_allowed: tensors whose difference was accepted, is still there, and is not accepted any more.
    """

    verdict: tuple[str, str]
    place: tuple[str, str] = ("", "")
    failing: tuple[str, ...] = ()
    mended: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    share: tuple[str, float, float] | None = None
    now_allowed: tuple[str, ...] = ()
    no_longer_allowed: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether verdict, place and the verdict of every tensor are as they were."""
        same = self.verdict[0] == self.verdict[1] and self.place[0] == self.place[1]
        return same and not any(names for _, names in self._named)

    @property
    def _named(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each kind of change in words, with the names of its tensors."""
        return (
            ("newly failing", self.failing),
            ("mended", self.mended),
            ("now allowed", self.now_allowed),
            ("no longer allowed", self.no_longer_allowed),
            ("new", self.added),
            ("gone", self.removed),
        )

    def lines(self) -> list[str]:
        """Return the changes as at most three lines of text."""
        before, now = self.verdict
        parts = [f"verdict {before} -> {now}" if before != now else f"verdict {now} as before"]
        parts += [f"{len(names)} {what} ({_some(names)})" for what, names in self._named if names]
        lines = [f"since the baseline: {'; '.join(parts) if not self.is_empty else 'nothing has changed'}"]
        if self.place[0] != self.place[1]:
            lines.append(f"  first divergence: {self.place[0] or 'none'} -> {self.place[1] or 'none'}")
        if self.share is not None:
            name, old, new = self.share
            lines.append(f"  largest change: {name}, {_written(old)} -> {_written(new)} of the allowed error")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


def read(path: str | Path) -> JsonObject:
    """Return a report that was written as JSON.

    Raises:
        ValueError: the file cannot be read, or does not hold a report of `compare`.
    """
    try:
        data = json.loads(read_text(path))
    except OSError as error:
        raise ValueError(f"the baseline {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the baseline {path} is not JSON: {error}") from error
    if not is_report(data):
        raise ValueError(f"the baseline {path} is not a report of compare, written with --json")
    return dict(data)


def changes(before: Data, now: Data) -> Changes:
    """Return the changes of a report since its baseline, both as JSON-ready data.

    Raises:
        ValueError: the baseline is not a report of `compare`.
    """
    if not is_report(before):
        raise ValueError("the baseline is not the data of a report of compare, as to_json() gives it")
    old, new = _tensors(before), _tensors(now)
    common = [name for name in new if name in old]
    states = {name: (_state(old[name]), _state(new[name])) for name in common}

    def which(*moves: tuple[str, str]) -> tuple[str, ...]:
        return tuple(name for name in common if states[name] in moves)

    moved = [
        (name, old_share, new_share)
        for name in common
        if (old_share := _used(old[name])) is not None and (new_share := _used(new[name])) is not None
    ]
    largest = max(moved, key=lambda old_share: abs(old_share[2] - old_share[1]), default=None)
    return Changes(
        (str(before["verdict"]), str(now["verdict"])),
        (_place(before), _place(now)),
        which(("equal", "fails")),
        which(("fails", "equal"), ("allowed", "equal")),
        tuple(name for name in new if name not in old),
        tuple(name for name in old if name not in new),
        None if largest is None or largest[1] == largest[2] else largest,
        which(("fails", "allowed"), ("equal", "allowed")),
        which(("allowed", "fails")),
    )


def is_report(data: object) -> bool:
    """Return whether data has the fields of a report that the comparison reads."""
    if not isinstance(data, Mapping) or data.get("verdict") not in SEVERITY:
        return False
    tensors, first = data.get("tensors"), data.get("first_divergence")
    return isinstance(tensors, list) and all(map(_is_tensor, tensors)) and (first is None or _is_place(first))


def _is_tensor(data: object) -> bool:
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str) or data.get("verdict") not in SEVERITY:
        return False
    shares = [data.get(key) for keys in SHARES for key in keys]
    return all(one is None or _is_number(one) for one in shares)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_place(data: object) -> bool:
    if not isinstance(data, Mapping) or not isinstance(data.get("path"), str):
        return False
    between = data.get("between")
    is_pair = isinstance(between, (list, tuple)) and len(between) == 2
    return between is None or (is_pair and all(isinstance(one, str) for one in between))


def _tensors(data: Data) -> dict[str, Data]:
    """Return name -> tensor; in several precisions, a name has its precision behind it."""
    counts = Counter(one["name"] for one in data["tensors"])
    return {
        one["name"] if counts[one["name"]] == 1 else f"{one['name']} ({one.get('dtype')})": one
        for one in data["tensors"]
    }


def _state(tensor: Data) -> str:
    """Return ``equal``, ``allowed``, or ``fails``."""
    if tensor["verdict"] == "equal":
        return "equal"
    return "allowed" if tensor.get("allowed") else "fails"


def _used(tensor: Data) -> float | None:
    shares = [next((tensor[key] for key in keys if tensor.get(key) is not None), None) for keys in SHARES]
    return max((float(one) for one in shares if one is not None), default=None)


def _place(data: Data) -> str:
    first = data.get("first_divergence")
    if not first:
        return ""
    path, between = first["path"], first.get("between")
    return between_words(path, between) if between else path or "the module itself"


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _written(share: float) -> str:
    return f"{share:.0%}" if share < 10 else f"{share:.3g} x"
