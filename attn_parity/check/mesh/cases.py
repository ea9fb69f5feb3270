"""The modules to run on a mesh: every variant in sizes that devices can share, and small whole models.

The examples of the specs have odd sizes, which find faults on one device. On a mesh, heads must divide: they are
multiplied, and the rest of a config stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from attn_bridge.masks import Mask, causal, full, sliding_window
from attn_bridge.specs import (
    VARIANTS,
    AlternatingUpdatesConfig,
    BertEncoderConfig,
    Config,
    CrossAttentionConfig,
    DecoderBlockConfig,
    DecoderConfig,
    EncoderDecoderBlockConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    GPTModelConfig,
    GroupedQueryAttentionConfig,
    LayerEmbeddingsConfig,
    LayerInputConfig,
    LayerNormConfig,
    MixtureOfExpertsConfig,
    RelativeBias,
    RMSNormConfig,
    Rotary,
    Router,
    StackConfig,
    Variant,
    find_variant,
)

from ..cases import CASES, CaseNumbers, TwinCase, cases_of, draw

HEADS, TOKENS, BATCH, VOCABULARY, WIDTH = 8, 16, 2, 32, 16

SIZES = {"d_in": 12, "d_out": 16, "context_length": TOKENS, "dropout": 0.1, "num_heads": HEADS, "qkv_bias": True}
"""Of variants that take their sizes one by one."""


@dataclasses.dataclass(frozen=True)
class MeshCase:
    """One module and its input.

    Attributes:
        name: class and example, such as ``GroupedQueryAttention gpt-oss``.
        class_name: its class in both packages.
        arguments: those of the constructor by name.
        config: its config.
        numbers: weights by their torch names and keyword inputs, float64.
    """

    name: str
    class_name: str
    arguments: dict[str, Any]
    config: Config
    numbers: CaseNumbers

    def inputs(self, dtype: str) -> dict[str, np.ndarray]:
        """Return the keyword inputs, those that are floating point in a dtype."""
        inputs = self.numbers.inputs
        return {name: one.astype(dtype) if one.dtype.kind == "f" else one for name, one in inputs.items()}


def mesh_cases(variants: tuple[str, ...] = (), seed: int = 0) -> list[MeshCase]:
    """Return the cases of some variants or models, by their class names; of all without names.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = {find_variant(name, tuple(MODELS)).name if name not in MODELS else name for name in variants}
    layers = [
        _case(variant, case, seed)
        for variant in VARIANTS
        if not variant.is_function and (not wanted or variant.name in wanted)
        for case in _cases_of(variant)
    ]
    return layers + [_model(name, config, seed) for name, config in MODELS.items() if not wanted or name in wanted]


def _cases_of(variant: Variant) -> list[TwinCase]:
    if not variant.examples:
        return [dataclasses.replace(CASES[0], name="shared", tokens=TOKENS, batch=BATCH, sizes=SIZES)]
    return [
        dataclasses.replace(
            case,
            tokens=TOKENS,
            batch=BATCH,
            return_weights=False,
            config=divisible(case.config),
            context=None if case.context is None else (TOKENS, case.context[1]),
        )
        for case in cases_of(variant)
        if case.config is not None
    ]


def _case(variant: Variant, case: TwinCase, seed: int) -> MeshCase:
    name = f"{variant.name} {case.name}"
    return MeshCase(name, variant.name, case.arguments(variant), case.config_of(variant), draw(case, variant, seed))


def divisible(config: Config) -> Config:
    """Return a config with 8 heads, or a multiple; key heads are as many as divide them, and fewer where they were."""
    sizes = vars(config)
    heads = sizes.get("num_heads")
    if heads is None:
        return config
    changes: dict[str, int | None] = {"num_heads": HEADS}
    if "num_kv_heads" in sizes:
        kv_heads = sizes["num_kv_heads"]
        changes["num_kv_heads"] = HEADS if kv_heads == heads else math.gcd(HEADS, kv_heads)
    if "num_groups" in sizes:
        changes = {"num_heads": HEADS * (heads // sizes["num_groups"]), "num_groups": HEADS, "norm_groups": HEADS}
    if "decay_rates" in sizes:
        changes["decay_rates"] = None
    if "num_value_heads" in sizes:
        changes["num_value_heads"] = HEADS * (sizes["num_value_heads"] // heads)
    return config.replace(**changes)


def _decoder(attention: Sequence[Any], feed_forward: FeedForwardConfig | MixtureOfExpertsConfig) -> DecoderConfig:
    blocks = tuple(DecoderBlockConfig(one, feed_forward, RMSNormConfig(WIDTH)) for one in attention)
    return DecoderConfig(vocab_size=VOCABULARY, emb_dim=WIDTH, blocks=blocks, norm=RMSNormConfig(WIDTH))


def _shared_keys() -> DecoderConfig:
    """Return a decoder whose second block reads keys of the first, with experts and per-layer embeddings (Gemma 4)."""
    lender = GroupedQueryAttentionConfig(WIDTH, HEADS, 2, 4, position=Rotary(), value_norm=1e-6, key_is_value=True)
    borrower = lender.replace(value_norm=None, key_is_value=False, shared=True)
    norm, expert = RMSNormConfig(WIDTH), FeedForwardConfig(WIDTH, 8)
    experts = MixtureOfExpertsConfig(expert, 4, 2, Router(norm=norm, expert_scales=True), norm=norm)
    first = DecoderBlockConfig(
        lender,
        experts,
        norm,
        norms="sandwich",
        dense=FeedForwardConfig(WIDTH, 24),
        layer_input=LayerInputConfig(5),
        scaled=True,
    )
    blocks = first, first.replace(attention=borrower, keys_of=0)
    embeddings = LayerEmbeddingsConfig(VOCABULARY, WIDTH, 5, 2)
    return DecoderConfig(VOCABULARY, WIDTH, blocks, norm, layer_embeddings=embeddings)


def _streams() -> DecoderConfig:
    """Return a decoder of three streams per token (Gemma 3n)."""
    attention = GroupedQueryAttentionConfig(WIDTH, HEADS, 2, 4, position=Rotary(), value_norm=1e-6)
    block = DecoderBlockConfig(
        attention,
        FeedForwardConfig(WIDTH, 24, sparsity=0.5),
        RMSNormConfig(WIDTH),
        norms="sandwich",
        layer_input=LayerInputConfig(5),
        laurel_rank=3,
        updates=AlternatingUpdatesConfig(WIDTH, 3, active=1),
    )
    embeddings = LayerEmbeddingsConfig(VOCABULARY, WIDTH, 5, 1)
    return DecoderConfig(VOCABULARY, WIDTH, (block,), RMSNormConfig(WIDTH), layer_embeddings=embeddings)


def _inner_norms() -> DecoderConfig:
    """Return a decoder with norms of contexts and gated units (BitNet), and ends of other widths (RemBERT)."""
    norm, ends = RMSNormConfig(WIDTH), (RMSNormConfig(12), RMSNormConfig(24))
    attention = GroupedQueryAttentionConfig(
        WIDTH, HEADS, 2, 4, position=Rotary(), context_norm=1e-6, value_dim=6, value_scale=0.5
    )
    layers = FeedForwardConfig(WIDTH, 24, hidden_norm=1e-6)
    blocks = [DecoderBlockConfig(attention, layers, norm, norms=place) for place in ("pre_last", "pre")]
    return DecoderConfig(
        VOCABULARY,
        WIDTH,
        tuple(blocks),
        norm,
        embedding_norm=ends[0],
        embedding_width=12,
        head_activation="gelu",
        head_norm=ends[1],
        head_width=24,
        head_linear_bias=False,
    )


def _encoder_decoder() -> EncoderDecoderConfig:
    def stack(mask: Mask, cross: CrossAttentionConfig | None) -> StackConfig:
        attention = GroupedQueryAttentionConfig(WIDTH, HEADS, qkv_bias=True, out_bias=True, mask=mask)
        feed_forward = FeedForwardConfig(WIDTH, 24, "gelu", gated=False, bias=True)
        block = EncoderDecoderBlockConfig(attention, feed_forward, LayerNormConfig(WIDTH), cross, norms="post")
        return StackConfig(WIDTH, (block,), TOKENS, position_offset=2)

    cross = CrossAttentionConfig(WIDTH, HEADS, qkv_bias=True, out_bias=True)
    return EncoderDecoderConfig(VOCABULARY, stack(full(), None), stack(causal(), cross), logits_bias=True)


def _shared_bias() -> EncoderDecoderConfig:
    """Return a T5, whose second blocks take the biases of positions from the first."""

    def stack(mask: Mask, cross: CrossAttentionConfig | None) -> StackConfig:
        bias = RelativeBias(8, TOKENS, bidirectional=cross is None)
        first = GroupedQueryAttentionConfig(WIDTH, HEADS, head_dim=4, position=bias, mask=mask, scale=1.0)
        later = first.replace(position=dataclasses.replace(bias, shared=True))
        norm, feed_forward = RMSNormConfig(WIDTH), FeedForwardConfig(WIDTH, 24, "relu", gated=False)
        blocks = (EncoderDecoderBlockConfig(attention, feed_forward, norm, cross) for attention in (first, later))
        return StackConfig(WIDTH, tuple(blocks), None, norm=norm)

    cross = CrossAttentionConfig(WIDTH, HEADS, head_dim=4, scale=1.0)
    return EncoderDecoderConfig(VOCABULARY, stack(full(), None), stack(causal(), cross), logit_scale=0.25)


def _models() -> dict[str, Config]:
    windowed, grouped = (
        GroupedQueryAttentionConfig(WIDTH, HEADS, 2, 4, position=Rotary(), mask=mask)
        for mask in (sliding_window(5), causal())
    )
    gated = FeedForwardConfig(WIDTH, 24)
    experts = MixtureOfExpertsConfig(FeedForwardConfig(WIDTH, 8), num_experts=4, top_k=2, shared=gated)
    recurrent = GatedDeltaNetConfig(WIDTH, HEADS, 2 * HEADS, 4, 2)
    bert = BertEncoderConfig(VOCABULARY, WIDTH, 2, HEADS, intermediate_size=24, max_position_embeddings=TOKENS)
    return {
        "DecoderModel": _decoder([windowed, grouped], gated),
        "DecoderModel experts": _decoder([grouped], experts),
        "DecoderModel hybrid": _decoder([recurrent, grouped], gated),
        "DecoderModel shared keys": _shared_keys(),
        "DecoderModel streams": _streams(),
        "DecoderModel inner norms": _inner_norms(),
        "EncoderDecoderModel": _encoder_decoder(),
        "EncoderDecoderModel shared bias": _shared_bias(),
        "GPTModel": GPTModelConfig(VOCABULARY, TOKENS, WIDTH, HEADS, n_layers=2, qkv_bias=True),
        "BertEncoder": bert,
    }


MODELS = _models()
"""Small whole models by class -> their distinguishing config."""


def _model(name: str, config: Config, seed: int) -> MeshCase:
    random = np.random.default_rng([seed, *name.encode()])
    weights = {
        row.rule.torch: random.normal(size=row.shape) / np.sqrt(row.shape[-1])
        if len(row.shape) > 1
        else random.uniform(0.5, 1.5, size=row.shape)
        for row in config.parameters
    }
    ids = {"tokens": random.integers(0, VOCABULARY, size=(BATCH, TOKENS))}
    if isinstance(config, EncoderDecoderConfig):
        ids = {"source": random.integers(0, VOCABULARY, size=(BATCH, TOKENS)), **ids}
    if isinstance(config, GPTModelConfig | BertEncoderConfig):
        ids = {"ids": ids["tokens"]}
    return MeshCase(name, name.split()[0], {"config": config}, config, CaseNumbers(weights, dict(ids), []))
