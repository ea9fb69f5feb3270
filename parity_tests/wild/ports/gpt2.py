"""Decoders in GPT-2's way: learned positions, fused ``c_attn`` in a Conv1D whose weight is [in, out], tanh GELU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..gallery import Case, entry, fault, inside
from ..weights import carry, fill, fresh, held, linen, onto, rules, tokens

WIDTH, HEADS, VOCABULARY, T = 16, 4, 24, 8
ATTENTION = inside("h.*.attn", "c_attn", "c_proj")
MLP = inside("h.*.mlp", "c_fc", "c_proj")

NAMES = """
wte.weight | wte.embedding
wpe.weight | wpe.embedding
h.{i}.ln_1.weight | h.{i}.ln_1.scale
h.{i}.ln_2.weight | h.{i}.ln_2.scale
ln_f.weight | ln_f.scale
{path}weight | {path}kernel
{path}bias | {path}bias
"""

SPLIT = """
wte.weight | token_embedding.embedding
wpe.weight | position_embedding.embedding
h.{i}.ln_1.weight | layers.{i}.norm1.scale
h.{i}.ln_1.bias | layers.{i}.norm1.bias
h.{i}.ln_2.weight | layers.{i}.norm2.scale
h.{i}.ln_2.bias | layers.{i}.norm2.bias
h.{i}.attn.{rest}.weight | layers.{i}.{rest}.kernel
h.{i}.attn.{rest}.bias | layers.{i}.{rest}.bias
h.{i}.mlp.c_fc.weight | layers.{i}.up.kernel
h.{i}.mlp.c_fc.bias | layers.{i}.up.bias
h.{i}.mlp.c_proj.weight | layers.{i}.down.kernel
h.{i}.mlp.c_proj.bias | layers.{i}.down.bias
ln_f.weight | ln_f.scale
ln_f.bias | ln_f.bias
"""


def torch_gpt2(layers: int = 1, wrong: str | None = None) -> Any:
    """Return the torch decoder; the logits are made with the token embedding."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Conv1D(nn.Module):
        def __init__(self, inner: int, outer: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(inner, outer)), nn.Parameter(torch.zeros(outer))

        def forward(self, x):
            return x @ self.weight + self.bias

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)

        def forward(self, x):
            b, t, d = x.shape
            q, k, v = (one.view(b, t, HEADS, -1).transpose(1, 2) for one in self.c_attn(x).split(d, -1))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=wrong != "torch-mask-forgotten")
            return self.c_proj(y.transpose(1, 2).reshape(b, t, d))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = Conv1D(WIDTH, 4 * WIDTH), Conv1D(4 * WIDTH, WIDTH)

        def forward(self, x):
            return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class GPT2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
            self.h = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f = nn.LayerNorm(WIDTH)

        def forward(self, ids):
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
            for block in self.h:
                x = block(x)
            return self.ln_f(x) @ self.wte.weight.T

    return fresh(GPT2())


def attend(q: Any, k: Any, v: Any, wrong: str | None) -> Any:
    """Attend causally over (b, t, d), cut into heads."""
    import jax
    import jax.numpy as jnp
    from einops import rearrange

    if wrong == "heads-inside-out":
        q, k, v = (rearrange(one, "b t (c h) -> b h t c", h=HEADS) for one in (q, k, v))
    else:
        q, k, v = (rearrange(one, "b t (h c) -> b h t c", h=HEADS) for one in (q, k, v))
    scale = 1.0 if wrong == "scale-missing" else (WIDTH // HEADS) ** -0.5
    scores = jnp.einsum("bhtc,bhsc->bhts", q, k) * scale
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = scores * seen if wrong == "mask-times-zero" else jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    y = jax.nn.softmax(scores, -1) @ v
    return rearrange(y, "b h t c -> b t (c h)" if wrong == "heads-inside-out" else "b h t c -> b t (h c)")


def nnx_gpt2(wrong: str | None, *, layers: int = 1, remat: bool = False) -> Any:
    """Return the NNX decoder with torch's names."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)
    eps = 1e-6 if wrong == "flax-eps" else 1e-5  # Flax's default is not torch's

    class Attention(nnx.Module):
        def __init__(self) -> None:
            self.c_attn = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
            self.c_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            q, k, v = jnp.split(self.c_attn(x), 3, -1)
            if wrong == "queries-and-keys-exchanged":
                q, k = k, q
            if wrong == "fused-per-head":  # reads (h 3 c) where (3 h c) is
                b, t, _ = x.shape
                q, k, v = (one.reshape(b, t, -1) for one in jnp.split(self.c_attn(x).reshape(b, t, HEADS, -1), 3, -1))
            return self.c_proj(attend(q, k, v, wrong))

    class MLP(nnx.Module):
        def __init__(self) -> None:
            self.c_fc = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.c_proj = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=wrong != "gelu-exact"))

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.ln_1 = nnx.LayerNorm(WIDTH, epsilon=eps, use_fast_variance=False, rngs=rngs)
            self.ln_2 = nnx.LayerNorm(WIDTH, epsilon=eps, use_fast_variance=False, rngs=rngs)
            self.attn, self.mlp = Attention(), MLP()

        def __call__(self, x):
            x = x + self.attn(self.ln_1(x))
            if wrong == "branch-detached":
                return x + self.mlp(jax.lax.stop_gradient(self.ln_2(x)))
            return x + self.mlp(self.ln_2(x))

    class GPT2(nnx.Module):
        def __init__(self) -> None:
            self.wte = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.wpe = nnx.Embed(16, WIDTH, rngs=rngs)
            self.h = nnx.List([Block() for _ in range(layers)])
            self.ln_f = nnx.LayerNorm(WIDTH, epsilon=eps, use_fast_variance=False, rngs=rngs)

        def __call__(self, ids):
            x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1]) + (wrong == "positions-off-by-one"))
            for block in self.h:
                x = nnx.remat(lambda block, x: block(x))(block, x) if remat else block(x)
            x = self.ln_f(x)
            return self.wte.attend(x)

    return GPT2()


def split_gpt2(wrong: str | None) -> Any:
    """Return an NNX decoder of other names, with query, key and value apart and blocks without parts."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
            self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
            self.query, self.key, self.value, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            y = self.norm1(x)
            x = x + self.out(attend(self.query(y), self.key(y), self.value(y), wrong))
            y = self.down(jax.nn.gelu(self.up(self.norm1(x) if wrong == "first-norm-twice" else self.norm2(x))))
            return x + (y + self.down.bias[...] if wrong == "bias-twice" else y)

    class GPT2(nnx.Module):
        def __init__(self) -> None:
            self.token_embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.position_embedding = nnx.Embed(16, WIDTH, rngs=rngs)
            self.layers = nnx.List([Layer()])
            self.ln_f = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

        def __call__(self, ids):
            x = self.token_embedding(ids) + self.position_embedding(jnp.arange(ids.shape[1]))
            for layer in self.layers:
                x = layer(x)
            return self.token_embedding.attend(self.ln_f(x))

    return GPT2()


def linen_gpt2(wrong: str | None) -> Any:
    """Return the Linen decoder, checkpointed with ``nn.remat``."""
    import jax.numpy as jnp
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(1e-5, name="ln_1")(x)
            q, k, v = jnp.split(nn.Dense(3 * WIDTH, name="c_attn")(y), 3, -1)
            x = x + nn.Dense(WIDTH, name="attn_proj")(attend(q, k, v, wrong))
            y = nn.Dense(4 * WIDTH, name="c_fc")(nn.LayerNorm(1e-5, name="ln_2")(x))
            y = nn.relu(y) if wrong == "relu-for-gelu" else nn.gelu(y)
            return x + nn.Dense(WIDTH, use_bias=True, name="mlp_proj")(y)

    class GPT2(nn.Module):
        @nn.compact
        def __call__(self, ids):
            wte = nn.Embed(VOCABULARY, WIDTH, name="wte")
            x = wte(ids) + nn.Embed(16, WIDTH, name="wpe")(jnp.arange(ids.shape[1]))
            x = nn.remat(Block)(name="h_0")(x)
            return wte.attend(nn.LayerNorm(1e-5, name="ln_f")(x))

    return GPT2()


@entry(
    "Conv1D",
    "tied",
    faults={
        "gelu-exact": fault(*MLP),
        "queries-and-keys-exchanged": fault(*ATTENTION),
        "fused-per-head": fault(*ATTENTION),
        "flax-eps": fault("h.0.ln_1"),
    },
)
def gpt2_conv1d(wrong: str | None) -> Case:
    """Conv1D weights lie as kernels do; query, key and value fused on both sides."""
    first = torch_gpt2()
    return Case(first, onto(first, nnx_gpt2(wrong), NAMES), tokens(2, T))


@entry(
    "fused and split",
    faults={
        # the port's block has layers, but neither attention nor MLP
        "first-norm-twice": fault(*inside("h.0", "attn", "attn.c_proj", "ln_1", "ln_2", "mlp", "mlp.c_fc"), "h.0.ln_2"),
        "bias-twice": fault("h.0", "h.0.mlp", "h.0.mlp.c_proj"),
        "scale-missing": fault("h.0", *ATTENTION, ("h.0.ln_1", "h.0.attn.c_proj")),  # the port has no c_attn
    },
)
def gpt2_split(wrong: str | None) -> Case:
    """Pair a fused ``c_attn`` against three layers, blocks without parts, other names."""
    first = torch_gpt2()
    arrays = held(first)
    for word in ("weight", "bias"):
        parts = np.split(arrays.pop(f"h.0.attn.c_attn.{word}"), 3, -1)
        arrays |= {f"h.0.attn.{name}.{word}": part for name, part in zip(("query", "key", "value"), parts, strict=True)}
        arrays[f"h.0.attn.out.{word}"] = arrays.pop(f"h.0.attn.c_proj.{word}")
    return Case(first, fill(split_gpt2(wrong), carry(arrays, rules(SPLIT))), tokens(2, T))


@entry(
    "remat",
    "backward",
    faults={
        "branch-detached": fault(*inside("h.*", "ln_2", "mlp"), "h.*.ln_2", "h.*.mlp", direction="backward"),
        "positions-off-by-one": fault(*inside("", "wte", "wpe"), "wpe"),
        "heads-inside-out": fault(*ATTENTION),
    },
)
def gpt2_remat(wrong: str | None) -> Case:
    """``nnx.remat`` around each block."""
    first = torch_gpt2(layers=2)
    return Case(first, onto(first, nnx_gpt2(wrong, layers=2, remat=True), NAMES), tokens(2, T))


@entry(
    "Linen",
    "remat",
    faults={
        "relu-for-gelu": fault("h.0", *MLP),
        "mask-times-zero": fault("h.0", *ATTENTION),
        "torch-mask-forgotten": fault("h.0", *ATTENTION, side="first"),
    },
)
def gpt2_linen_remat(wrong: str | None) -> Case:
    """``nn.remat`` around a Linen block, whose parts have other bounds than torch's."""
    first = torch_gpt2(wrong=wrong)
    table = rules("""
    h.{i}.attn.c_attn.weight | h_{i}.c_attn.kernel
    h.{i}.attn.c_attn.bias | h_{i}.c_attn.bias
    h.{i}.attn.c_proj.weight | h_{i}.attn_proj.kernel
    h.{i}.attn.c_proj.bias | h_{i}.attn_proj.bias
    h.{i}.mlp.c_fc.weight | h_{i}.c_fc.kernel
    h.{i}.mlp.c_fc.bias | h_{i}.c_fc.bias
    h.{i}.mlp.c_proj.weight | h_{i}.mlp_proj.kernel
    h.{i}.mlp.c_proj.bias | h_{i}.mlp_proj.bias
    h.{i}.ln_1.weight | h_{i}.ln_1.scale
    h.{i}.ln_1.bias | h_{i}.ln_1.bias
    h.{i}.ln_2.weight | h_{i}.ln_2.scale
    h.{i}.ln_2.bias | h_{i}.ln_2.bias
    ln_f.weight | ln_f.scale
    ln_f.bias | ln_f.bias
    {path}weight | {path}embedding
    """)
    inputs = tokens(2, T)
    return Case(first, linen(linen_gpt2(wrong), carry(held(first), table), inputs), inputs)
