"""Picks an entry of a structured output: the logits of a `ModelOutput`, where the other side returns them alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from attn_bridge.printable import listed

from .subject import ModuleFailedError

T = TypeVar("T")

WORD = re.compile(r"\[(?:'[^']*'|\"[^\"]*\"|[^\]]*)\]|\.\w+")
"""One step into a structure, as `flatten` writes it: ``.name``, ``['key']`` or ``[0]``."""

MAX_SHOWN = 8
"""Most entries that a message lists."""


def words(path: str) -> list[str]:
    """Return the names of the steps that lead to a leaf: ``.hidden_states[0]`` gives ``hidden_states`` and ``0``."""
    return [word[1:] if word.startswith(".") else word[1:-1].strip("'\"") for word in WORD.findall(path)]


def picked(leaves: Sequence[tuple[str, T]], entry: str, what: str) -> list[tuple[str, T]]:
    """Return the leaves below an entry, with paths relative to it; a bare array is returned unchanged.

    Args:
        leaves: path and array of every leaf, from `flatten`.
        entry: attribute, key or position; deeper ones are joined by dots: ``hidden_states.0``.
        what: the side, for the message.

    Raises:
        ModuleFailedError: no leaf is below that entry.
    """
    if [place for place, _ in leaves] == [""]:
        return list(leaves)
    wanted = entry.split(".")
    inside = []
    for path, leaf in leaves:
        steps = WORD.findall(path)
        if words(path)[: len(wanted)] == wanted:
            inside.append(("".join(steps[len(wanted) :]), leaf))
    if not inside:
        raise ModuleFailedError(f"output ({entry}) must be one of the entries that {what} returns: {shown(leaves)}")
    return inside


def shown(leaves: Iterable[tuple[str, object]]) -> str:
    """Return the names of the first entries of a structure."""
    return listed(list(dict.fromkeys(words(place)[0] for place, _ in leaves if place)), MAX_SHOWN)
