"""Hugging Face BERT: attention in ``encoder.layer.{i}.attention``, with its output projection in ``output.dense``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...printable import printable
from ...specs.bert_encoder import BertEncoderConfig
from ...weights.placements import Shape
from ...weights.rows import Row
from ..layout import Layout
from ..rows.common import is_counted, is_zero, layer_norm, with_bias

LAYER, OURS = "{prefix}encoder.layer.{i}.", "layers.{i}."


TYPES = "embeddings.token_type_embeddings.weight"


BIG_BIRD = "a pooler of BigBird, whose attention is sparse and which has another GELU than BERT"
"""Why names of BERT with a pooler that is a single layer are refused: BigBird has all other names of BERT."""


def _may_be_roberta(names: Mapping[str, Shape | None]) -> str:
    """Return why names of BERT may be of RoBERTa's kind: its single type of tokens, where BERT has two; else ""."""
    name, shape = next(((name, shape) for name, shape in names.items() if name.endswith(TYPES)), ("", None))
    if not shape or shape[0] != 1:
        return ""
    return (
        f"{printable(name)} has one row, as in RoBERTa and its kind, whose positions begin after the padding's (a "
        "config.json says which it is); --from hf-bert takes it as BERT's, whose positions begin at 0"
    )


LAYOUT = Layout(
    "hf-bert",
    "transformers BERT",
    [
        *(Row(f"{{prefix}}embeddings.{theirs}_embeddings.weight", (f"{ours}_emb.weight",))
          for theirs, ours in (("word", "tok"), ("position", "pos"), ("token_type", "type"))),
        *layer_norm("{prefix}embeddings.LayerNorm", "emb_norm"),
        *(row for name in ("query", "key", "value")
          for row in with_bias(f"{LAYER}attention.self.{name}", f"{OURS}att.W_{name}")),
        *with_bias(f"{LAYER}attention.output.dense", f"{OURS}att.out_proj"),
        *layer_norm(f"{LAYER}attention.output.LayerNorm", f"{OURS}norm1"),
        *with_bias(f"{LAYER}intermediate.dense", f"{OURS}ff.layers.0"),
        *with_bias(f"{LAYER}output.dense", f"{OURS}ff.layers.2"),
        *layer_norm(f"{LAYER}output.LayerNorm", f"{OURS}norm2"),
        Row("{prefix}embeddings.position_ids", reason="the numbers from 0 on", check=is_counted),
        Row("{prefix}embeddings.token_type_ids", reason="a buffer of zeros", check=is_zero),
        Row("{prefix}pooler.dense.weight", reason="the pooler is no part of the encoder"),
        Row("{prefix}pooler.dense.bias", reason="the pooler is no part of the encoder"),
        Row("cls.{rest}", reason="heads of pretraining are no part of the encoder"),
    ],
    prefixes=("", "bert."),
    whole=True,
    model_types=("bert",),
    refused={f"{{prefix}}pooler.{one}": BIG_BIRD for one in ("weight", "bias")},
    doubt=_may_be_roberta,
)  # fmt: skip


def write_bert_encoder(config: BertEncoderConfig, layout: Layout) -> dict[str, Any] | None:
    """Return the ``config.json`` of an encoder, which uses our keys; None if the layout is for other models."""
    if layout is not LAYOUT:
        return None
    return {"model_type": "bert", "architectures": ["BertModel"], **dataclasses.asdict(config)}
