"""What users of jax_attn write: type checkers give each call the type of its result. `make types` runs mypy on it."""

from typing import assert_type

from flax import nnx
from jax import Array

import jax_attn
from attn_bridge.specs import DecoderConfig, EncoderDecoderConfig
from jax_attn.decoding.cache import KeyValueCache
from jax_attn.decoding.recurrent_cache import RecurrentCache

Cached = KeyValueCache | RecurrentCache | tuple[KeyValueCache, RecurrentCache] | tuple[()]


def without_a_cache(layer: jax_attn.MultiHeadAttention, x: Array, flag: bool) -> None:
    assert_type(layer(x), Array)
    assert_type(layer(x, attention_mask=x > 0), Array)
    assert_type(layer(x, return_weights=True), tuple[Array, Array])
    assert_type(layer.__call__(x, return_weights=True), tuple[Array, Array])
    assert_type(layer(x, return_weights=flag), Array | tuple[Array, Array])


def every_class_without_a_cache(x: Array, rngs: nnx.Rngs) -> None:
    assert_type(jax_attn.SelfAttention_v1(4, 4, rngs=rngs)(x), Array)
    assert_type(jax_attn.SelfAttention(4, 4, rngs=rngs)(x, return_weights=True), tuple[Array, Array])
    assert_type(jax_attn.CausalAttention(4, 4, 8, rngs=rngs)(x, return_weights=True), tuple[Array, Array])
    assert_type(jax_attn.MultiHeadAttentionWrapper(4, 4, 8, rngs=rngs)(x, return_weights=True), tuple[Array, Array])
    assert_type(jax_attn.simple_self_attention(x, return_weights=True), tuple[Array, Array])
    assert_type(jax_attn.functional.dot_product_attention(x, x, x), Array)
    assert_type(jax_attn.functional.dot_product_attention(x, x, x, return_weights=True, scale=1.0), tuple[Array, Array])


def with_options_of_projections(config: DecoderConfig, x: Array, rngs: nnx.Rngs) -> None:
    layer = jax_attn.MultiHeadAttention(4, 4, 8, rngs=rngs, kernel_init=nnx.initializers.zeros, precision="highest")
    assert_type(layer(x), Array)
    assert_type(jax_attn.DecoderModel(config, rngs=rngs, bias_init=nnx.initializers.ones)(x), Array)


def with_a_cache(layer: jax_attn.GroupedQueryAttention, x: Array) -> None:
    cache = layer.init_cache(1, 8)
    assert_type(layer(x), Array)
    assert_type(layer(x, cache=cache), tuple[Array, KeyValueCache])
    assert_type(layer(x, cache=cache, return_weights=True), tuple[Array, Array, KeyValueCache])
    _, cache = layer(x, positions=None, cache=cache)


def every_class_with_a_cache(
    differential: jax_attn.DifferentialAttention,
    latent: jax_attn.MultiHeadLatentAttention,
    cross: jax_attn.CrossAttention,
    linear: jax_attn.LinearAttention,
    delta: jax_attn.GatedDeltaNet,
    kimi: jax_attn.KimiDeltaAttention,
    lightning: jax_attn.LightningAttention,
    convolution: jax_attn.GatedConvolution,
    mamba: jax_attn.Mamba,
    mamba2: jax_attn.Mamba2,
    sparse: jax_attn.SparseIndexedAttention,
    block: jax_attn.DecoderBlock,
    x: Array,
) -> None:
    assert_type(differential(x, cache=differential.init_cache(1, 8)), tuple[Array, KeyValueCache])
    assert_type(latent(x, cache=latent.init_cache(1, 8), absorbed=True), tuple[Array, KeyValueCache])
    assert_type(cross(x, context=x, return_weights=True), tuple[Array, Array])
    assert_type(linear(x, cache=linear.init_cache(1, 8), form="chunked"), tuple[Array, RecurrentCache])
    assert_type(delta(x, cache=delta.init_cache(1, 8)), tuple[Array, RecurrentCache])
    assert_type(kimi(x, cache=kimi.init_cache(1, 8), form="chunked"), tuple[Array, RecurrentCache])
    assert_type(lightning(x), Array)
    assert_type(mamba(x, cache=mamba.init_cache(1, 8)), tuple[Array, RecurrentCache])
    assert_type(sparse(x, cache=sparse.init_cache(1, 8), return_weights=True), tuple[Array, Array, KeyValueCache])
    assert_type(block(x, cache=block.init_cache(1, 8)), tuple[Array, Cached])
    assert_type(block(x), Array)


def whole_models(decoder: DecoderConfig, encoder_decoder: EncoderDecoderConfig, ids: Array, rngs: nnx.Rngs) -> None:
    model = jax_attn.DecoderModel(decoder, rngs=rngs)
    caches = model.init_cache(1, 8)
    assert_type(caches, tuple[Cached, ...])
    assert_type(model(ids), Array)
    assert_type(model(input_ids=ids, labels=ids), tuple[Array, Array])
    assert_type(model(ids, cache=caches), tuple[Array, tuple[Cached, ...]])
    assert_type(model(ids, cache=caches, labels=ids, attention_mask=ids), tuple[Array, Array, tuple[Cached, ...]])
    assert_type(model.generate(ids, 4), Array)
    gpt = jax_attn.GPTModel({"vocab_size": 8}, rngs=rngs)
    assert_type(gpt(ids), Array)
    assert_type(gpt(input_ids=ids, labels=ids), tuple[Array, Array])
    both = jax_attn.EncoderDecoderModel(encoder_decoder, rngs=rngs)
    assert_type(both(ids, ids, source_mask=ids), Array)
    _, cache = both(None, ids, cache=both.init_cache(1, 8))
    assert_type(both(None, ids, cache=cache, labels=ids)[0], Array)


def layers_without_options(x: Array, rngs: nnx.Rngs) -> None:
    assert_type(jax_attn.RMSNorm(4, rngs=rngs)(x), Array)


def wrong_calls(layer: jax_attn.GroupedQueryAttention, x: Array, state: RecurrentCache) -> None:
    layer(x, attention_masc=x)  # type: ignore[call-overload]
    layer(x, x, x)  # type: ignore[call-overload]
    layer(x, cache=state)  # type: ignore[call-overload]
    layer(x, form="chunked")  # type: ignore[call-overload]


class Wrapped(nnx.Module):
    """A module of the user's with one of ours in it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = jax_attn.MultiHeadAttention(4, 4, 8, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Call it."""
        return x + self.attention(x)
