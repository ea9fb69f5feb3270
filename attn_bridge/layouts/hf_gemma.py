"""Hugging Face Gemma 2 and 3: norms before and after attention and feed-forward; all of them scale by 1 + weight."""

from __future__ import annotations

from .attention import SPLIT
from .hf_decoder import FINAL_NORM, attention, decoder, feed_forward, norms

_VISION = "no part of the text model, which alone is converted; save that by itself first"

LAYOUT = decoder(
    "hf-gemma",
    "transformers Gemma 2 and 3, of Gemma 3 the text model",
    [
        *attention(SPLIT),
        *feed_forward(),
        *norms(
            norm1="input_layernorm",
            post_norm1="post_attention_layernorm",
            norm2="pre_feedforward_layernorm",
            post_norm2="post_feedforward_layernorm",
        ),
        FINAL_NORM,
    ],
    prefixes=("model.", "", "language_model.model.", "model.language_model."),
    defaults={"tie": 1},
    refused={
        f"{front}{part}.{{rest}}": _VISION
        for front in ("", "model.")
        for part in ("vision_tower", "multi_modal_projector")
    },
    model_types=("gemma2", "gemma3", "gemma3_text"),
)
