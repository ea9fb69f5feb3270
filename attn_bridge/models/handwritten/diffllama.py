"""DiffLlama: Llama with differential attention."""

from __future__ import annotations

from ...specs.decoder_model import DecoderConfig
from ...specs.differential_attention import DifferentialAttentionConfig
from ..family import AttentionLayer
from ..reading.decoders import attention_of, write_llama_decoder
from ..reading.grouped import head_dim_of, read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer

LAYOUT = table("hf-diffllama")


def read_diffllama(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of DiffLlama, whose initial lambda grows with the layer's index, without dropout."""
    config.refuse("attention_dropout", None, 0, 0.0)
    sizes = {name: value for name, value in read_sizes(config).items() if name != "dropout"}
    bias = config.flag("attention_bias")
    spec = DifferentialAttentionConfig(
        **sizes,
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config)),
        lambda_init=DifferentialAttentionConfig.lambda_of_layer(layer),
        norm_eps=config.number("rms_norm_eps"),
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


def write_diffllama(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of DiffLlama."""
    attention = attention_of(config, DifferentialAttentionConfig)
    return {
        **write_heads(attention),
        **write_rotary(attention.position),
        "attention_bias": attention.qkv_bias,
        **write_llama_decoder(config),
    }
