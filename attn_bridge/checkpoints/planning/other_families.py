"""Refuses to write a model of one family as another: one line, with the first difference."""

from __future__ import annotations

from collections.abc import Mapping

from ...models.layout import Layout
from ...models.ours import OWN
from ...printable import printable
from ...specs.model import Shape
from ...weights import WeightsMismatchError
from .. import configs
from ..containers.base import CheckpointError


def refuse_family(
    config: Mapping[str, object], layout: Layout, shapes: Mapping[str, Shape], error: WeightsMismatchError
) -> None:
    """Refuse names that a layout lacks if the config.json is of a family other than the layout's.

    Raises:
        CheckpointError: the families differ; the line names the first difference.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind.startswith(OWN) or not layout.model_types or kind in layout.model_types:
        return
    try:
        configs.of_target(config, layout, shapes)
    except CheckpointError as why:
        if str(why).startswith(f"a {kind} "):
            raise
    lacking = [f"{layout.name} has no tensor for its {printable(name)}" for name in error.unexpected]
    lacking += [f"it has no {printable(name)}" for name in error.missing]
    raise CheckpointError(f"a {printable(kind, 40)} can't become {layout.name}: {lacking[0]}")
