"""Advice in errors about names that fit no layout: a prefix to remove, or tensors to leave out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from ...printable import printable, shell_word
from ...weights.placements import LayoutError, Shape
from .. import fitting
from ..layout import Layout
from .beginnings import GENERATORS, below, is_average, is_moment, patterns_of, suspects

MOST = 16
"""How many prefixes are tried."""

LEAST_OF_WHOLE, LEAST_OF_PART = 0.25, 0.75
"""Minimum share of a file's tensors for advice on a whole model, and on a part of one.

Moments and other models that fit are not counted: a tower's first layer, or a norm of two tensors, is not a model.
"""

Shapes = Mapping[str, Shape | None]
"""Name -> shape, or None where only names are known."""

Fit = Callable[[Shapes, str], tuple[Layout, str]]
"""Returns the layout of names without a prefix, and why the user must name it with --from.

It raises a LayoutError if none fits, or if the prefix is that of another family.
"""


@dataclasses.dataclass(frozen=True)
class _Below:
    """The names below a prefix: their layout, their number, and why the user must name the layout ("" for no need)."""

    prefix: str
    layout: Layout
    count: int
    doubt: str


def of(names: Shapes, fit: Fit, closest: Iterable[tuple[Layout, str]]) -> str:
    """Return the options that make names fit a layout, as the end of an error; "" if none do.

    Args:
        names: all tensors.
        fit: finds the layout of a set of names.
        closest: layouts that match some of them, best match first, and why the user must name each.
    """
    fits = _worth_it(names, _below(names, fit))
    if fits:
        first, *others = fits
        if _head_outside(names, first):
            return _dropping(names, [(first.layout, first.doubt)])
        return _model_beside(names, first) + _stripping(names, first, others)
    return _dropping(names, closest)


def _below(names: Shapes, fit: Fit) -> list[_Below]:
    """Return the prefixes below which names fit a layout, none of them below another."""
    begins = below(names)
    moments = suspects(begins)
    prefixes: list[_Below] = []
    tried = 0
    for prefix, inside in sorted(begins.items(), key=lambda pair: -len(pair[1])):
        is_below = prefix.startswith((*moments, *(one.prefix for one in prefixes)))
        if is_moment(prefix) or is_below or _other_half(prefix) in begins:
            continue
        tried += 1
        if tried > MOST:
            break
        try:
            bare = {name[len(prefix) :]: shape for name, shape in names.items() if name.startswith(prefix)}
            layout, doubt = fit(bare, prefix)
        except LayoutError:
            continue
        own, covered = layout.match(names)
        if own != prefix or len(covered) < len(inside):  # else it is the layout's own, and others keep names from it
            prefixes.append(_Below(prefix, layout, len(inside), doubt))
    return prefixes


def _other_half(prefix: str) -> str:
    """Return the prefix of the other side of a model with an encoder and a decoder; "" for other prefixes."""
    front, _, last = prefix.rstrip(".").rpartition(".")
    other = {"encoder": "decoder.", "decoder": "encoder."}.get(last, "")
    return (f"{front}." if front else "") + other if other else ""


def _worth_it(names: Collection[str], fits: list[_Below]) -> list[_Below]:
    """Return the fits with a large enough share of the file: most tensors first, and weights before their averages."""
    if not fits:
        return []
    fits = sorted(fits, key=lambda fit: (-fit.count, is_average(fit.prefix)))
    first = fits[0]
    fits = [one for one in fits if one.layout is first.layout]
    moments = suspects(below(names))
    others = sum(
        1 for name in names if not is_moment(name) and not name.startswith((*moments, *(one.prefix for one in fits)))
    )
    least = LEAST_OF_WHOLE if first.layout.whole else LEAST_OF_PART
    return [one for one in fits if one.count >= least * max(first.count + others, one.count)]


def _stripping(names: Collection[str], first: _Below, others: list[_Below]) -> str:
    which = "all names" if first.count == len(names) else f"{first.count} names"
    end = f" --from {first.layout.name}" if first.doubt else ""
    text = (
        f"; {which} begin with {printable(first.prefix)}, and are those of {first.layout.name} without it "
        f"(--strip {shell_word(first.prefix)}{end})"
    )
    return (
        text
        + "".join(
            f"; so are {one.count} that begin with {printable(one.prefix)} (--strip {shell_word(one.prefix)}{end})"
            for one in others
        )
        + (f"; {first.doubt}" if first.doubt else "")
    )


def _model_beside(names: Collection[str], fit: _Below) -> str:
    """Return how to take the model whose names have no prefix, next to one such as its average; "" without any."""
    rest = [name for name in names if not name.startswith(fit.prefix)]
    covered = fit.layout.match(rest)[1]
    if not fit.layout.whole or len(covered) < len(rest) or not fit.layout.is_complete(covered):
        return ""
    end = f" --from {fit.layout.name}" if fit.doubt else ""
    pattern = shell_word(f"{fit.prefix}*")
    return f"; {len(rest)} names are those of {fit.layout.name} without the others (--drop {pattern}{end})"


def _head_outside(names: Collection[str], fit: _Below) -> bool:
    """Return whether the head that belongs to the names below a prefix is outside it."""
    head = fit.layout.head
    parts = fit.prefix.split(".")[:-1]
    fronts = ["".join(f"{part}." for part in parts[:count]) for count in range(len(parts))]
    return bool(head) and fit.prefix + head not in names and any(front + head in names for front in fronts)


def _dropping(every: Shapes, closest: Iterable[tuple[Layout, str]]) -> str:
    """Return advice on tensors to leave out, so that a layout covers the others and a model of it is complete."""
    for layout, doubt in closest:
        gone = layout.apart(every)
        names = [name for name in every if name not in gone]
        covered = layout.match(names)[1]
        patterns = dropped_for(names, layout, covered)
        shapes = {name: shape for name in covered if (shape := every[name]) is not None}
        if patterns and not (shapes and fitting.count_faults(layout, shapes)):
            options = " ".join(f"--drop {shell_word(one)}" for one in patterns)
            end, why = (f" --from {layout.name}", f"; {doubt}") if doubt else ("", "")
            count = len(names) - len(covered)
            return f"; without the other {count}, names are those of {layout.name} ({options}{end}){why}"
    return ""


def dropped_for(names: Collection[str], layout: Layout, covered: Mapping[str, object]) -> tuple[str, ...]:
    """Return patterns that match all names outside a layout; () if the rest would not be a model.

    Args:
        names: of all tensors.
        layout: the layout.
        covered: the names that it covers.
    """
    rest = [name for name in names if name not in covered]
    if layout.why_refused(rest):
        return ()  # the tensors change what the others mean
    if not layout.whole:  # the tensors that a model needs are unknown; only generators' state is surely not a weight
        patterns = [_of_generator(name) for name in rest]
        is_plain = all(patterns) and not any(map(_of_generator, covered))
        return tuple(dict.fromkeys(patterns)) if is_plain and len(covered) >= LEAST_OF_PART * len(names) else ()
    others = sum(1 for name in rest if not is_moment(name))
    head = f".{layout.head.rpartition('.')[0]}."
    if layout.head and any(head in f".{name}" for name in rest):
        return ()  # what is below the head's name is the head, in another form or with a part more
    inside = {name.rpartition(".")[0].rpartition(".")[0] for name in covered} - {layout.match(names)[0].rstrip("."), ""}
    if any(name.rpartition(".")[0].rpartition(".")[0] in inside for name in rest):
        return ()  # a norm more beside those of a block or a side is a part of a model that computes something else
    if not covered or len(covered) < LEAST_OF_WHOLE * (len(covered) + others) or not layout.is_complete(covered):
        return ()
    return patterns_of(rest, covered)


def _of_generator(name: str) -> str:
    """Return the pattern that matches a random generator's state with that name; "" for other names."""
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part in GENERATORS), None)
    return "" if at is None else f"{'*.' if at else ''}{parts[at]}{'.*' if at + 1 < len(parts) else ''}"
