"""One spec per variant: its frozen, self-validating config and the table of its parameters.

Both twins read the same spec, so that a bad argument gives the same message on both sides and a parameter is listed
once. A new variant is registered by one line in `VARIANTS`.
"""

from __future__ import annotations

from . import (
    causal_attention,
    cross_attention,
    differential_attention,
    gated_convolution,
    gated_delta_net,
    grouped_query_attention,
    kimi_delta_attention,
    layer_norm,
    lightning_attention,
    linear_attention,
    mamba,
    mamba2,
    multi_head_attention,
    multi_head_attention_wrapper,
    multi_head_latent_attention,
    rms_norm,
    self_attention_v1,
    self_attention_v2,
    simple_self_attention,
    sparse_indexed_attention,
)
from .base import Config, Parameter, Variant
from .bert_encoder import BertEncoderConfig
from .blocks.alternating_updates import AlternatingUpdatesConfig
from .blocks.feed_forward import ClampedGate, FeedForwardConfig
from .blocks.hyper_connection import HyperConnectionConfig
from .blocks.layer_embeddings import LayerEmbeddingsConfig, LayerInputConfig
from .blocks.mixture_of_experts import ExpertGroups, MixtureOfExpertsConfig, Router
from .causal_attention import CausalAttentionConfig
from .cross_attention import CrossAttentionConfig
from .decoder_model import DecoderBlockConfig, DecoderConfig
from .differential_attention import DifferentialAttentionConfig
from .encoder_decoder_model import ConvolutionsConfig, EncoderDecoderBlockConfig, EncoderDecoderConfig, StackConfig
from .gated_convolution import GatedConvolutionConfig
from .gated_delta_net import GatedDeltaNetConfig
from .gpt_model import GPTModelConfig
from .grouped_query_attention import GroupedQueryAttentionConfig, QKNorm, Temperature
from .kimi_delta_attention import KimiDeltaAttentionConfig
from .layer_norm import LayerNormConfig
from .lightning_attention import LightningAttentionConfig
from .lightning_indexer import Indexer
from .linear_attention import LinearAttentionConfig
from .mamba import MambaConfig
from .mamba2 import Mamba2Config
from .multi_head_attention import MultiHeadAttentionConfig
from .multi_head_attention_wrapper import MultiHeadAttentionWrapperConfig
from .multi_head_latent_attention import MultiHeadLatentAttentionConfig
from .position import Alibi, RelativeBias, Rotary
from .rms_norm import RMSNormConfig
from .rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    ProportionalScaling,
    Scaling,
    YaRNScaling,
)
from .self_attention_v1 import SelfAttentionV1Config
from .self_attention_v2 import SelfAttentionV2Config
from .simple_self_attention import SimpleSelfAttentionConfig
from .sparse_indexed_attention import SparseIndexedAttentionConfig
from .token_prediction import TokenPredictionConfig

__all__ = [
    "VARIANTS",
    "Alibi",
    "AlternatingUpdatesConfig",
    "BertEncoderConfig",
    "CausalAttentionConfig",
    "ClampedGate",
    "Config",
    "ConvolutionsConfig",
    "CrossAttentionConfig",
    "DecoderBlockConfig",
    "DecoderConfig",
    "DifferentialAttentionConfig",
    "EncoderDecoderBlockConfig",
    "EncoderDecoderConfig",
    "ExpertGroups",
    "FeedForwardConfig",
    "GPTModelConfig",
    "GatedConvolutionConfig",
    "GatedDeltaNetConfig",
    "GroupedQueryAttentionConfig",
    "HyperConnectionConfig",
    "Indexer",
    "KimiDeltaAttentionConfig",
    "LayerEmbeddingsConfig",
    "LayerInputConfig",
    "LayerNormConfig",
    "LightningAttentionConfig",
    "LinearAttentionConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "Mamba2Config",
    "MambaConfig",
    "MixtureOfExpertsConfig",
    "MultiHeadAttentionConfig",
    "MultiHeadAttentionWrapperConfig",
    "MultiHeadLatentAttentionConfig",
    "NTKScaling",
    "Parameter",
    "ProportionalScaling",
    "QKNorm",
    "RMSNormConfig",
    "RelativeBias",
    "Rotary",
    "Router",
    "Scaling",
    "SelfAttentionV1Config",
    "SelfAttentionV2Config",
    "SimpleSelfAttentionConfig",
    "SparseIndexedAttentionConfig",
    "StackConfig",
    "Temperature",
    "TokenPredictionConfig",
    "Variant",
    "YaRNScaling",
    "find_variant",
    "variant_of",
]

VARIANTS: tuple[Variant, ...] = (
    simple_self_attention.VARIANT,
    self_attention_v1.VARIANT,
    self_attention_v2.VARIANT,
    causal_attention.VARIANT,
    multi_head_attention_wrapper.VARIANT,
    multi_head_attention.VARIANT,
    layer_norm.VARIANT,
    rms_norm.VARIANT,
    grouped_query_attention.VARIANT,
    multi_head_latent_attention.VARIANT,
    sparse_indexed_attention.VARIANT,
    cross_attention.VARIANT,
    differential_attention.VARIANT,
    gated_convolution.VARIANT,
    gated_delta_net.VARIANT,
    kimi_delta_attention.VARIANT,
    lightning_attention.VARIANT,
    linear_attention.VARIANT,
    mamba.VARIANT,
    mamba2.VARIANT,
)


def find_variant(name: str, others: tuple[str, ...] = ()) -> Variant:
    """Return the variant of a class name or alias.

    Args:
        name: the name.
        others: further names that the caller accepts, for the message of the error.

    Raises:
        ValueError: no variant has that name.
    """
    for variant in VARIANTS:
        if name in (variant.name, *variant.aliases):
            return variant
    names = [*(variant.name for variant in VARIANTS), *others]
    raise ValueError(f"variant ({name}) must be one of {', '.join(names)}")


def variant_of(config: Config) -> Variant:
    """Return the variant whose config it is.

    Raises:
        ValueError: it is that of no variant.
    """
    for variant in VARIANTS:
        if type(config) is variant.config:
            return variant
    raise ValueError(f"{type(config).__name__} is the config of no variant")
