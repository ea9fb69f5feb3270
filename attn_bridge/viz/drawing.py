"""Heat maps of attention weights, light and dark, with a text description."""

from __future__ import annotations

import base64
import dataclasses
import html
import importlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import backends
from . import reading
from .reading import Array

Theme = Literal["light", "dark"]

MOST_HEADS, MOST_LABELS, COLUMNS = 32, 40, 4
"""Maximum heads of one picture, maximum tokens with labels, and maps per row."""

TINY = 1e-38
"""Weights or differences below it are drawn as zero, on a scale that ends at 1."""

FORMATS = ("png", "svg", "pdf")


@dataclasses.dataclass(frozen=True)
class Look:
    """Colours of a theme; words and lines have at least 4.5 to 1 of contrast with the page (WCAG 2.2)."""

    page: str
    ink: str
    line: str
    scale: str
    difference: str


LOOKS: dict[str, Look] = {
    "light": Look("#ffffff", "#1c2126", "#59626c", "YlGnBu", "RdBu_r"),
    "dark": Look("#14171a", "#e6e9ec", "#a2acb6", "magma", "berlin"),
}
"""Theme -> colours; a weight or a difference of zero is the colour that is next to the page's."""


@dataclasses.dataclass(frozen=True)
class Heatmap:
    """A picture of attention weights.

    Attributes:
        rows: name of each row of maps -> ``(H, T, S)``.
        alt: description in words, for readers who can't see the picture.
        title: above the maps.
        tokens: labels of the queries and of the keys; empty for numbers.
        heads: the heads that are drawn, by their number in the module.
        theme: ``light`` or ``dark``.
    """

    rows: dict[str, Array]
    alt: str
    title: str
    tokens: tuple[Sequence[str], Sequence[str]]
    heads: tuple[int, ...]
    theme: Theme = "light"

    @property
    def figure(self) -> Any:
        """The picture as a ``matplotlib.figure.Figure``, drawn again at each access; `pyplot` is not touched."""
        return _draw(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture to a file in the format of its extension: ``.png``, ``.svg`` or ``.pdf``; return the path.

        PNG and SVG contain the text as their description.

        Raises:
            ValueError: another extension, or the file can't be written.
        """
        target = Path(path)
        kind = target.suffix.removeprefix(".").lower()
        if kind not in FORMATS:
            raise ValueError(f"path ({target}) must end with .{', .'.join(FORMATS)}")
        try:
            target.write_bytes(self._bytes(kind))
        except OSError as error:
            raise ValueError(f"{target} cannot be written: {error.strerror or error}") from None
        return target

    def to_html(self) -> str:
        """Return a self-contained ``<img>`` with the text, in light or dark as its reader prefers."""
        dark, light = (
            base64.b64encode(dataclasses.replace(self, theme=theme)._bytes("svg")).decode("ascii")
            for theme in ("dark", "light")
        )
        kind = "data:image/svg+xml;base64,"
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{kind}{dark}">'
            f'<img src="{kind}{light}" alt="{html.escape(self.alt)}" style="max-width: 100%"></picture>'
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def _bytes(self, kind: str) -> bytes:
        stream = io.BytesIO()
        metadata: dict[str, Any] = {
            "png": {"Description": self.alt, "Software": None},
            "svg": {"Title": self.title, "Description": self.alt, "Date": None},
            "pdf": {"Title": self.title, "Subject": self.alt, "CreationDate": None},
        }[kind]
        matplotlib = _matplotlib("")
        # The same picture is the same bytes: no random ids.
        with matplotlib.rc_context({"svg.hashsalt": "attn-bridge", "svg.fonttype": "none"}):
            self.figure.savefig(stream, format=kind, metadata=metadata, facecolor=LOOKS[self.theme].page, dpi=150)
        return stream.getvalue()


def heatmap(
    source: object,
    x: object = None,
    *,
    second: object = None,
    heads: Sequence[int] | None = None,
    batch: int = 0,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str | None = None,
    theme: Theme = "light",
    path: str | os.PathLike[str] | None = None,
    **call: object,
) -> Heatmap:
    """Draw attention weights: a map per head, queries down, keys across.

    Args:
        source: a module of `torch_attn` or `jax_attn`, or weights ``(T, S)``, ``(H, T, S)`` or ``(B, H, T, S)`` of
            NumPy, torch or JAX.
        x: input of the module: an array, or a tuple of positional ones; None with weights.
        second: a second module, called with the same, or second weights; its maps are drawn below, and the difference.
        heads: which heads; None draws all, at most 32.
        batch: which sequence of a batch.
        tokens: labels of the queries, and of the keys where `key_tokens` is None.
        key_tokens: labels of the keys.
        title: above the maps; None makes one.
        theme: ``light`` or ``dark``.
        path: file to write the picture to as well, ``.png``, ``.svg`` or ``.pdf``.
        **call: further keywords of the module's call, such as ``attention_mask``.

    Returns:
        The picture, with `save`, `to_html`, `figure` and `alt`; a notebook shows it.

    Raises:
        TypeError: a module that gives no weights, or `x` with weights.
        ValueError: arguments that do not fit.
        ImportError: matplotlib is not installed.
    """
    if theme not in LOOKS:
        raise ValueError(f"theme ({theme}) must be one of {', '.join(LOOKS)}")
    _matplotlib("viz.heatmap draws")
    maps = {}
    for argument, side in (("first", source), ("second", second)):
        if side is not None:
            name, array = _rows(side, x, call, batch, argument)
            maps[f"second {name}" if name in maps else name] = array
    arrays = list(maps.values())
    if len(arrays) == 2:
        if arrays[0].shape != arrays[1].shape:
            raise ValueError(f"second has weights {arrays[1].shape}; the first has {arrays[0].shape}")
        maps["difference"] = arrays[0] - arrays[1]
    count, queries, keys = arrays[0].shape
    chosen = _heads(heads, count)
    of_keys = tokens if key_tokens is None and queries == keys else key_tokens
    labels = _labels(tokens, queries, "tokens"), _labels(of_keys, keys, "key_tokens")
    rows = {name: array[list(chosen)] for name, array in maps.items()}
    headline = title or f"Attention weights of {' and '.join(name for name in rows if name != 'difference')}"
    picture = Heatmap(rows, _alt(headline, rows, chosen, labels), headline, labels, chosen, theme)
    if path is not None:
        picture.save(path)
    return picture


def _rows(source: object, x: object, call: Mapping[str, object], batch: int, argument: str) -> tuple[str, Array]:
    framework = backends.framework_of(source)
    if framework is None:
        if x is not None or call:
            raise TypeError(f"{argument}: x and keywords go with a module, got {type(source).__name__}")
        return f"the {argument} weights" if argument == "second" else "the weights", reading.per_head(source, batch)
    if x is None:
        raise TypeError(f"x is needed to call {type(source).__name__} with")
    name = f"{type(source).__name__} ({'Flax' if framework == 'flax' else framework})"
    return name, reading.per_head(reading.weights(source, x, **call), batch, f"the weights of {name}")


def _heads(heads: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if heads is None:
        return tuple(range(min(count, MOST_HEADS)))
    chosen = tuple(heads)
    wrong = [one for one in chosen if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < count]
    if wrong or not chosen or len(chosen) > MOST_HEADS:
        raise ValueError(f"heads ({list(chosen)}) must be 1 to {MOST_HEADS} whole numbers from 0 to {count - 1}")
    return chosen


def _labels(tokens: Sequence[str] | None, count: int, name: str) -> Sequence[str]:
    if tokens is None:
        return ()
    if len(tokens) != count:
        raise ValueError(f"{name} has {len(tokens)} labels for {count} positions")
    return [str(one) for one in tokens]


def _alt(title: str, rows: dict[str, Array], heads: Sequence[int], labels: tuple[Sequence[str], Sequence[str]]) -> str:
    """Return a description of the picture: sizes, and the key with the most weight of each head."""
    first = next(iter(rows.values()))
    sentences = [
        f"{title}: {len(heads)} head{'s' if len(heads) > 1 else ''}, {first.shape[1]} queries by {first.shape[2]} keys."
    ]
    for name, array in rows.items():
        is_apart = name == "difference"
        if is_apart:
            sentences.append(f"The largest difference is {np.abs(array).max():.2g}.")
            continue
        parts = []
        for head, weights in list(zip(heads, array, strict=True))[:8]:
            looked_at = weights.mean(axis=0)
            key = int(looked_at.argmax())
            part = f"head {head}: {looked_at[key]:.2f} on key {_place(labels[1], key)}"
            if weights.shape[0] == weights.shape[1]:
                part += f", {weights.diagonal().mean():.2f} on the query's own position"
            parts.append(part)
        sentences.append(f"{name}, most of the weight on average: {'; '.join(parts)}.")
    return " ".join(sentences)


def _place(labels: Sequence[str], position: int) -> str:
    return f"{position} ({labels[position]})" if labels else str(position)


def _draw(picture: Heatmap) -> Any:
    look, rows = LOOKS[picture.theme], picture.rows
    matplotlib = _matplotlib("viz.heatmap draws")
    colormaps = matplotlib.colormaps
    figures = importlib.import_module("matplotlib.figure")
    columns = min(COLUMNS, len(picture.heads))
    lines = math.ceil(len(picture.heads) / columns)
    _, queries, keys = next(iter(rows.values())).shape
    labelled = max(queries, keys) <= MOST_LABELS
    side = min(max(2.2, 0.16 * max(queries, keys)), 4.5)
    height = lines * len(rows) * (side * min(max(queries / keys, 0.4), 2.0) + 0.7) + 0.8
    figure = figures.Figure(figsize=(columns * (side + 0.9) + 0.6, height), layout="constrained", facecolor=look.page)
    figure.suptitle(picture.title, color=look.ink, fontsize=12)
    largest = max((float(array.max()) for name, array in rows.items() if name != "difference"), default=1.0)
    axes = figure.subplots(lines * len(rows), columns, squeeze=False)
    for number, (name, array) in enumerate(rows.items()):
        is_apart = name == "difference"
        most = float(np.abs(array).max()) if is_apart else largest
        most = most if most > TINY else 1.0
        low = -most if is_apart else 0.0
        band = axes[number * lines : (number + 1) * lines]
        image = None
        for index, axis in enumerate(band.flat):
            if index >= len(picture.heads):
                axis.set_axis_off()
                continue
            image = axis.imshow(
                array[index],
                cmap=colormaps[
                    (look.difference if look.difference in colormaps else "RdBu_r") if is_apart else look.scale
                ],
                vmin=low,
                vmax=most,
                interpolation="nearest",
            )
            words = f"{name}, " if len(rows) > 1 else ""
            axis.set_title(f"{words}head {picture.heads[index]}", color=look.ink, fontsize=9)
            is_last = number == len(rows) - 1 and index + columns >= len(picture.heads)
            _label(axis, picture.tokens, labelled, look, index % columns == 0, is_last)
        bar = figure.colorbar(image, ax=list(band.flat), shrink=0.8, pad=0.02)
        bar.ax.tick_params(colors=look.ink, labelsize=8)
        bar.outline.set_edgecolor(look.line)
        caption = "weight" if not is_apart else "difference" if array.any() else "no difference"
        bar.set_label(caption, color=look.ink, fontsize=8)
    return figure


def _label(
    axis: Any, tokens: tuple[Sequence[str], Sequence[str]], labelled: bool, look: Look, is_first: bool, is_last: bool
) -> None:
    axis.tick_params(colors=look.ink, labelsize=7)
    for spine in axis.spines.values():
        spine.set_edgecolor(look.line)
    if is_last:
        axis.set_xlabel("key", color=look.ink, fontsize=8)
    if is_first:
        axis.set_ylabel("query", color=look.ink, fontsize=8)
    queries, keys = tokens
    if queries and labelled:
        axis.set_yticks(range(len(queries)), [_short(one) for one in queries])
    if keys and labelled:
        axis.set_xticks(range(len(keys)), [_short(one) for one in keys], rotation=90)


def _short(label: str) -> str:
    """Return a short label without characters that matplotlib would parse as a formula."""
    short = label if len(label) <= 12 else f"{label[:11]}…"
    return short.replace("\n", " ").replace("$", r"\$")


def _matplotlib(what: str) -> Any:
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError(
            f"{what or 'this'} with matplotlib, which cannot be imported ({error}); install it with: "
            "pip install 'attn-bridge[viz]'"
        ) from None
