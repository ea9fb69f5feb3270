"""Hugging Face Llama and its kin (Mistral, Qwen 2 and 3): grouped queries, RMS norms, a gated feed-forward."""

from __future__ import annotations

from .layout import Layout
from .table import Row

LAYER, OURS = "{prefix}layers.{i}.", "trf_blocks.{i}."


def _both(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{LAYER}{theirs}.weight", (f"{OURS}{ours}.weight",)),
            Row(f"{LAYER}{theirs}.bias", (f"{OURS}{ours}.bias",), optional=True)]  # fmt: skip


LAYOUT = Layout(
    "hf-llama",
    "transformers Llama, Mistral, Qwen 2 and 3",
    [
        Row("{prefix}embed_tokens.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("lm_head.weight", ("out_head.weight",), optional=True),
        *(row for name, ours in (("q", "query"), ("k", "key"), ("v", "value"))
          for row in _both(f"self_attn.{name}_proj", f"att.W_{ours}")),
        *_both("self_attn.o_proj", "att.out_proj"),
        *(Row(f"{LAYER}self_attn.{name}_norm.weight", (f"{OURS}att.{name}_norm.scale",), optional=True)
          for name in ("q", "k")),
        *(row for name, ours in (("gate", "fc1"), ("up", "fc2"), ("down", "fc3"))
          for row in _both(f"mlp.{name}_proj", f"ff.{ours}")),
        Row(f"{LAYER}input_layernorm.weight", (f"{OURS}norm1.scale",)),
        Row(f"{LAYER}post_attention_layernorm.weight", (f"{OURS}norm2.scale",)),
        Row("{prefix}norm.weight", ("final_norm.scale",)),
        Row(f"{LAYER}self_attn.rotary_emb.inv_freq", reason="rotary frequencies, which are computed"),
    ],
    prefixes=("model.", ""),
    settings={"tie": ("tie_word_embeddings",)},
    defaults={"tie": 0},
    whole=True,
)  # fmt: skip
