"""Keys of config.json files of few families that say in other words what most say: their usual keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...printable import printable
from ..reading.grouped import KINDS
from ..reading.rotary import rope_type

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of ``hybrid_override_pattern`` -> kind of a layer."""

_PART = 0.334
"""Part of a head that turns where a config has none."""

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
