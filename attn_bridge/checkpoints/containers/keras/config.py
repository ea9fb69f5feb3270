"""The backbones of KerasHub as a config.json of `transformers`: GPT-2, Llama, Mistral, Qwen 2 and 3, Gemma, BERT.

In: the config.json that Keras serialises, of a backbone or of a task around it. Out: the keys of the model that
computes the same. A key that is not known, and could change the model, is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ....printable import printable
from ..files import bad

Settings = Mapping[str, Any]
Keys = dict[str, Any]

CLASS, SETTINGS, BACKBONE = "class_name", "config", "backbone"

INERT = frozenset({"name", "trainable", "dtype", "dropout"})
"""Keys that change nothing in evaluation."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A class of backbones.

    Attributes:
        model_type: of `transformers`.
        architecture: class of `transformers`.
        keys: key of Keras -> key of `transformers`.
        fixed: keys of `transformers` that the class fixes.
        neutral: key of Keras -> the value that changes nothing; any other is refused.
        more: further keys of `transformers`, made of Keras's; it raises ValueError for a model that is not read.
        read: keys of Keras that `more` reads.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    fixed: Settings
    neutral: Settings = dataclasses.field(default_factory=dict)
    more: Callable[[Settings], Keys] = lambda settings: {}
    read: tuple[str, ...] = ()


DECODER = {
    "vocabulary_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_query_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "hidden_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
    "rope_max_wavelength": "rope_theta",
}

LLAMA3 = {
    "rope_frequency_adjustment_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_pretraining_sequence_length": "original_max_position_embeddings",
}
"""Keys of the scaling that Llama 3.1 and later have."""

UNSCALED = {"rope_scaling_factor": 1}


def _llama(settings: Settings) -> Keys:
    scaling = {theirs: settings.get(key) for key, theirs in LLAMA3.items()}
    is_scaled = any(value is not None for value in scaling.values())
    return {"rope_scaling": {"rope_type": "llama3", **scaling}} if is_scaled else {}


def _qwen3(settings: Settings) -> Keys:
    """Return the window, which all layers have."""
    window = settings.get("sliding_window_size")
    if window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _mistral(settings: Settings) -> Keys:
    head_dim = settings.get("head_dim")
    return {"sliding_window": settings.get("sliding_window"), **({"head_dim": head_dim} if head_dim else {})}


GEMMA = {
    **{key: theirs for key, theirs in DECODER.items() if key != "rope_max_wavelength"},
    "head_dim": "head_dim",
}

GEMMA_SWITCHES = (
    *("query_head_dim_normalize", "use_post_ffw_norm", "use_post_attention_norm", "final_logit_soft_cap"),
    *("attention_logit_soft_cap", "sliding_window_size", "use_sliding_window_attention"),
)


def _windows(settings: Settings) -> Keys:
    """Return the window of the layers that have it, or that none has it."""
    if settings.get("use_sliding_window_attention"):
        return {"sliding_window": settings.get("sliding_window_size")}
    return {"layer_types": ["full_attention"] * settings["num_layers"]}


def _scale(settings: Settings) -> Keys:
    """Return the scale of scores in Gemma 2, one over the root of `head_dim` or of the model's width per head."""
    is_by_head = settings.get("query_head_dim_normalize", True)
    heads = settings["num_query_heads"]
    return {"query_pre_attn_scalar": settings["head_dim"] if is_by_head else settings["hidden_dim"] // heads}


def _gemma(settings: Settings) -> Keys:
    """Return the keys of Gemma 1 or 2, which share a class; the feed-forward's width counts gates and values."""
    sizes = {"intermediate_size": settings["intermediate_dim"] // 2}
    if settings.get("use_post_ffw_norm") and settings.get("use_post_attention_norm"):
        caps = {
            "attn_logit_softcapping": settings.get("attention_logit_soft_cap"),
            "final_logit_softcapping": settings.get("final_logit_soft_cap"),
        }
        second = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
        return {**second, **sizes, **caps, **_scale(settings), **_windows(settings)}
    # Gemma 1 has neither norm nor the other switches: a mixture is a model that `transformers` has no class for.
    odd = [key for key in GEMMA_SWITCHES if key not in ("query_head_dim_normalize", "sliding_window_size")]
    odd = [key for key in odd if settings.get(key)]
    if odd or not settings.get("query_head_dim_normalize", True):
        raise ValueError(f"{odd[0] if odd else 'query_head_dim_normalize'} without both of Gemma 2's norms")
    return sizes


def _gemma3(settings: Settings) -> Keys:
    factor = settings.get("global_rope_scaling_factor", 1.0)
    scaling = {} if factor == 1 else {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    return {**_scale(settings), **_windows(settings), **scaling}


GEMMA_ACTIVATION = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")

KINDS = {
    "GemmaBackbone": Kind("gemma", "GemmaForCausalLM", GEMMA, GEMMA_ACTIVATION, more=_gemma, read=GEMMA_SWITCHES),
    "Gemma3Backbone": Kind(
        "gemma3_text",
        "Gemma3ForCausalLM",
        GEMMA,
        {**GEMMA_ACTIVATION, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
        {
            **dict.fromkeys(("use_query_key_norm", "use_post_ffw_norm", "use_post_attention_norm"), True),
            **dict.fromkeys(("image_size", "vision_encoder", "pooling_intermediate_dim", "embedding_dim")),
            **dict.fromkeys(("attention_logit_soft_cap", "final_logit_soft_cap")),
            **dict.fromkeys(("use_bidirectional_attention", "is_embedding_model"), False),
            "local_rope_scaling_factor": 1,
        },
        _gemma3,
        (
            "query_head_dim_normalize",
            "sliding_window_size",
            "use_sliding_window_attention",
            "global_rope_scaling_factor",
        ),
    ),
    "BertBackbone": Kind(
        "bert",
        "BertModel",
        {
            "vocabulary_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "hidden_dim": "hidden_size",
            "intermediate_dim": "intermediate_size",
            "max_sequence_length": "max_position_embeddings",
            "num_segments": "type_vocab_size",
        },
        {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-12},
    ),
    "GPT2Backbone": Kind(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "vocabulary_size": "vocab_size",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "hidden_dim": "n_embd",
            "intermediate_dim": "n_inner",
            "max_sequence_length": "n_positions",
        },
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
    ),
    **dict.fromkeys(
        ("LlamaBackbone", "Llama3Backbone"),
        Kind(
            "llama",
            "LlamaForCausalLM",
            DECODER,
            {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
            {"rope_position_scaling_factor": 1},
            _llama,
            (*LLAMA3, "tie_word_embeddings"),
        ),
    ),
    "MistralBackbone": Kind(
        "mistral",
        "MistralForCausalLM",
        DECODER,
        {"hidden_act": "silu"},
        UNSCALED,
        _mistral,
        ("sliding_window", "head_dim"),
    ),
    "QwenBackbone": Kind(
        "qwen2",
        "Qwen2ForCausalLM",
        DECODER,
        {"hidden_act": "silu", "use_sliding_window": False},
        {**UNSCALED, "use_sliding_window_attention": False},
        read=("tie_word_embeddings", "sliding_window_size"),
    ),
    "Qwen3Backbone": Kind(
        "qwen3",
        "Qwen3ForCausalLM",
        {**DECODER, "head_dim": "head_dim"},
        {"hidden_act": "silu", "attention_bias": False},
        UNSCALED,
        _qwen3,
        ("tie_word_embeddings", "sliding_window_size"),
    ),
}
"""Class of a backbone -> its counterpart in `transformers`."""


HEAD = "reversible_embedding.vars.1"
"""End of the name of a head. A backbone without it is tied: not every version of Keras has that in the config."""


def of(path: Path, document: Settings, names: Iterable[str]) -> Keys:
    """Return the config of a backbone; {} where the document is of another class.

    Args:
        path: of the file that has the document, for errors.
        document: as Keras serialises a model: its ``class_name`` and ``config``.
        names: of the tensors.

    Raises:
        CheckpointError: a key that is missing, or that makes a model which is not read.
    """
    settings = document.get(SETTINGS)
    if isinstance(settings, Mapping) and isinstance(settings.get(BACKBONE), Mapping):
        document = settings[BACKBONE]
        settings = document.get(SETTINGS)
    name = document.get(CLASS)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(settings, Mapping):
        return {}
    missing = [key for key in kind.keys if key not in settings]
    if missing:
        raise bad(path, f"the config of a {name} lacks {', '.join(missing)}")
    for key, value in settings.items():
        is_neutral = key in kind.neutral and (value is None or value == kind.neutral[key])
        if key not in INERT and key not in kind.keys and key not in kind.read and not is_neutral:
            raise bad(path, f"{printable(key)} ({printable(value, 40)}) of a {name} makes a model that is not read")
    values = {theirs: settings[key] for key, theirs in kind.keys.items()}
    try:
        more = kind.more(settings)
    except (TypeError, ValueError) as error:
        raise bad(path, f"{printable(error, 200)} of a {name} makes a model that is not read") from None
    return {
        "model_type": kind.model_type,
        "architectures": [kind.architecture],
        **kind.fixed,
        **values,
        **more,
        "tie_word_embeddings": not any(name.endswith(HEAD) for name in names),
    }
