"""Decoders in Llama's way (arXiv 2302.13971): RMSNorm, rotary positions, grouped queries, SwiGLU.

The torch side is one model. The ports keep the rotary tables in three places, fuse and split, stack and unroll.
b batch, t query position, s key position, h query head, k key/value head, c channel of a head.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..gallery import Case, entry, fault, inside
from ..weights import fresh, onto, rules, tokens

WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, VOCABULARY, T = 16, 4, 2, 4, 24, 24, 8
ATTENTION = inside("blocks.*.attn", "q_proj", "k_proj", "v_proj", "o_proj")
MLP = inside("blocks.*.mlp", "gate_proj", "up_proj", "down_proj")
TABLES = inside("", "embed", "blocks.0")

NNX_NAMES = """
embed.weight | embed.embedding
blocks.{i}.{rest}norm.weight | blocks.{i}.{rest}norm.scale
blocks.{i}.attn.sinks | blocks.{i}.attn.sinks
blocks.{i}.{rest}.weight | blocks.{i}.{rest}.kernel | o d -> d o
norm.weight | norm.scale
head.weight | head.kernel | o d -> d o
"""


def tables(positions: np.ndarray, theta: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of the rotary angles in float32, ``(t, HEAD)``, both halves alike."""
    frequencies = 1.0 / theta ** (np.arange(0, HEAD, 2, dtype=np.float32) / HEAD)
    angles = positions[:, None].astype(np.float32) * frequencies
    both = np.concatenate([angles, angles], -1)
    return np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)


def torch_llama(
    *, layers: int = 1, window: int = 0, sinks: bool = False, given: bool = False, reentrant: bool | None = None
) -> Any:
    """Return the torch decoder; `given` cos and sin in the call, or checkpointed, reentrant or not."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotate(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
            self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
            self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
            self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
            if sinks:
                self.sinks = nn.Parameter(torch.zeros(HEADS))

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            q, k, v = (f(x).view(b, t, -1, HEAD).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
            seen = torch.ones(t, t, dtype=torch.bool).tril()
            if window:
                seen = seen & ~torch.ones(t, t, dtype=torch.bool).tril(-window)
            scores = (q @ k.mT * HEAD**-0.5).masked_fill(~seen, -torch.inf)
            if sinks:
                scores = torch.cat([scores, self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)], -1)
            weights = scores.softmax(-1)[..., :t]
            return self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, -1))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
            self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
            self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x):
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_norm, self.attn, self.mlp_norm, self.mlp = RMSNorm(), Attention(), RMSNorm(), MLP()

        def forward(self, x, cos, sin):
            x = x + self.attn(self.attn_norm(x), cos, sin)
            return x + self.mlp(self.mlp_norm(x))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = RMSNorm()
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            frequencies = 1.0 / 10000.0 ** (torch.arange(0, HEAD, 2).float() / HEAD)
            self.register_buffer("inv_freq", frequencies, persistent=False)

        def forward(self, ids, cos=None, sin=None):
            if not given:
                angles = torch.outer(torch.arange(ids.shape[1]).float(), self.inv_freq)
                angles = torch.cat([angles, angles], -1)
                cos, sin = angles.cos(), angles.sin()
            x = self.embed(ids)
            for block in self.blocks:
                run = block if reentrant is None else functools.partial(checkpoint, block, use_reentrant=reentrant)
                x = run(x, cos, sin)
            return self.head(self.norm(x))

    return fresh(Llama())


def rotate(x: Any, cos: Any, sin: Any, wrong: str | None = None) -> Any:
    """Turn the halves (b, t, h, c) against each other."""
    import jax.numpy as jnp

    if wrong == "rotary-interleaved":
        turned = jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        cos, sin = (jnp.repeat(one[..., : HEAD // 2], 2, -1) for one in (cos, sin))
    else:
        first, second = jnp.split(x, 2, -1)
        turned = jnp.concatenate([-second, first], -1)
    return x * cos[:, None] + turned * sin[:, None]


def attend(q: Any, k: Any, v: Any, wrong: str | None = None, window: int = 0, sinks: Any = None) -> Any:
    """Attend causally from (b, t, h, c) to (b, s, k, c)."""
    import jax
    import jax.numpy as jnp

    b, t, h, c = q.shape
    if wrong == "heads-tiled":  # query head h reads key head h % k instead of h // (h/k)
        k, v = (jnp.tile(one, (1, 1, h // one.shape[2], 1)) for one in (k, v))
    else:
        k, v = (jnp.repeat(one, h // one.shape[2], axis=2) for one in (k, v))
    scores = jnp.einsum("bthc,bshc->bhts", q, k) * (WIDTH if wrong == "scaled-by-the-model-width" else c) ** -0.5
    ahead = jnp.arange(t)[:, None] - jnp.arange(t)
    seen = ahead >= (-1 if wrong == "mask-off-by-one" else 0)
    if window:
        seen &= (ahead <= window) if wrong == "window-off-by-one" else (ahead < window)
    scores = jnp.where(seen, scores, -jnp.inf)
    if wrong == "scores-in-bfloat16":
        scores = scores.astype(jnp.bfloat16)
    if sinks is not None and wrong != "sinks-left-out":
        column = jnp.broadcast_to(sinks[:, None, None], (b, h, t, 1))
        scores = jnp.concatenate([scores, column.astype(scores.dtype)], -1)
    weights = jax.nn.softmax(scores, axis=-2 if wrong == "softmax-over-the-queries" else -1)[..., :t]
    return jnp.einsum("bhts,bshc->bthc", weights.astype(v.dtype), v).reshape(b, t, -1)


def nnx_llama(
    wrong: str | None = None, *, layers: int = 1, where: str = "call", fused: bool = False, **attention: Any
) -> Any:
    """Return the NNX decoder; `where` its tables are: a constant, an attribute, made in the call, or given."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)
    theta = 10010.0 if wrong == "theta-off-by-1e-3" else 10000.0
    sinks = attention.pop("sinks", False)
    plain = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)

    def norm() -> Any:
        return nnx.RMSNorm(WIDTH, epsilon=1e-5 if wrong == "norm-eps" else 1e-6, rngs=rngs)

    class Attention(nnx.Module):
        def __init__(self) -> None:
            if fused:
                self.qkv_proj = plain(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD)
            else:
                self.q_proj = plain(WIDTH, HEADS * HEAD)
                self.k_proj = plain(WIDTH, KV_HEADS * HEAD)
                self.v_proj = plain(WIDTH, KV_HEADS * HEAD)
            self.o_proj = plain(HEADS * HEAD, WIDTH)
            if sinks:
                self.sinks = nnx.Param(jnp.zeros(HEADS))

        def __call__(self, x, cos, sin):
            b, t, _ = x.shape
            if fused:
                sizes = (HEADS, KV_HEADS, KV_HEADS)
                ends = np.cumsum([size * HEAD for size in sizes])[:2]
                parts = jnp.split(self.qkv_proj(x), ends, -1)
            else:
                parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            q, k, v = (one.reshape(b, t, -1, HEAD) for one in parts)
            if wrong == "keys-and-values-exchanged":
                k, v = v, k
            q = rotate(q, cos, sin, wrong)
            k = k if wrong == "keys-not-turned" else rotate(k, cos, sin, wrong)
            own = self.sinks[...] if sinks else None
            return self.o_proj(attend(q, k, v, wrong, sinks=own, **attention))

    class MLP(nnx.Module):
        def __init__(self) -> None:
            self.gate_proj, self.up_proj = plain(WIDTH, HIDDEN), plain(WIDTH, HIDDEN)
            self.down_proj = plain(HIDDEN, WIDTH)

        def __call__(self, x):
            gate, up = self.gate_proj(x), self.up_proj(x)
            if wrong == "gate-and-up-exchanged":
                gate, up = up, gate
            return self.down_proj(jax.nn.gelu(gate) * up if wrong == "gelu-for-silu" else jax.nn.silu(gate) * up)

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.attn_norm, self.attn, self.mlp_norm, self.mlp = norm(), Attention(), norm(), MLP()

        def __call__(self, x, cos, sin):
            y = self.attn_norm(x)
            x = (y if wrong == "residual-after-the-norm" else x) + self.attn(y, cos, sin)
            y = self.mlp(self.mlp_norm(x))
            return y if wrong == "residual-missing" else x + y

    class Llama(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block() for _ in range(layers)])
            self.norm, self.head = norm(), plain(WIDTH, VOCABULARY)
            if where == "attribute":
                self.cos, self.sin = (nnx.Cache(jnp.asarray(one)) for one in tables(np.arange(32), theta))

        def __call__(self, ids, cos=None, sin=None):
            t = ids.shape[1]
            if where == "constant":
                cos, sin = tables(np.arange(t), theta)
            elif where == "attribute":
                cos, sin = self.cos[...][:t], self.sin[...][:t]
            elif where == "call":
                frequencies = 1.0 / theta ** (jnp.arange(0, HEAD, 2, dtype=jnp.float32) / HEAD)
                angles = jnp.arange(t, dtype=jnp.float32)[:, None] * frequencies
                angles = jnp.concatenate([angles, angles], -1)
                cos, sin = jnp.cos(angles), jnp.sin(angles)
            elif wrong == "cos-and-sin-exchanged":
                cos, sin = sin, cos
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, cos, sin)
            return self.head(self.norm(x))

    return Llama()


@entry(
    "rotary",
    "constant table",
    faults={
        "theta-off-by-1e-3": fault(*TABLES),
        "rotary-interleaved": fault(*ATTENTION),
        "heads-tiled": fault(*ATTENTION),
    },
)
def llama_table_constant(wrong: str | None) -> Case:
    """Rotary tables as a NumPy constant."""
    first = torch_llama()
    return Case(first, onto(first, nnx_llama(wrong, where="constant"), NNX_NAMES), tokens(2, T))


@entry(
    "rotary",
    "table in __init__",
    faults={
        "theta-off-by-1e-3": fault(*TABLES),
        "mask-off-by-one": fault(*ATTENTION),
        "gate-and-up-exchanged": fault(*MLP),
    },
)
def llama_table_attribute(wrong: str | None) -> Case:
    """Rotary tables kept by the module."""
    first = torch_llama()
    return Case(first, onto(first, nnx_llama(wrong, where="attribute"), NNX_NAMES), tokens(2, T))


@entry(
    "rotary",
    "table in the call",
    faults={
        "theta-off-by-1e-3": fault(*TABLES),
        "keys-not-turned": fault(*ATTENTION),
        "norm-eps": fault("blocks.0.attn_norm"),
        "scores-in-bfloat16": fault(*ATTENTION, effect="precision"),
    },
)
def llama_table_in_call(wrong: str | None) -> Case:
    """Rotary tables made in the call, two blocks."""
    first = torch_llama(layers=2)
    return Case(first, onto(first, nnx_llama(wrong, layers=2), NNX_NAMES), tokens(2, T))


@entry(
    "rotary",
    "table given",
    faults={
        "rotary-interleaved": fault(*ATTENTION),
        "cos-and-sin-exchanged": fault(*TABLES),
        "scaled-by-the-model-width": fault(*ATTENTION),
    },
)
def llama_table_given(wrong: str | None) -> Case:
    """Both sides get cos and sin as float32 inputs."""
    first = torch_llama(given=True)
    inputs = {"ids": tokens(2, T), **dict(zip(("cos", "sin"), tables(np.arange(T)), strict=True))}
    return Case(first, onto(first, nnx_llama(wrong, where="given"), NNX_NAMES), inputs, {"fixed": ("cos", "sin")})


FUSED = [
    *rules(
        "blocks.{i}.attn.q_proj.weight, blocks.{i}.attn.k_proj.weight, blocks.{i}.attn.v_proj.weight"
        " | blocks.{i}.attn.qkv_proj.kernel | o d -> d o | along=o split=16,8,8"
    ),
    *rules(NNX_NAMES),
]


@entry(
    "rotary",
    "fused",
    faults={
        "keys-and-values-exchanged": fault(*ATTENTION),
        "keys-not-turned": fault(*ATTENTION),
        "residual-missing": fault(*inside("blocks.0", "attn", "mlp")),
    },
)
def llama_fused(wrong: str | None) -> Case:
    """Query, key and value in one layer of unequal parts; one rule says so, names say the rest."""
    first = torch_llama()
    return Case(first, onto(first, nnx_llama(wrong, fused=True), FUSED), tokens(2, T), {"rules": FUSED[:1]})


@entry(
    "sliding window",
    faults={"window-off-by-one": fault(*ATTENTION), "softmax-over-the-queries": fault(*ATTENTION)},
)
def llama_sliding_window(wrong: str | None) -> Case:
    """Pair a window of three tokens, the token itself counted."""
    first = torch_llama(window=3)
    return Case(first, onto(first, nnx_llama(wrong, window=3), NNX_NAMES), tokens(2, T))


@entry(
    "sinks",
    "sliding window",
    faults={
        "sinks-left-out": fault(*ATTENTION),
        "gelu-for-silu": fault(*MLP),
    },
)
def llama_sinks(wrong: str | None) -> Case:
    """One more logit per head takes part of the softmax (gpt-oss)."""
    first = torch_llama(window=4, sinks=True)
    return Case(first, onto(first, nnx_llama(wrong, window=4, sinks=True), NNX_NAMES), tokens(2, T))
