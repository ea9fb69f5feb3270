"""Outside layouts as data: how other libraries name and shape the weights under our torch names.

A layout is a table of rows (`Row`), each an outside tensor in terms of ours; a conversion between two layouts goes
through ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..printable import listed, printable, shell_word
from ..weights import WeightsMismatchError
from ..weights.placements import LayoutError, Placement, SettingError, Shape
from ..weights.rows import Row
from . import chapter3, fitting
from .derived import known
from .derived.family import Scoped
from .layout import DecodedTensors, Encoded, Layout, Settings
from .libraries import flax_transformers, maxtext
from .ours import OWN
from .tables import LIBRARIES, TABLES, table
from .unknown_names import advice, strangers

__all__ = [
    "DecodedTensors",
    "Encoded",
    "Layout",
    "LayoutError",
    "Placement",
    "Row",
    "SettingError",
    "attention_layers",
    "decode",
    "detect",
    "find",
    "names",
]

_VLLM = table("vllm")

_PACKAGED: dict[str, Layout] = {
    one.name: one
    for one in (
        *chapter3.LAYOUTS,
        *map(table, TABLES),
        *flax_transformers.LAYOUTS,
        *map(table, LIBRARIES),
        maxtext.LAYOUT,
        _VLLM,
        *known.LAYOUTS,
    )
}

_LAYOUTS: Mapping[str, Layout] = Scoped(_PACKAGED, lambda family: _named_after(family.layout, bare=True))

_ALIASES: Mapping[str, Layout] = Scoped(
    {
        f"hf-{kind.replace('_', '-')}": one
        for one in _PACKAGED.values()
        if one.name.startswith("hf-")
        for kind in one.model_types
    }
    | _PACKAGED,
    lambda family: _named_after(family.layout),
)
"""Layouts by name, and by the ``model_type`` of a config.json."""

_CLOSEST = 3
"""Number of close layouts to try for advice."""

_FRAMEWORKS = {"jax": "flax", "nnx": "flax", "pytorch": "torch", "pt": "torch", "hf": "hf-llama, hf-gpt2, ..."}
"""Names of libraries -> the layout that the user may mean."""

_LIST = "docs/layouts.md lists all layouts"

_RULES = "rules of your own (--rules, docs/rules.md) take any names"
"""The alternative that errors suggest if no layout fits."""


class RefusedTensorError(LayoutError):
    """A tensor that a layout refuses; the message names it and the reason."""


def _named_after(layout: Layout | None, *, bare: bool = False) -> dict[str, Layout]:
    """Return a layout by its name and, unless `bare`, by its model types; {} for None."""
    if layout is None:
        return {}
    names = () if bare else (f"hf-{kind.replace('_', '-')}" for kind in layout.model_types)
    return {layout.name: layout, **dict.fromkeys(names, layout)}


def find(name: str) -> Layout:
    """Return the layout of that name, or of the ``model_type`` of a config.json after ``hf-``.

    Raises:
        ValueError: the name is unknown; the message lists the layouts.
    """
    if name not in _ALIASES:
        raise LayoutError(f"layout ({printable(name)}) is not known{_nearest(name)}; {_LIST}")
    return _ALIASES[name]


def _nearest(name: str) -> str:
    """Return a suggestion of layouts that the user may mean; "" if no name is near."""
    near = list(dict.fromkeys(_ALIASES[one].name for one in difflib.get_close_matches(name, _ALIASES, 3, 0.7)))
    near = [_FRAMEWORKS[name.lower()]] if name.lower() in _FRAMEWORKS else near
    return f"; did you mean {' or '.join(near)}?" if near else ""


def names() -> tuple[str, ...]:
    """Return the names of all layouts."""
    return tuple(_LAYOUTS)


def decode(layout: Layout, shapes: Mapping[str, Shape], settings: Settings, *, part: bool = False) -> DecodedTensors:
    """Return `layout.decode` of a checkpoint; if it fits another layout, the error describes the file.

    Raises:
        LayoutError: a shape that does not fit, or a setting that is missing.
        WeightsMismatchError: names that are missing, and names that no row covers.
    """
    try:
        return layout.decode(shapes, settings, part=part)
    except SettingError:
        raise
    except (LayoutError, WeightsMismatchError) as error:
        text = _as_another(layout, shapes, settings)
        if text:
            raise LayoutError(text) from None
        if isinstance(error, WeightsMismatchError) and error.unexpected and not error.missing:
            patterns = advice.dropped_for(shapes, layout, layout.match(shapes)[1])
            drops = " ".join(f"--drop {shell_word(one)}" for one in patterns)
            hint = f"{drops} leaves the unexpected tensors out" if drops else ""
            raise WeightsMismatchError((), error.unexpected, error.misshapen, hint) from None
        raise


def _as_another(layout: Layout, shapes: Mapping[str, Shape], settings: Settings) -> str:
    """Return a description of a file with a layout's names and another layout's shapes; "" if no other layout fits."""
    if not layout.whole or len(layout.match(shapes)[1]) < len(shapes):
        return ""
    for other in _LAYOUTS.values():
        if other is layout or not other.whole or len(other.match(shapes)[1]) < len(shapes):
            continue
        try:
            placements = other.decode(shapes, settings).placements
        except ValueError:
            continue
        text = fitting.difference(layout, shapes, other, {name: one.shape for name, one in placements.items()})
        if text:
            return text
    return ""


def detect(names: Iterable[str], model_type: object = None) -> Layout:
    """Return the layout that covers all the names, and has their shapes.

    Args:
        names: the names of all tensors; a mapping to shapes, or to objects with a ``shape``, distinguishes layouts with
            the same names.
        model_type: from the model's config.json; a layout for other types is refused.

    Raises:
        LayoutError: none fits, or several do; the message names the closest ones, or a prefix to remove.
    """
    shapes = {name: _shape_of(names[name]) for name in names} if isinstance(names, Mapping) else dict.fromkeys(names)
    try:
        return _detect(shapes, model_type)
    except RefusedTensorError as error:
        raise LayoutError(f"{error}{_advice(shapes, model_type)}") from None
    except LayoutError as error:
        computed = strangers.why_computed(shapes)
        if computed:  # before any advice, which would leave that weight out
            raise LayoutError(computed) from None
        advised = _advice(shapes, model_type).removeprefix("; ")
        raise LayoutError(f"{advised}; {error}" if advised else strangers.why(shapes) or str(error)) from None


def _shape_of(tensor: Any) -> Shape:
    return tuple(getattr(tensor, "shape", tensor))


def _advice(names: Mapping[str, Shape | None], model_type: object) -> str:
    """Return advice for names that fit no layout: a prefix to remove, or tensors to leave out; "" if neither helps."""

    def fit(some: Mapping[str, Shape | None], prefix: str) -> tuple[Layout, str]:
        layout = _fitting(some, model_type)
        other = _why_other_type(layout, model_type) or _why_prefix(layout, prefix)
        if other:  # another family's names for a part of this model would be converted with exit 0
            raise LayoutError(other)
        return layout, _why_ambiguous(layout, some, model_type)

    own = [layout for layout in _LAYOUTS.values() if not _why_other_type(layout, model_type)]
    covers = {layout.name: len(layout.match(names)[1]) for layout in own}
    closest = sorted((one for one in own if covers[one.name]), key=lambda layout: -covers[layout.name])
    return advice.of(names, fit, [(one, _why_ambiguous(one, names, model_type)) for one in closest[:_CLOSEST]])


def _by_shapes(candidates: list[str], shapes: Mapping[str, Shape | None]) -> list[str]:
    """Return, of layouts that have all the names, those that match the tensors' shapes, or match most."""
    full_shapes = {name: shape for name, shape in shapes.items() if shape is not None}
    if len(full_shapes) < len(shapes):
        return candidates
    faults = {name: fitting.count_faults(_LAYOUTS[name], full_shapes) for name in candidates}
    return [name for name in candidates if faults[name] == min(faults.values())]


def _place_equally(candidates: Iterable[str], names: Mapping[str, Shape | None]) -> bool:
    """Return whether layouts that have all the names map each of them to the same elements of ours.

    Families that differ in their configs alone, such as granitemoe and granitemoeshared, then need no choice.
    """
    first, *others = (_LAYOUTS[name].match(names)[1] for name in candidates)
    pairs = {
        (id(row), id(other[name][0])): (row, other[name][0]) for other in others for name, (row, _) in first.items()
    }
    return all(row.places_like(other) for row, other in pairs.values())


def _detect(names: Mapping[str, Shape | None], model_type: object) -> Layout:
    layout = _fitting(names, model_type)
    why = _why_other_type(layout, model_type, names)
    if why and model_type in _VLLM.model_types and len(_VLLM.match(names)[1]) == len(names):
        why += f"; --from {_VLLM.name} takes them as those of vLLM"
    why = why or _why_ambiguous(layout, names, model_type)
    if why:
        raise LayoutError(why)
    return layout


def _why_ambiguous(layout: Layout, names: Mapping[str, Shape | None], model_type: object) -> str:
    """Return why names and shapes alone do not determine the layout; "" if they do."""
    return layout.doubt(names) if layout.doubt is not None and model_type is None else ""


def _fitting(names: Mapping[str, Shape | None], model_type: object) -> Layout:
    """Return the layout that covers all the names, for any type of model; of several, that of the given type."""
    covered = _covering(names, [layout for layout in _LAYOUTS.values() if layout.may_cover(names)])
    full = [name for name, (_, found) in covered.items() if len(found) == len(names)]
    if "linen-mha" in full:  # the names of NNX, below params
        full.remove("nnx-mha" if covered["linen-mha"][0] else "linen-mha")
    ours = [name for name in full if name in ("torch", "flax")]
    if ours:  # nothing in the names is particular to a layout that only adds to ours, unless it has a mark
        marked = [name for name in full if _LAYOUTS[name].marks and _LAYOUTS[name].is_complete(names)]
        full = marked or ours[:1]
    if len(full) > 1 and _VLLM.name in full:  # such files need --from, as another library has the same names
        full.remove(_VLLM.name)
    rivals = [name for name in full if _LAYOUTS[name].form]
    if len(rivals) > 1:  # with the same names, but different required tensors
        chosen = _by_shapes(rivals, names)
        full = [name for name in full if name not in rivals or name in chosen]
    if len(full) > 1:
        full = [name for name in full if _LAYOUTS[name].is_complete(names) and _LAYOUTS[name].is_unmixed(names)] or full
    if len(full) > 1:
        full = [name for name in full if model_type in _LAYOUTS[name].model_types] or full
    if len(full) > 1:
        full = _by_shapes(full, names)
    if len(full) > 1:  # a derived family needs its model_type where a layout written by hand has the same names
        derived = {layout.name for layout in known.LAYOUTS}
        full = [name for name in full if name not in derived] or full
    if len(full) > 1 and _place_equally(full, names):
        full = [min(full, key=lambda name: len(_LAYOUTS[name].rows))]
    if len(full) == 1:
        return _LAYOUTS[full[0]]
    if not full:
        full = _without_parts(names)
        full = [name for name in full if model_type in _LAYOUTS[name].model_types] or full
    if len(full) == 1:
        return _LAYOUTS[full[0]]
    covered = _covering(names, _LAYOUTS.values())
    own = [name for name in covered if model_type in _LAYOUTS[name].model_types]
    if full and (not own or {*own} & {*full}):
        raise LayoutError(f"the names fit the layouts {', '.join(full)}; say which with --from")
    if not names:
        raise LayoutError("it holds no tensor")
    type_unknown = _why_unknown_type(model_type)
    if not covered:
        first = printable(next(iter(names)))
        raise LayoutError(f"{type_unknown}no tensor has a name that a layout knows, such as {first}; {_RULES}")
    closest = max(own or covered, key=lambda name: len(covered[name][1]))
    rest = [name for name in names if name not in covered[closest][1]]
    refused = _LAYOUTS[closest].why_refused(rest)
    if refused:
        raise RefusedTensorError(f"{type_unknown}{refused}")
    raise LayoutError(
        f"{type_unknown}the names fit no layout; {closest} comes closest, but does not know "
        f"{listed(list(map(printable, rest)), 3)}; {_RULES}"
    )


def _covering(
    names: Iterable[str], layouts: Iterable[Layout]
) -> dict[str, tuple[str, dict[str, tuple[Row, dict[str, str]]]]]:
    """Return layout -> prefix and matches, for the layouts that map some of the names to ours."""
    covering = {}
    for layout in layouts:
        prefix, matches = layout.match(names)
        if any(row.ours for row, _ in matches.values()):
            covering[layout.name] = prefix, matches
    return covering


def _why_unknown_type(model_type: object) -> str:
    """Return the beginning of an error for a model type without a layout; "" if a layout exists."""
    is_named = isinstance(model_type, str) and not model_type.startswith(OWN)
    if not is_named or any(model_type in layout.model_types for layout in _LAYOUTS.values()):
        return ""
    return f"no layout is for the model_type {printable(model_type, 40)} of config.json; "


def _without_parts(names: Mapping[str, Shape | None]) -> list[str]:
    """Return the layouts that cover all names except those of excluded parts: of complete models, if any."""
    fits = []
    for layout in _LAYOUTS.values():
        gone = layout.apart(names)
        rest = [name for name in names if name not in gone] if gone else []
        if rest and len(layout.match(rest)[1]) == len(rest):
            fits.append((layout.name, layout.is_complete(rest)))
    return [name for name, is_whole in fits if is_whole] or [name for name, _ in fits]


def _why_other_type(layout: Layout, model_type: object, names: Collection[str] = ()) -> str:
    """Return why a layout is not for models of a type; "" if it is; our layouts are for all types.

    With the names of all tensors, --from is advised where the layout needs no others.
    """
    is_said = isinstance(model_type, str) and not model_type.startswith(OWN)
    if not is_said or not layout.model_types or model_type in layout.model_types:
        return ""
    missing = layout.missing(names) if names else []
    remedy = (
        f"and {layout.name} needs {printable(missing[0])}: no layout has such a model; {_RULES}"
        if missing
        else f"which may mean other things by them; --from {layout.name} takes them as they are"
    )
    return (
        f"the names fit {layout.name}, which is for {listed(layout.model_types, 8)}, but config.json says "
        f"{printable(model_type)}, {remedy}"
    )


def _why_prefix(layout: Layout, prefix: str) -> str:
    """Return why names below a prefix are not of a layout: it is named after another family; "" if they may be."""
    front = prefix.rstrip(".").rpartition(".")[2].replace("_", "-")
    types = {kind.replace("_", "-"): one for one in _LAYOUTS.values() for kind in one.model_types}
    other = types.get(front, layout)
    return "" if not layout.model_types or other is layout else f"{printable(prefix)} is the prefix of {other.name}"


def attention_layers(arrays: Mapping[str, object]) -> dict[int, dict[str, Any]]:
    """Return layer -> its attention's arrays, by the names that `MultiHeadAttention` has for them.

    Args:
        arrays: a whole model under our names; arrays outside attention are left out.
    """
    layers: dict[int, dict[str, Any]] = {}
    for name, array in arrays.items():
        hit = re.fullmatch(r"(?:layers|trf_blocks)\.([0-9]+)\.att\.(.+)", name)
        if hit is not None:
            layers.setdefault(int(hit[1]), {})[hit[2]] = array
    return dict(sorted(layers.items()))
