"""Rows that the decoders of `transformers` which took over Llama's names have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...weights.rows import Row
from ..layout import Layout
from ..parts import OmittedPart, towers
from .common import TIE

LAYER, OURS = "{prefix}layers.{i}.", "trf_blocks.{i}."

QUANTISED = dict.fromkeys(
    ("{rest}.weight_scale_inv", "{rest}.weight_scale"),
    "a scale of quantised weights, which would not follow them; --dequantize makes bfloat16 of both",
)

TOWERS = towers(
    *("visual.", "vision_tower.", "vision_model.", "vision_encoder.", "vision_projection.", "visual_embeddings_table."),
    *("image_newline", "image_tower.", "video_tower.", "audio_tower.", "vqmodel.", "vision_embed_tokens."),
    *("multi_modal_projector.", "connector.", "aligner.", "embed_vision.", "embed_audio."),
    *("acoustic_tokenizer_encoder.", "semantic_tokenizer_encoder.", "embed_tokens_extend.", "vision_embedder."),
) + tuple(
    OmittedPart(front + begin, mark=mark)  # other models have such names as well
    for front in ("", "model.")
    for begin, mark in (("encoder.", "input_linear.weight"), ("projector.", "query"))
)
"""Modules of multimodal models of `transformers` other than their decoder."""

_FURTHER_TOKENS = "predicts further tokens, which transformers leaves out, too"
FURTHER_LAYER = OmittedPart(LAYER, f"it {_FURTHER_TOKENS}", mark="eh_proj.weight")
"""A layer behind the others, as DeepSeek V3 and GLM-4.5 have it."""

FURTHER_ROWS = tuple(Row(name, reason=_FURTHER_TOKENS) for name in ("mtp.{rest}", "{prefix}mtp_{rest}"))
"""Modules that do the same next to the layers, as in Qwen3-Next and ERNIE 4.5."""

OUTER = "language_model."
"""Prefix of all names of a multimodal model's text model, including the head, before `transformers` 5."""

OF_EMU = "text_model."
"""The same prefix in files of Emu3."""

PREFIXES = ("model.", "", "model.language_model.", f"{OUTER}model.", "model.text_model.", f"{OF_EMU}model.")

EMBEDDINGS = [
    Row("{prefix}embed_tokens.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
    Row("lm_head.weight", ("out_head.weight",), optional=True, branch="head/model"),
    *(
        Row(f"{outer}lm_head.weight", ("out_head.weight",), optional=True, branch=f"head/{outer}model.")
        for outer in (OUTER, OF_EMU)
    ),
]


def decoder(
    name: str,
    title: str,
    rows: Iterable[Row],
    *,
    model_types: tuple[str, ...],
    settings: Mapping[str, tuple[str, ...]] | None = None,
    defaults: Mapping[str, int] | None = None,
    prefixes: tuple[str, ...] = PREFIXES,
    embeddings: Iterable[Row] = EMBEDDINGS,
    tie: Mapping[str, tuple[str, ...]] = TIE,
    refused: Mapping[str, str] | None = None,
    marks: tuple[str, ...] = (),
    parts: tuple[OmittedPart, ...] = (),
    unread: Callable[[Mapping[str, object]], tuple[OmittedPart, ...]] | None = None,
) -> Layout:
    """Return the layout of a decoder with these rows between its embeddings; the rest is as `Layout` takes it."""
    return Layout(
        name,
        title,
        [*embeddings, *rows],
        prefixes=prefixes,
        settings={**tie, **(settings or {})},
        defaults={"tie": 0, **(defaults or {})},
        whole=True,
        marks=marks,
        refused={**QUANTISED, **(refused or {})},
        model_types=model_types,
        parts=(*TOWERS, *parts),
        unread=unread,
    )


APART, TOGETHER = "feed-forward/experts", "feed-forward/fused"
"""Branches of experts that have tensors each, and of all experts of a layer in one."""

EXPERTS = "feed-forward/experts|fused"
"""Branch of rows that layers with experts have in files and in `transformers`' fused form alike."""

FUSED = {"fused": ()}
