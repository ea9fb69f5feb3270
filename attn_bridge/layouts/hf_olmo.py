"""Hugging Face OLMo, whose norms have no weights, and OLMo 2 and 3, which have norms after everything alone."""

from __future__ import annotations

from .attention import SPLIT
from .hf_decoder import EMBEDDINGS, FINAL_NORM, QUANTISED, TIE, attention, feed_forward, norms
from .layout import Layout

LAYOUTS = [
    Layout(
        "hf-olmo",
        "transformers OLMo 1",
        [*EMBEDDINGS, *attention(row for row in SPLIT if "norm" not in row.theirs), *feed_forward()],
        prefixes=("model.", ""),
        settings=TIE,
        defaults={"tie": 0},
        whole=True,
        refused=QUANTISED,
        model_types=("olmo",),
    ),
    Layout(
        "hf-olmo2",
        "transformers OLMo 2 and 3",
        [
            *EMBEDDINGS,
            *attention(SPLIT, required=("q_norm", "k_norm")),
            *feed_forward(),
            *norms(post_norm1="post_attention_layernorm", post_norm2="post_feedforward_layernorm"),
            FINAL_NORM,
        ],
        prefixes=("model.", ""),
        settings=TIE,
        defaults={"tie": 0},
        whole=True,
        refused=QUANTISED,
        model_types=("olmo2", "olmo3"),
    ),
]
