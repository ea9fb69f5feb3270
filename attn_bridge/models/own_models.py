"""The book's GPT-2 and our BERT as models of `transformers`: their config.json, and tensors that others have too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..printable import printable
from ..specs.bert_encoder import BertEncoderConfig
from ..specs.gpt_model import GPTModelConfig
from ..weights.placements import Shape
from .layout import Layout
from .reading.decoders import WrittenKeys

TYPES = "embeddings.token_type_embeddings.weight"


def write_gpt_model(config: GPTModelConfig, layout: Layout) -> WrittenKeys | None:
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


def may_be_gpt_bigcode(names: Mapping[str, Shape | None]) -> str:
    """Return why names of nanoGPT may be of GPTBigCode; "" without biases or with the masks that nanoGPT saves."""
    bias = next((name for name in names if name.endswith("attn.c_attn.bias")), "")
    if not bias or any(name.endswith(".attn.bias") for name in names):
        return ""
    return (
        f"{printable(bias)} may be of nanoGPT, or of GPTBigCode with multi_query=False, which orders the rows by "
        "heads; --from nanogpt takes it as nanoGPT's, no layout takes the other's"
    )


def write_bert_encoder(config: BertEncoderConfig, layout: Layout) -> WrittenKeys | None:
    """Return the ``config.json`` of an encoder, which uses our keys; None if the layout is for other models."""
    if layout.name != "hf-bert":
        return None
    return {"model_type": "bert", "architectures": ["BertModel"], **dataclasses.asdict(config)}


def may_be_roberta(names: Mapping[str, Shape | None]) -> str:
    """Return why names of BERT may be of RoBERTa's kind: its single type of tokens, where BERT has two; else ""."""
    name, shape = next(((name, shape) for name, shape in names.items() if name.endswith(TYPES)), ("", None))
    if not shape or shape[0] != 1:
        return ""
    return (
        f"{printable(name)} has one row, as in RoBERTa and its kind, whose positions begin after the padding's (a "
        "config.json says which it is); --from hf-bert takes it as BERT's, whose positions begin at 0"
    )
