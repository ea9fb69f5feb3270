"""Converts configs that makers of models publish with their own files to the form of `transformers`.

Meta's ``params.json`` (and Mistral's, which is like it), OpenAI's ``config.json`` of gpt-oss, and the book's dicts.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..weights.placements import Shape
from . import layouts
from .reading.decoders import WrittenKeys
from .reading.model_config import ConfigFile

UNKNOWN_VOCABULARY = -1
"""Placeholder in Meta's files for the tokenizer's size; `fitted` reads it off the weights."""


def to_transformers(config: Mapping[str, object]) -> WrittenKeys | None:
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
    if "emb_dim" not in config or not _OF_BOOK & config.keys():
        return None
    if set(_OF_GEMMA) & config.keys():
        return _gemma3(config)
    return _qwen3(config) if {"qk_norm", "head_dim", *_OF_EXPERTS} & config.keys() else _llama3(config)


def fitted(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> WrittenKeys:
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


def _sizes(
    config: ConfigFile,
    kind: str,
    architecture: str,
    *,
    width: str = "emb_dim",
    kv_heads: str = "n_kv_groups",
    base: str = "rope_base",
    hidden: str = "hidden_dim",
    activation: str = "hidden_act",
    eps: float = 1e-6,
) -> WrittenKeys:
    """Return the keys that Meta's files and the book's dicts share: sizes, activation, norms, and the rotary base.

    `width`, `kv_heads`, `base` and `hidden` are keys of theirs, `activation` one of `transformers`.
    """
    emb_dim, heads = config.size(width), config.size("n_heads")
    has_head_dim = config.get("head_dim") is not None
    if not has_head_dim and emb_dim % heads:
        raise ValueError(f"{width} ({emb_dim}) of {config.model_type} must be a multiple of n_heads ({heads})")
    is_unknown = config.get("vocab_size") == config.defaults.get("vocab_size")
    has_length = base == "rope_base" and config.get("context_length") is not None  # Meta's files name it otherwise
    return {
        "model_type": kind,
        "architectures": [architecture],
        "vocab_size": UNKNOWN_VOCABULARY if is_unknown else config.size("vocab_size"),
        "hidden_size": emb_dim,
        "intermediate_size": config.size(hidden) if hidden in config else _hidden_size(config, emb_dim),
        "num_hidden_layers": config.depth("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.size(kv_heads) if kv_heads in config else heads,
        "head_dim": config.size("head_dim") if has_head_dim else emb_dim // heads,
        activation: "gelu_pytorch_tanh" if activation == "hidden_activation" else "silu",
        "rms_norm_eps": config.positive("norm_eps") if "norm_eps" in config.defaults else eps,
        "rope_theta": config.positive(base),
        "tie_word_embeddings": False,
        **({"max_position_embeddings": config.size("context_length")} if has_length else {}),
    }


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


def _meta(document: Mapping[str, object]) -> WrittenKeys:
    """Return the config of Llama, Mistral or Mixtral for a ``params.json``."""
    is_mistral = any(key in document for key in _MISTRAL)
    theta = 1e6 if is_mistral and document.get("sliding_window") is None else 1e4  # each as its own code has it
    config = ConfigFile(
        {key: value for key, value in document.items() if value is not None},
        "params.json",
        {"vocab_size": UNKNOWN_VOCABULARY, "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": theta},
    )
    config.check_keys(("dim", "n_layers", "n_heads"), _META, _OF_A_RUN)
    keys = _sizes(config, "llama", "LlamaForCausalLM", width="dim", kv_heads="n_kv_heads", base="rope_theta")
    if not is_mistral:
        return {**keys, "attention_bias": False, "mlp_bias": False, **_llama_context(config, keys["hidden_size"])}
    window = config.size("sliding_window") if "sliding_window" in config else None
    config.refuse("use_scaled_rope", None, False)
    keys |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    keys["max_position_embeddings"] = _positions(config, 32768)
    return keys if "moe" not in config else keys | _experts(config)


def _hidden_size(config: ConfigFile, width: int) -> int:
    """Return the width of feed-forward layers by Meta's formula."""
    multiple = config.size("multiple_of")
    factor = config.positive("ffn_dim_multiplier") if "ffn_dim_multiplier" in config else 1
    if factor > 1024:
        raise ValueError(f"ffn_dim_multiplier ({factor:g}) of params.json must be at most 1024")
    # SwiGLU (arXiv 2002.05202) has a third matrix: two thirds of the usual width, 4 * dim, keep the number of weights.
    hidden = int(factor * (8 * width // 3))
    return max(1, -(-hidden // multiple)) * multiple


def _llama_context(config: ConfigFile, width: int) -> WrittenKeys:
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


def _experts(config: ConfigFile) -> WrittenKeys:
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


def _openai(document: Mapping[str, object]) -> WrittenKeys:
    """Return the config of gpt-oss for OpenAI's ``config.json``."""
    config = ConfigFile(document, "OpenAI's config.json", _GPT_OSS)
    config.check_keys(_SIZES, (*_SIZES, *_GPT_OSS))
    config.depth("num_hidden_layers")
    sizes = {key: config.size(key) for key in _SIZES}
    context, factor = config.size("initial_context_length"), config.positive("rope_scaling_factor")
    keys: WrittenKeys = {
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


# ---- the book's Llama 3, Qwen 3 (dense and with experts) and Gemma 3

_COMMON = ("vocab_size", "emb_dim", "n_heads", "n_layers", "n_kv_groups", "rope_base")
_IDLE = ("context_length", "dtype")
_OF_GEMMA = ("layer_types", "sliding_window", "rope_local_base", "query_pre_attn_scalar")
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_FREQUENCIES = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
_OF_BOOK = {"hidden_dim", "n_kv_groups", "rope_base", "num_experts"}
"""Keys that the dict of the book's GPT does not have."""


def _llama3(document: Mapping[str, object]) -> WrittenKeys:
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


def _qwen3(document: Mapping[str, object]) -> WrittenKeys:
    config = ConfigFile(document, "config.json of the book's Qwen 3", {})
    has_experts = config.get("num_experts") not in (None, 0)
    needed = _OF_EXPERTS if has_experts else ("hidden_dim",)
    config.check_keys((*_COMMON, *needed), (*_COMMON, *_OF_EXPERTS, "hidden_dim", "head_dim", "qk_norm"), _IDLE)
    if not has_experts and not config.flag("qk_norm"):  # what `transformers` calls a Llama
        return _sizes(config, "llama", "LlamaForCausalLM") | {"attention_bias": False, "mlp_bias": False}
    config.refuse("qk_norm", True)
    if not has_experts:
        return _sizes(config, "qwen3", "Qwen3ForCausalLM") | {"attention_bias": False, "use_sliding_window": False}
    return _sizes(config, "qwen3_moe", "Qwen3MoeForCausalLM", hidden="moe_intermediate_size") | {
        **{key: config.size(key) for key in _OF_EXPERTS},
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    }


def _gemma3(document: Mapping[str, object]) -> WrittenKeys:
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
