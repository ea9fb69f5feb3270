"""MiniMax-01 (arXiv 2501.08313): lightning attention, and in some layers grouped-query attention as in Mixtral.

Outputs of attention and experts are added to the output of the norm before them.
"""

from __future__ import annotations

from ...specs.base import DERIVED
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.lightning_attention import LightningAttentionConfig, layer_decay_rates
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..reading.decoders import WrittenKeys, attention_of, read_rms_norm, write_rms_norm, write_sizes
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import SPLIT, Size, Table, below, interleaved_rotary
from ..rows.common import HEADS
from ..rows.decoder import FINAL_NORM, FUSED, LAYER, OURS, attention, decoder, norms
from .grouped import KINDS, attention_layer, head_dim_of, mask_of, read_sizes, window_of, write_heads
from .mixtral import experts_rows, read_experts, write_experts


def table(num_heads: Size) -> Table:
    """Return the rows of a lightning layer: of each head its query, its key and its value in one projection."""
    computed = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    return (
        Row(
            "qkv_proj.weight",
            ("W_query.weight", "W_key.weight", "W_value.weight"),
            "(h c) i -> (h part c) i",
            part="part",
            sizes={"h": num_heads},
        ),
        Row("output_gate.weight", ("W_gate.weight",)),
        Row("norm.weight", ("norm.scale",)),
        Row("out_proj.weight", ("out_proj.weight",)),
        *(Row(name, reason="decays, which follow from the config") for name in computed),
    )


def read_lightning(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of lightning attention.

    Its norm adds 1e-6 regardless of ``rms_norm_eps``, as in `transformers`.
    """
    config.refuse("hidden_act", "silu", "swish")
    heads = config.integer("num_attention_heads")
    spec = LightningAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=heads,
        head_dim=config.integer_or_none("head_dim") or DERIVED,
        decay_rates=layer_decay_rates(heads, layer, config.integer("num_hidden_layers")),
    )
    prefix = f"model.layers.{layer}.self_attn."
    return AttentionLayer("LightningAttention", spec, layer, {"transformers": table(heads)}, prefix)


def read_full(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Mixtral's attention."""
    kind = KINDS[config.integer_or_none("sliding_window") is not None]
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        position=read_rotary(config, head_dim_of(config), kind),
        mask=mask_of(config, layer, kind),
    )
    meta = interleaved_rotary(spec.num_heads, spec.num_kv_heads or spec.num_heads)
    return attention_layer(layer, spec, {"transformers": SPLIT, "meta": meta})


def read_minimax(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of either kind."""
    kind = _kind(config, layer)
    kinds = {"full_attention": read_full, "linear_attention": read_lightning}
    if kind not in kinds:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(kinds)}")
    return kinds[kind](config, layer)


def _kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer; without ``layer_types`` every second one has lightning attention."""
    return config.layer_type(layer, "linear_attention" if layer % 2 else "full_attention")


def _block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of MiniMax-01.

    Raises:
        ValueError: the factors of the outputs differ from each other.
    """
    kind = _kind(config, layer).removesuffix("_attention")
    scale = config.positive("mlp_beta_factor")
    config.refuse(f"{kind}_attn_beta_factor", scale)
    return DecoderBlockConfig(
        attention,
        read_experts(config),
        read_rms_norm(config),
        norms="stream",
        residual_scale=scale,
        stream_scales=(config.positive(f"{kind}_attn_alpha_factor"), config.positive("mlp_alpha_factor")),
    )


def write_minimax(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of MiniMax-01."""
    names = {GroupedQueryAttentionConfig: "full", LightningAttentionConfig: "linear"}
    kinds = [names.get(type(block.attention), "") for block in config.blocks]
    first = config.blocks[0]
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_rms_norm(config),
        **write_experts(config),
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "mlp_alpha_factor": first.stream_scales[1],
        "mlp_beta_factor": first.residual_scale,
    }
    for kind in sorted(set(kinds)):
        block = config.blocks[kinds.index(kind)]
        keys |= {
            f"{kind}_attn_alpha_factor": block.stream_scales[0],
            f"{kind}_attn_beta_factor": block.residual_scale,
        }
    if "full" in kinds:
        full = attention_of(config, GroupedQueryAttentionConfig)
        rotary = write_rotary(full.position)
        return {**keys, **write_heads(full), **rotary, "sliding_window": window_of(full.mask)}
    lightning = attention_of(config, LightningAttentionConfig)
    return {**keys, "num_attention_heads": lightning.num_heads, "head_dim": lightning.head_dim}


FAMILIES = (
    Family(
        ("minimax",),
        read_minimax,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
            **{f"{kind}_{one}_factor": 1 for kind in ("full_attn", "linear_attn", "mlp") for one in ("alpha", "beta")},
        },
        block=_block,
        write=write_minimax,
        architecture="MiniMaxForCausalLM",
    ),
)


LAYOUT = decoder(
    "hf-minimax",
    "transformers MiniMax-01",
    [
        *below(table("num_heads"), f"{LAYER}self_attn.", f"{OURS}linear_att.", branch="attention/linear"),
        *attention(SPLIT, branch="attention/full"),
        *experts_rows(),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    settings={**FUSED, **HEADS},
    defaults={"fused": 0},
    marks=("self_attn.qkv_proj.",),
    model_types=("minimax",),
)
