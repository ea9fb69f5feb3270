"""Hugging Face Llama and its kin (Mistral, Qwen 2 and 3): grouped queries, RMS norms, a gated feed-forward."""

from __future__ import annotations

from .attention import SPLIT
from .hf_decoder import FINAL_NORM, attention, decoder, feed_forward, norms

LAYOUT = decoder(
    "hf-llama",
    "transformers Llama, Mistral, Qwen 2 and 3",
    [
        *attention(SPLIT),
        *feed_forward(bias=True),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    model_types=("llama", "mistral", "qwen2", "qwen3"),
)
