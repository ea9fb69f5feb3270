"""Tensors of OLMo 1, whose norms have no weights, and of OLMo 2 and 3, with norms of whole projections."""

from __future__ import annotations

from ..rows.attention import SPLIT
from ..rows.decoder import FINAL_NORM, attention, decoder, feed_forward, norms

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
