"""The settings that a family may have, as choices of keys and values that the search tries."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from attn_bridge.models.derived import runs
from attn_bridge.models.derived.description import KeySource
from attn_bridge.models.reading.decoders import ACTIVATIONS as ACTIVATION_NAMES
from attn_bridge.specs.blocks.feed_forward import Activation
from attn_bridge.specs.position import Pairing

from ..model_classes import experts as mixtures
from ..model_classes import structure
from ..model_classes.model_class import DerivationError, ModelClass
from ..model_classes.structure import Structure
from .key_changes import GROWTH, is_nested

FULL, SLIDING = "full_attention", "sliding_attention"

EPS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")


ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "afn", "activation")


WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim")


SWITCH = "use_sliding_window"
"""Key that switches the window of all layers on."""


HEADS_OF_LAYERS = "num_attention_heads_per_layer"
"""Key of the number of query heads of each layer."""


Fields = Mapping[str, KeySource | None]


Choice = tuple[tuple[Fields, Mapping[str, Any]], ...]
"""Alternatives, the likeliest first: fields to set (None removes one), and arguments of `rows.rows`."""


def constant(value: Any) -> KeySource:
    """Return the source of a field that is the same in every model of a class."""
    return KeySource(value=value)


def alternatives(*fields: Fields) -> Choice:
    """Return a choice between sources of fields, without changes of the description."""
    return tuple((one, {}) for one in fields)


def _scales(subject: ModelClass) -> Iterator[Choice]:
    """Yield the choices of scales, from keys that the class reads."""

    def keyed(field: str, key: str, *powers: float, per: str = "", per_power: float = 1.0) -> Iterator[Choice]:
        for name in sorted(subject.read):
            if name.rpartition(".")[2] == key and isinstance(subject.usual(name), int | float):
                sources = (KeySource(key=name, power=power, per=per, per_power=per_power) for power in powers)
                yield alternatives(*({field: source} for source in sources), {})

    yield from keyed("attention.scale", "attention_multiplier", 1.0)
    yield from keyed("attention.scale", "query_pre_attn_scalar", -0.5)
    yield from keyed("attention.scale", "softmax_scale", 1.0)
    if not {"attention_multiplier", "query_pre_attn_scalar"} & subject.read:
        yield alternatives({}, {"attention.scale": constant(1.0)})
    yield from keyed("attention.softcap", "attn_logit_softcapping", 1.0)
    yield from keyed("attention.clip", "clip_qkv", 1.0)
    yield from keyed("block.residual_scale", "residual_multiplier", 1.0)
    yield from keyed("block.residual_scale", "scale_depth", 1.0, per="num_hidden_layers", per_power=0.5)
    yield from keyed("model.logit_scale", "logits_scaling", -1.0, 1.0)
    yield from keyed("model.logit_scale", "dim_model_base", 1.0, per="hidden_size")
    yield from keyed("model.logit_scale", "logit_scale", 1.0, -1.0)
    yield from keyed("model.logit_softcap", "final_logit_softcapping", 1.0)
    multiplier = next((key for key in ("embedding_multiplier", "scale_emb") if key in subject.read), None)
    if multiplier is not None:
        yield from keyed("model.embedding_scale", multiplier, 1.0)
    else:
        yield alternatives({}, {"model.embedding_scale": KeySource(key="hidden_size", power=0.5)})


def _norms(subject: ModelClass, parts: Structure) -> Iterator[Choice]:
    key = next((key for key in EPS if key in subject.read), None)
    eps: tuple[KeySource, ...] = (KeySource(key=key),) if key else (constant(1e-5), constant(1e-6))
    bias = parts.flags.get("norm.bias", constant(False))
    rms = {"norm.kind": constant("rms"), "norm.bias": None}
    layer = {"norm.kind": constant("layer"), "norm.bias": bias}
    is_layer = bool(bias.key or bias.value)
    offset, from_one = ({**kind, "norm.unit_offset": constant(True)} for kind in (rms, layer))
    if not any(name.endswith(f"{parts.norms[0]}.weight") for name in parts.tensors):
        bare: Fields = {"norm.bias": None, "norm.affine": constant(False)}
        yield alternatives(*({**bare, "norm.kind": constant(kind)} for kind in ("layer", "rms")))
    else:
        yield alternatives(layer, from_one) if is_layer else alternatives(rms, offset, layer)
    own = _own_eps(subject, parts, key) if key else None
    last = [{"norm.eps": constant(own), "last_norm.eps": eps[0]}] if own is not None else []
    yield alternatives(*last, *({"norm.eps": one} for one in eps))
    child, names = parts.attention
    inner = {"attention.context_norm": names, "feed_forward.hidden_norm": parts.feed_forward[1]}
    yield from (alternatives({field: eps[0]}) for field, roles in inner.items() if field.partition(".")[2] in roles)
    if parts.has_bare_norms:
        bare = {"qk_norm.affine": constant(False), "qk_norm.eps": eps[0]}
        yield alternatives({**bare, "qk_norm.rotated": constant(True)}, bare)
    elif "q_norm" in names:
        width = parts.shapes[f"{parts.front}{parts.layers}.0.{child}.{names['q_norm']}.weight"]
        scope = "full" if width[0] > parts.head_dim else "head"
        plain: Fields = {"qk_norm.scope": constant(scope), "qk_norm.eps": eps[0]}
        plain = {**plain, "qk_norm.kind": constant("layer")} if parts.has_shifts("q_norm") else plain
        rotated = ({**plain, "qk_norm.rotated": constant(True)},) if scope == "head" else ()
        yield alternatives(plain, {**plain, "qk_norm.unit_offset": constant(True)}, *rotated)


def _own_eps(subject: ModelClass, parts: Structure, key: str) -> float | None:
    """Return the constant of the blocks' norms where it is another than the key's, which the last norm has (CTRL)."""
    block = subject.instance(subject.keys()).get_submodule(f"{parts.front}{parts.layers}.0")
    eps = getattr(block.get_submodule(parts.norms[0]), "eps", None) if parts.norms else None
    return eps if isinstance(eps, float) and eps != subject.usual(key) else None


def _positions(subject: ModelClass, parts: Structure) -> Iterator[Choice]:
    defaults = subject.defaults
    kinds = defaults.get("layer_types")
    has_window = "sliding_window" in subject.read and "sliding_window" in defaults
    rules: list[Fields] = [{"layers.rule": constant("full"), "layers.switch": None}]
    if has_window:
        rules.insert(0, {"layers.rule": constant("window"), "layers.switch": None})
    if has_window and SWITCH in defaults:
        rules.insert(0, {"layers.rule": constant("window"), "layers.switch": KeySource(key=SWITCH)})
    if has_runs(subject):
        rules.insert(0, {"layers.rule": constant("runs"), "layers.runs": KeySource(key=runs.KEY)})
    if kinds and has_window:
        switch = KeySource(key=SWITCH) if SWITCH in defaults else None
        rules.insert(0, {"layers.rule": constant("types"), "layers.switch": switch})
    yield alternatives(*rules)
    rotary = defaults.get("rope_parameters")
    if "rotary_dim" in subject.read:
        width = {
            "position.kinds": constant((FULL, SLIDING)),
            "position.theta": constant(10000.0),
            "position.dim": KeySource(key="rotary_dim"),
        }
        yield alternatives({**width, "position.pairing": constant("interleaved")}, width)
        return
    if not isinstance(rotary, dict):
        kinds_of = {"position.kinds": constant((FULL, SLIDING))}
        turned = {**kinds_of, "position.theta": constant(10000.0), "position.fixed": constant(True)}
        others = (
            {**kinds_of, "position.alibi": constant(True)},
            {**turned, "position.pairing": constant("interleaved")},
            turned,
        )
        yield alternatives({}, *(() if parts.outside.positions else others))
        return
    if GROWTH in rotary:
        keys = {"rate": GROWTH, "interval": "original_max_position_embeddings"}
        yield alternatives(
            {f"temperature.{name}": KeySource(key=f"rope_parameters.{key}") for name, key in keys.items()}
        )
    base: Fields = {"position.theta": constant(_missing_base(subject, float(rotary.get("rope_theta", 10000.0))))}
    if is_nested(rotary):
        base = {"position.nested": constant(True)}
    usual: Fields = {"position.kinds": constant((FULL, SLIDING)), **base}
    sliding: Fields = {**usual, "position.kinds": constant((SLIDING,))}
    none: Fields = dict.fromkeys(
        f"position.{name}" for name in ("kinds", "theta", "nested", "pairing", "partial", "alpha")
    )
    flags = [key for key in subject.read & defaults.keys() if "interleave" in key]
    yield alternatives(
        *({"position.pairing": KeySource(key=key)} for key in flags),
        *({"position.pairing": constant(pairing)} for pairing in get_args(Pairing)),
    )
    yield alternatives({"position.partial": constant(False)}, {"position.partial": constant(True)})
    if not is_nested(rotary):
        yield alternatives({}, {"position.alpha": constant(True)})
    yield alternatives(usual, *((sliding,) if kinds and has_window else ()), none)


def has_runs(subject: ModelClass) -> bool:
    """Return whether the kinds of layers are runs of kinds."""
    return isinstance(subject.defaults.get(runs.KEY), list) and "window_size" in subject.read


def _missing_base(subject: ModelClass, usual: float) -> float:
    """Return the base of rotary parameters that name none, which may be another than that of a config without any."""
    try:
        filled = subject.config_class(rope_parameters={"rope_type": "default"}).rope_parameters
        return float(filled["rope_theta"])
    except Exception:  # a class that refuses them reads no file without a base
        return usual


def choices_of(subject: ModelClass, parts: Structure) -> list[Choice]:
    """Return the choices that names and shapes leave open; the first alternative of each is the likeliest."""
    child, names = parts.feed_forward
    acts = [key for key in ACTIVATIONS if key in subject.read]
    widths = list(_widths(subject, parts)) if names else []
    if names and not widths:
        raise DerivationError(
            f"{child} ({parts.classes.get(child, '')}): no key of its width is known; the nearest is {WIDTHS[0]}"
        )
    activations = [KeySource(key=key) for key in acts] or [constant(name) for name in get_args(Activation)]
    plain: Choice = alternatives(*({"feed_forward.activation": one} for one in activations))
    renamed = [
        ({"feed_forward.activation": KeySource(key=key)}, {"renamed": one})
        for key, one in _renamed(subject, parts, acts)
    ]
    choices = [
        *_positions(subject, parts),
        *_norms(subject, parts),
        *_scales(subject),
        (*renamed, *plain),
        alternatives(*({"block.norms": constant(one)} for one in parts.placements)),
    ]
    if names:
        choices.append(alternatives(*({"feed_forward.hidden_dim": one} for one in widths)))
    if parts.outside.tables:
        choices.append(alternatives(*parts.outside.tables))
    if parts.outside.tables and parts.outside.embedding_norm:
        choices.append(alternatives({}, {"model.norm_tokens": constant(True)}))
    if parts.outside.head_linear:
        choices.append(alternatives(*({"model.head_activation": one} for one in activations)))
    if parts.experts is not None:
        choices += mixtures.choices(subject, parts.experts)
    if parts.gates:
        choices.append(alternatives({}, {"attention.gate_activation": constant("softplus")}))
    if "fused" in parts.attention[1]:
        choices.append(fused(parts))
    if "gate_up" in names:
        choices.append((({}, {"gate_first": True}), ({}, {"gate_first": False})))
    return choices


def _renamed(
    subject: ModelClass, parts: Structure, keys: Sequence[str]
) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Yield keys of an activation with the usual name of their value, where a class uses other names.

    OpenAI's GPT calls ``gelu`` the activation that is ``gelu_new`` elsewhere.
    """
    table = importlib.import_module("transformers").activations.ACT2FN
    kinds = set(parts.classes.values())
    for key in keys:
        usual = subject.usual(key)
        if isinstance(usual, str) and usual in table and type(table[usual]).__name__ not in kinds:
            others = (name for name in ACTIVATION_NAMES if name in table and type(table[name]).__name__ in kinds)
            yield from ((key, {key: {usual: name}}) for name in others)


def _widths(subject: ModelClass, parts: Structure) -> Iterator[KeySource]:
    """Yield sources of the width between the feed-forward matrices: keys that change it alone."""
    child, names = parts.feed_forward
    name = f"{parts.front}{parts.layers}.0.{structure.join(child, names.get('down', ''))}.weight"
    axis = 0 if parts.classes.get(structure.join(child, names.get("down", ""))) == structure.TURNED else 1
    if parts.experts is not None or "down" not in names:
        yield from (KeySource(key=key) for key in WIDTHS if key in subject.read)
        return

    def width(**changes: int | None) -> int:
        try:
            return subject.shapes(subject.keys(**changes))[name][axis]
        except Exception:  # a value that the class refuses changes nothing
            return -1

    hidden, usual = subject.keys()[inner_key(subject, "hidden_size")], width()
    counts = {
        key: value for key, value in {**subject.defaults, **subject.sizes}.items() if isinstance(value, int | None)
    }
    for key in sorted(counts, key=lambda key: key not in WIDTHS):
        if isinstance(counts[key], bool) or key == inner_key(subject, "hidden_size"):
            continue
        if width(**{key: 24}) == 24 != usual:
            null = width(**{key: None})
            yield KeySource(key=key, widths=null // hidden if null > 0 and null % hidden == 0 and null != 24 else 0)
        elif width(**{key: 3}) == 3 * hidden != usual:
            yield KeySource(key=key, times="hidden_size")
    if usual == 4 * hidden:
        yield KeySource(key="hidden_size", widths=4)


def inner_key(subject: ModelClass, key: str) -> str:
    """Return the name of a key in the files of a class."""
    return str(getattr(subject.config_class, "attribute_map", {}).get(key, key))


def fused(parts: Structure) -> Choice:
    """Return how queries, keys and values may be in single projection."""
    single: Fields = {"attention.num_kv_heads": constant(1)}
    if parts.kv_heads == 1:
        return ((single, {"fused": "stacked"}),)
    kinds = ("stacked", "by-head", "by-four") if parts.kv_heads == 4 else ("stacked", "by-group")
    return tuple(({}, {"fused": kind}) for kind in kinds)
