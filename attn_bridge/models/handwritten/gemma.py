"""Tensors of Gemma 2 and 3, with norms before and after attention and feed-forward."""

from __future__ import annotations

from ..rows.attention import SPLIT
from ..rows.decoder import FINAL_NORM, attention, decoder, feed_forward, norms

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
    defaults={"tie": 1},
    model_types=("gemma2", "gemma3", "gemma3_text"),
)
