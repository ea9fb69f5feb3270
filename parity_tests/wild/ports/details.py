"""Small things that ports get wrong: 1 + w norms, soft caps, padding rows, detached branches, query-key norms."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..gallery import Case, entry, fault, inside
from ..weights import carry, fresh, held, linen, numbers, onto, rules, tokens

WIDTH, HEADS, HIDDEN, VOCABULARY, T = 16, 2, 24, 24, 6
ATTENTION = inside("attn", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")

GEMMA_NAMES = """
embed.weight | embedder.input_embedding
{rest}norm.weight | {rest}norm.scale
attn.{rest}.weight | attn.{rest}.kernel | o d -> d o
mlp.{rest}.weight | mlp.{rest}.kernel | o d -> d o
"""


def torch_gemma() -> Any:
    """Return Gemma of one block (arXiv 2408.00118): 1 + w norms before and after, soft caps, GeGLU, tied logits."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Norm(nn.Module):
        def __init__(self, size: int = WIDTH) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(size))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.q_norm, self.k_norm = Norm(WIDTH // HEADS), Norm(WIDTH // HEADS)

        def forward(self, x):
            b, t, d = x.shape
            q, k, v = (f(x).view(b, t, HEADS, -1) for f in (self.q_proj, self.k_proj, self.v_proj))
            q, k, v = (one.transpose(1, 2) for one in (self.q_norm(q), self.k_norm(k), v))
            scores = 5.0 * torch.tanh(q @ k.mT * (d // HEADS) ** -0.5 / 5.0)
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
            return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
            self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x):
            return self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))

    class Gemma(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attn, self.mlp = nn.Embedding(VOCABULARY, WIDTH), Attention(), MLP()
            self.pre_attn_norm, self.post_attn_norm, self.pre_mlp_norm = Norm(), Norm(), Norm()
            self.post_mlp_norm, self.final_norm = Norm(), Norm()

        def forward(self, ids):
            x = self.embed(ids) * WIDTH**0.5
            x = x + self.post_attn_norm(self.attn(self.pre_attn_norm(x)))
            x = x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))
            return 3.0 * torch.tanh(self.final_norm(x) @ self.embed.weight.T / 3.0)

    return fresh(Gemma())


@entry(
    "1 + w norms",
    "soft cap",
    "query-key norms",
    "Linen",
    faults={
        "one-plus-forgotten": fault("pre_attn_norm", "*_norm"),
        "cap-after-the-mask": fault(*ATTENTION),
        "embedding-not-scaled": fault(*inside("", "embed", "pre_attn_norm", "attn"), "embed"),
        "query-norm-eps": fault("attn.q_norm"),
    },
)
def gemma(wrong: str | None) -> Case:
    """Gemma's arrangement against Linen with DeepMind's names."""
    import jax
    import jax.numpy as jnp
    from flax import linen as fnn

    class Norm(fnn.Module):
        eps: float = 1e-6

        @fnn.compact
        def __call__(self, x):
            scale = self.param("scale", fnn.initializers.zeros, (x.shape[-1],))
            scale = scale if wrong == "one-plus-forgotten" else 1 + scale
            return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + self.eps) * scale

    def dense(size: int, name: str) -> Any:
        return fnn.Dense(size, use_bias=False, name=name)

    class Attention(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            b, t, d = x.shape
            names = ("q_proj", "k_proj", "v_proj")
            q, k, v = (dense(d, name)(x).reshape(b, t, HEADS, -1) for name in names)
            q = Norm(1e-5 if wrong == "query-norm-eps" else 1e-6, name="q_norm")(q)
            scores = jnp.einsum("bthc,bshc->bhts", q * (d // HEADS) ** -0.5, Norm(name="k_norm")(k))
            seen = jnp.tril(jnp.ones((t, t), bool))
            if wrong == "cap-after-the-mask":
                scores = 5.0 * jnp.tanh(jnp.where(seen, scores, -1e9) / 5.0)
            else:
                scores = jnp.where(seen, 5.0 * jnp.tanh(scores / 5.0), -jnp.inf)
            y = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v)
            return dense(d, "o_proj")(y.reshape(b, t, d))

    class MLP(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            return dense(WIDTH, "down_proj")(fnn.gelu(dense(HIDDEN, "gate_proj")(x)) * dense(HIDDEN, "up_proj")(x))

    class Embedder(fnn.Module):
        def setup(self) -> None:
            self.input_embedding = self.param("input_embedding", fnn.initializers.normal(), (VOCABULARY, WIDTH))

        def encode(self, ids):
            return self.input_embedding[ids] * (1.0 if wrong == "embedding-not-scaled" else WIDTH**0.5)

        def decode(self, x):
            return x @ self.input_embedding.T

    class Gemma(fnn.Module):
        @fnn.compact
        def __call__(self, ids):
            embedder = Embedder(name="embedder")
            x = embedder.encode(ids)
            y = Attention(name="attn")(Norm(name="pre_attn_norm")(x))
            x = x + Norm(name="post_attn_norm")(y)
            x = x + Norm(name="post_mlp_norm")(MLP(name="mlp")(Norm(name="pre_mlp_norm")(x)))
            return 3.0 * jnp.tanh(embedder.decode(Norm(name="final_norm")(x)) / 3.0)

    first, inputs = torch_gemma(), tokens(2, T)
    return Case(first, linen(Gemma(), carry(held(first), rules(GEMMA_NAMES)), inputs), inputs)


@entry(
    "padding_idx",
    "mean over tokens",
    faults={
        "padding-row-learns": fault("embed", direction="backward"),
        "padding-counted-in-the-mean": fault("", ("embed", "fc")),
        "offset-forgotten": fault("", ("", "embed", "positions"), "positions"),
    },
)
def padded_embedding(wrong: str | None) -> Case:
    """``Embedding(padding_idx=1)`` learns nothing at its row; positions count from the padding index, as RoBERTa's."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1), nn.Embedding(16, WIDTH)
            self.fc = nn.Linear(WIDTH, 4)

        def forward(self, ids):
            real = (ids != 1).int()
            x = self.embed(ids) + self.positions(torch.cumsum(real, 1) * real + 1)
            return self.fc((x * real[..., None]).sum(1) / real.sum(1, keepdim=True) + self.embed(ids).amax(1))

    rngs = nnx.Rngs(0)

    class Embed(nnx.Embed):
        def __call__(self, ids):
            x = super().__call__(ids)
            return x if wrong == "padding-row-learns" else jnp.where(ids[..., None] == 1, jax.lax.stop_gradient(x), x)

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.embed, self.positions = Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.Embed(16, WIDTH, rngs=rngs)
            self.fc = nnx.Linear(WIDTH, 4, rngs=rngs)

        def __call__(self, ids):
            real = (ids != 1).astype(int)
            x = self.embed(ids) + self.positions(jnp.cumsum(real, 1) * real + (wrong != "offset-forgotten"))
            count = ids.shape[1] if wrong == "padding-counted-in-the-mean" else real.sum(1, keepdims=True)
            return self.fc((x * real[..., None]).sum(1) / count + self.embed(ids).max(1))

    names = """
    embed.weight | embed.embedding
    positions.weight | positions.embedding
    fc.weight | fc.kernel | o d -> d o
    fc.bias | fc.bias
    """
    ids = tokens(2, T) // 2 * 2 + 2
    ids = np.where(np.arange(T) < np.array([[T - 1], [T - 3]]), ids % VOCABULARY, 1)
    first = fresh(Torch())
    return Case(first, onto(first, Port(), names), ids)


@entry(
    "stop gradient",
    "backward",
    faults={
        "straight-through-forgotten": fault("", "codes", ("encoder", "decoder"), direction="backward"),
        "commitment-the-other-way": fault("", "codes", "encoder", ("", "encoder", "decoder"), direction="backward"),
    },
)
def vector_quantizer(wrong: str | None) -> Case:
    """Pair a quantizer with a straight-through gradient and two detached losses (VQ-VAE, arXiv 1711.00937)."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
            self.codes = nn.Parameter(torch.zeros(8, 4))

        def forward(self, x):
            z = self.encoder(x)
            code = self.codes[(z[..., None, :] - self.codes).square().sum(-1).argmin(-1)]
            loss = 0.25 * (z - code.detach()).square().mean() + (z.detach() - code).square().mean()
            return self.decoder(z + (code - z).detach()), loss

    rngs = nnx.Rngs(0)

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.encoder, self.decoder = nnx.Linear(WIDTH, 4, rngs=rngs), nnx.Linear(4, WIDTH, rngs=rngs)
            self.codes = nnx.Param(jnp.zeros((8, 4)))

        def __call__(self, x):
            stop = jax.lax.stop_gradient
            z, codes = self.encoder(x), self.codes[...]
            code = codes[jnp.argmin(jnp.square(z[..., None, :] - codes).sum(-1), -1)]
            fixed, moved = (z, code) if wrong == "commitment-the-other-way" else (code, z)
            loss = 0.25 * jnp.square(moved - stop(fixed)).mean() + jnp.square(stop(moved) - fixed).mean()
            through = code if wrong == "straight-through-forgotten" else z + stop(code - z)
            return self.decoder(through), loss

    names = """
    codes | codes
    {path}weight | {path}kernel | o d -> d o
    {path}bias | {path}bias
    """
    first = fresh(Torch())
    return Case(first, onto(first, Port(), names), numbers(2, T, WIDTH))


@entry(
    "adapters",
    "low rank",
    faults={
        "alpha-not-divided-by-the-rank": fault(*inside("", "base", "down", "up")),
        "base-learns": fault("", "base", direction="backward"),
    },
)
def low_rank_adapter(wrong: str | None) -> Case:
    """Pair a frozen layer and a trained low-rank one beside it (arXiv 2106.09685)."""
    import jax
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH)
            self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

        def forward(self, x):
            return nn.functional.linear(x, self.base.weight.detach(), self.base.bias) + self.up(self.down(x)) * (8 / 3)

    rngs = nnx.Rngs(0)

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.base = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.down = nnx.Linear(WIDTH, 3, use_bias=False, rngs=rngs)
            self.up = nnx.Linear(3, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x):
            kernel = self.base.kernel[...]
            kernel = kernel if wrong == "base-learns" else jax.lax.stop_gradient(kernel)
            scale = 8.0 if wrong == "alpha-not-divided-by-the-rank" else 8 / 3
            return x @ kernel + self.base.bias[...] + self.up(self.down(x)) * scale

    first = fresh(Torch())
    names = "{path}weight | {path}kernel | o d -> d o\n{path}bias | {path}bias"
    return Case(first, onto(first, Port(), names), numbers(2, T, WIDTH))
