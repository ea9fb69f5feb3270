"""Hugging Face BERT: attention in ``encoder.layer.{i}.attention``, its output projection beside it."""

from __future__ import annotations

from ..weights import Rule, Rules

NAME = "hf-bert"

RULES = Rules(
    [
        Rule("layers.{i}.W_query.weight", "encoder.layer.{i}.attention.self.query.weight", "o i -> o i"),
        Rule("layers.{i}.W_query.bias", "encoder.layer.{i}.attention.self.query.bias", "o -> o"),
        Rule("layers.{i}.W_key.weight", "encoder.layer.{i}.attention.self.key.weight", "o i -> o i"),
        Rule("layers.{i}.W_key.bias", "encoder.layer.{i}.attention.self.key.bias", "o -> o"),
        Rule("layers.{i}.W_value.weight", "encoder.layer.{i}.attention.self.value.weight", "o i -> o i"),
        Rule("layers.{i}.W_value.bias", "encoder.layer.{i}.attention.self.value.bias", "o -> o"),
        Rule("layers.{i}.out_proj.weight", "encoder.layer.{i}.attention.output.dense.weight", "o i -> o i"),
        Rule("layers.{i}.out_proj.bias", "encoder.layer.{i}.attention.output.dense.bias", "o -> o"),
    ]
)
