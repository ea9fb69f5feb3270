"""Two sides of one framework: torch and torch, Linen and NNX, NNX and NNX."""

from __future__ import annotations

from ..gallery import Case, entry, fault, inside
from ..weights import fresh, held, linen, numbers, onto, rules, tokens

WIDTH, HEADS, HIDDEN, T = 8, 2, 12, 6


@entry(
    "torch and torch",
    faults={
        "gate-and-up-exchanged": fault("", "gate", "up", ("", "gate", "up", "down")),  # gate and up are one layer there
        "silu-for-gelu": fault("", ("", "gate", "up", "down")),  # the same
    },
)
def torch_fused_mlp(wrong: str | None) -> Case:
    """Gate and up apart, or in one layer."""
    from torch import nn
    from torch.nn import functional

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
            self.down = nn.Linear(HIDDEN, WIDTH)

        def forward(self, x):
            return self.down(functional.gelu(self.gate(x)) * self.up(x))

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x):
            gate, up = self.gate_up(x).chunk(2, -1)
            if wrong == "gate-and-up-exchanged":
                gate, up = up, gate
            return self.down((functional.silu if wrong == "silu-for-gelu" else functional.gelu)(gate) * up)

    fused = rules("""
    gate.weight, up.weight | gate_up.weight | o d -> o d | along=o
    gate.bias, up.bias | gate_up.bias | o -> o | along=o
    """)
    first = fresh(Apart())
    second = onto(first, Fused(), [*fused, *rules("down.weight | down.weight\ndown.bias | down.bias")])
    return Case(first, second, numbers(2, T, WIDTH), {"rules": fused})


@entry(
    "torch and torch",
    "exchanged layers",
    faults={
        "layers-exchanged": fault("", "fc", "linear"),
        "norms-exchanged": fault("", "norm", "layer_norm"),
        "bias-twice": fault(*inside("", "linear", "head", "layer_norm"), "head"),
    },
)
def torch_equal_names(wrong: str | None) -> Case:
    """Equal names on both sides, which a port uses in the wrong order."""
    from torch import nn

    class Module(nn.Module):
        def __init__(self, wrong: str | None) -> None:
            super().__init__()
            self.fc, self.linear, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.norm, self.layer_norm, self.wrong = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), wrong

        def forward(self, x):
            fc, linear, norm, layer_norm = self.fc, self.linear, self.norm, self.layer_norm
            if self.wrong == "layers-exchanged":
                fc, linear = linear, fc
            if self.wrong == "norms-exchanged":
                norm, layer_norm = layer_norm, norm
            x = x + fc(norm(x)).relu()
            y = self.head(layer_norm(x + linear(x).tanh()))
            return y + self.head.bias if self.wrong == "bias-twice" else y

    first, second = fresh(Module(None)), Module(wrong)
    second.load_state_dict(first.state_dict())
    return Case(first, second.eval(), numbers(2, T, WIDTH))


@entry(
    "Linen and NNX",
    faults={
        "causal-mask-missing": fault("", *inside("attention", "query", "key", "value", "out"), "attention"),
        "norm-eps": fault("norm"),
        "out-and-head-exchanged": fault("", "mix", "head"),
    },
)
def linen_and_nnx(wrong: str | None) -> Case:
    """Use the same layers of both of Flax's interfaces: attention, norm, two square layers."""
    import jax
    from flax import linen as fnn
    from flax import nnx

    class Linen(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            mask = fnn.make_causal_mask(x[..., 0], dtype=bool)
            y = fnn.MultiHeadDotProductAttention(HEADS, name="attention")(x, mask=mask)
            y = fnn.Dense(WIDTH, name="mix")(fnn.LayerNorm(use_fast_variance=False, name="norm")(x + y))
            return fnn.Dense(WIDTH, name="head")(fnn.gelu(y))

    rngs = nnx.Rngs(0)

    class Nnx(nnx.Module):
        def __init__(self) -> None:
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            eps = 1e-5 if wrong == "norm-eps" else 1e-6
            self.norm = nnx.LayerNorm(WIDTH, epsilon=eps, use_fast_variance=False, rngs=rngs)
            self.mix, self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            mask = None if wrong == "causal-mask-missing" else nnx.make_causal_mask(x[..., 0], dtype=bool)
            mix, head = (self.head, self.mix) if wrong == "out-and-head-exchanged" else (self.mix, self.head)
            return head(jax.nn.gelu(mix(self.norm(x + self.attention(x, mask=mask)))))

    second, inputs = fresh(Nnx()), numbers(2, T, WIDTH)
    return Case(linen(Linen(), held(second), inputs), second, inputs)


@entry(
    "NNX and NNX",
    "scan",
    faults={"activation-tanh": fault("", "layers", "layers.*"), "order-reversed": fault("", "layers", "layers.*")},
)
def nnx_scanned_and_unrolled(wrong: str | None) -> Case:
    """Numbered layers against one scanned stack, both in NNX."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def make(rngs):
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    class Unrolled(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([make(nnx.Rngs(i)) for i in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + jax.nn.silu(layer(x))
            return x

    class Scanned(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.vmap(lambda key: make(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))

        def __call__(self, x):
            def step(layer, x):
                return x + (jnp.tanh if wrong == "activation-tanh" else jax.nn.silu)(layer(x))

            reverse = wrong == "order-reversed"
            return nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, reverse=reverse)(self.layers, x)

    table = rules("""
    layers.{i}.kernel | layers.kernel | d o -> l d o | stack=l
    layers.{i}.bias | layers.bias | o -> l o | stack=l
    """)
    first = fresh(Unrolled())
    return Case(first, onto(first, Scanned(), table), numbers(2, T, WIDTH), {"rules": table})


@entry(
    "NNX and NNX",
    "vmap",
    faults={
        "heads-in-the-wrong-order": fault("", "out"),
        "dropout-factor-left-in": fault("", ("out", "heads"), ("value", "out")),
    },
)
def nnx_einsum_and_linear(wrong: str | None) -> Case:
    """Heads merged by reshaping and a ``Linear``, or contracted at once by a ``LinearGeneral``."""
    import jax
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Merged(nnx.Module):
        def __init__(self) -> None:
            self.query, self.key, self.value, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))

        def __call__(self, x):
            q, k, v = (f(x).reshape(*x.shape[:-1], HEADS, -1) for f in (self.query, self.key, self.value))
            return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))

    class General(nnx.Module):
        def __init__(self) -> None:
            heads = (HEADS, WIDTH // HEADS)
            self.query, self.key, self.value = (nnx.LinearGeneral(WIDTH, heads, rngs=rngs) for _ in range(3))
            self.out = nnx.LinearGeneral(heads, WIDTH, axis=(-2, -1), rngs=rngs)

        def __call__(self, x):
            y = jax.nn.dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
            y = y[..., ::-1, :] if wrong == "heads-in-the-wrong-order" else y
            return self.out(y / 0.9 if wrong == "dropout-factor-left-in" else y)

    table = rules(
        """
    out.kernel | out.kernel | (h c) d -> h c d
    out.bias | out.bias
    {path}kernel | {path}kernel | d (h c) -> d h c
    {path}bias | {path}bias | (h c) -> h c
    """,
        h=HEADS,
    )
    first = fresh(Merged())
    return Case(first, onto(first, General(), table), numbers(2, T, WIDTH))


@entry(
    "NNX first",
    "torch second",
    faults={"eps": fault("norm"), "embedding-not-scaled": fault("", ("embed", "norm"))},
)
def nnx_first(wrong: str | None) -> Case:
    """Take Flax's as the original and torch's as the port."""
    import torch
    from flax import nnx
    from torch import nn

    rngs = nnx.Rngs(0)

    class Nnx(nnx.Module):
        def __init__(self) -> None:
            self.embed, self.norm = nnx.Embed(12, WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

        def __call__(self, ids):
            return self.head(self.norm(self.embed(ids) * WIDTH**0.5))

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 5)
            self.norm = nn.RMSNorm(WIDTH, eps=1e-5 if wrong == "eps" else 1e-6)

        def forward(self, ids):
            x = self.embed(ids)
            return self.head(self.norm(x + torch.ones(()) if wrong == "embedding-not-scaled" else x * WIDTH**0.5))

    first = fresh(Nnx())
    names = """
    embed.embedding | embed.weight
    norm.scale | norm.weight
    head.kernel | head.weight | d o -> o d
    head.bias | head.bias
    """
    return Case(first, onto(first, Torch(), names), tokens(2, T, vocabulary=12))
