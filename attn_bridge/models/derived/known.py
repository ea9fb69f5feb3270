"""The families that are data, and the layouts of their tensors; some use the layout of a family written by hand."""

from __future__ import annotations

import copy
import os
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ...printable import printable
from ..handwritten import bloom, deepseek, gemma, gpt2, gpt_oss, llama, mixtral, olmo, phi3, qwen3_moe
from ..layout import Layout
from ..reading import multimodal
from .description import Description, loads
from .reading import DerivedFamily, FamilyReader, layout_of

_BY_HAND = {
    layout.name: layout
    for layout in (
        *(llama.LAYOUT, gemma.LAYOUT, *olmo.LAYOUTS, phi3.LAYOUT),
        *(mixtral.LAYOUT, qwen3_moe.LAYOUT, deepseek.LAYOUT, bloom.LAYOUT, gpt2.LAYOUT, gpt_oss.LAYOUT),
    )
}
"""Layouts that described families may use, and then are listed with."""


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
    """Return the layout of a description: one written by hand, that of another description, or a new one."""
    if description.rows:
        return layout_of(description)
    if description.layout in _BY_HAND:
        return _BY_HAND[description.layout]
    return _OWN[description.layout]


def candidates(name: str) -> tuple[Layout, ...]:
    """Return the layouts of others that a family may share; a stored derived layout shares no other derived one."""
    derived = () if name in _OWN else tuple(_OWN.values())
    return tuple(layout for layout in (*_BY_HAND.values(), *derived) if layout.name != name)


DESCRIPTIONS = load()
_OWN = {one.layout: layout_of(one) for one in DESCRIPTIONS if one.rows}
LAYOUTS = tuple(_OWN.values())
"""Layouts that no family written by hand has."""


def _families() -> tuple[DerivedFamily, ...]:
    families = []
    for description in DESCRIPTIONS:
        layout = _OWN.get(description.layout) or _BY_HAND[description.layout]
        kind = multimodal.decoder_type(description.model_type)
        if kind not in layout.model_types:
            layout.model_types += (kind,)
        families.append(FamilyReader(description, layout).family())
    return tuple(families)


FAMILIES = _families()


def family_of(description: Description) -> DerivedFamily:
    """Return the family of a description outside the package, with a layout that is for its ``model_type`` as well.

    Raises:
        ValueError: the layout that it names is not known.
    """
    try:
        layout = copy.copy(layout_for(description))
    except KeyError:
        raise ValueError(f"layout ({printable(description.layout)}) of the family is not known") from None
    kind = multimodal.decoder_type(description.model_type)
    if kind not in layout.model_types:
        layout.model_types += (kind,)
    return FamilyReader(description, layout).family()
