"""A user's own layout: a TOML file of ``[[rule]]`` tables, read into the two layouts that it connects.

Keys: ``torch`` and ``flax`` (names; one of the two may be a list of parts, which are one tensor on the other side),
``pattern`` and sizes by letter as in `Rule`, ``part`` (axis of the one tensor that counts the parts), or ``along`` (the
axis of their concatenation) and ``split`` (sizes), ``stack`` (axis of the one tensor, or else of Flax's, that counts
``{i}`` or ``{j}``), and ``drop`` (the reason; then one name only).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..weights.placements import LayoutError
from ..weights.rows import Row
from ..weights.toml import read_tables
from .layout import Layout

_KEYS = {"torch", "flax", "pattern", "part", "along", "split", "stack", "drop"}


def direction(source: str | None, target: str | None) -> str:
    """Return the side, torch or flax, that the layouts of a conversion by rules name as its source; "" for none.

    Raises:
        LayoutError: they name anything but the two sides, or the same side twice.
    """
    other = {"torch": "flax", "flax": "torch"}
    for option, value in (("--from", source), ("--to", target)):
        if value is not None and value not in other:
            raise LayoutError(
                f"{option} ({value}) must be torch or flax beside --rules, which stand in place of layouts"
            )
    if source is not None and source == target:
        raise LayoutError(f"--from and --to ({source}) must be the two sides of the rules")
    return source or (other[target] if target is not None else "")


def read(path: Path, names: Iterable[str], layout: str = "", source: str = "") -> tuple[Layout, Layout]:
    """Return the layout of a checkpoint with those names, and the layout that the rules convert it to.

    Args:
        path: the file.
        names: the tensors' names.
        layout: the user's name for the checkpoint's layout, for names that both sides cover.
        source: the side whose names the checkpoint must have, torch or flax; "" takes the one that fits.

    Raises:
        LayoutError: not TOML, a table that is not a rule, or rules that fit neither way; the message names the line.
    """
    try:
        tables = read_tables(path)
    except OSError as error:
        raise LayoutError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise LayoutError(str(error)) from None
    if not tables:
        raise LayoutError(f"{path}: rule must be tables, each headed [[rule]]")
    flax_rows, torch_rows = [], []
    for location, table in tables:
        try:
            of_flax, of_torch = ([dataclasses.replace(row, place=location) for row in rows] for rows in _rows(table))
        except (LayoutError, TypeError) as error:
            raise LayoutError(f"{location}: {error}") from None
        flax_rows += of_flax
        torch_rows += of_torch
    torch = Layout(f"{path.name} torch", "", torch_rows, ours=False)
    flax = Layout(f"{path.name} flax", "", flax_rows, ours=False)
    names = list(names)
    sides = {"torch": (torch,), "flax": (flax,)}.get(source, (torch, flax))
    fits = [layout for layout in sides if len(layout.match(names)[1]) == len(names)]
    if not fits:
        closest = max(sides, key=lambda layout: len(layout.match(names)[1]))
        matches = closest.match(names)[1]
        rest = [name for name in names if name not in matches]
        raise LayoutError(f"{path}: no rule covers {', '.join(rest[:3])}{' ...' if len(rest) > 3 else ''}")
    return (torch, flax) if torch in fits and (flax not in fits or layout != flax.name) else (flax, torch)


def _rows(table: dict[str, Any]) -> tuple[list[Row], list[Row]]:
    """Return the rows of one rule for the Flax side and for the torch side."""
    if isinstance(table.get("flax"), list):  # read as the rule of two sides that are called the other way round
        if not table["flax"]:
            raise LayoutError("torch and flax must be a name or a list of names")
        if not isinstance(table.get("torch", ""), str):
            raise LayoutError("one of torch and flax may be a list of parts, and the other is a name")
        if not isinstance(table.get("pattern", ""), str):
            raise LayoutError(f"pattern must be a text, got {table['pattern']!r}")
        before, arrow, after = table.get("pattern", "").partition("->")
        turned = {**table, "torch": table["flax"], "flax": table.get("torch", "")}
        of_torch, of_flax = _rows(turned | ({"pattern": f"{after} -> {before}"} if arrow else {}))
        return of_flax, of_torch
    if "optional" in table:
        raise LayoutError("optional is no key of a rule: every rule is passed over where it has no tensor")
    sizes = {key: value for key, value in table.items() if key not in _KEYS}
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, str)) or (isinstance(size, int) and size < 1):
            raise LayoutError(f"{axis} must be a size, a whole number of at least 1 or a setting's name, got {size!r}")
    torch, flax, reason = table.get("torch", []), table.get("flax", ""), table.get("drop", "")
    ours = tuple([torch] if isinstance(torch, str) else torch)
    for key, kind in (("flax", str), ("pattern", str), ("part", str), ("along", str), ("stack", str), ("drop", str)):
        if not isinstance(table.get(key, ""), kind):
            raise LayoutError(f"{key} must be a text, got {table[key]!r}")
    if not all(isinstance(name, str) for name in ours):
        raise LayoutError("torch and flax must be a name or a list of names")
    if reason:
        if bool(flax) == bool(ours) or sizes or table.keys() - {"torch", "flax", "drop"}:
            raise LayoutError("a rule that drops has one name, torch or flax, and the reason")
        return ([Row(flax, reason=reason)], []) if flax else ([], [Row(name, reason=reason) for name in ours])
    if not ours or not flax:
        raise LayoutError(f"a rule needs the keys torch and flax, got {', '.join(table) or 'none'}")
    split = table.get("split", [])
    if not isinstance(split, list) or not all(isinstance(size, (int, str)) for size in split):
        raise LayoutError(f"split must be a list of sizes or settings' names, got {split!r}")
    row = Row(
        flax,
        ours,
        table.get("pattern", "... -> ..."),
        table.get("part", ""),
        table.get("along", ""),
        tuple(split),
        table.get("stack", ""),
        sizes,
    )
    return [row], [Row(name, (name,)) for name in ours]
