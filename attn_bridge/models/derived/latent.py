"""Attention of described families whose keys and values are made of a latent (DeepSeek V2, arXiv 2405.04434)."""

from __future__ import annotations

from ...masks import Mask
from ...specs.lightning_indexer import Indexer
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from ...specs.position import Rotary
from ..reading.model_config import ConfigFile
from ..reading.rotary import magnitude_of
from .experts import Values

LATENT_DIM = "attention.latent_dim"
"""Field of a description that only such attention has."""


def read_latent(
    config: ConfigFile, values: Values, position: Rotary | None, mask: Mask
) -> MultiHeadLatentAttentionConfig:
    """Return the attention of a layer, whose scale grows with scaled positions as in `transformers`.

    The norms of the latents add 1e-6 regardless of the model's constant.

    Args:
        config: the model's.
        values: widths and biases, by our names.
        position: of the channels that have one.
        mask: who attends to whom.

    Raises:
        ValueError: fewer keys than queries, or a width that does not fit.
    """
    heads = config.integer("num_attention_heads")
    config.refuse("num_key_value_heads", None, heads)
    magnitude = 1.0 if position is None else magnitude_of(config, position.scaling)
    return MultiHeadLatentAttentionConfig(
        config.integer("hidden_size"),
        heads,
        **values,
        position=position,
        mask=mask,
        scale=(values["nope_dim"] + values["rope_dim"]) ** -0.5 * magnitude * magnitude,
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )


def read_indexer(config: ConfigFile, values: Values) -> Indexer:
    """Return the indexer of every layer; GLM-5's layers may share the choice of one layer, which ours do not.

    Args:
        config: the model's.
        values: its heads, their width, the number of chosen keys, and which channels turn together.

    Raises:
        ValueError: a layer takes the choice of another.
    """
    layers = config.integer("num_hidden_layers")
    config.refuse("indexer_types", None, ["full"] * layers)
    config.refuse("index_topk_pattern", None, "F" * layers, ["full"] * layers)
    config.refuse("index_topk_freq", None, 0, 1)
    return Indexer(**values)
