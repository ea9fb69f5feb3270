"""Laws of JAX sides: each is broken by a side with that fault, and by no right one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_attn
from attn_bridge import parity, specs

from ...support.calls.bad_calls import D_IN, MODULES
from ...support.calls.cover import some

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 5, 4)).astype("float32")


class Attention(nnx.Module):
    """Causal attention with a cache, heads and a mask of padding, and a place for a fault."""

    def __init__(self, fault: str = ""):
        rngs = nnx.Rngs(0)
        self.fault, self.num_heads = fault, 2
        self.query, self.key, self.value, self.out_proj = (nnx.Linear(4, 4, rngs=rngs) for _ in range(4))

    def __call__(self, x, attention_mask=None, cache=None, is_causal=True, segment_ids=None):
        query, key, value = (self.split(project(x)) for project in (self.query, self.key, self.value))
        if cache is not None:
            key = jnp.concatenate([cache[0], key], 2)
            value = jnp.concatenate([jnp.roll(cache[1], 1, 2) if self.fault == "cache" else cache[1], value], 2)
        scores = query @ key.swapaxes(-1, -2)
        tokens, keys = scores.shape[-2:]
        seen = jnp.tril(jnp.ones((tokens, keys), bool), keys - tokens + (self.fault == "causality"))
        scores = jnp.where(seen, scores, -jnp.inf)
        if attention_mask is not None:
            hidden = -3.0 if self.fault == "padding" else -1e30
            scores = jnp.where(attention_mask[:, None, None].astype(bool), scores, hidden)
        if segment_ids is not None:
            keys_of = jnp.roll(segment_ids, 1, 1) if self.fault == "documents" else segment_ids
            scores = jnp.where((segment_ids[:, :, None] == keys_of[:, None])[:, None], scores, -1e30)
        if self.fault == "dtype":
            scores = scores * np.float32([1.0])
        context = (jax.nn.softmax(scores) @ value).swapaxes(1, 2).reshape(x.shape)
        return self.out_proj(context), (key, value)

    def split(self, x):
        batch, tokens, width = x.shape
        if self.fault == "heads":
            return x.reshape(batch, self.num_heads, tokens, width // self.num_heads)
        return x.reshape(batch, tokens, self.num_heads, width // self.num_heads).swapaxes(1, 2)


@jax.custom_vjp
def wrong_tanh(x):
    """Return the tanh, whose gradient is 1 % too large."""
    return jnp.tanh(x)


wrong_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, gradient: (1.01 * gradient * (1 - jnp.tanh(x) ** 2),))


class Drawing(nnx.Module):
    """A module that draws in eval mode."""

    def __init__(self):
        self.rngs = nnx.Rngs(0)

    def __call__(self, x):
        return x * jax.random.bernoulli(self.rngs(), 0.5, x.shape)


class Averaging(nnx.Module):
    """A norm that moves its running mean in eval mode."""

    def __init__(self):
        self.mean = nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x):
        normed = x - self.mean.get_value()
        self.mean.set_value(0.9 * self.mean.get_value() + 0.1 * x.mean((0, 1)))
        return normed


class BatchNorm(linen.Module):
    """A norm by the statistics of the batch."""

    @linen.compact
    def __call__(self, x):
        scale = self.param("scale", linen.initializers.ones, (4,))
        centred = x - x.mean((0, 1))
        return scale * centred


class Decoding(linen.Module):
    """A sum of all tokens so far whose cache holds the last token alone."""

    decode: bool = False

    @linen.compact
    def __call__(self, x, is_causal=True):
        x = linen.Dense(3)(x)
        if not self.decode:
            return jnp.cumsum(x, 1)
        has_cache = self.has_variable("cache", "total")
        total = self.variable("cache", "total", jnp.zeros_like, x[:, :1])
        if has_cache:
            x, total.value = total.value + x, x
        return x


def initialised(module):
    """Return a Linen module with its variables."""
    return module, module.init(jax.random.key(0), X)


def keras_dropout(weights, x):
    """Return a dropout as Keras runs it: random numbers of a state among the weights."""
    key = jax.random.wrap_key_data(weights["dropout/seed_generator_state"])
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0.0)


def keras_norm(weights, x):
    """Return a batch norm of Keras in eval mode, whose variance is among the weights of a function."""
    return x / jnp.sqrt(weights["batch_normalization/moving_variance"])


FAULTS = {
    "determinism: a draw": ("determinism", Drawing),
    "determinism: statistics": ("determinism", Averaging),
    "determinism: a draw of Keras": (
        "determinism",
        lambda: parity.function(keras_dropout, {"dropout/seed_generator_state": jnp.zeros(2, "uint32")}),
    ),
    "batch: statistics of a batch": ("batch", lambda: initialised(BatchNorm())),
    "rows: the first is special": (
        "rows",
        lambda: parity.function(lambda _, x: (x - x.mean(1, keepdims=True)).at[0].mul(2), {}, framework="jax"),
    ),
    "padding: it leaks": ("padding", lambda: Attention("padding")),
    "causality: a mask off by one": ("causality", lambda: Attention("causality")),
    "cache: a position late": ("cache", lambda: Attention("cache")),
    "chunks: a position late": ("chunks", lambda: Attention("cache")),
    "heads: no transpose": ("heads", lambda: Attention("heads")),
    "documents: ids of keys off by one": ("documents", lambda: Attention("documents")),
    "dtype: a float32 constant": ("dtype", lambda: Attention("dtype")),
    "cache: a Linen cache of one token": ("cache", lambda: initialised(Decoding())),
    "gradients: a factor": (
        "gradients",
        lambda: parity.function(lambda weights, x: wrong_tanh(x @ weights["a"]), {"a": jnp.ones((4, 3))}),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_law_is_named_with_a_witness(name):
    law, make = FAULTS[name]
    (found,) = parity.laws(make(), X, only=law).broken
    assert found.name == law
    assert found.witness.expected != found.witness.got
    assert found.size > found.limit


def test_the_right_attention_obeys_all_laws_that_are_tried():
    report = parity.laws(Attention(), X).raise_for_broken()
    held = {law.name for law in report.laws if law.status == "holds"}
    assert held == {"determinism", "batch", "rows", "padding", "causality", "cache", "chunks"} | {
        *("documents", "heads", "gradients", "dtype")
    }


def right_modules():
    """Return name -> maker of a stock module."""
    return {
        "linear": lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
        "batch norm": lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
        "attention": lambda: nnx.MultiHeadAttention(2, 4, decode=False, dropout_rate=0.1, rngs=nnx.Rngs(0)),
        "lstm": lambda: nnx.RNN(nnx.LSTMCell(4, 2, rngs=nnx.Rngs(0))),
        "linen dense": lambda: initialised(linen.Dense(3)),
        "linen batch norm": lambda: initialised(linen.BatchNorm(use_running_average=True)),
        "linen attention": lambda: initialised(linen.MultiHeadDotProductAttention(2)),
        "linen lstm": lambda: initialised(linen.RNN(linen.LSTMCell(2))),
        "linen lstm inside": lambda: initialised(linen.Sequential([linen.Dense(3), linen.RNN(linen.GRUCell(2))])),
        "low precision": lambda: nnx.Linear(4, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        "linen low precision": lambda: initialised(linen.Sequential([linen.tanh, linen.Dense(3, dtype=jnp.bfloat16)])),
        "linen convolution": lambda: initialised(linen.Conv(3, (3,))),
        "keras norm": lambda: parity.function(keras_norm, {"batch_normalization/moving_variance": jnp.ones(4)}),
        "cumulative sum": lambda: parity.function(lambda _, x: jnp.cumsum(x, 1), {}, framework="jax"),
    }


RIGHT = ("linear", "batch norm", "attention", "lstm", "linen dense", "linen batch norm", "linen attention")
RIGHT += ("linen lstm", "linen lstm inside", "low precision", "linen low precision", "linen convolution")
RIGHT += ("keras norm", "cumulative sum")


@some("name", RIGHT, always=("batch norm", "attention", "linen dense", "keras norm", "cumulative sum"))
def test_stock_modules_break_no_law(name):
    report = parity.laws(right_modules()[name](), X).raise_for_broken()
    status = {law.name: law.status for law in report.laws}
    assert [status[law] for law in ("determinism", "batch", "rows", "gradients")] == ["holds"] * 4
    if name in ("attention", "lstm", "linen attention", "linen lstm"):
        assert status["cache"] == "holds"


@pytest.mark.parametrize("name", ["lstm", "linen lstm inside", "low precision", "linen low precision"])
def test_a_dtype_that_a_layer_was_made_with_is_no_leak(name):
    (law,) = parity.laws(right_modules()[name](), X, only="dtype").laws
    assert law.status == "holds"


@some("name", [variant.name for variant in specs.VARIANTS], always=("MultiHeadAttention",))
def test_our_variants_break_no_law(name):
    variant = specs.find_variant(name)
    if variant.is_function:
        side = parity.function(lambda _, x: getattr(jax_attn, variant.name)(x), {}, framework="jax")
        inputs = {"x": X}
    elif variant.examples:
        example = variant.examples[0]
        side = getattr(jax_attn, variant.name)(config=example.config, rngs=nnx.Rngs(0))
        inputs = {"x": RANDOM.normal(size=(2, 5, example.config.d_in)).astype("float32")}
        if example.context is not None:
            inputs["context"] = RANDOM.normal(size=(2, *example.context)).astype("float32")
    else:
        arguments = MODULES.get(variant.name, {"emb_dim": D_IN})
        side = getattr(jax_attn, variant.name)(**arguments, rngs=nnx.Rngs(0))
        inputs = {"x": RANDOM.normal(size=(2, 5, D_IN)).astype("float32")}
    report = parity.laws(side, inputs).raise_for_broken()
    status = {law.name: law.status for law in report.laws}
    assert [status[law] for law in ("determinism", "batch", "rows", "gradients")] == ["holds"] * 4
