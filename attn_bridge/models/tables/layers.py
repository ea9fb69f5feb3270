"""The attention of one layer, whose table of tensors is a part of that of the whole model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

from ...specs import Config
from ...specs.decoder_model import Recurrent
from ...weights.rows import Row
from ..attention_layer import AttentionLayer
from ..layout import Layout
from ..reading.model_config import ConfigFile
from ..rows.common import Table
from ..rows.decoder import OURS

KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm", "v_norm")
"""Modules of a layer that has no use for them where it reads the keys and values of another (Gemma 3n and 4)."""

IN_MEMORY = "joined"
"""Alternative of rows that `transformers` has in memory, where files have another."""


def attention_of_layer(
    layout: Layout,
    config: ConfigFile,
    layer: int,
    spec: Config,
    *,
    numbers: Mapping[str, int] | None = None,
    libraries: Mapping[str, Table] | None = None,
) -> AttentionLayer:
    """Return the attention of a layer.

    Args:
        layout: of the model.
        config: of the model.
        layer: index of the layer.
        spec: config of its attention.
        numbers: settings that sizes are named after -> their values; None reads them from the config.
        libraries: further libraries -> their tables.
    """
    if numbers is None:
        keyed = ((name, [config.get(key) for key in keys]) for name, keys in layout.settings.items())
        numbers = {name: next((one for one in values if type(one) is int), 0) for name, values in keyed}
    front, tables = _tables(layout, spec, tuple(sorted(numbers.items())))
    prefix = front.replace("{prefix}", layout.prefixes[0]).replace("{i}", str(layer))
    return AttentionLayer(
        type(spec).__name__.removesuffix("Config"), spec, layer, {**tables, **(libraries or {})}, prefix
    )


def table_of_layer(layout: Layout, spec: Config, numbers: Mapping[str, int]) -> Table:
    """Return the rows of a layer's attention in another library, and of norms with the same prefix.

    Args:
        layout: of the library.
        spec: config of the attention.
        numbers: settings that sizes are named after -> their values.
    """
    front, tables = _tables(layout, spec, tuple(sorted(numbers.items())))
    ours = f"{OURS}att."
    beside = (row for row in layout.rows if row.theirs.startswith(front) and not row.reason)
    others = (row.theirs for row in beside if not row.ours[0].startswith(ours))
    rows = next(iter(tables.values()))
    return (*rows, *(Row(name.removeprefix(front), reason="a norm next to the attention") for name in others))


@functools.lru_cache(maxsize=1024)
def _tables(layout: Layout, spec: Config, sizes: tuple[tuple[str, int], ...]) -> tuple[str, dict[str, Table]]:
    """Return the beginning of the names of a layer's tensors, and library -> the rows behind it.

    Of alternative rows, those that fit the config; where files and `transformers` in memory differ, both.
    """
    ours = f"{OURS}{'linear_att' if isinstance(spec, Recurrent) else 'att'}."
    rows = [row for row in layout.rows if row.ours and row.ours[0].startswith(ours)]
    front = _front(rows)
    dropped = [row for row in layout.rows if row.reason and row.theirs.startswith(front)]
    alternatives = list(dict.fromkeys(name for row in rows for name in row.alternatives if name)) or [""]
    every = {
        name: tuple(_bare(row, front, ours, dict(sizes)) for row in (*rows, *dropped) if _is_of(row, name))
        for name in alternatives
    }
    if getattr(spec, "shared", False):
        reason = "keys and values are those of an earlier layer"
        every = {
            name: tuple(
                Row(row.theirs, reason=reason) if row.theirs.startswith(KEYS_AND_VALUES) else row for row in rows
            )
            for name, rows in every.items()
        }
    tables = {name: table for name, table in every.items() if _fits(table, spec)} or every
    in_memory = tables.pop(IN_MEMORY) if IN_MEMORY in tables else tables.pop(next(iter(tables)))
    other = next((table for table in tables.values() if table != in_memory), None)
    return front, {"transformers": in_memory} if other is None else {"transformers": in_memory, "files": other}


def _is_of(row: Row, alternative: str) -> bool:
    return not row.branch or alternative in row.alternatives


def _fits(table: Table, spec: Config) -> bool:
    """Return whether rows have all parameters of a layer, and need no other."""
    wanted = {parameter.rule.torch for parameter in spec.parameters}
    needed = {one for row in table if not (row.optional or row.sparse or row.last) for one in row.ours}
    return needed <= wanted <= {one for row in table for one in row.ours}


def _front(rows: list[Row]) -> str:
    """Return the beginning that the names of all modules share."""
    modules = [row.theirs.split(".")[:-1] for row in rows]
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(modules), max(modules), strict=False))
    return ".".join(part for part, _ in shared) + "."


def _bare(row: Row, front: str, ours: str, numbers: Mapping[str, int]) -> Row:
    """Return a row without prefixes and branch, with numbers for the names of sizes."""

    def number(size: int | str) -> int | str:
        names = size.split("*") if isinstance(size, str) else ()
        return math.prod(numbers[name] for name in names) if names and numbers.keys() >= {*names} else size

    return dataclasses.replace(
        row,
        theirs=row.theirs.removeprefix(front),
        ours=tuple(name.removeprefix(ours) for name in row.ours),
        lengths=tuple(name.removeprefix(ours) for name in row.lengths),
        sizes={axis: number(size) for axis, size in row.sizes.items()},
        split=tuple(map(number, row.split)),
        shares=tuple(map(number, row.shares)),
        branch="",
    )
