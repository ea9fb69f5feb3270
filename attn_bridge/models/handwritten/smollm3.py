"""SmolLM3: Llama without rotary positions in every fourth layer (arXiv 2501.18795)."""

from __future__ import annotations

from ...specs.decoder_model import DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ..family import AttentionLayer, Family
from ..reading.decoders import attention_of, read_llama_block, write_llama_decoder
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import SPLIT
from .grouped import (
    KINDS,
    attention_layer,
    head_dim_of,
    is_rotated,
    mask_of,
    read_sizes,
    write_heads,
    write_windows,
)


def read_smollm3(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of SmolLM3."""
    bias, turns = config.flag("attention_bias"), is_rotated(config, layer)
    has_window = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    kind = config.layer_type(layer, "sliding_attention" if has_window and not turns else "full_attention")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config)) if turns else None,
        mask=mask_of(config, layer, kind),
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def write_smollm3(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of SmolLM3."""
    attention, windows = attention_of(config, GroupedQueryAttentionConfig), write_windows(config)
    positions = [getattr(block.attention, "position", None) for block in config.blocks]
    return {
        **write_heads(attention),
        **write_rotary(next((one for one in positions if one is not None), None)),
        "no_rope_layers": [int(one is not None) for one in positions],
        "attention_bias": attention.qkv_bias,
        **windows,
        "use_sliding_window": KINDS[True] in windows["layer_types"],
        **write_llama_decoder(config, bias="mlp_bias"),
    }


FAMILIES = (
    Family(
        ("smollm3",),
        read_smollm3,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2000000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        block=read_llama_block,
        write=write_smollm3,
        architecture="SmolLM3ForCausalLM",
    ),
)
