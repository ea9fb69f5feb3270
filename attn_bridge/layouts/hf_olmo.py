"""Hugging Face OLMo, whose norms have no weights, and OLMo 2 and 3, which have norms after everything alone."""

from __future__ import annotations

from .attention import SPLIT
from .hf_decoder import FINAL_NORM, attention, decoder, feed_forward, norms

LAYOUTS = [
    decoder(
        "hf-olmo",
        "transformers OLMo 1",
        [*attention(row for row in SPLIT if "norm" not in row.theirs), *feed_forward()],
        model_types=("olmo",),
    ),
    decoder(
        "hf-olmo2",
        "transformers OLMo 2 and 3",
        [
            *attention(SPLIT, required=("q_norm", "k_norm")),
            *feed_forward(),
            *norms(post_norm1="post_attention_layernorm", post_norm2="post_feedforward_layernorm"),
            FINAL_NORM,
        ],
        model_types=("olmo2", "olmo3"),
    ),
]
