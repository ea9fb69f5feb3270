"""Tensors of Phi-3 and Phi-4: one matrix for query, key and value, and one for gate and up."""

from __future__ import annotations

from ...weights.rows import Row
from ..rows.attention import FREQUENCIES, Size, Table
from ..rows.decoder import FINAL_NORM, LAYER, OURS, attention, decoder, norms


def fused(num_heads: Size, num_kv_heads: Size) -> Table:
    """Return the table of attention with all queries, then all keys, then all values in one projection."""
    parts = tuple(f"W_{name}.weight" for name in ("query", "key", "value"))
    shares = (num_heads, num_kv_heads, num_kv_heads)
    return (
        Row("qkv_proj.weight", parts, "o i -> o i", along="o", shares=shares),
        Row("o_proj.weight", ("out_proj.weight",)),
        FREQUENCIES,
    )


LAYOUT = decoder(
    "hf-phi3",
    "transformers Phi-3 and Phi-4",
    [
        *attention(fused("num_heads", "num_kv_heads")),
        Row(
            f"{LAYER}mlp.gate_up_proj.weight",
            tuple(f"{OURS}ff.{one}.weight" for one in ("fc1", "fc2")),
            "o i -> (part o) i",
            part="part",
        ),
        Row(f"{LAYER}mlp.down_proj.weight", (f"{OURS}ff.fc3.weight",)),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    settings={
        "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
    },
    model_types=("phi3",),
)
