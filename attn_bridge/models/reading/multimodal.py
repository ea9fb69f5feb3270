"""Multimodal models of `transformers` whose text model is one of ours: their types, and the config of that part.

Without an image or a sound, they compute the same as their text model alone; tests compare each with `transformers`. A
model that is not listed (PaliGemma looks ahead, Mllama attends to images) may use the same names with other meanings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODELS = frozenset(
    (
        *("gemma3", "llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava", "video_llava"),
        *("mistral3", "internvl", "got_ocr2", "idefics2", "idefics3", "smolvlm", "ovis2", "deepseek_vl", "lighton_ocr"),
        *(
            "voxtral",
            "audioflamingo3",
            "musicflamingo",
            "granite_speech",
            "granite_speech_plus",
            "glmasr",
            "vibevoice_asr",
            "qwen2_audio",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
        ),
    )
)
"""``model_type`` of each."""

TEXT_TYPES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""``model_type`` of a text model, or of the whole in files without ``text_config`` -> the equivalent type."""

SECTIONS = ("mrope_section", "mrope_interleaved")
"""Keys that assign a head's channels to time, height and width: text has the same position in each."""


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model in a multimodal config; any other config unchanged."""
    inner = config.get("text_config")
    found = dict(config)
    if isinstance(inner, Mapping):
        found = {**inner, "model_type": inner.get("model_type", config.get("model_type"))}
        if "tie_word_embeddings" in config:  # the head is that of the whole model
            found["tie_word_embeddings"] = config["tie_word_embeddings"]
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_TYPES:
        return found
    found["model_type"] = TEXT_TYPES[kind]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(key), Mapping):
            found[key] = _without_sections(found[key])
    return {key: value for key, value in found.items() if not key.endswith("_config") or isinstance(inner, Mapping)}


def _without_sections(rotary: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in rotary.items() if key not in SECTIONS}
    return {key: "default" if key in ("type", "rope_type") and value == "mrope" else value
            for key, value in kept.items()}  # fmt: skip


def type_of(config: Mapping[str, Any]) -> Any:
    """Return the ``model_type`` that names of tensors follow: of a multimodal model its text model's."""
    kind = config.get("model_type")
    return text_of(config).get("model_type") if isinstance(kind, str) and kind in MODELS else kind
