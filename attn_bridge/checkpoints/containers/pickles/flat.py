"""What a pickle of ``torch.save`` holds: tensors by dotted name, and plain values beside them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ....printable import printable
from ..files import bad, check_count, check_name
from .machine import Machine, Strided

MAX_DEPTH = 64
"""Dicts within dicts."""


def read_pickle(data: bytes, path: Path) -> tuple[dict[str, Strided], dict[str, Any]]:
    """Return the tensors of a pickled dict by dotted name, and the plain values beside them.

    Args:
        data: the pickle.
        path: named in errors.

    Raises:
        CheckpointError: it is damaged, or refers to anything but tensors, dicts, lists and plain values.
    """
    # Each value takes a byte of the pickle, so more values than bytes are the same ones again.
    return _flatten(path, Machine(data, path).run(), most=len(data))


class Plain:
    """Makes plain values of what a pickle holds, in at most so many steps.

    Args:
        path: named in errors.
        most: steps.
    """

    def __init__(self, path: Path, most: int):
        self._path, self._left = path, most

    def count(self, name: str, depth: int) -> None:
        """Count a step."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise bad(self._path, f"{printable(name)} is nested too deeply or repeated too often")

    def value(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return a value with its tuples as lists and its keys as texts.

        Raises:
            CheckpointError: it is, or holds, something that JSON has not.
        """
        path = self._path
        self.count(name, depth)
        if isinstance(value, Strided):
            raise bad(path, f"{printable(name)} is a list with tensors; only dicts of them are read")
        if isinstance(value, list | tuple):
            return [self.value(one, name, depth + 1) for one in value]
        if isinstance(value, dict):
            whole = {str(key): self.value(one, name, depth + 1) for key, one in value.items()}
            if len(whole) < len(value):
                raise bad(path, f"{printable(name)} has a key as a number and as text")
            return whole
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise bad(path, f"{printable(name)} is neither a tensor nor a plain value: {printable(repr(value), 60)}")


def _flatten(path: Path, found: Any, most: int) -> tuple[dict[str, Strided], dict[str, Any]]:
    """Return the tensors of nested dicts by dotted name, and what else is there, in at most so many values."""
    if isinstance(found, Strided):
        raise bad(path, "holds a single tensor, not a dict of them")
    if not isinstance(found, dict):
        raise bad(path, f"holds a {type(found).__name__}, not a dict of tensors")
    tensors: dict[str, Strided] = {}
    others: dict[str, Any] = {}
    plain = Plain(path, most)

    def walk(value: Any, name: str, depth: int) -> None:
        plain.count(name, depth)
        if isinstance(value, dict) and (value or not name):
            for key, one in value.items():
                part = str(key)
                if not part:
                    raise bad(path, f"a key in {printable(name) or 'its dict'} is empty")
                walk(one, f"{name}.{part}" if name else part, depth + 1)
            return
        check_name(path, name)
        if name in tensors or name in others:
            raise bad(path, f"{printable(name)} comes twice")
        if isinstance(value, Strided):
            tensors[name] = value
        else:
            others[name] = plain.value(value, name, depth)

    walk(found, "", 0)
    check_count(path, len(tensors))
    return tensors, others
