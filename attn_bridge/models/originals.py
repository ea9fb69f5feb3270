"""Converts configs that makers of models publish with their own files to the form of `transformers`.

Meta's ``params.json`` (and Mistral's, which is like it), OpenAI's ``config.json`` of gpt-oss, and the book's dicts.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..weights.placements import Shape
from . import book_models, layouts
from .reading.model_config import ConfigFile

UNKNOWN_VOCABULARY = -1
"""Placeholder in Meta's files for the tokenizer's size; `fitted` reads it off the weights."""


def to_transformers(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return the config of an original in the form of `transformers`; None for an unknown config.

    Args:
        config: a ``params.json`` or ``config.json`` as a dict.

    Raises:
        TypeError: a value of it has the wrong type.
        ValueError: it lacks a key, has an unknown key, or a value that does not fit.
    """
    if "model_type" in config:
        return None
    if "dim" in config and {"n_layers", "n_heads"} & config.keys():
        return _meta(config)
    if {"experts_per_token", "initial_context_length", "rope_ntk_alpha"} & config.keys():
        return _openai(config)
    return book_models.to_transformers(config)


def fitted(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> dict[str, object]:
    """Return the result of `to_transformers` completed from the weights: the vocabulary, and whether the head is tied.

    Args:
        config: from `to_transformers`.
        shapes: name -> shape of every tensor of the original.

    Raises:
        LayoutError: (a ValueError) the names or shapes fit no layout; `WeightsMismatchError` lists names.
        ValueError: the width from Meta's formula differs from that of the weights.
    """
    layout = layouts.detect(shapes, config["model_type"])
    placements = layout.decode(shapes, layout.read_settings(config)).placements
    table, head = placements.get("tok_emb.weight"), placements.get("out_head.weight")
    keys = dict(config)
    if keys["vocab_size"] == UNKNOWN_VOCABULARY and table is not None:
        keys["vocab_size"] = table.shape[0]
    first = placements.get("trf_blocks.0.ff.fc1.weight")
    if first is not None and first.shape[0] != config["intermediate_size"]:
        raise ValueError(
            f"feed-forward layers are {config['intermediate_size']} wide by the config, {first.shape[0]} by the weights"
        )
    return keys | {"tie_word_embeddings": head is None or head == table}


# ---- Meta's, and Mistral's

_LLAMA_32 = {(2048, 16), (3072, 28)}
"""Width and layers of Llama 3.2's text models.

Their files have ``use_scaled_rope`` without a factor, as those of Llama 3.1 do; Meta's own code then takes 8 for both,
but they were trained, and are published for `transformers`, with 32.
"""

_MISTRAL = ("head_dim", "hidden_dim", "sliding_window", "moe")
_META = (
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
    *("rope_theta", "use_scaled_rope", "rope_scaling_factor", *_MISTRAL),
)
_OF_A_RUN = ("max_batch_size", "max_seq_len", "max_position_embeddings", "model_parallel_size")
"""Keys of the setup of a run, which do not change the model's computation."""


def _meta(document: Mapping[str, object]) -> dict[str, object]:
    """Return the config of Llama, Mistral or Mixtral for a ``params.json``."""
    is_mistral = any(key in document for key in _MISTRAL)
    theta = 1e6 if is_mistral and document.get("sliding_window") is None else 1e4  # each as its own code has it
    config = ConfigFile(
        {key: value for key, value in document.items() if value is not None},
        "params.json",
        {"vocab_size": UNKNOWN_VOCABULARY, "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": theta},
    )
    config.check_keys(("dim", "n_layers", "n_heads"), _META, _OF_A_RUN)
    width, heads = config.size("dim"), config.size("n_heads")
    if "head_dim" not in config and width % heads:
        raise ValueError(f"dim ({width}) of params.json must be a multiple of n_heads ({heads})")
    is_known = config.get("vocab_size") != UNKNOWN_VOCABULARY
    keys: dict[str, object] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.size("vocab_size") if is_known else UNKNOWN_VOCABULARY,
        "hidden_size": width,
        "intermediate_size": _hidden_size(config, width),
        "num_hidden_layers": config.depth("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.size("n_kv_heads") if "n_kv_heads" in config else heads,
        "head_dim": config.size("head_dim") if "head_dim" in config else width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.positive("norm_eps"),
        "rope_theta": config.positive("rope_theta"),
        "tie_word_embeddings": False,
    }
    if not is_mistral:
        return {**keys, "attention_bias": False, "mlp_bias": False, **_llama_context(config, width)}
    window = config.size("sliding_window") if "sliding_window" in config else None
    config.refuse("use_scaled_rope", None, False)
    keys |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    keys["max_position_embeddings"] = _positions(config, 32768)
    return keys if "moe" not in config else keys | _experts(config)


def _hidden_size(config: ConfigFile, width: int) -> int:
    """Return the width of feed-forward layers: from Mistral's files, or by Meta's formula."""
    if "hidden_dim" in config:
        return config.size("hidden_dim")
    multiple = config.size("multiple_of")
    factor = config.positive("ffn_dim_multiplier") if "ffn_dim_multiplier" in config else 1
    if factor > 1024:
        raise ValueError(f"ffn_dim_multiplier ({factor:g}) of params.json must be at most 1024")
    # SwiGLU (arXiv 2002.05202) has a third matrix: two thirds of the usual width, 4 * dim, keep the number of weights.
    hidden = int(factor * (8 * width // 3))
    return max(1, -(-hidden // multiple)) * multiple


def _llama_context(config: ConfigFile, width: int) -> dict[str, object]:
    """Return the context length of a Llama, and the scaling of its positions."""
    if not config.flag("use_scaled_rope"):
        return {"max_position_embeddings": _positions(config, 8192 if config.number("rope_theta") >= 5e5 else 4096)}
    default = 32.0 if (width, config.integer("n_layers")) in _LLAMA_32 else 8.0
    has_factor = "rope_scaling_factor" in config
    scaling = {
        "rope_type": "llama3",
        "factor": config.positive("rope_scaling_factor") if has_factor else default,
        # As `apply_scaling` of Meta's code has them.
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"max_position_embeddings": _positions(config, 131072), "rope_scaling": scaling}


def _positions(config: ConfigFile, default: int) -> int:
    key = "max_position_embeddings"
    return config.size(key) if key in config else default


def _experts(config: ConfigFile) -> dict[str, object]:
    """Return the keys that a Mixtral has in addition to a Mistral."""
    experts = ConfigFile(config.mapping("moe"), "moe of params.json", {})
    keys = ("num_experts", "num_experts_per_tok")
    experts.check_keys(keys, keys)
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts.size(keys[0]),
        "num_experts_per_tok": experts.size(keys[1]),
    }


# ---- OpenAI's

_SIZES = (
    *("num_hidden_layers", "num_experts", "experts_per_token", "vocab_size", "hidden_size", "intermediate_size"),
    *("head_dim", "num_attention_heads", "num_key_value_heads"),
)
_GPT_OSS: dict[str, object] = {
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000.0,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0,
}
"""Defaults of OpenAI's code for missing keys."""


def _openai(document: Mapping[str, object]) -> dict[str, object]:
    """Return the config of gpt-oss for OpenAI's ``config.json``."""
    config = ConfigFile(document, "OpenAI's config.json", _GPT_OSS)
    config.check_keys(_SIZES, (*_SIZES, *_GPT_OSS))
    config.depth("num_hidden_layers")
    sizes = {key: config.size(key) for key in _SIZES}
    context, factor = config.size("initial_context_length"), config.positive("rope_scaling_factor")
    keys: dict[str, object] = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        **{key: size for key, size in sizes.items() if "experts" not in key},
        "num_local_experts": sizes["num_experts"],
        "num_experts_per_tok": sizes["experts_per_token"],
        "swiglu_limit": config.positive("swiglu_limit"),
        "sliding_window": config.size("sliding_window"),
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(sizes["num_hidden_layers"])
        ],
        "max_position_embeddings": int(context * max(factor, 1.0)),
        "rope_theta": config.positive("rope_theta"),
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    scaled = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": config.positive("rope_ntk_beta"),
        "beta_slow": config.positive("rope_ntk_alpha"),
        "truncate": False,
        "original_max_position_embeddings": context,
    }
    return {**keys, "rope_scaling": scaled if factor > 1 else {"rope_type": "default"}}
