"""Plans from a checkpoint to the weights of a live module: the selected tensors, and their conversion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ... import specs
from ...models import rules_file
from ...specs.model import ModelConfig
from .. import configs, manifest, planning
from ..containers.base import Reader
from ..options import ConvertOptions
from ..selection import Selection, check_patterns, select

Side = Literal["torch", "flax"]


def plan_for(
    side: Side,
    reader: Reader,
    config: object,
    before: manifest.Manifest | None,
    options: ConvertOptions,
    selection: Selection | None,
) -> planning.Plan:
    """Plan the conversion of a checkpoint to the weights of a module with that config."""
    is_tied = isinstance(config, ModelConfig) and bool(getattr(config, "tie", False))
    if options.rules is None:
        return planning.make(
            reader,
            source_layout=options.from_layout,
            target_layout=side,
            settings=options.settings,
            config=configs.of_reader(reader),
            manifest=before,
            for_module=True,
            selection=selection,
            tied=is_tied,
        )
    direction = rules_file.direction(options.from_layout, None)
    own = "" if before is None else before.layout
    table = rules_file.read(Path(options.rules), reader.tensors, own, direction)
    return planning.make(
        reader, settings=options.settings, table=table, manifest=before, for_module=True, selection=selection
    )


def torch_names(config: object) -> list[str]:
    """Return the torch names of a module of ours; [] of any other."""
    return [row.rule.torch for row in config.parameters] if isinstance(config, specs.Config) else []


def selected(
    reader: Reader, strip: str | None, drop: str | Sequence[str] | None, *, keep_wrappers: bool
) -> tuple[Reader, Selection | None]:
    """Return a checkpoint as `convert` reads it with `strip` and `drop`; without them, as it is."""
    if strip is None and drop is None:
        return reader, None
    return select(reader, strip, check_patterns(drop), keep_wrappers=keep_wrappers)
