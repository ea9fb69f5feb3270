"""How many blocks a model has: those of its config.json, of which a source may hold a part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...models import families
from ...models.layout import Layout
from ..containers.base import CheckpointError
from ..selection import Selection

_BLOCK = re.compile(r"trf_blocks\.([0-9]+)\.")


def check(
    path: Path, layout: Layout, names: Iterable[str], config: Mapping[str, Any], selection: Selection | None
) -> None:
    """Refuse a source that holds fewer blocks than its config.json says, unless the user leaves out some by name.

    Args:
        path: of the source.
        layout: of the source.
        names: ours, of all tensors.
        config: beside the source; {} where it has none.
        selection: which tensors of the source are taken; None: all.

    Raises:
        CheckpointError: it is a part of a model.
    """
    said = families.depth_of(config) if layout.whole else None
    if said is None or (selection is not None and selection.dropped):
        return
    key, depth = said
    count = len({hit[1] for hit in map(_BLOCK.match, names) if hit is not None})
    if 0 < count < depth:
        raise CheckpointError(
            f"{path} has {count} of the {depth} blocks of {key} in its config.json: it is a part of a model; convert "
            f"all of it at once, or correct {key}"
        )
