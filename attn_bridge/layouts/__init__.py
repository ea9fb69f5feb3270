"""Outside layouts as data: how other libraries name and shape the weights that we call by our torch names.

A layout is a table of rules. Its first column is our torch name, below ``layers.{i}`` for a stack of layers; the second
column of a layout's table is the outside name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..weights import Rules
from . import hf_bert

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A named table of rules; ``rule.torch`` is our name, ``rule.flax`` the outside one."""

    name: str
    rules: Rules

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the names that the layout covers, bare or below any prefix, in the order given.

        The rest is what the layout leaves out; report it.
        """
        return list(self._prefixes(names))

    def find_prefix(self, names: Iterable[str]) -> str:
        """Return the one prefix that the covered names stand below, such as ``"bert"``; empty if there is none.

        Raises:
            ValueError: they stand below several.
        """
        prefixes = sorted(set(self._prefixes(names).values()))
        if len(prefixes) > 1:
            found = ", ".join(repr(prefix) for prefix in prefixes)
            raise ValueError(f"{self.name} tensors must stand below one prefix, got {found}; convert one at a time")
        return prefixes[0] if prefixes else ""

    def to_canonical(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        """Convert arrays under outside names, bare or below one prefix, to arrays under our torch names.

        Raises:
            ValueError: the names stand below several prefixes.
            WeightsMismatchError: (a ValueError) lists every missing, unexpected and misshapen name; what is no part of
                the layout has to be left out with `select` first.
        """
        return self.rules.prefixed("", self.find_prefix(arrays)).convert(arrays, "flax")

    def from_canonical(self, arrays: Mapping[str, np.ndarray[Any, Any]], *, prefix: str = "") -> Arrays:
        """Convert arrays under our torch names to arrays under outside names, below `prefix`.

        Raises:
            WeightsMismatchError: (a ValueError) lists every missing, unexpected and misshapen name.
        """
        return self.rules.prefixed("", prefix).convert(arrays, "torch")

    def _prefixes(self, names: Iterable[str]) -> dict[str, str]:
        """Return covered name -> prefix in front of the part that a rule names."""
        splits = {name: list(_splits(name)) for name in names}
        endings = {ending for split in splits.values() for _, ending in split}
        known, _, _ = self.rules.pair(endings, "flax")
        covered: dict[str, str] = {}
        for name, split in splits.items():
            for prefix, ending in split:
                if ending in known:
                    covered.setdefault(name, prefix)
        return covered


def find(name: str) -> Layout:
    """Return the layout of that name.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    if name not in _LAYOUTS:
        raise ValueError(f"layout ({name}) must be one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


def names() -> tuple[str, ...]:
    """Return the names of all layouts."""
    return tuple(_LAYOUTS)


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Split a dotted name into prefix and ending at every dot, the longest ending first."""
    parts = name.split(".")
    for position in range(len(parts)):
        yield ".".join(parts[:position]), ".".join(parts[position:])


_LAYOUTS = {module.NAME: Layout(module.NAME, module.RULES) for module in (hf_bert,)}
