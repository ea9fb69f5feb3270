"""The family of one call, which a table of the package's families or layouts takes in while the call runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TypeVar

from .family import Family

V = TypeVar("V")

_IN_USE: ContextVar[Family | None] = ContextVar("attn_bridge_family", default=None)


@contextlib.contextmanager
def using(family: Family | None) -> Iterator[None]:
    """Put a family before those of the package, in this thread and while the context is open; None adds none."""
    token = _IN_USE.set(_IN_USE.get() if family is None else family)
    try:
        yield
    finally:
        _IN_USE.reset(token)


class Scoped(Mapping[str, V]):
    """A table of the package, with the entries of the family in use before its own.

    Args:
        table: the package's entries.
        entries: from a family to its entries.
    """

    def __init__(self, table: Mapping[str, V], entries: Callable[[Family], Mapping[str, V]]):
        self._table, self._entries = table, entries

    def _all(self) -> Mapping[str, V]:
        family = _IN_USE.get()
        return self._table if family is None else {**self._table, **self._entries(family)}

    def __getitem__(self, name: str) -> V:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
