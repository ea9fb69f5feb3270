"""Keys of few families: kinds, numbers and sizes of layers, shared keys, functions from a file's keys to usual keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...printable import printable
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ..reading.decoders import KINDS
from ..reading.model_config import ConfigFile, as_number
from ..reading.rotary import rope_type

KEY = "attention_types"
"""Key of the runs, such as ``[[["global", "local"], 12]]``."""

EACH = "attention_layers"
"""Key of the name of every layer, which `transformers` makes of the runs, writes, and prefers where a file has it."""

PER_LAYER = "per_layer_config"
"""Key of the values of single layers, by their index."""

_NAMES = {"global": KINDS[False], "local": KINDS[True]}


def read_kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer.

    Raises:
        ValueError: the keys hold neither names nor runs of them, or they are of another number of layers.
    """
    layers, key, runs = config.integer("num_hidden_layers"), KEY, config.get(KEY)
    if config.get(EACH) is not None:
        key, runs = EACH, [[config.get(EACH), 1]]
    kinds: list[str] = []
    for run in runs if isinstance(runs, Sequence) else [runs]:
        if not isinstance(run, Sequence) or len(run) != 2 or not _is_run(*run):
            form = "names, global or local" if key == EACH else "lists of global and local, each with a number"
            raise ValueError(f"{key} of {config.model_type} must be {form}")
        # More of them than layers are refused below; a huge number must not make a huge list.
        kinds += [_NAMES[name] for name in run[0]] * min(run[1], layers + 1)
    if len(kinds) != layers:
        raise ValueError(f"{key} of {config.model_type} must be those of num_layers ({layers})")
    return kinds[layer]


def _is_run(names: object, times: object) -> bool:
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) and name in _NAMES for name in names)
    return is_list and isinstance(times, int) and not isinstance(times, bool)


def write_runs(kinds: Sequence[str]) -> list[list[object]]:
    """Return the kinds of all layers as a single run that occurs once: ``[[[name, ...], 1]]``; `read_kind` reads it."""
    theirs = {ours: name for name, ours in _NAMES.items()}
    return [[[theirs[kind] for kind in kinds], 1]]


def read_number(config: ConfigFile, key: str, layer: int, usual: int) -> int:
    """Return the number of a layer in a list of one per layer; `usual` where a config has no such list.

    Raises:
        ValueError: the list has another length than the model, or a number below 1.
    """
    counts = config.get(key)
    if counts is None:
        return usual
    layers = config.integer("num_hidden_layers")
    if not isinstance(counts, list | tuple) or len(counts) != layers or any(type(one) is not int for one in counts):
        excerpt = printable(repr(counts), 60)
        raise ValueError(f"{key} ({excerpt}) of {config.model_type} must be a list of {layers} integers")
    if counts[layer] < 1:
        raise ValueError(f"{key}[{layer}] ({counts[layer]}) of {config.model_type} must be at least 1")
    return int(counts[layer])


def read_published_kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer by ``linear_attn_config``, whose indices begin at 1, or else by the default."""
    published = config.mapping("linear_attn_config")
    listed = {
        kind: published[key]
        for key, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention"))
        if isinstance(published.get(key), Sequence)
    }
    if len(listed) < 2:
        return "full_attention" if layer and layer % 4 == 0 else "linear_attention"
    kinds = [kind for kind, numbers in listed.items() if layer + 1 in numbers]
    if len(kinds) != 1:
        raise ValueError(
            f"layer {layer} of {config.model_type} must be in full_attn_layers or in kda_layers of linear_attn_config, "
            f"which count from 1; it is in {' and in '.join(kinds) or 'neither'}"
        )
    return kinds[0]


def adjusted_width(config: ConfigFile, width: int) -> int:
    """Return the width of feed-forward layers of LFM2: two thirds of one, times a factor, rounded up."""
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return width
    multiple = config.integer("block_multiple_of")
    return -(-int(config.positive("block_ffn_dim_multiplier") * width) // multiple) * multiple


def read_of_layer(config: ConfigFile, key: str, layer: int) -> object:
    """Return a layer's value of a key that has one per layer.

    Raises:
        ValueError: it has another number of values.
    """
    values, layers = config.get(key), config.integer("num_hidden_layers")
    if not isinstance(values, Sequence) or len(values) != layers:
        raise ValueError(f"{key} of {config.model_type} must be a list of {layers} values, one per layer")
    return values[layer]


def read_sparsity(config: ConfigFile, key: str, layer: int) -> float:
    """Return the share of a gate that becomes 0 in a layer of Gemma 3n: of many layers, most in the first ten."""
    if config.get(key) is None:
        return 0.95 if config.integer("num_hidden_layers") > 10 and layer < 10 else 0.0
    return max(0.0, as_number(f"{key} of {config.model_type}", read_of_layer(config, key, layer)))


def read_lender(config: ConfigFile, key: str, kinds: Sequence[str], layer: int) -> int | None:
    """Return the earlier layer whose keys and values a layer reads; None for a layer that projects them.

    Args:
        config: the model's.
        key: of the number of layers, the last ones, that read those of others.
        kinds: kind of every layer.
        layer: index of the layer.

    Raises:
        ValueError: no layer of its kind projects keys.
    """
    first = len(kinds) - config.integer(key, 0)
    if layer < first:
        return None
    lenders = [number for number in range(max(first, 0)) if kinds[number] == kinds[layer]]
    if not lenders:
        raise ValueError(
            f"{key} ({config.get(key)}) of {config.model_type} leaves no layer of type {kinds[layer]} with keys"
        )
    return lenders[-1]


def read_heads(config: ConfigFile, kinds: Sequence[str], layer: int) -> dict[str, int]:
    """Return the width of a head and the number of key heads of a layer, which may depend on its kind (Gemma 4).

    `transformers` 5.23 writes both in ``per_layer_config``; older files have further keys for full attention.

    Raises:
        ValueError: layers of one kind differ, or a layer differs in another value.
    """
    if PER_LAYER not in config:
        head_dim, heads = config.integer("head_dim"), config.integer("num_key_value_heads")
        if kinds[layer] == KINDS[False]:
            head_dim = config.integer("global_head_dim")
            if config.flag("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
                heads = config.integer("num_global_key_value_heads")
        return {"head_dim": head_dim, "num_kv_heads": heads}
    sizes = [_own_heads(config, number) for number in range(len(kinds))]
    for number, kind in enumerate(kinds):
        if kind == kinds[layer] and sizes[number] != sizes[layer]:
            raise ValueError(
                f"{PER_LAYER} of {config.model_type} must be the same for all layers of type {kind}, but layers "
                f"{min(number, layer)} and {max(number, layer)} differ"
            )
    return sizes[layer]


def _own_heads(config: ConfigFile, layer: int) -> dict[str, int]:
    # A config in memory may have integers as keys; in a file, transformers pads them with zeros to one length.
    values = {str(key).lstrip("0") or "0": value for key, value in config.mapping(PER_LAYER).items()}
    values = values.get(str(layer)) or {}
    unknown = [key for key in values if key not in ("head_dim", "num_key_value_heads")]
    if unknown:
        raise ValueError(f"{PER_LAYER} of {config.model_type} must not change {unknown[0]}")
    own = config.with_given({**config.given, **values})
    return {"head_dim": own.integer("head_dim"), "num_kv_heads": own.integer("num_key_value_heads")}


def write_heads(attentions: Sequence[GroupedQueryAttentionConfig]) -> dict[str, object]:
    """Return the keys that `read_heads` reads: heads of the first layer, and of those that differ from it."""
    sizes = [{"head_dim": one.head_dim, "num_key_value_heads": one.num_kv_heads} for one in attentions]
    return {**sizes[0], PER_LAYER: {str(number): own for number, own in enumerate(sizes) if own != sizes[0]}}


_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of ``hybrid_override_pattern`` -> kind of a layer."""

# Of MiMo-V2-Flash, in `transformers`.
_PART = 0.334
"""Part of a head that turns where a config has none."""

# Of ModernBERT, in `transformers`.
_BASES = {KINDS[False]: ("global_rope_theta", 160000.0), KINDS[True]: ("local_rope_theta", 10000.0)}
"""Kind of a layer -> the key of the base of its positions in older files, and its default."""


def prepare_letters(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys with the kinds of the layers in ``layer_types``, and their number, which files may lack.

    Raises:
        ValueError: a letter of ``hybrid_override_pattern`` is unknown.
    """
    kinds, pattern = keys.get("layers_block_type", keys.get("layer_types")), keys.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        unknown = sorted(set(pattern) - _LETTERS.keys())
        if unknown:
            raise ValueError(
                f"hybrid_override_pattern ({printable(pattern)}) must consist of {' '.join(_LETTERS)}, "
                f"not {printable(unknown[0])}"
            )
        kinds = [_LETTERS[letter] for letter in pattern]
    if kinds is None:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        return {**keys, "layer_types": kinds}
    return {**keys, "layer_types": kinds, "num_hidden_layers": len(kinds)}


def prepare_mimo(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys with the width of the window, and with the part of a head that turns."""
    prepared = dict(keys)
    if "num_local_experts" in keys:
        prepared["n_routed_experts"] = keys["num_local_experts"]
    size = keys.get("sliding_window_size")
    if type(size) is int:
        prepared["sliding_window"] = size + 1
    rotary = keys.get("rope_parameters")
    if isinstance(rotary, Mapping):
        prepared["rope_parameters"] = {
            kind: {"partial_rotary_factor": _PART, **values}
            if isinstance(values, Mapping) and rope_type(values) == "default"
            else values
            for kind, values in rotary.items()
        }
    return prepared


def prepare_modernbert(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys with the width of the window, and with a base of positions for each kind of layers."""
    local = keys.get("local_attention", 128)
    window = local // 2 if type(local) is int else local
    rotary = keys.get("rope_parameters") or {}
    prepared = {"sliding_window": window, **keys}
    if isinstance(rotary, Mapping) and rotary.keys() <= _BASES.keys():
        prepared["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": keys.get(key, base), **(rotary.get(kind) or {})}
            for kind, (key, base) in _BASES.items()
        }
    return prepared


PREPARE: dict[str, Callable[[Mapping[str, object]], Mapping[str, object]]] = {
    "letters": prepare_letters,
    "mimo": prepare_mimo,
    "modernbert": prepare_modernbert,
}
"""Name in a description -> the function from a file's keys to those that are read."""
