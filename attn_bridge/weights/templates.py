"""Templates of tensor names, such as ``h.{i}.attn.weight``: their placeholders, and matching of names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

INTEGER = r"(0|[1-9][0-9]*)"

_DIGIT = r"([0-9])"

_LATER = r"(?:_(?P<i>[1-9][0-9]*))?"

_RUN = re.compile(r"(?:\{[^{}]*\}){2,}")
"""Placeholders that touch each other."""

LATER = "_i"
"""Placeholder of a layout that is ``{i}`` as Keras numbers layers: nothing for the first, ``_1`` for the second."""

KINDS: Mapping[str, str] = {"i": INTEGER, "j": INTEGER, "path": r"((?:[^.]+\.)*?)", "rest": r"(.+)"}
"""Regular expressions of a layout's placeholders, each a group.

``{i}`` is an integer, ``{j}`` one below it; ``{path}`` any prefix, possibly empty, with its dot; ``{rest}`` anything
that follows. All placeholders of a plain rule are integers.
"""


@functools.cache
def placeholders(template: str) -> frozenset[str]:
    """Return the placeholders of a template; layouts share most templates, so that each is parsed once."""
    return frozenset("i" if name == LATER else name for name in PLACEHOLDER.findall(template))


@functools.cache
def adjacent(template: str) -> frozenset[str]:
    """Return the placeholders that touch another placeholder: those of integers match one digit each."""
    return frozenset(word for run in _RUN.findall(template) for word in PLACEHOLDER.findall(run))


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return a template with its placeholders filled in."""
    return PLACEHOLDER.sub(lambda hit: _later(values["i"]) if hit[1] == LATER else values[hit[1]], template)


def _later(number: str) -> str:
    return "" if number == "0" else f"_{number}"


def expanded(template: str) -> tuple[str, ...]:
    """Return templates without ``{_i}`` that cover the same names."""
    later = f"{{{LATER}}}"
    return (template.replace(later, ""), template.replace(later, "_{i}")) if later in template else (template,)


def match(template: str, name: str, prefixes: tuple[str, ...] | None = None) -> dict[str, str] | None:
    """Return the values of the placeholders in a name, or None if it does not match.

    Args:
        template: the template.
        name: the name.
        prefixes: values of ``{prefix}`` in a layout; None: every placeholder is an integer.
    """
    if "{" not in template:
        return {} if name == template else None
    hit = _expression(template, prefixes).fullmatch(name)
    if hit is None:
        return None
    values = hit.groupdict()
    if "i" in values and values["i"] is None:  # the first one of `LATER`
        values["i"] = "0"
    return values


@functools.cache
def _expression(template: str, prefixes: tuple[str, ...] | None) -> re.Pattern[str]:
    """Return the regular expression of a template, whose groups are its placeholders."""
    kinds = dict.fromkeys(adjacent(template), _DIGIT)
    if prefixes is not None:
        kinds |= {**KINDS, "prefix": f"({'|'.join(map(re.escape, prefixes))})"}
    pieces: list[str] = []
    names: set[str] = set()
    end = 0
    for hit in PLACEHOLDER.finditer(template):
        name = hit[1]
        pieces.append(re.escape(template[end : hit.start()]))
        if name == LATER:
            pieces.append(_LATER)
        else:
            pieces.append(f"(?P={name})" if name in names else kinds.get(name, INTEGER).replace("(", f"(?P<{name}>", 1))
        names.add(name)
        end = hit.end()
    return re.compile("".join([*pieces, re.escape(template[end:])]))
