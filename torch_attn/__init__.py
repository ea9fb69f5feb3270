"""Attention in PyTorch: the twin of `jax_attn`, with the same classes, arguments and numbers."""

from attn_bridge.backends import require

require("torch", "torch")

from . import functional, steps
from .bert_encoder import BertEncoder
from .blocks.decoder_block import DecoderBlock
from .blocks.hyper_connection import HyperConnection
from .blocks.token_prediction import TokenPrediction
from .causal_attention import CausalAttention
from .checkpoints import from_hf, load, save, to_hf
from .cross_attention import CrossAttention
from .decoder_model import DecoderModel
from .differential_attention import DifferentialAttention
from .encoder_decoder_model import EncoderDecoderModel
from .gated_convolution import GatedConvolution
from .gated_delta_net import GatedDeltaNet
from .gpt_model import GPTModel
from .grouped_query_attention import GroupedQueryAttention
from .kimi_delta_attention import KimiDeltaAttention
from .layer_norm import LayerNorm
from .lightning_attention import LightningAttention
from .linear_attention import LinearAttention
from .mamba import Mamba
from .mamba2 import Mamba2
from .multi_head_attention import MultiHeadAttention
from .multi_head_attention_wrapper import MultiHeadAttentionWrapper
from .multi_head_latent_attention import MultiHeadLatentAttention
from .rms_norm import RMSNorm
from .self_attention_v1 import SelfAttention_v1
from .self_attention_v2 import SelfAttention, SelfAttention_v2
from .simple_self_attention import simple_self_attention
from .sparse_indexed_attention import SparseIndexedAttention

__all__ = [
    "BertEncoder",
    "CausalAttention",
    "CrossAttention",
    "DecoderBlock",
    "DecoderModel",
    "DifferentialAttention",
    "EncoderDecoderModel",
    "GPTModel",
    "GatedConvolution",
    "GatedDeltaNet",
    "GroupedQueryAttention",
    "HyperConnection",
    "KimiDeltaAttention",
    "LayerNorm",
    "LightningAttention",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "MultiHeadLatentAttention",
    "RMSNorm",
    "SelfAttention",
    "SelfAttention_v1",
    "SelfAttention_v2",
    "SparseIndexedAttention",
    "TokenPrediction",
    "from_hf",
    "functional",
    "load",
    "save",
    "simple_self_attention",
    "steps",
    "to_hf",
]
