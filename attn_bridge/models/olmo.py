"""OLMo (some clip q, k and v), OLMo 2 (norms of whole projections), OLMo 3 (and a window in three of four layers).

The norms of OLMo 1 have no weights; OLMo 2 and 3 have norms after attention and feed-forward alone.
"""

from __future__ import annotations

from typing import Any

from ..masks import causal
from ..specs.decoder_model import DecoderBlockConfig
from ..specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ..specs.layer_norm import LayerNormConfig
from ..specs.position import Rotary
from .family import AttentionLayer, Family
from .grouped import attention_layer, head_dim_of, mask_of, read_sizes
from .reading.decoders import read_feed_forward, read_rms_norm
from .reading.model_config import ModelConfig
from .reading.rotary import make_rotary, read_rotary
from .rows.attention import SPLIT
from .rows.decoder import FINAL_NORM, attention, decoder, feed_forward, norms


def read_olmo(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return a layer of OLMo 1, 2 or 3."""
    bias = config.flag("attention_bias")
    slides = config.model_type == "olmo3"
    kind = config.layer_type(layer, "full_attention" if (layer + 1) % 4 == 0 else "sliding_attention") if slides else ""
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=_olmo3_rotary(config, kind) if slides else read_rotary(config, head_dim_of(config)),
        qk_norm=None if config.model_type == "olmo" else QKNorm("full", config.number("rms_norm_eps")),
        mask=mask_of(config, layer, kind) if slides else causal(),
        clip=config.number_or_none("clip_qkv") if config.model_type == "olmo" else None,
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def _olmo3_rotary(config: ModelConfig, kind: str) -> Rotary:
    """Return the rotary positions of a kind of layers.

    `transformers` gives ``rope_scaling`` and ``rope_theta`` of older files to full attention alone; all that were
    published say the default base.
    """
    values = dict(config.mapping("rope_parameters").get(kind) or {})
    base = values.get("rope_theta")
    if kind == "full_attention":
        values |= config.mapping("rope_scaling")
        base = values.get("rope_theta", config.get("rope_theta"))
    return make_rotary(config, head_dim_of(config), values, 500_000.0 if base is None else base)


def _block(config: ModelConfig, layer: int, attention: Any) -> DecoderBlockConfig:
    """Return a block of OLMo 1, whose norms have no weights, or of OLMo 2 and 3, which norm what they add."""
    if config.model_type == "olmo":
        return DecoderBlockConfig(attention, read_feed_forward(config), _plain_norm(config))
    return DecoderBlockConfig(attention, read_feed_forward(config), read_rms_norm(config), norms="post")


def _model_of_olmo1(config: ModelConfig) -> dict[str, Any]:
    return {"norm": _plain_norm(config), "tie": config.flag("tie_word_embeddings")}


def _plain_norm(config: ModelConfig) -> LayerNormConfig:
    return LayerNormConfig(config.integer("hidden_size"), 1e-5, affine=False)


_OLMO: dict[str, Any] = {
    "vocab_size": 100352,
    "intermediate_size": 11008,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
}

FAMILIES = (
    Family(("olmo",), read_olmo, {**_OLMO, "vocab_size": 50304}, block=_block, model=_model_of_olmo1),
    Family(("olmo2",), read_olmo, {**_OLMO, "rms_norm_eps": 1e-5}, block=_block),
    Family(
        ("olmo3",),
        read_olmo,
        {**_OLMO, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        block=_block,
    ),
)


LAYOUTS = [
    decoder(
        "hf-olmo",
        "transformers OLMo 1",
        [*attention(row for row in SPLIT if "norm" not in row.theirs), *feed_forward()],
        model_types=("olmo",),
    ),
    decoder(
        "hf-olmo2",
        "transformers OLMo 2 and 3",
        [
            *attention(SPLIT, required=("q_norm", "k_norm")),
            *feed_forward(),
            *norms(post_norm1="post_attention_layernorm", post_norm2="post_feedforward_layernorm"),
            FINAL_NORM,
        ],
        model_types=("olmo2", "olmo3"),
    ),
]
