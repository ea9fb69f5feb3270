"""How the source of a plan is read: its layout, and where our tensors are in it, all of it from headers.

`making` calls this before anything else; everything that does not fit is refused in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...models import fitting, layouts
from ...models.reading import multimodal
from ...weights.rows import SettingError
from .. import configs
from ..containers.base import TensorInfo
from ..manifest import Manifest
from . import sizes


def layout_of(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], manifest: Manifest | None
) -> layouts.Layout:
    """Return the layout of a checkpoint: what its manifest says, if its names are those, or what names and shapes say.

    Raises:
        LayoutError: no layout fits, or several do.
    """
    if manifest is not None and manifest.layout in layouts.names():
        layout = layouts.find(manifest.layout)
        if len(layout.match(tensors)[1]) == len(tensors):
            return layout
    return layouts.detect(tensors, multimodal.type_of(config))


def decode(
    layout: layouts.Layout,
    target: layouts.Layout,
    tensors: Mapping[str, TensorInfo],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    is_part: bool = False,
) -> layouts.Decoded:
    """Return where our tensors are in a source whose shapes fit each other, its target and its config.

    Args:
        layout: layout of the source.
        target: layout of the target.
        tensors: the source's tensors.
        settings: what names and shapes do not tell.
        config: the config.json next to the source.
        is_part: whether the user left tensors out by name, so that blocks of the config may be missing.

    Raises:
        LayoutError: a shape that does not fit, or a setting that is missing.
        WeightsMismatchError: names that are missing, and names that no row covers.
    """
    shapes = {name: info.shape for name, info in tensors.items()}
    decoded = layouts.decode(layout, shapes, settings)
    if layout.ours and target.ours:
        if target.whole and not layout.whole:
            fitting.check(layout, shapes, decoded.placements, {**settings, **decoded.restore}, is_whole=True)
        sizes.check(config, layout, shapes, decoded.placements, is_part=is_part)
    return decoded


def check(layout: layouts.Layout, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    """Refuse tensors that keep a layout which they do not fit; a part of a model will do.

    Raises:
        LayoutError: a shape that does not fit.
    """
    shapes = {name: info.shape for name, info in tensors.items()}
    try:
        decoded = layouts.decode(layout, shapes, layout.read_settings(configs.with_defaults(config)), part=True)
    except SettingError:
        return  # nothing gives it where the layout stays
    if layout.ours:
        sizes.check(config, layout, shapes, decoded.placements)
