"""Whether the shapes of a checkpoint fit together as a layout reads them, and the message where they do not.

In: a layout, the shapes of outside tensors, and where ours are in them. Out: nothing, or a `LayoutError` of one line
that names the tensor. `misfits` finds them.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..printable import printable
from ..weights.rows import LayoutError, Placement, SettingError, Shape
from .misfits import Misfit, find_misfits, usual_shapes

if TYPE_CHECKING:
    from .layout import Layout, Settings


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
        placements: our name -> where it is in them.
        settings: settings that lead back to the same outside names.
        is_whole: whether the layers must be alike; None: where the layout describes a whole model.

    Raises:
        ShapeError: a tensor differs from the others in a size that they share.
    """
    is_whole = layout.whole if is_whole is None else is_whole
    ours = {name: placement.shape for name, placement in placements.items()}
    sources = {name: placement.theirs for name, placement in placements.items()}
    found = find_misfits(ours, sources, is_whole=is_whole)
    if found:
        usual = usual_shapes(ours, sources, is_whole=is_whole)
        raise ShapeError(_message(layout, shapes, sources, found, usual, settings))


def count_faults(layout: Layout, shapes: Mapping[str, Shape]) -> int:
    """Return how many tensors do not fit a layout by their shapes, as far as names and shapes tell."""
    _, found = layout.match(shapes)
    placements: dict[str, Placement] = {}
    wrong = set()
    for name, (row, values) in found.items():
        if row.reason:
            continue
        try:
            placements |= row.decode(name, shapes[name], values, layout.defaults)
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
    """Return what a file is that fits another layout than the one that was asked for; "" where no shape differs.

    Args:
        layout: the layout that was asked for.
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
    """Return the shape that an outside tensor would have if it fitted the others; None where that is not known."""
    try:
        parts = {name: usual[name] for name, source in sources.items() if source == theirs}
        return layout.encode(parts, settings, part=True).shapes.get(theirs)
    except ValueError:
        return None
