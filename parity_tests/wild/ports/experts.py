"""Mixtures of experts: Mixtral's top-k (arXiv 2401.04088) and Switch's top-1 (2101.03961). e expert, n token."""

from __future__ import annotations

from typing import Any

from ..gallery import Case, entry, fault, inside
from ..weights import Rule, fresh, numbers, onto, rules

WIDTH, HIDDEN, EXPERTS, TOP = 8, 12, 4, 2
MIXED = inside("", "router", "experts.*")


def torch_mixture() -> Any:
    """Return Mixtral's layer: a loop over numbered experts."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
            self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x):
            return self.w2(functional.silu(self.w1(x)) * self.w3(x))

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

        def forward(self, x):
            flat = x.reshape(-1, WIDTH)
            weights, chosen = self.router(flat).softmax(-1).topk(TOP, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            out = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                token, place = torch.where(chosen == number)
                out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
            return out.view(x.shape)

    return fresh(Mixture())


STACKED: list[Rule] = rules("""
experts.{i}.w1.weight | w1 | o d -> e d o | stack=e
experts.{i}.w2.weight | w2 | o d -> e d o | stack=e
experts.{i}.w3.weight | w3 | o d -> e d o | stack=e
""")


@entry(
    "mixture of experts",
    "stacked experts",
    faults={
        "not-renormalised": fault(*MIXED),
        "renormalised-over-all": fault(*MIXED),
        "first-of-two-only": fault(*MIXED),
    },
)
def mixture_stacked(wrong: str | None) -> Case:
    """Pair a loop over numbered experts against one einsum over stacked ones."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Mixture(nnx.Module):
        def __init__(self) -> None:
            self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
            self.w1 = nnx.Param(jnp.zeros((EXPERTS, WIDTH, HIDDEN)))
            self.w2 = nnx.Param(jnp.zeros((EXPERTS, HIDDEN, WIDTH)))
            self.w3 = nnx.Param(jnp.zeros((EXPERTS, WIDTH, HIDDEN)))

        def __call__(self, x):
            shape, x = x.shape, x.reshape(-1, WIDTH)
            weights = jax.nn.softmax(self.router(x), -1)
            top, chosen = jax.lax.top_k(weights, 1 if wrong == "first-of-two-only" else TOP)
            if wrong == "renormalised-over-all":
                top = jax.nn.softmax(top, -1)
            elif wrong != "not-renormalised":
                top = top / top.sum(-1, keepdims=True)
            gates = jnp.zeros_like(weights).at[jnp.arange(x.shape[0])[:, None], chosen].set(top)
            y = jax.nn.silu(jnp.einsum("nd,edf->nef", x, self.w1[...])) * jnp.einsum("nd,edf->nef", x, self.w3[...])
            return jnp.einsum("nef,efd,ne->nd", y, self.w2[...], gates).reshape(shape)

    first = torch_mixture()
    table = [*STACKED, *rules("router.weight | router.kernel | o d -> d o")]
    return Case(first, onto(first, Mixture(), table), numbers(2, 5, WIDTH), {"rules": STACKED})


@entry(
    "mixture of experts",
    "numbered experts",
    faults={
        "gate-and-up-exchanged": fault(*inside("experts.*", "w1", "w2", "w3"), "experts.*.w1", "experts.*.w3"),
        "experts-exchanged": fault(*MIXED, "experts.*"),
        "router-detached": fault(*MIXED, "router", direction="backward"),
    },
)
def mixture_numbered(wrong: str | None) -> Case:
    """Every expert sees every token in the port; the top logits are chosen before the softmax, which is the same."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Expert(nnx.Module):
        def __init__(self) -> None:
            self.w1 = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
            self.w3 = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
            self.w2 = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x):
            gate, up = (self.w3, self.w1) if wrong == "gate-and-up-exchanged" else (self.w1, self.w3)
            return self.w2(jax.nn.silu(gate(x)) * up(x))

    class Mixture(nnx.Module):
        def __init__(self) -> None:
            self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
            self.experts = nnx.List([Expert() for _ in range(EXPERTS)])

        def __call__(self, x):
            shape, x = x.shape, x.reshape(-1, WIDTH)
            logits = self.router(x)
            top, chosen = jax.lax.top_k(logits, TOP)
            weights = jax.nn.softmax(jax.lax.stop_gradient(top) if wrong == "router-detached" else top, -1)
            gates = jnp.zeros_like(logits).at[jnp.arange(x.shape[0])[:, None], chosen].set(weights)
            order = [1, 0, 2, 3] if wrong == "experts-exchanged" else [0, 1, 2, 3]
            return sum(gates[:, e, None] * self.experts[order[e]](x) for e in range(EXPERTS)).reshape(shape)

    first = torch_mixture()
    return Case(first, onto(first, Mixture(), "{path}weight | {path}kernel | o d -> d o"), numbers(2, 5, WIDTH))


@entry(
    "mixture of experts",
    "Switch",
    faults={
        "gate-not-applied": fault(*inside("", "router", "wi", "wo")),
        "softmax-over-the-tokens": fault(*inside("", "router", "wi", "wo"), "router"),  # the gate goes in last
        "router-in-bfloat16": fault(*MIXED, "router", effect="precision"),
    },
)
def switch(wrong: str | None) -> Case:
    """Top-1 routing with a one-hot dispatch; experts fused into one kernel, hidden units of each in turn."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, EXPERTS)
            self.wi, self.wo = nn.Linear(WIDTH, EXPERTS * HIDDEN), nn.Linear(EXPERTS * HIDDEN, WIDTH, bias=False)

        def forward(self, x):
            gate, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
            y = torch.relu(self.wi(x)).unflatten(-1, (EXPERTS, HIDDEN))
            mine = nn.functional.one_hot(chosen[..., 0], EXPERTS)[..., None]
            return self.wo((y * mine).flatten(-2)) * gate

    rngs = nnx.Rngs(0)

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
            self.wi = nnx.Linear(WIDTH, EXPERTS * HIDDEN, rngs=rngs)
            self.wo = nnx.Linear(EXPERTS * HIDDEN, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x):
            logits = self.router(x)
            if wrong == "router-in-bfloat16":
                logits = logits.astype(jnp.bfloat16).astype(x.dtype)
            gates = jax.nn.softmax(logits, 1 if wrong == "softmax-over-the-tokens" else -1)
            mine = jax.nn.one_hot(jnp.argmax(logits, -1), EXPERTS, dtype=x.dtype)
            y = jax.nn.relu(self.wi(x)).reshape(*x.shape[:-1], EXPERTS, HIDDEN) * mine[..., None]
            y = self.wo(y.reshape(*x.shape[:-1], -1))
            return y if wrong == "gate-not-applied" else y * (gates * mine).sum(-1, keepdims=True)

    first = fresh(Torch())
    table = "{path}weight | {path}kernel | o d -> d o\n{path}bias | {path}bias"
    return Case(first, onto(first, Port(), table), numbers(2, 5, WIDTH))
