"""Multimodal models of `transformers` whose text model is one of ours: their types, and the config of that part.

Without an image or a sound, they compute the same as their text model alone; tests compare each with `transformers`. A
model that is not listed (PaliGemma looks ahead, Mllama attends to images) may use the same names with other meanings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...weights.toml import packaged

_FILE = packaged(__package__, "multimodal.toml")
MODELS, DECODERS = frozenset(_FILE["models"]), frozenset(_FILE["decoders"])
TEXT_TYPES: Mapping[str, str] = _FILE["text_types"]


def decoder_type(model_type: str) -> str:
    """Return the type under which the family of a decoder alone is registered, which differs from an encoder's."""
    return f"{model_type}-decoder" if model_type in DECODERS else model_type


def written_type(model_type: str) -> str:
    """Return the ``model_type`` in the config.json of a registered type."""
    bare = model_type.removesuffix("-decoder")
    return bare if bare in DECODERS else model_type


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model in a multimodal config; any other config unchanged.

    The type of a decoder alone that shares its type with an encoder is that of `decoder_type`.
    """
    inner = config.get("text_config")
    text_config = dict(config)
    if isinstance(inner, Mapping):
        text_config = {**inner, "model_type": inner.get("model_type", config.get("model_type"))}
        if "tie_word_embeddings" in config:  # the head is that of the whole model
            text_config["tie_word_embeddings"] = config["tie_word_embeddings"]
    kind = text_config.get("model_type")
    if isinstance(kind, str) and kind in DECODERS and _is_decoder_alone(kind, text_config):
        return {**text_config, "model_type": decoder_type(kind)}
    if not isinstance(kind, str) or kind not in TEXT_TYPES:
        return text_config
    text_config["model_type"] = TEXT_TYPES[kind]
    keys = [key for key in ("rope_scaling", "rope_parameters") if isinstance(text_config.get(key), Mapping)]
    for key in keys or ["rope_parameters"]:
        text_config[key] = _with_sections(text_config.get(key) or {}, text_config["model_type"])
    return {
        key: value for key, value in text_config.items() if not key.endswith("_config") or isinstance(inner, Mapping)
    }


def _is_decoder_alone(model_type: str, config: Mapping[str, object]) -> bool:
    """Return whether a config of one of `DECODERS` is that of a decoder alone, as `transformers` writes it."""
    is_pair = config.get("is_encoder_decoder")
    return (config.get("is_decoder") is True and is_pair is not True) or (model_type != "bert" and is_pair is False)


def _with_sections(rotary: Mapping[str, object], text_type: str) -> dict[str, Any]:
    """Return rotary values with the pairs of channels per row of positions, and whether the rows take turns.

    `transformers` reads the order off the class, whatever ``mrope_interleaved`` is.
    """
    kind = next((rotary[key] for key in ("rope_type", "type") if key in rotary), "default")
    others = {key: value for key, value in rotary.items() if key not in ("type", "rope_type")}
    return {
        **others,
        "rope_type": "default" if kind == "mrope" else kind,
        "mrope_section": rotary.get("mrope_section", [*_FILE["sections"][text_type]]),
        "mrope_interleaved": text_type != "qwen2",
    }


def registered_type(config: Mapping[str, object]) -> object:
    """Return the ``model_type`` of a config, or that of `decoder_type` for a decoder alone."""
    kind = config.get("model_type")
    is_other = isinstance(kind, str) and kind in DECODERS
    return text_of(config).get("model_type") if is_other else kind


def type_of(config: Mapping[str, object]) -> object:
    """Return the ``model_type`` that names of tensors follow: of a multimodal model its text model's.

    That of a decoder alone is its registered type, see `decoder_type`.
    """
    kind = config.get("model_type")
    is_whole = isinstance(kind, str) and kind in MODELS
    return text_of(config).get("model_type") if is_whole else registered_type(config)
