"""Checks that the shapes of a checkpoint fit together as a layout reads them, and writes the message if not.

In: a layout, the shapes of outside tensors, and the placements of ours in them. Out: nothing, or a `LayoutError` of one
line that names the tensor. `find_misfits` uses the symbols of `dimensions`: shapes under our names, and the outside
tensors that contain them, give a `Misfit` for each size that differs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..printable import printable
from ..weights.placements import LayoutError, Placement, SettingError, Shape, joined
from .dimensions import WORDS, Axes, Symbol, axes_of

if TYPE_CHECKING:
    from .layout import Layout, Settings


@dataclasses.dataclass(frozen=True)
class Misfit:
    """Tensors whose sizes differ from those of others that they must equal.

    Attributes:
        names: our names of those that differ.
        rule: the violated rule.
        others: our names of tensors that they differ from, or that are just as likely wrong.
    """

    names: tuple[str, ...]
    rule: str
    others: tuple[str, ...] = ()


def find_misfits(shapes: Mapping[str, Shape], sources: Mapping[str, str], *, is_whole: bool) -> list[Misfit]:
    """Return the tensors whose shapes do not fit those of the others; among different sizes, the rarest is at fault.

    Args:
        shapes: our name -> shape.
        sources: our name -> the tensor that contains it; tensors are counted, not their parts.
        is_whole: see `axes_of`.
    """
    all_axes = axes_of(shapes, is_whole=is_whole)
    misfits = []
    for name, axes in all_axes.items():
        shape = shapes[name]
        if len(shape) != len(axes):
            misfits.append(Misfit((name,), f"has {len(shape)} axes, expected {len(axes)}"))
            continue
        for axis, symbol in enumerate(axes):
            if isinstance(symbol, int) and shape[axis] != symbol:
                misfits.append(Misfit((name,), f"axis {axis} must be {symbol}"))
    usual: dict[Symbol, int] = {}
    for symbol, of_size in _sizes(shapes, all_axes).items():
        ranked = _by_votes(of_size, sources)
        usual[symbol] = ranked[0]
        for size in ranked[1:]:
            rule = f"the {WORDS[symbol.kind]} would be {size} and {ranked[0]}"
            misfits.append(Misfit(tuple(of_size[size]), rule, tuple(of_size[ranked[0]])))
    return misfits or list(_unlike_multiples(shapes, all_axes, usual))


def usual_shapes(shapes: Mapping[str, Shape], sources: Mapping[str, str], *, is_whole: bool) -> dict[str, Shape]:
    """Return the shapes that our tensors would have if all sizes were the most frequent ones; see `find_misfits`."""
    all_axes = axes_of(shapes, is_whole=is_whole)
    usual = {symbol: _by_votes(of_size, sources)[0] for symbol, of_size in _sizes(shapes, all_axes).items()}
    new_shapes = dict(shapes)
    for name, axes in all_axes.items():
        if len(axes) == len(shapes[name]):
            new_shapes[name] = tuple(
                usual[symbol] if isinstance(symbol, Symbol) else size if symbol is None else symbol
                for symbol, size in zip(axes, shapes[name], strict=True)
            )
    return new_shapes


def _sizes(shapes: Mapping[str, Shape], all_axes: Mapping[str, Axes]) -> dict[Symbol, dict[int, dict[str, None]]]:
    """Return symbol -> size -> the names of tensors that have it, of those with the right number of axes."""
    sizes: dict[Symbol, dict[int, dict[str, None]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for name, axes in all_axes.items():
        for size, symbol in zip(shapes[name], axes, strict=True) if len(axes) == len(shapes[name]) else ():
            if isinstance(symbol, Symbol):
                sizes[symbol][size][name] = None
    return sizes


def _by_votes(of_size: Mapping[int, Iterable[str]], sources: Mapping[str, str]) -> list[int]:
    """Return sizes, that of most tensors first."""
    return sorted(of_size, key=lambda size: -len({sources[name] for name in of_size[size]}))


def _unlike_multiples(
    shapes: Mapping[str, Shape], all_axes: Mapping[str, Axes], usual: Mapping[Symbol, int]
) -> Iterator[Misfit]:
    """Yield sizes that are not multiples of the heads, and stacks whose number of experts no router has."""
    scopes: dict[str, dict[str, int]] = collections.defaultdict(dict)
    names: dict[str, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for symbol, size in usual.items():
        scopes[symbol.scope][symbol.kind] = size
    for name, axes in all_axes.items():
        for axis in axes:
            if isinstance(axis, Symbol):
                names[axis.scope][axis.kind].append(name)
    for scope, sizes in scopes.items():
        for kind, divisor in _divisors(sizes):
            if sizes.get(divisor) and sizes.get(kind, 0) % sizes[divisor]:
                rule = (
                    f"the {WORDS[kind]} ({sizes[kind]}) must be a multiple of the {WORDS[divisor]} ({sizes[divisor]})"
                )
                first, second = (tuple(dict.fromkeys(names[scope][one])) for one in (divisor, kind))
                yield Misfit(first, rule, second)
        if "rotary" in sizes and "keys" in sizes and "queries" in sizes:
            yield from _unlike_latent(sizes, names[scope])
    yield from _convolutions(shapes, all_axes, usual)
    yield from _numbers_of_experts(shapes, all_axes)


def _divisors(sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    if "rotary" in sizes or "value head" in sizes:
        return [("values", "value head"), ("values", "heads")]
    return (
        [("queries", "keys"), ("queries", "head"), ("keys", "head"), ("queries", "heads")] if "queries" in sizes else []
    )


def _unlike_latent(sizes: Mapping[str, int], names: Mapping[str, list[str]]) -> Iterator[Misfit]:
    """Yield latent attention whose query width is not the key width plus rotary channels per head."""
    rest = sizes["queries"] - sizes["keys"]
    heads, left = divmod(rest, sizes["rotary"]) if sizes["rotary"] else (0, 1)
    if left or heads < 1 or sizes["keys"] % heads or sizes.get("values", 0) % heads:
        rule = (
            f"the {WORDS['queries']} ({sizes['queries']}) must be that of keys ({sizes['keys']}) and "
            f"{sizes['rotary']} rotary channels for each head"
        )
        yield Misfit(tuple(names["rotary"]), rule, (*names["queries"], *names["keys"]))


def _convolutions(
    shapes: Mapping[str, Shape], all_axes: Mapping[str, Axes], usual: Mapping[Symbol, int]
) -> Iterator[Misfit]:
    """Yield convolutions of gated delta nets whose channels are not all queries, keys and values."""
    for name in all_axes:
        if not name.endswith("conv1d.weight"):
            continue
        stem = name.removesuffix("conv1d.weight")
        key, value = all_axes.get(f"{stem}W_key.weight"), all_axes.get(f"{stem}W_value.weight")
        if key is None or value is None or not isinstance(key[0], Symbol) or not isinstance(value[0], Symbol):
            continue
        if key[1] == value[0] or key[0] == all_axes[name][0]:  # the convolution of Mamba, or of LFM2, has values alone
            continue
        wanted = 2 * usual[key[0]] + usual[value[0]]
        if shapes[name][0] != wanted:
            others = (f"{stem}W_key.weight", f"{stem}W_value.weight")
            rule = f"its channels ({shapes[name][0]}) must be queries, keys and values ({wanted})"
            yield Misfit((name,), rule, others)


def _numbers_of_experts(shapes: Mapping[str, Shape], all_axes: Mapping[str, Axes]) -> Iterator[Misfit]:
    """Yield routers whose number of experts differs from that of the experts present."""
    counts: collections.Counter[str] = collections.Counter()
    for name in all_axes:
        stem, _, number = name.removesuffix(".fc3.weight").rpartition("experts.")
        if name.endswith(".fc3.weight") and number.isdigit():
            counts[stem] += 1
    for stem, count in counts.items():
        router = f"{stem}router.weight"
        if router in all_axes and shapes[router][0] != count:
            rule = f"the number of experts would be {shapes[router][0]} and {count}"
            yield Misfit((router,), rule, (f"{stem}experts.0.fc3.weight",))


class ShapeError(LayoutError):
    """Shapes of a checkpoint that do not fit together."""


def check(
    layout: Layout,
    shapes: Mapping[str, Shape],
    placements: Mapping[str, Placement],
    settings: Settings,
    *,
    is_whole: bool | None = None,
) -> None:
    """Refuse shapes that do not fit each other.

    Args:
        layout: the layout that the tensors were read by.
        shapes: outside name -> shape.
        placements: our name -> its placement in them.
        settings: settings that lead back to the same outside names.
        is_whole: whether the layers must be alike; None: if the layout describes a whole model.

    Raises:
        ShapeError: a tensor differs from the others in a size that they share.
    """
    is_whole = layout.whole if is_whole is None else is_whole
    ours = {name: placement.shape for name, placement in placements.items()}
    sources = {name: placement.theirs for name, placement in placements.items()}
    misfits = find_misfits(ours, sources, is_whole=is_whole)
    if misfits:
        usual = usual_shapes(ours, sources, is_whole=is_whole)
        raise ShapeError(_message(layout, shapes, sources, misfits, usual, settings))


def count_faults(layout: Layout, shapes: Mapping[str, Shape]) -> int:
    """Return how many tensors do not fit a layout by their shapes, as far as names and shapes determine this."""
    _, matches = layout.match(shapes)
    placements: dict[str, Placement] = {}
    pieces: dict[str, dict[int, Placement]] = collections.defaultdict(dict)
    wrong = set()
    for name, (row, values) in matches.items():
        if row.reason:
            continue
        try:
            for part, placed in row.decode(name, shapes[name], values, layout.defaults).items():
                pieces[part][row.piece] = placed
                placements[part] = joined(pieces[part]) if row.lengths else placed
        except SettingError:
            continue
        except LayoutError:
            wrong.add(name)
    sources = {name: placement.theirs for name, placement in placements.items()}
    ours = {name: placement.shape for name, placement in placements.items()}
    for misfit in find_misfits(ours, sources, is_whole=layout.whole) if layout.ours else ():
        wrong |= {sources[name] for name in misfit.names}
    return len(wrong)


def difference(layout: Layout, shapes: Mapping[str, Shape], other: Layout, ours: Mapping[str, Shape]) -> str:
    """Return a description of a file that fits another layout than the requested one; "" if no shape differs.

    Args:
        layout: the requested layout.
        shapes: outside name -> shape.
        other: the layout that the shapes fit.
        ours: our name -> shape, as the other layout reads them.
    """
    try:
        prefix = layout.match(shapes)[0]
        wanted = layout.encode(ours, {"prefix": prefix}, part=True).shapes
    except ValueError:
        return ""
    name = next((name for name, shape in shapes.items() if wanted.get(name, shape) != tuple(shape)), None)
    if name is None:
        return ""
    form = other.form or f"as {other.name} has it"
    return f"{printable(name)} is {tuple(shapes[name])}: {form}; {layout.name} has {wanted[name]} (--from {other.name})"


def _message(
    layout: Layout,
    shapes: Mapping[str, Shape],
    sources: Mapping[str, str],
    misfits: list[Misfit],
    usual: Mapping[str, Shape],
    settings: Settings,
) -> str:
    """Return the line that names the tensor most at fault, a tensor that it differs from, and the rule."""
    blamed: collections.Counter[str] = collections.Counter()
    for misfit in misfits:
        blamed.update(list(dict.fromkeys(sources[name] for name in misfit.names)))
    (worst, _), more = blamed.most_common(1)[0], len(blamed) - 1
    chosen = next(misfit for misfit in misfits if worst in {sources[name] for name in misfit.names})
    expected = _expected(layout, worst, sources, usual, settings)
    is_turned = expected is not None and expected != shapes[worst] and expected == tuple(shapes[worst])[::-1]
    other = next((sources[name] for name in chosen.others if sources[name] != worst), None)
    return (
        f"{printable(worst)} is {tuple(shapes[worst])}"
        + (f", transposed; {layout.name} has {expected}" if is_turned else "")
        + (f", which does not fit {printable(other)} {tuple(shapes[other])}" if other is not None else "")
        + f": {chosen.rule}"
        + (f" ({more} more tensors do not fit)" if more > 1 else " (1 more tensor does not fit)" if more else "")
    )


def _expected(
    layout: Layout, theirs: str, sources: Mapping[str, str], usual: Mapping[str, Shape], settings: Settings
) -> Shape | None:
    """Return the shape that an outside tensor would have if it fitted the others; None if unknown."""
    try:
        parts = {name: usual[name] for name, source in sources.items() if source == theirs}
        return layout.encode(parts, settings, part=True).shapes.get(theirs)
    except ValueError:
        return None
