"""The book's Llama 3, Qwen 3 (dense and with experts) and Gemma 3: their dicts of sizes as those of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .reading.model_config import ConfigFile

_COMMON = ("vocab_size", "emb_dim", "n_heads", "n_layers", "n_kv_groups", "rope_base")
_IDLE = ("context_length", "dtype")
_OF_GEMMA = ("layer_types", "sliding_window", "rope_local_base", "query_pre_attn_scalar")
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_FREQUENCIES = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
_TELLING = {"hidden_dim", "n_kv_groups", "rope_base", "num_experts"}
"""Keys that the dict of the book's GPT does not have."""


def to_transformers(config: Mapping[str, object]) -> dict[str, Any] | None:
    """Return the config of `transformers` for a dict of the book's; None for other dicts.

    Raises:
        TypeError: a value of it has the wrong type.
        ValueError: it lacks a key, has an unknown key, or a value that does not fit.
    """
    if "emb_dim" not in config or not _TELLING & config.keys():
        return None
    if set(_OF_GEMMA) & config.keys():
        return _gemma3(config)
    if {"qk_norm", "head_dim", *_OF_EXPERTS} & config.keys():
        return _qwen3(config)
    return _llama3(config)


def _llama3(document: Mapping[str, object]) -> dict[str, Any]:
    config = ConfigFile(document, "config.json of the book's Llama 3", {})
    config.check_keys((*_COMMON, "hidden_dim"), (*_COMMON, "hidden_dim", "rope_freq"), _IDLE)
    keys = _sizes(config, "llama", "LlamaForCausalLM", eps=1e-5) | {"attention_bias": False, "mlp_bias": False}
    if config.get("rope_freq") is None:
        return keys
    scaling = ConfigFile(config.mapping("rope_freq"), f"rope_freq of {config.model_type}", {})
    scaling.check_keys(_FREQUENCIES, _FREQUENCIES)
    return keys | {
        "rope_scaling": {
            "rope_type": "llama3",
            **{key: scaling.positive(key) for key in _FREQUENCIES[:-1]},
            "original_max_position_embeddings": scaling.size(_FREQUENCIES[-1]),
        }
    }


def _qwen3(document: Mapping[str, object]) -> dict[str, Any]:
    config = ConfigFile(document, "config.json of the book's Qwen 3", {})
    has_experts = config.get("num_experts") not in (None, 0)
    needed = _OF_EXPERTS if has_experts else ("hidden_dim",)
    config.check_keys((*_COMMON, *needed), (*_COMMON, *_OF_EXPERTS, "hidden_dim", "head_dim", "qk_norm"), _IDLE)
    if not has_experts and not config.flag("qk_norm"):  # what `transformers` calls a Llama
        return _sizes(config, "llama", "LlamaForCausalLM") | {"attention_bias": False, "mlp_bias": False}
    config.refuse("qk_norm", True)
    if not has_experts:
        return _sizes(config, "qwen3", "Qwen3ForCausalLM") | {"attention_bias": False, "use_sliding_window": False}
    return _sizes(config, "qwen3_moe", "Qwen3MoeForCausalLM", width="moe_intermediate_size") | {
        **{key: config.size(key) for key in _OF_EXPERTS},
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    }


def _gemma3(document: Mapping[str, object]) -> dict[str, Any]:
    config = ConfigFile(document, "config.json of the book's Gemma 3", {})
    allowed_keys = (*_COMMON, "hidden_dim", "head_dim", "qk_norm", *_OF_GEMMA)
    config.check_keys([key for key in allowed_keys if key != "query_pre_attn_scalar"], allowed_keys, _IDLE)
    config.refuse("qk_norm", True)
    keys = _sizes(config, "gemma3_text", "Gemma3ForCausalLM", activation="hidden_activation")
    layers = keys["num_hidden_layers"]
    kinds = [config.layer_type(layer, "") for layer in range(layers)]
    wrong = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
    if wrong or len(config.get("layer_types")) != layers:
        raise ValueError(
            f"layer_types of {config.model_type} must be sliding_attention or full_attention for each of {layers} "
            f"layers, got {wrong[0] if wrong else len(config.get('layer_types'))!r:.60}"
        )
    return keys | {
        "layer_types": kinds,
        "sliding_window": config.size("sliding_window"),
        "rope_local_base_freq": config.positive("rope_local_base"),
        "query_pre_attn_scalar": config.positive("query_pre_attn_scalar")
        if config.get("query_pre_attn_scalar") is not None
        else keys["head_dim"],
        "attention_bias": False,
    }


def _sizes(
    config: ConfigFile,
    kind: str,
    architecture: str,
    *,
    eps: float = 1e-6,
    width: str = "hidden_dim",
    activation: str = "hidden_act",
) -> dict[str, Any]:
    """Return the keys that all three share: sizes, activation, norms, and the rotary base."""
    emb_dim, heads = config.size("emb_dim"), config.size("n_heads")
    if config.get("head_dim") is None and emb_dim % heads:
        raise ValueError(f"emb_dim ({emb_dim}) of {config.model_type} must be a multiple of n_heads ({heads})")
    has_head_dim = config.get("head_dim") is not None
    keys = {
        "model_type": kind,
        "architectures": [architecture],
        "vocab_size": config.size("vocab_size"),
        "hidden_size": emb_dim,
        "intermediate_size": config.size(width),
        "num_hidden_layers": config.depth("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.size("n_kv_groups"),
        "head_dim": config.size("head_dim") if has_head_dim else emb_dim // heads,
        activation: "gelu_pytorch_tanh" if activation == "hidden_activation" else "silu",
        "rms_norm_eps": eps,
        "rope_theta": config.positive("rope_base"),
        "tie_word_embeddings": False,
    }
    length = config.get("context_length")
    return keys if length is None else keys | {"max_position_embeddings": config.size("context_length")}
