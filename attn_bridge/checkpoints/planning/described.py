"""Refuses a source whose tensors are not those of the model that its config.json describes: its target would not load.

In: the config, and our names of the source's tensors. The parameters of the config's model are those of its spec. A
model of one family is not written as one of another either, and the refusal names the first difference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...models import families
from ...models.layout import HEAD, Layout
from ...models.layouts import LayoutError
from ...models.ours import OWN
from ...printable import printable
from ...weights import WeightsMismatchError
from ...weights.placements import Placement, Shape
from .. import configs, rewritten_configs
from ..containers.base import CheckpointError

SWITCHES = ("attention_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "use_bias")
"""Keys of a config.json that add biases."""

COUNTS = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
)
"""Keys of a config.json for the numbers of layers and experts."""


def check(
    config: Mapping[str, object],
    layout: Layout,
    shapes: Mapping[str, Shape],
    placements: Mapping[str, Placement],
    settings: Mapping[str, object],
) -> None:
    """Compare the tensors of a whole model with the parameters that its config.json describes.

    Args:
        config: the source's; {} if missing.
        layout: of the source.
        shapes: name -> shape of the source's tensors.
        placements: our name -> placement of its elements in the source.
        settings: with which the layout writes the source's names.

    Raises:
        CheckpointError: parameters are missing, or tensors have no parameter.
    """
    if not config or not layout.whole or not layout.ours:
        return
    try:
        config = configs.as_transformers(config, shapes) or config
        if configs.left_out(config, COUNTS):  # a default is no evidence against a source
            return
        model = families.find_whole(config, placements)
    except (TypeError, ValueError, RecursionError):  # of a family, or with a switch, that is not computed here
        return
    wanted = {row.rule.torch: row.shape for row in model.parameters}
    all_names = {*wanted, *model.tied_weights("torch"), *model.unread_weights("torch"), HEAD}
    missing = [name for name in wanted if name not in placements and name != HEAD]
    unexpected = [placements[name].theirs for name in placements if name not in all_names]
    if missing:
        names = _outside(layout, wanted, settings)
        _refuse(
            [names.get(name, name) for name in missing], config, ("the model of config.json", "the source"), to=False
        )
    if unexpected:
        _refuse(unexpected, config, ("the source", "the model of config.json"), to=True)


def _outside(layout: Layout, shapes: Mapping[str, Shape], settings: Mapping[str, object]) -> dict[str, str]:
    """Return our name -> the layout's name; {} if the layout can't write such a model."""
    try:
        parts = layout.encode(shapes, settings).parts
    except (LayoutError, WeightsMismatchError):
        return {}
    return {ours: theirs for theirs, several in parts.items() for ours in several}


def _refuse(names: Collection[str], config: Mapping[str, object], sides: tuple[str, str], *, to: bool) -> None:
    """Refuse names that the first side has and the other lacks; `to` is the value of a switch that would fit."""
    first, *more = map(printable, names)
    others = f" and {len(more)} more" if more else ""
    keys = [key for key in SWITCHES if isinstance(config.get(key), bool) and config[key] is not to]
    is_bias = all(name.endswith(".bias") for name in names)
    remedy = f"set {' or '.join(keys)} to {str(to).lower()}" if keys and is_bias else "convert it with its own config"
    raise CheckpointError(f"{sides[0]} has {first}{others}, which {sides[1]} lacks; {remedy} if the source is right")


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
        rewritten_configs.of_target(config, layout, shapes)
    except CheckpointError as why:
        if str(why).startswith(f"a {kind} "):
            raise
    lacking = [f"{layout.name} has no tensor for its {printable(name)}" for name in error.unexpected]
    lacking += [f"it has no {printable(name)}" for name in error.missing]
    raise CheckpointError(f"a {printable(kind, 40)} can't become {layout.name}: {lacking[0]}")
