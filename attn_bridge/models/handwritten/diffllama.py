"""DiffLlama: Llama with differential attention."""

from __future__ import annotations

from ...specs.decoder_model import DecoderConfig
from ...specs.differential_attention import LAMBDAS, DifferentialAttentionConfig
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..reading.decoders import attention_of, read_mistral_block, write_llama_decoder
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import SPLIT, Table
from ..rows.decoder import FINAL_NORM, attention, decoder, feed_forward, norms
from .grouped import head_dim_of, read_sizes, write_heads

TABLE: Table = (*SPLIT, *(Row(name, (name,)) for name in LAMBDAS))


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
    prefix = f"model.layers.{layer}.self_attn."
    return AttentionLayer("DifferentialAttention", spec, layer, {"transformers": TABLE}, prefix)


def write_diffllama(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of DiffLlama."""
    attention = attention_of(config, DifferentialAttentionConfig)
    return {
        **write_heads(attention),
        **write_rotary(attention.position),
        "attention_bias": attention.qkv_bias,
        **write_llama_decoder(config),
    }


FAMILIES = (
    Family(
        ("diffllama",),
        read_diffllama,
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
        block=read_mistral_block,
        write=write_diffllama,
        architecture="DiffLlamaForCausalLM",
    ),
)


LAYOUT = decoder(
    "hf-diffllama",
    "transformers DiffLlama: Llama with differential attention",
    [
        *attention(TABLE),
        *feed_forward(),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    marks=("lambda_q1",),
    model_types=("diffllama",),
)
