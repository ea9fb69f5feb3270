"""Hugging Face GPT-2: matrices are [in, out], q, k and v are concatenated in one, the output head is the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...printable import printable
from ...specs.gpt_model import GPTModelConfig
from ...weights.placements import Shape
from ..layout import Layout


def write_gpt_model(config: GPTModelConfig, layout: Layout) -> dict[str, Any] | None:
    """Return the ``config.json`` of the book's model; None if the layout is for other models."""
    if layout.name != "hf-gpt2":
        return None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.emb_dim,
        "n_head": config.n_heads,
        "n_layer": config.n_layers,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm.eps,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.drop_rate),
        "tie_word_embeddings": True,
    }


MODEL_TYPES = ("gpt2", "gpt-sw3")
"""Model types that `transformers` runs with the classes of GPT-2: its config and its model."""


def may_be_gpt_bigcode(names: Mapping[str, Shape | None]) -> str:
    """Return why names of nanoGPT may be of GPTBigCode; "" without biases or with the masks that nanoGPT saves."""
    bias = next((name for name in names if name.endswith("attn.c_attn.bias")), "")
    if not bias or any(name.endswith(".attn.bias") for name in names):
        return ""
    return (
        f"{printable(bias)} may be of nanoGPT, or of GPTBigCode with multi_query=False, which orders the rows by "
        "heads; --from nanogpt takes it as nanoGPT's, no layout takes the other's"
    )
