"""Meta's own files of Llama, and Mistral's: rows of queries and keys in the order in which their rotary positions turn.

Positions there turn neighbouring channels, in `transformers` and in ours channels of the two halves of a head.
"""

from __future__ import annotations

from .attention import below, turned
from .layout import Layout
from .table import Row

LAYER, OURS = "layers.{i}.", "trf_blocks.{i}."

LAYOUT = Layout(
    "meta-llama",
    "Meta's own files of Llama, and Mistral's",
    [
        Row("tok_embeddings.weight", ("tok_emb.weight",)),
        Row("output.weight", ("out_head.weight",)),
        *below(turned("num_heads", "num_kv_heads"), f"{LAYER}attention.", f"{OURS}att."),
        *(
            Row(f"{LAYER}feed_forward.{theirs}.weight", (f"{OURS}ff.{ours}.weight",))
            for theirs, ours in (("w1", "fc1"), ("w3", "fc2"), ("w2", "fc3"))
        ),
        Row(f"{LAYER}attention_norm.weight", (f"{OURS}norm1.scale",)),
        Row(f"{LAYER}ffn_norm.weight", (f"{OURS}norm2.scale",)),
        Row("norm.weight", ("final_norm.scale",)),
        Row("rope.freqs", reason="rotary frequencies, which are computed"),
    ],
    settings={
        "num_heads": ("n_heads", "num_attention_heads"),
        "num_kv_heads": ("n_kv_heads", "num_key_value_heads", "n_heads", "num_attention_heads"),
    },
    whole=True,
)
