"""Models in the style of public ones, with the drop-in in the line that makes their attention layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_attn import compat

E, H, B, T = 8, 2, 3, 5
NORMAL = nnx.initializers.normal(0.5)


class MiniGPT(nnx.Module):
    """A block of JAX's tutorial on a small GPT: kernels with partitions, and a mask of 0 and 1 with two axes."""

    def __init__(self, attention, rngs):
        self.mha = attention(
            num_heads=H,
            in_features=E,
            kernel_init=nnx.with_metadata(nnx.initializers.xavier_uniform(), axes=(None, "model")),
            bias_init=nnx.with_metadata(NORMAL, axes=("model",)),
            rngs=rngs,
        )
        self.layer_norm1 = nnx.LayerNorm(epsilon=1e-6, num_features=E, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.0, rngs=rngs)

    def __call__(self, x, training=False):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))
        output = self.mha(inputs_q=x, mask=mask, decode=False)
        return self.layer_norm1(x + self.dropout1(output, deterministic=not training))


class ViT(nnx.Module):
    """A block of the tutorial on vision transformers, whose mode `eval()` and `train()` set."""

    def __init__(self, attention, rngs):
        self.norm1 = nnx.LayerNorm(E, rngs=rngs)
        self.attn = attention(
            num_heads=H, in_features=E, dropout_rate=0.3, broadcast_dropout=False, decode=False, deterministic=False,
            rngs=rngs,
        )  # fmt: skip

    def __call__(self, x):
        return x + self.attn(self.norm1(x))


class Lm1b(nnx.Module):
    """Self-attention of the example on lm1b: no stream is kept, each call gets one, and a mask of floats."""

    def __init__(self, attention, rngs):
        self.ln1 = nnx.LayerNorm(E, rngs=rngs)
        self.attention = attention(
            num_heads=H, in_features=E, qkv_features=12, dtype=jnp.float32, kernel_init=NORMAL, bias_init=NORMAL,
            use_bias=False, broadcast_dropout=False, dropout_rate=0.2, keep_rngs=False, rngs=rngs,
        )  # fmt: skip
        self.streams = nnx.Rngs(dropout=5)

    def __call__(self, x):
        tokens = jnp.arange(x.shape[1])[None] % jnp.array([[4], [5], [3]])
        mask = nnx.combine_masks(nnx.make_attention_mask(tokens > 0, tokens > 0), nnx.make_causal_mask(tokens))
        mask = mask.at[..., 0].set(1.0)  # every token sees a key
        return x + self.attention(self.ln1(x), mask=mask, deterministic=False, decode=False, rngs=self.streams)


class Translator(nnx.Module):
    """Decoder of the tutorial on translation: attention to itself, and to the padded output of the encoder."""

    def __init__(self, attention, rngs):
        self.attention_1 = attention(H, E, decode=False, rngs=rngs)
        self.attention_2 = attention(H, E, decode=False, kernel_init=NORMAL, rngs=rngs)

    def __call__(self, x):
        encoded, padding = x[:, ::-1], jnp.arange(x.shape[1]) < jnp.array([[3], [5], [4]])
        y = x + self.attention_1(inputs_q=x, inputs_v=x, inputs_k=x, mask=nnx.make_causal_mask(x[..., 0]))
        return y + self.attention_2(inputs_q=y, inputs_v=encoded, inputs_k=encoded, mask=padding[:, None, None, :])


class Captioner(nnx.Module):
    """A decoder that writes into its cache token by token, with normalised queries and keys of fewer heads."""

    def __init__(self, attention, rngs):
        self.attention = attention(4, E, num_kv_heads=2, normalize_qk=True, decode=True, rngs=rngs)
        self.attention.init_cache((B, T, E))

    def __call__(self, x):
        self.attention.init_cache(x.shape)
        steps = [self.attention(x[:, at : at + 1]) for at in range(3)]
        return x[:, :3] + jnp.concatenate(steps, 1)


@pytest.mark.parametrize("model", [MiniGPT, ViT, Lm1b, Translator, Captioner], ids=lambda model: model.__name__)
def test_a_model_learns_the_same_weights(model):
    x, results = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, E)), jnp.float32), []
    for kind in (nnx.MultiHeadAttention, compat.MultiHeadAttention):
        module = model(kind, nnx.Rngs(0))
        optimizer = nnx.Optimizer(module, optax.sgd(0.5), wrt=nnx.Param)

        @nnx.jit
        def step(module, optimizer):
            def loss(module):
                output = module(x)
                return (output * jnp.cos(jnp.arange(output.size).reshape(output.shape))).mean(), output

            (_, output), gradients = nnx.value_and_grad(loss, has_aux=True)(module)
            optimizer.update(module, gradients)
            return output

        with jax.default_matmul_precision("highest"):
            results.append([step(module, optimizer), step(module, optimizer)])
        module.eval()
        results[-1].append(module(x))
    for ours, theirs in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
