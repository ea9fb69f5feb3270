"""Checks of a source against the model that its config.json describes: its parameters, its family, and its head.

The parameters of the config's model are those of its spec: a source with others would make a target that does not load.
A head is a matrix of the file, or the embeddings where a config ties them; it is never invented.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ...models import families
from ...models.layout import HEAD, Layout
from ...models.layouts import LayoutError
from ...models.ours import OWN
from ...models.unknown_names.advice import dropped_for
from ...printable import printable, shell_word
from ...weights import WeightsMismatchError
from ...weights.placements import Placement, Shape
from .. import configs, rewritten_configs
from ..containers.base import CheckpointError
from ..manifest import Manifest
from ..selection import Selection

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


def check_parameters(
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
        model = families.find_whole(families.without_code(config), placements)
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


TABLE, KEY = "tok_emb.weight", "tie_word_embeddings"
"""Our name of the embeddings that a head may be tied to, and the key of a config.json that ties it."""


def tied_by(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> bool | None:
    """Return whether a config.json ties the head to the embeddings, with its family's default for a missing key.

    Args:
        config: the source's; {} if missing.
        shapes: name -> shape of the source's tensors, which decide for an original (Meta's, the book's).

    Returns:
        None if the config does not determine it.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind.startswith(OWN):
        return _tied_by_own(kind.removeprefix(OWN), config)
    try:
        config = configs.as_transformers(config, shapes) or config
        is_tied = families.ties_head(config)
    except (TypeError, ValueError):  # no config of a model that is known
        is_tied = None
    if is_tied is not None:
        return is_tied
    inner = config.get("text_config")
    value = config.get(KEY, inner.get(KEY) if isinstance(inner, Mapping) else None)
    return value if isinstance(value, bool) else None


def _tied_by_own(model: str, config: Mapping[str, object]) -> bool | None:
    if model not in configs.OWN_MODELS:
        return None
    try:
        return bool(getattr(configs.OWN_MODELS[model].read(config), "tie", False))
    except (TypeError, ValueError, RecursionError):
        return None  # the code that builds its model reports the error


def check_head(
    path: Path,
    pair: tuple[Layout, Layout],
    placements: Mapping[str, Placement],
    tied: bool | None,
    settings: Mapping[str, object],
    manifest: Manifest | None,
    selection: Selection | None,
) -> None:
    """Refuse a conversion that would use the embeddings as a head that the source lacks.

    Args:
        path: of the source.
        pair: layouts of source and target.
        placements: our name -> placement of its elements in the source.
        tied: from the source's config, or the module that is loaded; None if unknown.
        settings: from the user.
        manifest: of an earlier conversion to the source.
        selection: which tensors of the source are taken; None: all.

    Raises:
        CheckpointError: the head is not tied to the embeddings.
    """
    ours, theirs = pair
    selection = selection or Selection()
    table = _taken_for_head(theirs, placements)
    if not table or tied or (tied is None and settings.get("tie")):
        return
    head = ours.head or HEAD
    outside = selection.outside(head)
    if outside:
        raise CheckpointError(
            f"--strip {shell_word(selection.prefix)} leaves out the head, {printable(outside)}, and nothing ties it to "
            f"{printable(table)}; {_with_head(outside.removesuffix(head), ours, selection)}"
        )
    if tied is None and _is_tied_by_layout(ours, settings, manifest):
        return
    dropped = next((name for some in selection.dropped.values() for name in some if name.endswith(head)), "")
    why = f"--drop leaves out {printable(dropped)}" if dropped else "as a base model's"
    reason, remedy = f"and its config.json does not tie one to {printable(table)} ({KEY})", "set that to true"
    if tied is None:
        reason, remedy = f"and no config.json ties one to {printable(table)}", "give --set tie=1"
    raise CheckpointError(
        f"{path} holds no head, {head}, {why}, {reason}; convert a checkpoint that has the head, or {remedy} if its "
        "model's head is the embeddings; --to same changes its container alone"
    )


def tied_pairs(placements: Mapping[str, Placement], ties: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the embeddings and the head of a model that ties them, where both are written and none is left out.

    A head that was trained apart loads neither with its config, which ties it, nor gives the source's logits without.

    Args:
        placements: our name -> placement of its elements in the source.
        ties: (our name, our name that is left out) of the target.
    """
    tables = [name for name in placements if name.endswith(TABLE)]
    is_checked = HEAD not in placements or any(left_out == HEAD for _, left_out in ties)
    same_size = [name for name in tables if not is_checked and placements[name].shape == placements[HEAD].shape]
    return [(name, HEAD) for name in same_size[:1]]


def _taken_for_head(theirs: Layout, placements: Mapping[str, Placement]) -> str:
    """Return the outside name of the embeddings used as the head, in our layout or the target's; "" if not used."""
    head = placements.get(HEAD)
    tables = [place for name, place in placements.items() if name.endswith(TABLE)]
    if head is not None:
        return next((place.theirs for place in tables if place.theirs == head.theirs), "")
    has_head = any(HEAD in (*row.ours, *row.tied) for row in theirs.rows)
    return tables[0].theirs if tables and theirs.whole and has_head else ""


def _is_tied_by_layout(ours: Layout, settings: Mapping[str, object], manifest: Manifest | None) -> bool:
    """Return whether a model of that layout without a head is tied, if neither config nor settings decide.

    For layouts of `transformers`, whose base models have no head, only models that are tied by default. Other libraries
    have no models without a head, so that a missing head means a tied one.
    """
    if "tie" in settings:
        return False
    before = () if manifest is None else manifest.restore.values()
    if any(one.get("settings", {}).get("tie") == 1 for one in before):
        return True
    return bool(ours.defaults.get("tie")) or not ours.name.startswith(("hf-", "flax-", "vllm"))


def _with_head(front: str, ours: Layout, selection: Selection) -> str:
    """Return options that include the head: another prefix, or none and --drop for the names left out.

    Args:
        front: prefix of the head's name.
        ours: layout of the source.
        selection: which tensors of the source are taken without the head.
    """
    gone = {name for some in selection.dropped.values() for name in some}
    names = [name.removeprefix(front) for name in selection.names if name.startswith(front) and name not in gone]
    covered = ours.match(names)[1]
    wanted = sum(1 for name in selection.names if name.startswith(selection.prefix) and name not in gone) + 1
    patterns = dropped_for(names, ours, covered) if len(covered) < len(names) else ()
    if len(covered) < wanted or ours.head not in covered or (len(covered) < len(names) and not patterns):
        return "rules of your own (--rules, docs/rules.md) take any names"
    options = [f"--strip {shell_word(front)}"] if front else []
    options += [f"--drop {shell_word(front + one)}" for one in patterns]
    instead = "" if front or patterns else "names without --strip"
    return f"{' '.join(options) or instead} take{'s' if options else ''} it along"
