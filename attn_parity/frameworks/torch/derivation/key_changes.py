"""The changes of a config that a proof tries: other values of each key, keys left out, and several keys at once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attn_bridge.whole_files import JsonObject

from ..model_classes.experts import older_keys
from ..model_classes.model_class import ABSENT, ModelClass
from ..model_classes.sizes import COUNTS, LAYERS

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
_SIZES = {
    "hidden_size": (96,),
    "intermediate_size": (24, 56),
    "num_hidden_layers": (2, 6),
    "num_attention_heads": (2, 8),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), (2, 6)),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads"), (2, 8)),
    "num_key_value_heads": (1, 4, None),
    "head_dim": (8, 32, None),
    "vocab_size": (61,),
    "sliding_window": (3, 6, 1, None),
    **dict.fromkeys(COUNTS, (12,)),
    "moe_norm_min": (0.9,),
    "max_seq_len": (128,),
}
"""Other values of keys; a table of distances (``max_seq_len``) that is shorter than the sample is out of use."""
STRETCHED: dict[str, str | float] = {"rope_type": "dynamic", "factor": 3.0, "alpha": 50.0, "rope_theta": 900.0}
"""Rotary positions whose ``alpha`` stretches the base in some models."""

LONGER: dict[str, str | float] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 900.0,
    "original_max_position_embeddings": 8,
}
"""Rotary positions that scale queries and keys, which norms behind them take back."""

GROWTH = "llama_4_scaling_beta"
"""Key in rotary parameters of the rate at which queries grow with their position."""

_ROTARY: tuple[JsonObject, ...] = (
    STRETCHED,
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0},
    {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 900.0},
    LONGER,
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 700.0,
    },
)

IGNORED = frozenset(
    (
        *("pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "output_attentions"),
        *("output_hidden_states", "gradient_checkpointing", "name_or_path", "per_layer_config", "is_heterogeneous"),
        *("quantization_config", "text_config", "decoder", "generator", "is_encoder_decoder", "kv_sharing_modes"),
        *("base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan"),
        *("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy", "use_cache"),
        *("output_router_logits", "router_aux_loss_coef"),
        *("problem_type", "num_labels", "chunk_size_feed_forward", "transformers_version", "default_rope_type"),
    )
)
"""Keys without any effect on the logits of a text model."""


def alternatives(subject: ModelClass, key: str) -> Iterator[Any]:
    """Yield other values of a key, of its kind."""
    usual = subject.usual(key)
    if key in _SIZES:
        yield from (value for value in _SIZES[key] if value != usual)
    elif key == "rope_parameters" and isinstance(usual, Mapping) and is_nested(usual):
        for kind, values in itertools.product(usual, _ROTARY):
            yield {**usual, kind: values}
    elif key == "rope_parameters":
        plain = subject.defaults.get(key)
        growing = {"original_max_position_embeddings": 4, GROWTH: 0.7} if GROWTH in (plain or {}) else {}
        yield from ({**growing, **values} for values in _ROTARY)
        if isinstance(plain, dict) and "original_max_position_embeddings" in plain:
            # Factors that grow with the position begin beyond the original context, which samples must pass.
            yield {**plain, "original_max_position_embeddings": 4}
    elif key == "layer_types" and isinstance(usual, list):
        kinds = ("full_attention", "sliding_attention")
        yield [kinds[layer % 2] for layer in range(LAYERS)]
        yield [kinds[1]] * LAYERS
        yield [kinds[0]] * LAYERS
    elif key == "attention_types":
        yield from ([[["global"], LAYERS]], [[["local"], 2], [["global", "local"], 1]])
    elif key == "mlp_layer_types":
        kinds = ("dense", "sparse")
        yield [kinds[layer % 2] for layer in range(LAYERS)]
        yield [kinds[layer < 3] for layer in range(LAYERS)]
    elif key == "num_attention_heads_per_layer":
        yield from ([4, 8, 2, 6], [8] * LAYERS)
    elif key == "mlp_only_layers":
        yield from ([1], [0, 2])
    elif key == "attention_type":
        yield "block_sparse"
    elif isinstance(usual, bool):
        yield not usual
    elif isinstance(usual, str):
        yield from (value for value in _ACTIVATIONS if value != usual and "act" in key)
    elif isinstance(usual, int):
        yield from (usual + 1, usual * 2, 1, None, *((0, -1) if "layer" in key else (0,) if "shared" in key else ()))
    elif isinstance(usual, float):
        yield from (usual * 1.37 + 0.01, usual * 0.5 + 0.001, None)
    elif usual is None:
        yield from (True, 2, 0.7)


def is_nested(rotary: object) -> bool:
    """Return whether rotary parameters are separate per kind of layers."""
    return isinstance(rotary, Mapping) and "full_attention" in rotary


def _structural(subject: ModelClass, change: Mapping[str, object]) -> bool:
    """Return whether a change takes a size away or gives the kinds of the layers, which other keys may depend on."""
    ((key, value),) = change.items()
    return key == "layer_types" or (value is None and key in _SIZES)


def _switches(subject: ModelClass, change: Mapping[str, object]) -> bool:
    """Return whether a change switches something on or off, rather than sets a number."""
    ((key, value),) = change.items()
    usual = subject.usual(key)
    return _structural(subject, change) or isinstance(usual, bool) or (key == "sliding_window" and value is not ABSENT)


Keys = JsonObject

LEGACY: tuple[Keys, ...] = (
    {"rope_theta": 333.0},
    {"rope_theta": 333.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 333.0, "partial_rotary_factor": 0.5},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}},
)
"""Keys of older files."""

GROWING: Keys = {
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4, GROWTH: 0.6}
}
"""Keys of an older file whose queries grow with their position."""


def changes_of(subject: ModelClass) -> list[JsonObject]:
    """Return changes of the usual config: each key that an instance reads or its config declares, and older ones."""
    keys = sorted(key for key in subject.read | subject.sizes.keys() | subject.own_keys if key not in IGNORED)
    if "pad_token_id" in subject.read - subject.sizes.keys():
        keys.append("pad_token_id")  # a class that can't do without may count positions from it
    keys = [key for key in keys if not callable(getattr(subject.config_class, key, None))]
    single = [{key: value} for key in keys for value in alternatives(subject, key)]
    switches = [one for one in single if _switches(subject, one)]
    single += [
        one | other
        for one, other in itertools.combinations(switches, 2)
        if one.keys() != other.keys() and (_structural(subject, one) or _structural(subject, other))
    ]
    single += [{key: 2} for key in older_keys(subject)]
    single += [{key: ABSENT} for key in sorted(subject.sizes) if key not in IGNORED]
    if "rope_parameters" not in subject.read:
        return single
    grows = GROWTH in (subject.defaults.get("rope_parameters") or {})
    return single + list(LEGACY) + ([GROWING] if grows else [])


def renamed(subject: ModelClass, singles: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Yield the first change of each key that has other names, under each of these alone."""
    for outer, names in subject.other_names.items():
        inner, *others = names
        values = (change[key] for change in singles for key in (inner, outer) if [*change] == [key])
        value = next((value for value in values if value is not None), None)
        if value is not None:
            yield from ({inner: ABSENT, outer: ABSENT, name: value} for name in (outer, *others))


def mixed(subject: ModelClass, singles: list[JsonObject], count: int, seed: int = 0) -> list[JsonObject]:
    """Return random changes of three keys at once, of which a config leaves out at most one.

    The defaults of two sizes, such as width and vocabulary, would make instances of many gigabytes.
    """
    drawn = random.Random(seed)
    mixtures = [
        {key: value for change in drawn.sample(singles, 3) for key, value in change.items()}
        for _ in range(count if len(singles) >= 3 else 0)
    ]
    absent = [[key for key, value in mixture.items() if value is ABSENT] for mixture in mixtures]
    return [
        {key: value for key, value in mixture.items() if key not in left_out[1:]}
        for mixture, left_out in zip(mixtures, absent, strict=True)
    ]
