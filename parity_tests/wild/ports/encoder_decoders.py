"""Encoders with decoders: T5's relative bias (arXiv 1910.10683) and cross attention.

b batch, t query position, s key position, h head, c channel of a head.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..gallery import Case, entry, fault, inside
from ..weights import carry, fresh, held, linen, numbers, onto, rules, tokens

WIDTH, HEADS, HIDDEN, VOCABULARY, S, T = 16, 2, 24, 24, 9, 6
BUCKETS, FURTHEST = 8, 8


def buckets(queries: int, keys: int, *, both: bool, wrong: str | None = None) -> np.ndarray:
    """Return the bucket of each distance, exact near by and logarithmic far away."""
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    count, offset = BUCKETS, 0
    if both:
        count //= 2
        offset = count * (distance > 0)
        distance = np.abs(distance)
    else:
        distance = -np.minimum(distance, 0)
    near = count // 2 + (wrong == "bucket-off-by-one")
    far = near + (
        np.log(np.maximum(distance, 1).astype(np.float32) / near) / math.log(FURTHEST / near) * (count - near)
    ).astype(int)
    return offset + np.where(distance < near, distance, np.minimum(far, count - 1))


def torch_t5() -> Any:
    """Return T5 of one encoder and one decoder block: no biases, no scale, RMSNorm, shared position bias."""
    import torch
    from torch import nn

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    class Attention(nn.Module):
        def __init__(self, biased: bool, both: bool = True) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.both = both
            self.relative_attention_bias = nn.Embedding(BUCKETS, HEADS) if biased else None

        def forward(self, x, memory, mask=None):
            b, t, d = x.shape
            split = lambda y: y.view(b, -1, HEADS, d // HEADS).transpose(1, 2)  # noqa: E731
            scores = split(self.q(x)) @ split(self.k(memory)).mT
            if self.relative_attention_bias is not None:
                index = torch.as_tensor(buckets(t, memory.shape[1], both=self.both))
                scores = scores + self.relative_attention_bias(index).permute(2, 0, 1)
            if mask is not None:
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            return self.o((scores.softmax(-1) @ split(self.v(memory))).transpose(1, 2).reshape(b, t, d))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x):
            return self.wo(torch.relu(self.wi(x)))

    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Embedding(VOCABULARY, WIDTH)
            self.enc_norm, self.enc_attn = Norm(), Attention(True)
            self.enc_mlp_norm, self.enc_mlp, self.enc_final = Norm(), MLP(), Norm()
            self.dec_norm, self.dec_attn = Norm(), Attention(True, both=False)
            self.cross_norm, self.cross_attn = Norm(), Attention(False)
            self.dec_mlp_norm, self.dec_mlp, self.dec_final = Norm(), MLP(), Norm()

        def forward(self, source, target, mask):
            seen = mask[:, None, None]
            x = self.shared(source)
            y = self.enc_norm(x)
            x = x + self.enc_attn(y, y, seen)
            memory = self.enc_final(x + self.enc_mlp(self.enc_mlp_norm(x)))
            x = self.shared(target)
            y = self.dec_norm(x)
            x = x + self.dec_attn(y, y, torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril())
            x = x + self.cross_attn(self.cross_norm(x), memory, seen)
            x = self.dec_final(x + self.dec_mlp(self.dec_mlp_norm(x)))
            return x * WIDTH**-0.5 @ self.shared.weight.T

    return fresh(T5())


T5_NAMES = """
shared.weight | shared.embedding
{path}relative_attention_bias.weight | {path}relative_attention_bias.embedding
enc_norm.weight | enc_norm.scale
dec_norm.weight | dec_norm.scale
enc_mlp_norm.weight | enc_mlp_norm.scale
dec_mlp_norm.weight | dec_mlp_norm.scale
cross_norm.weight | cross_norm.scale
enc_final.weight | enc_final.scale
dec_final.weight | dec_final.scale
{path}weight | {path}kernel | o d -> d o
"""
PROJECTIONS = ("q", "k", "v", "o", "relative_attention_bias")


def t5_inputs() -> dict[str, np.ndarray]:
    """Return source and target ids and the source's padding mask."""
    mask = np.arange(S) < np.array([[S], [6]])
    return {"source": tokens(2, S), "target": tokens(2, T, seed=2), "mask": mask}


def scores_of(q: Any, k: Any, wrong: str | None) -> Any:
    """Return unscaled scores (b, h, t, s)."""
    import jax.numpy as jnp

    return jnp.einsum("bthc,bshc->bhts", q, k) * (q.shape[-1] ** -0.5 if wrong == "scaled-after-all" else 1.0)


def nnx_t5(wrong: str | None) -> Any:
    """Return the NNX port."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)

    def norm() -> Any:
        return nnx.RMSNorm(WIDTH, rngs=rngs)

    def linear(inner: int, outer: int) -> Any:
        return nnx.Linear(inner, outer, use_bias=False, rngs=rngs)

    class Attention(nnx.Module):
        def __init__(self, biased: bool, both: bool = True) -> None:
            self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
            self.both = both or wrong == "decoder-bias-both-ways"
            self.relative_attention_bias = nnx.Embed(BUCKETS, HEADS, rngs=rngs) if biased else None

        def __call__(self, x, memory, mask=None):
            b, t, d = x.shape
            q, k, v = (y.reshape(b, -1, HEADS, d // HEADS) for y in (self.q(x), self.k(memory), self.v(memory)))
            scores = scores_of(q, k, wrong)
            if self.relative_attention_bias is not None:
                index = jnp.asarray(buckets(t, memory.shape[1], both=self.both, wrong=wrong))
                scores = scores + self.relative_attention_bias(index).transpose(2, 0, 1)
            if mask is not None:
                scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
            return self.o(jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores, -1), v).reshape(b, t, d))

    class MLP(nnx.Module):
        def __init__(self) -> None:
            self.wi, self.wo = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

        def __call__(self, x):
            return self.wo(jax.nn.relu(self.wi(x)))

    class T5(nnx.Module):
        def __init__(self) -> None:
            self.shared = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.enc_norm, self.enc_attn = norm(), Attention(True)
            self.enc_mlp_norm, self.enc_mlp, self.enc_final = norm(), MLP(), norm()
            self.dec_norm, self.dec_attn = norm(), Attention(True, both=False)
            self.cross_norm, self.cross_attn = norm(), Attention(False)
            self.dec_mlp_norm, self.dec_mlp, self.dec_final = norm(), MLP(), norm()

        def __call__(self, source, target, mask):
            seen = mask[:, None, None]
            x = self.shared(source)
            y = self.enc_norm(x)
            x = x + self.enc_attn(y, y, seen)
            memory = self.enc_final(x + self.enc_mlp(self.enc_mlp_norm(x)))
            x = self.shared(target)
            y = self.dec_norm(x)
            x = x + self.dec_attn(y, y, jnp.tril(jnp.ones((target.shape[1],) * 2, bool)))
            x = x + self.cross_attn(self.cross_norm(x), memory, None if wrong == "memory-not-masked" else seen)
            x = self.dec_final(x + self.dec_mlp(self.dec_mlp_norm(x)))
            return self.shared.attend(x if wrong == "logits-not-scaled" else x * WIDTH**-0.5)

    return T5()


@entry(
    "T5",
    "relative bias",
    "cross attention",
    faults={
        "bucket-off-by-one": fault("*_attn.relative_attention_bias", *inside("*_attn", *PROJECTIONS)),
        "scaled-after-all": fault(*inside("*_attn", *PROJECTIONS)),
        "memory-not-masked": fault("", *inside("cross_attn", *PROJECTIONS)),
        "logits-not-scaled": fault(*inside("", "dec_final", "shared")),
        "decoder-bias-both-ways": fault("dec_attn.relative_attention_bias", *inside("dec_attn", *PROJECTIONS)),
    },
)
def t5(wrong: str | None) -> Case:
    """T5 against NNX."""
    first = torch_t5()
    return Case(first, onto(first, nnx_t5(wrong), T5_NAMES), t5_inputs())


@entry(
    "cross attention",
    "torch's own layer",
    "Linen",
    faults={
        "queries-from-the-memory": fault(
            "",
            *inside("multihead_attn", "out_proj"),
            "multihead_attn",
            ("norm1", "multihead_attn"),  # what it is given
        ),
        "causal-mask-missing": fault("", *inside("self_attn", "out_proj"), "self_attn"),
        "cross-before-self": fault(*inside("", "self_attn", "multihead_attn", "norm1", "norm2")),
    },
)
def transformer_decoder_layer(wrong: str | None) -> Case:
    """``torch.nn.TransformerDecoderLayer``, post-norm, against Linen with heads apart."""
    import jax.numpy as jnp
    import torch
    from flax import linen as fnn
    from torch import nn

    class Torch(nn.TransformerDecoderLayer):
        def forward(self, x, memory):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return super().forward(x, memory, tgt_mask=mask)

    class Port(fnn.Module):
        @fnn.compact
        def __call__(self, x, memory):
            own = fnn.MultiHeadDotProductAttention(HEADS, name="self_attn")
            cross = fnn.MultiHeadDotProductAttention(HEADS, name="cross_attn")
            norms = [fnn.LayerNorm(1e-5, use_fast_variance=False, name=f"norm{i}") for i in (1, 2, 3)]
            seen = None if wrong == "causal-mask-missing" else jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None, None]
            if wrong == "cross-before-self":
                x = norms[1](x + cross(x, memory))
                x = norms[0](x + own(x, x, mask=seen))
            else:
                x = norms[0](x + own(x, x, mask=seen))
                start = memory[:, : x.shape[1]] if wrong == "queries-from-the-memory" else x
                x = norms[1](x + cross(start, memory))
            y = fnn.Dense(WIDTH, name="linear2")(fnn.relu(fnn.Dense(HIDDEN, name="linear1")(x)))
            return norms[2](x + y)

    first = fresh(Torch(WIDTH, HEADS, HIDDEN, batch_first=True))
    arrays, carried = held(first), {}
    for name, theirs in (("self_attn", "self_attn"), ("multihead_attn", "cross_attn")):
        weights = np.split(arrays.pop(f"{name}.in_proj_weight"), 3)
        biases = np.split(arrays.pop(f"{name}.in_proj_bias"), 3)
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            carried[f"{theirs}.{part}.kernel"] = weight.T.reshape(WIDTH, HEADS, -1)
            carried[f"{theirs}.{part}.bias"] = bias.reshape(HEADS, -1)
    table = """
    self_attn.out_proj.weight | self_attn.out.kernel | d (h c) -> h c d
    self_attn.out_proj.bias | self_attn.out.bias
    multihead_attn.out_proj.weight | cross_attn.out.kernel | d (h c) -> h c d
    multihead_attn.out_proj.bias | cross_attn.out.bias
    norm{i}.weight | norm{i}.scale
    {path}weight | {path}kernel | o d -> d o
    {path}bias | {path}bias
    """
    carried |= carry(arrays, rules(table, h=HEADS))
    inputs = {"x": numbers(2, T, WIDTH), "memory": numbers(2, S, WIDTH, seed=2)}
    return Case(first, linen(Port(), carried, **inputs), inputs)
