"""A checkpoint as one HTML page: the tree of its names, and the distribution of each tensor's values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge import whole_files as files

from ..text import count, memory, number, shape
from . import charts, markup
from .markup import Markup, element
from .page import written

BINS = 32
"""Bins of a histogram."""

DRAWN = 1 << 22
"""Elements of a tensor that its histogram counts; of a larger one, that many of them, evenly spread."""

TOGETHER = 12
"""A folder of no more tensors is one table."""

OPEN_DEPTH, OPEN_TENSORS = 2, 60
"""Levels of the tree that are unfolded, in a checkpoint of no more tensors."""


@dataclasses.dataclass(frozen=True)
class Values:
    """The distribution of a tensor's values.

    Attributes:
        dtype: of its elements.
        shape: its shape.
        nbytes: its size in bytes.
        file: the file that contains it.
        low: smallest finite value; None if it has no finite values or no numbers.
        high: largest finite value.
        mean: of the finite values.
        deviation: their standard deviation.
        zeros: number of zeros.
        not_finite: number of infinite or NaN elements.
        counts: elements per bin from `low` to `high`.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    deviation: float | None = None
    zeros: int = 0
    not_finite: int = 0
    counts: tuple[int, ...] = ()


def values_of(info: Any, array: np.ndarray | None) -> Values:
    """Return the distribution of a tensor's values; large tensors are sampled, except for the zeros.

    Args:
        info: dtype, shape, bytes and file.
        array: its elements; None if they are not read.
    """
    values = Values(info.dtype, tuple(info.shape), info.nbytes, str(info.file))
    if array is None or not array.size or not _is_number(array):
        return values
    flat = array.reshape(-1)
    zeros = int(flat.size - np.count_nonzero(flat))
    flat = flat[:: max(1, math.ceil(flat.size / DRAWN))].astype(np.float64)
    finite = flat[np.isfinite(flat)]
    lost = int(flat.size - finite.size)
    if not finite.size:
        return dataclasses.replace(values, zeros=zeros, not_finite=lost)
    low, high = float(finite.min()), float(finite.max())
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(finite.mean()), float(finite.std())
    span = (low, high) if np.isfinite(high - low) and high > low else (low - 0.5, low + 0.5)
    if not np.isfinite(high - low):
        finite, span = finite / 4, (low / 4, high / 4)
    counts, _ = np.histogram(finite, BINS, span)
    return dataclasses.replace(
        values, low=low, high=high, mean=mean, deviation=deviation, zeros=zeros, not_finite=lost,
        counts=tuple(map(int, counts)),
    )  # fmt: skip


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuf" or array.dtype.name.startswith(("bfloat16", "float"))


def as_html(title: str, facts: Mapping[str, str], tensors: Mapping[str, Values], path: str | Path | None = None) -> str:
    """Return a checkpoint as one self-contained page.

    Args:
        title: its name.
        facts: facts about the whole: container, layout.
        tensors: name -> distribution of its values.
        path: file to write it to as well.

    Raises:
        ValueError: the file cannot be written.
    """
    target = files.checked(path)
    total = _size(one.nbytes for one in tensors.values())
    broken = [name for name, one in tensors.items() if one.not_finite]
    header = element(
        "header",
        element("h1", element("span", title)),
        element("p", element("span", f"{count(len(tensors), 'tensor')}, {total}", class_="hint"), class_="meaning"),
        element("p", f"Not finite: {', '.join(broken[:10])}{' ...' if len(broken) > 10 else ''}", class_="note")
        if broken
        else None,
        element("div", markup.facts(facts.items()), class_="facts"),
    )
    return written(target, title, header, _tree(tensors))


def _tree(tensors: Mapping[str, Values]) -> Markup:
    is_small = len(tensors) <= OPEN_TENSORS
    about = "Folders are the parts of names between dots. Select one to unfold it, also with the keyboard."
    tree = _level({tuple(name.split(".")): (name, one) for name, one in tensors.items()}, 0, is_small)
    return markup.section("tensors", "Tensors", markup.hint(about), element("div", tree, class_="files"))


Named = dict[tuple[str, ...], tuple[str, Values]]


def _level(inside: Named, depth: int, is_small: bool) -> list[Markup]:
    """Return a level of the tree: tables of tensors, and a folder for each first part of the other names."""
    few = len(inside) <= TOGETHER
    leaves = {parts: one for parts, one in inside.items() if few or len(parts) == 1}
    folders: dict[str, Named] = {}
    for parts, child in inside.items():
        if parts not in leaves:
            folders.setdefault(parts[0], {})[parts[1:]] = child
    tables = [_table([(".".join(parts), *one) for parts, one in leaves.items()])] if leaves else []
    for name, content in folders.items():
        label = name
        while len({parts[0] for parts in content}) == 1 and all(len(parts) > 1 for parts in content):
            part = next(iter(content))[0]  # a folder that holds one folder alone is shown with it
            label, content = f"{label}.{part}", {parts[1:]: one for parts, one in content.items()}
        size = _size(one.nbytes for _, one in content.values())
        tables.append(
            element(
                "details",
                element(
                    "summary",
                    markup.named(label),
                    element("span", f" {count(len(content), 'tensor')}, {size}", class_="hint"),
                ),
                _level(content, depth + 1, is_small),
                open=is_small and depth < OPEN_DEPTH,
            )
        )
    return tables


def _size(sizes: Iterable[int]) -> str:
    total = sum(sizes)
    return memory(total) if total >= 1e6 else count(total, "byte")


HEADS = ("Name", "Dtype", "Shape", "Smallest", "Largest", "Mean", "Deviation", "Zeros", "Values")


def _table(rows: Sequence[tuple[str, str, Values]]) -> Markup:
    """Return a table of tensors: the name of each below its folder, its full name, and its values."""
    table = markup.table(HEADS, (_row(*row) for row in rows))
    return markup.scrolled(table, f"Tensors from {rows[0][1]} on", "scroll")


def _row(label: str, name: str, values: Values) -> Markup:
    size = math.prod(values.shape)
    picture: Markup | None = None
    if values.low is not None and values.high is not None:
        most = max(range(len(values.counts)), key=values.counts.__getitem__)
        width = (values.high / len(values.counts)) - (values.low / len(values.counts))
        start = values.low + most * width
        words = (
            f"histogram of {name} from {number(values.low, 3)} to {number(values.high, 3)}; "
            f"most values lie between {number(start, 3)} and {number(start + width, 3)}"
        )
        picture = charts.bars(values.counts, words)
    zeros = f"{values.zeros / size:.1%}" if values.zeros else "0"
    numbers = (values.low, values.high, values.mean, values.deviation)
    return element(
        "tr",
        element("th", markup.named(label), scope="row"),
        element("td", values.dtype),
        element("td", shape(values.shape), class_="number"),
        (element("td", "" if value is None else number(value, 3), class_="number") for value in numbers),
        element("td", zeros if values.low is not None else "", class_="number"),
        element("td", picture, f"{values.not_finite:,} not finite" if values.not_finite else None),
    )
