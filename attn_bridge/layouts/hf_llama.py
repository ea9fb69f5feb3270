"""Hugging Face Llama and its kin (Mistral, Qwen 2 and 3): grouped queries, RMS norms, a gated feed-forward."""

from __future__ import annotations

from .attention import SPLIT
from .hf_decoder import EMBEDDINGS, FINAL_NORM, QUANTISED, TIE, attention, feed_forward, norms
from .layout import Layout

LAYOUT = Layout(
    "hf-llama",
    "transformers Llama, Mistral, Qwen 2 and 3",
    [
        *EMBEDDINGS,
        *attention(SPLIT),
        *feed_forward(bias=True),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    prefixes=("model.", ""),
    settings=TIE,
    defaults={"tie": 0},
    whole=True,
    refused=QUANTISED,
    model_types=("llama", "mistral", "qwen2", "qwen3"),
)
