"""Hugging Face BERT: attention in ``encoder.layer.{i}.attention``, with its output projection in ``output.dense``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...printable import printable
from ...specs.bert_encoder import BertEncoderConfig
from ...weights.placements import Shape
from ..layout import Layout

TYPES = "embeddings.token_type_embeddings.weight"


def may_be_roberta(names: Mapping[str, Shape | None]) -> str:
    """Return why names of BERT may be of RoBERTa's kind: its single type of tokens, where BERT has two; else ""."""
    name, shape = next(((name, shape) for name, shape in names.items() if name.endswith(TYPES)), ("", None))
    if not shape or shape[0] != 1:
        return ""
    return (
        f"{printable(name)} has one row, as in RoBERTa and its kind, whose positions begin after the padding's (a "
        "config.json says which it is); --from hf-bert takes it as BERT's, whose positions begin at 0"
    )


def write_bert_encoder(config: BertEncoderConfig, layout: Layout) -> dict[str, Any] | None:
    """Return the ``config.json`` of an encoder, which uses our keys; None if the layout is for other models."""
    if layout.name != "hf-bert":
        return None
    return {"model_type": "bert", "architectures": ["BertModel"], **dataclasses.asdict(config)}
