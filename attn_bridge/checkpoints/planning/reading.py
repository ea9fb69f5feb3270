"""Reads the source of a plan from headers: its layout, the placements of our tensors in it, and their sizes.

`making` calls this before anything else; all mismatches are refused here. `check_sizes` refuses a config whose sizes
differ from those of the tensors, as loading it would, in one line with the key, the tensor and both numbers. A config
that no model of ours reads is compared with the tensors key by key.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...models import dimensions, families, fitting, layouts
from ...models.ours import OWN
from ...models.reading import multimodal
from ...printable import printable
from ...specs.base import Config
from ...specs.bert_encoder import BertEncoderConfig
from ...specs.decoder_model import DecoderConfig
from ...specs.encoder_decoder_model import EncoderDecoderConfig
from ...specs.model import ModelConfig, Shape
from ...weights.placements import LayoutError, SettingError
from .. import configs
from ..containers.base import TensorInfo
from ..manifest import Manifest
from . import model_checks

KEYS = {
    "vocab": ("vocab_size",),
    "width": ("hidden_size", "n_embd", "d_model", "emb_dim", "dim"),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"),
    "expert": ("moe_intermediate_size", "intermediate_size"),
    "shared": ("shared_expert_intermediate_size", "shared_intermediate_size", "n_shared_experts"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "positions": ("max_position_embeddings", "n_positions", "context_length", "max_target_positions"),
    "types": ("type_vocab_size",),
    "queries": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "keys": ("num_key_value_heads", "n_kv_heads", "n_kv_groups", "num_attention_heads", "n_head", "n_heads"),
    "values": ("linear_num_value_heads", "num_key_value_heads", "n_kv_heads", "num_attention_heads", "n_head"),
    "heads": ("linear_num_value_heads", "num_attention_heads"),
    "value head": ("linear_value_head_dim",),
    "head": ("head_dim",),
    "latent": ("kv_lora_rank",),
    "query latent": ("q_lora_rank",),
    "rotary": ("qk_rope_head_dim",),
}
"""Kind of a size -> the keys that a config.json may have it under; queries and keys are heads times ``head_dim``."""

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys of the number of layers."""

OF_TASKS = re.compile(r"(?:^|\.)(?:score|qa_outputs|classifier)\.(?:weight|bias)$")
"""Names of the heads of transformers' classes for classification and for questions."""

MOST = 64
"""Maximum ratio of a model's numbers to a checkpoint's; above it, the model's tensors are not even listed."""


def check_sizes(
    config: Mapping[str, object],
    layout: layouts.Layout,
    shapes: Mapping[str, Shape],
    ours: Mapping[str, Any],
    *,
    is_part: bool = False,
) -> None:
    """Refuse tensors of other sizes than the config's.

    Args:
        config: the config.json next to the source; {} where it has none.
        layout: layout of the source.
        shapes: outside name -> shape.
        ours: our name -> where it is (`Placement`).
        is_part: whether fewer layers than the config's are meant.

    Raises:
        LayoutError: a size, or the number of layers, differs.
    """
    if not config or not ours:
        return
    our_shapes = {name: placement.shape for name, placement in ours.items()}
    whole = _model_of(config, shapes)
    symbols = dimensions.axes_of(our_shapes, is_whole=True)
    if whole is not None and not is_part:
        _check_depth(config, whole, our_shapes)
    if whole is None or whole.count > MOST * sum(math.prod(shape) for shape in our_shapes.values()):
        if not is_part:
            _check_plain_depth(config, layout, our_shapes)
        _check_keys(config, layout, our_shapes, symbols, ours)
        if whole is None or is_part:
            return
    for name, wanted in _wanted(whole):
        shape = our_shapes.get(name, wanted)
        if shape == wanted:
            continue
        axis = next((at for at, pair in enumerate(zip(shape, wanted, strict=False)) if len({*pair}) > 1), 0)
        symbol = symbols.get(name, ())[axis : axis + 1]
        kind = symbol[0].kind if symbol and isinstance(symbol[0], dimensions.Symbol) else ""
        theirs = ours[name].theirs
        if not _is_given(config, kind):
            if _is_complete(config, shapes):
                raise LayoutError(_of_another(config, theirs, shape, wanted))
            continue
        raise LayoutError(_line(config, theirs, shapes[theirs], kind, shape[axis], wanted[axis]))


def _wanted(whole: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield our names and shapes of a model; a decoder's equal blocks are listed once, as experts are many."""
    if not isinstance(whole, DecoderConfig):
        yield from ((row.rule.torch, row.shape) for row in whole.parameters)
        return
    yield from ((row.rule.torch, row.shape) for row in (*whole.embedding_parameters, *whole.head_parameters))
    listed: dict[Config, list[tuple[str, Shape]]] = {}
    for number, block in enumerate(whole.blocks):
        if block not in listed:
            listed[block] = [(row.rule.torch, row.shape) for row in block.parameters]
        yield from ((f"trf_blocks.{number}.{name}", shape) for name, shape in listed[block])


def _is_own(config: Mapping[str, object]) -> bool:
    return str(config.get("model_type")).startswith(OWN)


def _is_given(config: Mapping[str, object], kind: str) -> bool:
    """Whether a config gives a size itself; where a key is missing, the default may be that of another model."""
    if _is_own(config):
        return True
    flat = _flat(config)
    if kind in ("queries", "keys", "values") and not (_key(flat, KEYS["head"]) or _key(flat, KEYS["width"])):
        return False
    return bool(_key(flat, KEYS.get(kind, ())))


def _is_complete(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> bool:
    """Whether a config of `transformers` leaves out no number of its family, and so gives all sizes of its model."""
    theirs = configs.as_transformers(config, shapes) or {}
    family = families.FAMILIES.get(str(theirs.get("model_type")))
    if family is None:
        return False
    numbers = [key for key, default in family.description.defaults.items() if type(default) is int]
    return not configs.left_out(theirs, numbers)


def _of_another(config: Mapping[str, object], theirs: str, shape: Shape, wanted: Shape) -> str:
    """Return the message for a tensor whose shape the config's model lacks, and which no key of the config gives."""
    kind = printable(str(config.get("model_type")), 40)
    return (
        f"{printable(theirs)} is {shape}, but the {kind} of config.json has {wanted} there: it is the config of "
        "another model; convert the file with its own"
    )


def _model_of(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> ModelConfig | None:
    """Return our config of the whole model; None if no model of ours reads the config."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind.startswith(OWN) and kind.removeprefix(OWN) not in configs.OWN_MODELS:
        return None
    try:
        model = _read_model(config, shapes)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None  # `notes_on_config` and the loader report errors of the config; sizes are compared key by key
    return model if isinstance(model, ModelConfig) else None


def _read_model(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> object:
    kind = config.get("model_type")
    if isinstance(kind, str) and kind.startswith(OWN):
        return configs.OWN_MODELS[kind.removeprefix(OWN)].read(config)
    if multimodal.registered_type(config) == "bert":
        return BertEncoderConfig.read(config)
    theirs = configs.as_transformers(config, shapes)
    return None if theirs is None else families.find_whole(theirs, shapes)


def notes_on_config(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> list[str]:
    """Return a note where the family is known and a value of its config is of a model that is not computed here.

    Args:
        config: the config.json next to the source; {} where it has none.
        shapes: outside name -> shape.
    """
    kind = multimodal.registered_type(config)
    if kind != "bert" and not (isinstance(kind, str) and kind in families.FAMILIES):
        return []
    try:
        _read_model(config, shapes)
    except ValueError as error:
        return [f"config.json: {error}: the weights are converted, but from_pretrained refuses this config"]
    except (TypeError, OverflowError, RecursionError):
        return []  # refused by its sizes
    return []


def _check_depth(config: Mapping[str, object], whole: ModelConfig, our_shapes: Mapping[str, Shape]) -> None:
    """Refuse a number of layers that differs from the config's."""
    wanted = _depths(whole)
    for root, count in dimensions.blocks_of(our_shapes).items():
        is_given = _is_own(config) or _key(_flat(config), (f"{root.rstrip('.')}_layers", *DEPTHS))
        if is_given and wanted.get(root, count) != count:
            raise LayoutError(_depth(config, wanted[root], count, root))


def _depths(whole: ModelConfig) -> dict[str, int]:
    """Return the path of each stack of blocks -> the number of its blocks, without listing their parameters."""
    if isinstance(whole, EncoderDecoderConfig):
        return {"encoder.": len(whole.encoder.blocks), "decoder.": len(whole.decoder.blocks)}
    if isinstance(whole, DecoderConfig):
        return {"": len(whole.blocks)}
    depths = [getattr(whole, field.name) for field in dataclasses.fields(whole) if field.name.endswith("layers")]
    return {"": depths[0]} if depths else {}


def _check_plain_depth(config: Mapping[str, object], layout: layouts.Layout, our_shapes: Mapping[str, Shape]) -> None:
    """Refuse a number of layers that differs from a plain key's, if no model of ours reads the config."""
    if not layout.whole and "tok_emb.weight" not in our_shapes:
        return
    flat = _flat(config)
    depth, layers = _number(flat, _key(flat, DEPTHS)), dimensions.blocks_of(our_shapes)
    if depth is not None and len(layers) == 1 and {depth} != {*layers.values()}:
        raise LayoutError(_depth(config, depth, next(iter(layers.values()))))


def _check_keys(
    config: Mapping[str, object],
    layout: layouts.Layout,
    our_shapes: Mapping[str, Shape],
    symbols: Mapping[str, dimensions.Axes],
    ours: Mapping[str, Any],
) -> None:
    """Compare the plain keys of a config with a whole model, if no model of ours reads the config."""
    if not layout.whole and "tok_emb.weight" not in our_shapes:
        return
    flat = _flat(config)
    wanted = dict(_plain_sizes(flat))
    for name, axes in symbols.items():
        for axis, symbol in enumerate(axes):
            size = wanted.get(symbol.kind) if isinstance(symbol, dimensions.Symbol) else None
            if size is not None and axis < len(our_shapes[name]) and our_shapes[name][axis] != size:
                kind = symbol.kind if isinstance(symbol, dimensions.Symbol) else ""
                theirs = ours[name].theirs
                raise LayoutError(_line(config, theirs, our_shapes[name], kind, our_shapes[name][axis], size))


def _plain_sizes(flat: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    for kind in ("vocab", "width", "hidden", "experts"):
        size = _number(flat, _key(flat, KEYS[kind]))
        if size is not None:
            yield kind, size
    head, width = _number(flat, "head_dim"), _number(flat, _key(flat, KEYS["width"]))
    heads, kv_heads = (_number(flat, _key(flat, KEYS[kind])) for kind in ("queries", "keys"))
    if head is None and width is not None and heads:
        head = width // heads  # as most models of transformers round it; none has heads of several widths
    if head is not None and heads is not None and kv_heads is not None and "kv_lora_rank" not in flat:
        yield "queries", heads * head
        yield "keys", kv_heads * head


def _line(config: Mapping[str, object], theirs: str, shape: Shape, kind: str, size: int, stated: int) -> str:
    """Return the message for a tensor whose size is not the config's."""
    flat = _flat(config)
    key = _key(flat, KEYS.get(kind, ()))
    start = f"{printable(theirs)} is {tuple(shape)}"
    words = dimensions.WORDS.get(kind, "size")
    if key and flat.get(key) == stated and kind not in ("queries", "keys", "values"):  # widths, where the key counts
        return (
            f"{start}, but {key} of config.json is {stated}: the {words} in the file is {size}; set {key} to {size} if "
            "the file is right" + (", as after a resize of the vocabulary" if kind == "vocab" else "")
        )
    by = f" ({key} {printable(repr(flat[key]))})" if key else ""
    return f"{start}, but config.json{by} makes the {words} {stated}; in the file it is {size}"


def _depth(config: Mapping[str, object], stated: int, layers: int, root: str = "") -> str:
    key = _key(_flat(config), (f"{root.rstrip('.')}_layers", *DEPTHS)) or f"{root}layers"
    wrong = f"the file has {layers} layers, but {key} of config.json is {stated}"
    return f"{wrong}; set {key} to {layers} if the file is right"


def _flat(config: Mapping[str, object]) -> dict[str, object]:
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else config.get("config")
    return {**config, **inner} if isinstance(inner, Mapping) else dict(config)


def _key(flat: Mapping[str, object], keys: tuple[str, ...]) -> str:
    return next((key for key in keys if flat.get(key) is not None), "")


def _number(flat: Mapping[str, object], key: str) -> int | None:
    value = flat.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def layout_of(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, object], manifest: Manifest | None
) -> layouts.Layout:
    """Return the layout of a checkpoint: its manifest's if the names match, otherwise by names and shapes.

    Raises:
        LayoutError: no layout fits, or several do.
    """
    if manifest is not None and manifest.layout in layouts.names():
        layout = layouts.find(manifest.layout)
        if len(layout.match(tensors)[1]) == len(tensors):
            return layout
    try:
        return layouts.detect(tensors, multimodal.type_of(config))
    except LayoutError as error:
        unlike = notes_on_config(config, {name: info.shape for name, info in tensors.items()})
        if unlike:  # the value that makes the names others than those of the family
            raise LayoutError(f"{unlike[0].partition(': the weights')[0]}; {error}") from None
        head = next(filter(OF_TASKS.search, tensors), "")
        if not head or model_checks.tied_by(config, {name: info.shape for name, info in tensors.items()}) is not False:
            raise  # without that head it is a base model, whose embeddings are the head
    raise LayoutError(
        f"{printable(head)} is a head for classes or answers, and config.json ties no head over the vocabulary to the "
        "embeddings (tie_word_embeddings): no layout has such a model; --to same changes its container alone"
    )


def decode(
    layout: layouts.Layout,
    target: layouts.Layout,
    tensors: Mapping[str, TensorInfo],
    settings: Mapping[str, object],
    config: Mapping[str, object],
    *,
    is_part: bool = False,
) -> layouts.DecodedTensors:
    """Return the placements of our tensors in a source, after checks of its shapes, its target and its config.

    Args:
        layout: layout of the source.
        target: layout of the target.
        tensors: the source's tensors.
        settings: values that names and shapes do not determine.
        config: the source's config.json.
        is_part: whether the user left tensors out by name, so that blocks of the config may be missing.

    Raises:
        LayoutError: a shape that does not fit, or a setting that is missing.
        WeightsMismatchError: names that are missing, and names that no row covers.
    """
    shapes = {name: info.shape for name, info in tensors.items()}
    try:
        decoded = layouts.decode(layout, shapes, settings)
    except LayoutError as error:
        unlike = [] if isinstance(error, SettingError) else notes_on_config(config, shapes)
        if not unlike:
            raise
        raise LayoutError(f"{unlike[0].partition(': the weights')[0]}; {error}") from None
    if layout.ours and target.ours:
        if target.whole and not layout.whole:
            fitting.check(layout, shapes, decoded.placements, {**settings, **decoded.restore}, is_whole=True)
        check_sizes(config, layout, shapes, decoded.placements, is_part=is_part)
    return decoded


def check(layout: layouts.Layout, tensors: Mapping[str, TensorInfo], config: Mapping[str, object]) -> None:
    """Check tensors that keep their layout against it; a part of a model is accepted.

    Raises:
        LayoutError: a shape that does not fit.
    """
    shapes = {name: info.shape for name, info in tensors.items()}
    try:
        decoded = layouts.decode(layout, shapes, layout.read_settings(configs.with_defaults(config)), part=True)
    except SettingError:
        return  # nothing gives it where the layout stays
    if layout.ours:
        check_sizes(config, layout, shapes, decoded.placements)
