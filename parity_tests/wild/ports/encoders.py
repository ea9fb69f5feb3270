"""Encoders: BERT's blocks, torch's own layer, packed documents.

b batch, t query position, s key position, h head, c channel of a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..gallery import Case, entry, fault, inside
from ..weights import carry, fresh, held, numbers, onto, rules, tokens
from ..weights import linen as with_variables

WIDTH, HEADS, HIDDEN, VOCABULARY, T = 16, 2, 24, 24, 8

BERT_NAMES = """
layer.{i}.{rest}norm.weight | layer.{i}.{rest}norm.scale
embeddings.norm.weight | embeddings.norm.scale
embeddings.{rest}.weight | embeddings.{rest}.embedding
{path}weight | {path}kernel | o d -> d o
{path}bias | {path}bias
"""


def torch_bert(pooled: bool = True) -> Any:
    """Return BERT (arXiv 1810.04805) of one layer: post-norm, token types, padding mask, pooler."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
            self.token_type, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)

        def forward(self, ids, types):
            x = self.word(ids) + self.token_type(types) + self.position(torch.arange(ids.shape[1]))
            return self.norm(x)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.attn_norm, self.mlp_norm = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x, mask):
            b, t, d = x.shape
            q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
            x = self.attn_norm(x + self.out(y.transpose(1, 2).reshape(b, t, d)))
            return self.mlp_norm(x + self.down(functional.gelu(self.up(x))))

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings, self.layer, self.pooler = Embeddings(), nn.ModuleList([Layer()]), nn.Linear(WIDTH, WIDTH)

        def forward(self, ids, types, mask):
            x = self.embeddings(ids, types)
            for layer in self.layer:
                x = layer(x, mask)
            return x, torch.tanh(self.pooler(x[:, 0]))

    return fresh(Bert())


def nnx_bert(wrong: str | None) -> Any:
    """Return the NNX port."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)

    def norm() -> Any:
        eps = 1e-6 if wrong == "flax-eps" else 1e-12
        return nnx.LayerNorm(WIDTH, epsilon=eps, use_fast_variance=False, rngs=rngs)

    def linear(inner: int = WIDTH, outer: int = WIDTH) -> Any:
        return nnx.Linear(inner, outer, rngs=rngs)

    class Embeddings(nnx.Module):
        def __init__(self) -> None:
            self.word, self.position = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.Embed(16, WIDTH, rngs=rngs)
            self.token_type, self.norm = nnx.Embed(2, WIDTH, rngs=rngs), norm()

        def __call__(self, ids, types):
            types = jnp.zeros_like(types) if wrong == "token-types-ignored" else types
            return self.norm(self.word(ids) + self.token_type(types) + self.position(jnp.arange(ids.shape[1])))

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.query, self.key, self.value, self.out = (linear() for _ in range(4))
            self.attn_norm, self.mlp_norm = norm(), norm()
            self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

        def __call__(self, x, mask):
            b, t, d = x.shape
            q, k, v = (f(x).reshape(b, t, HEADS, -1) for f in (self.query, self.key, self.value))
            mask = mask[:, None, :, None] if wrong == "mask-on-the-queries" else mask[:, None, None]
            y = jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(b, t, d)
            y = y @ self.out.kernel[...] if wrong == "out-bias-dropped" else self.out(y)
            x = self.attn_norm(x + y)
            y = self.down(jax.nn.gelu(self.up(x), approximate=wrong == "gelu-tanh"))
            return x + self.mlp_norm(y) if wrong == "norm-before-the-residual" else self.mlp_norm(x + y)

    class Bert(nnx.Module):
        def __init__(self) -> None:
            self.embeddings, self.layer, self.pooler = Embeddings(), nnx.List([Layer()]), linear()

        def __call__(self, ids, types, mask):
            x = self.embeddings(ids, types)
            for layer in self.layer:
                x = layer(x, mask)
            return x, jnp.tanh(self.pooler(x.mean(1) if wrong == "pooler-over-the-mean" else x[:, 0]))

    return Bert()


def bert_inputs() -> dict[str, np.ndarray]:
    """Return ids, token types and a padding mask."""
    mask = np.arange(T) < np.array([[T], [5]])
    return {"ids": tokens(2, T), "types": np.array([[0] * 3 + [1] * 5, [0] * 4 + [1] * 4]), "mask": mask}


LAYER = inside("layer.0", *(["query", "key", "value", "out", "attn_norm", "up", "down", "mlp_norm"]))


@entry(
    "BERT",
    "padding mask",
    faults={
        "flax-eps": fault("embeddings.norm"),
        "token-types-ignored": fault(
            ("embeddings", "embeddings.token_type"),  # the zeros are written between these
            "embeddings",
            "embeddings.token_type",
            ("embeddings.word", "embeddings.token_type", "embeddings.position"),
        ),
        "gelu-tanh": fault("layer.0", ("layer.0.up", "layer.0.down")),
        "mask-on-the-queries": fault("layer.0", tuple(f"layer.0.{one}" for one in ("query", "key", "value", "out"))),
    },
)
def bert(wrong: str | None) -> Case:
    """Hugging Face's arrangement against NNX with ``jax.nn.dot_product_attention``."""
    first = torch_bert()
    return Case(first, onto(first, nnx_bert(wrong), BERT_NAMES), bert_inputs())


@entry(
    "BERT",
    "pooler",
    faults={
        "out-bias-dropped": fault(*LAYER, "layer.0.out"),
        "norm-before-the-residual": fault(*LAYER),
        "pooler-over-the-mean": fault("", ("layer.0", "pooler", "layer.0.mlp_norm")),
    },
)
def bert_pooler(wrong: str | None) -> Case:
    """Plant faults late in the layer and after it."""
    first = torch_bert()
    return Case(first, onto(first, nnx_bert(wrong), BERT_NAMES), bert_inputs())


PACKED_NAMES = """
embed.weight | token_embedder.embedding
position.weight | position_embedder.embedding
norm.weight | pre_norm.scale
norm.bias | pre_norm.bias
query.weight | query.kernel | (h c) d -> d h c
query.bias | query.bias | (h c) -> h c
key.weight | key.kernel | (h c) d -> d h c
key.bias | key.bias | (h c) -> h c
value.weight | value.kernel | (h c) d -> d h c
value.bias | value.bias | (h c) -> h c
out.weight | out.kernel | d (h c) -> h c d
out.bias | out.bias
"""


@entry(
    "packed documents",
    "Linen",
    "heads apart",
    faults={
        "segments-ignored": fault("", ("query", "key", "value", "out")),
        "positions-not-restarted": fault("", ("", "position"), ("embed", "position"), "position"),
        "mask-off-by-one": fault("", ("query", "key", "value", "out")),
    },
)
def packed_documents(wrong: str | None) -> Case:
    """Documents packed into a row: positions restart, segments do not see each other; Linen's ``DenseGeneral``."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import linen
    from torch import nn
    from torch.nn import functional

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, ids, positions, segments):
            b, t = ids.shape
            x = self.embed(ids) + self.position(positions)
            y = self.norm(x)
            q, k, v = (f(y).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
            seen = (segments[:, :, None] == segments[:, None]) & torch.ones(t, t, dtype=torch.bool).tril()
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
            return x + self.out(y.transpose(1, 2).reshape(b, t, -1))

    class Port(linen.Module):
        @linen.compact
        def __call__(self, ids, positions, segments):
            if wrong == "positions-not-restarted":
                positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
            x = linen.Embed(VOCABULARY, WIDTH, name="token_embedder")(ids)
            x = x + linen.Embed(16, WIDTH, name="position_embedder")(positions)
            y = linen.LayerNorm(1e-5, use_fast_variance=False, name="pre_norm")(x)
            heads = (HEADS, WIDTH // HEADS)
            q, k, v = (linen.DenseGeneral(heads, name=name)(y) for name in ("query", "key", "value"))
            seen = linen.make_causal_mask(ids, dtype=bool)
            if wrong == "mask-off-by-one":
                seen = jnp.roll(seen, 1, -1).at[..., 0].set(True)
            if wrong != "segments-ignored":
                seen &= linen.make_attention_mask(segments, segments, jnp.equal, dtype=bool)
            scores = jnp.einsum("bthc,bshc->bhts", q * heads[1] ** -0.5, k)
            weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), -1)
            y = jnp.einsum("bhts,bshc->bthc", weights, v)
            return x + linen.DenseGeneral(WIDTH, (-2, -1), name="out")(y)

    first = fresh(Packed())
    inputs = {
        "ids": tokens(2, T),
        "positions": np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 0]]),
        "segments": np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 2, 2, 3]]),
    }
    arrays = carry(held(first), rules(PACKED_NAMES, h=HEADS))
    return Case(first, with_variables(Port(), arrays, **inputs), inputs)


TORCH_LAYER = """
self_attn.in_proj_weight | attention.in_proj.kernel | o d -> d o
self_attn.in_proj_bias | attention.in_proj.bias
self_attn.out_proj.weight | attention.out_proj.kernel | o d -> d o
self_attn.out_proj.bias | attention.out_proj.bias
linear1.weight | linear1.kernel | o d -> d o
linear1.bias | linear1.bias
linear2.weight | linear2.kernel | o d -> d o
linear2.bias | linear2.bias
norm1.weight | norm1.scale
norm1.bias | norm1.bias
norm2.weight | norm2.scale
norm2.bias | norm2.bias
"""


@entry(
    "torch's own layer",
    faults={
        "norms-exchanged": fault("norm1", "norm2", ""),
        "norm-first": fault(*inside("", "self_attn", "norm1", "linear1")),
        "values-scaled": fault(*inside("self_attn", "out_proj")),
    },
)
def transformer_encoder_layer(wrong: str | None) -> Case:
    """``torch.nn.TransformerEncoderLayer`` against NNX with a fused projection."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from torch import nn

    rngs = nnx.Rngs(0)

    class Attention(nnx.Module):
        def __init__(self) -> None:
            self.in_proj = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
            self.out_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            b, t, d = x.shape
            q, k, v = (one.reshape(b, t, HEADS, -1) for one in jnp.split(self.in_proj(x), 3, -1))
            v = v * 1.01 if wrong == "values-scaled" else v
            return self.out_proj(jax.nn.dot_product_attention(q, k, v).reshape(b, t, d))

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.attention = Attention()
            self.linear1, self.linear2 = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
            self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
            self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

        def __call__(self, x):
            norm1, norm2 = (self.norm2, self.norm1) if wrong == "norms-exchanged" else (self.norm1, self.norm2)
            if wrong == "norm-first":
                x = x + self.attention(norm1(x))
                return x + self.linear2(jax.nn.relu(self.linear1(norm2(x))))
            x = norm1(x + self.attention(x))
            return norm2(x + self.linear2(jax.nn.relu(self.linear1(x))))

    first = fresh(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True))
    return Case(first, onto(first, Layer(), TORCH_LAYER), numbers(2, T, WIDTH))
