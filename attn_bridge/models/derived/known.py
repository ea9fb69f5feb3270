"""The families that are data, and the layouts of their tensors; some share one of `tables`."""

from __future__ import annotations

import copy
import os
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ...printable import printable
from ..layout import Layout
from ..reading import multimodal
from ..tables import TABLES, table
from .description import Description, loads
from .layout import layout_of
from .reading import DerivedFamily

FOLDER = "ATTN_BRIDGE_FAMILIES"
"""Environment variable: a folder of further families, as ``attn-bridge derive`` writes them."""


def load() -> tuple[Description, ...]:
    """Return the families of the package, and those of the user's folder, which go before."""
    folders: list[Traversable] = [resources.files("attn_bridge.models").joinpath("families")]
    if os.environ.get(FOLDER):
        folders.append(Path(os.environ[FOLDER]))
    families: dict[str, Description] = {}
    for folder in folders:
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".toml"):
                family = loads(file.read_text(encoding="utf-8"), str(file))
                families[family.model_type] = family
    return tuple(families.values())


def layout_for(description: Description) -> Layout:
    """Return the layout of a description: one of `tables`, that of another description, or a new one."""
    if description.rows:
        return layout_of(description)
    if description.layout in _SHARED:
        return _SHARED[description.layout]
    return _OWN[description.layout]


def candidates(name: str) -> tuple[Layout, ...]:
    """Return the layouts of others that a family may share; one that is packaged with a layout keeps it."""
    if name in _OWN:
        return ()
    return tuple(layout for layout in (*_SHARED.values(), *_OWN.values()) if layout.name != name)


DESCRIPTIONS = load()
_SHARED = {name: table(name) for name in TABLES if name in {one.layout for one in DESCRIPTIONS if not one.rows}}
"""Layouts that described families may use, and then are listed with."""

_OWN = {one.layout: layout_of(one) for one in DESCRIPTIONS if one.rows}
LAYOUTS = tuple(_OWN.values())
"""Layouts with a table in the file of a family."""


def _for(description: Description, layout: Layout) -> Layout:
    """Return a layout that is for the ``model_type`` of a description as well."""
    kind = multimodal.decoder_type(description.model_type)
    if kind not in layout.model_types:
        layout.model_types += (kind,)
    return layout


FAMILIES = tuple(DerivedFamily(one, _for(one, _OWN.get(one.layout) or _SHARED[one.layout])) for one in DESCRIPTIONS)


def own_layout(description: Description) -> Layout:
    """Return the layout of a description outside the package, which no other family has.

    Raises:
        ValueError: the layout that it names is not known.
    """
    try:
        return _for(description, copy.copy(layout_for(description)))
    except KeyError:
        raise ValueError(f"layout ({printable(description.layout)}) of the family is not known") from None


def family_of(description: Description) -> DerivedFamily:
    """Return the family of a description outside the package; errors as of `own_layout`."""
    return DerivedFamily(description, own_layout(description))
