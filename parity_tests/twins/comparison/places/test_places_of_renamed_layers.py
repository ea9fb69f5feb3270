"""A fault in a port whose layers have other names: which is which is told by when they run, and so is the place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx

from attn_bridge import parity
from parity_tests.support.calls import cover


class Mixer(torch.nn.Module):
    """A block that mixes tokens, and then channels."""

    def __init__(self):
        super().__init__()
        self.norm1, self.tok1, self.tok2 = torch.nn.LayerNorm(16), torch.nn.Linear(7, 14), torch.nn.Linear(14, 7)
        self.norm2, self.ch1, self.ch2 = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        tokens = torch.nn.functional.silu(self.tok1(self.norm1(x).transpose(1, 2)))
        x = x + self.tok2(tokens).transpose(1, 2)
        return x + self.ch2(torch.nn.functional.silu(self.ch1(self.norm2(x))))


class Port(nnx.Module):
    """The same in Flax: its norms have the opposite order by name, in which NNX puts them where it clones a module."""

    def __init__(self, fault):
        rngs = nnx.Rngs(0)
        self.ln_tokens = nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs)
        self.fc_in, self.fc_out = nnx.Linear(7, 14, rngs=rngs), nnx.Linear(14, 7, rngs=rngs)
        self.ln_channels = nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs)
        self.mlp_in, self.mlp_out = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.fault = fault

    def __call__(self, x):
        tokens = jax.nn.silu(self.fc_in(jnp.swapaxes(self.ln_tokens(x), 1, 2)))
        x = x + jnp.swapaxes(self.fc_out(tokens), 1, 2)
        normed = self.ln_channels(x)
        act = jax.nn.gelu if self.fault == "activation" else jax.nn.silu
        return (normed if self.fault == "residual" else x) + self.mlp_out(act(self.mlp_in(normed)))


class LinenPort(linen.Module):
    """The same in Linen."""

    fault: str

    def setup(self):
        self.ln_tokens, self.ln_channels = linen.LayerNorm(epsilon=1e-5), linen.LayerNorm(epsilon=1e-5)
        self.fc_in, self.fc_out = linen.Dense(14), linen.Dense(7)
        self.mlp_in, self.mlp_out = linen.Dense(32), linen.Dense(16)

    __call__ = Port.__call__


def in_linen(fault):
    """Return the port and its variables, which `jit` sorts by name."""
    module = LinenPort(fault)
    return module, jax.jit(module.init)(jax.random.key(0), jnp.ones((2, 7, 16)))


PORTS = {"NNX": Port, "NNX, sorted by name": lambda fault: nnx.clone(Port(fault)), "Linen": in_linen}

PLACES = {"activation": "between ch1 and ch2", "residual": "between ch2 and the outputs"}


@cover.rotated(("kind", "fault"), list(PORTS), ["activation", "residual", ""])
def test_a_fault_is_placed_where_it_is(kind, fault):
    x = np.random.default_rng(0).normal(size=(2, 7, 16)).astype("float32")
    report = parity.compare(Mixer(), PORTS[kind](fault), x)
    if not fault:
        assert report.verdict == "equal", str(report)
        return
    assert report.verdict == "different"
    assert PLACES[fault] in str(report), str(report)
    assert "they may begin to differ elsewhere" in str(report).replace("\n", " ")


class Run(torch.nn.Module):
    """Eight layers of one size, named in another order than they run."""

    names = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")

    def __init__(self):
        super().__init__()
        for name in self.names:
            setattr(self, name, torch.nn.Linear(5, 5))

    def forward(self, x):
        for name in self.names:
            x = torch.tanh(getattr(self, name)(x))
        return x


class RunPort(nnx.Module):
    """The same in Flax, defined and named in other orders than they run."""

    names = ("q", "c", "x", "a", "m", "b", "z", "k")

    def __init__(self):
        rngs = nnx.Rngs(0)
        for name in reversed(self.names):
            setattr(self, name, nnx.Linear(5, 5, rngs=rngs))

    def __call__(self, x):
        for name in self.names:
            x = jnp.tanh(getattr(self, name)(x))
        return x


def test_too_many_layers_to_try_are_paired_by_execution_order():
    report = parity.compare(Run(), RunPort(), np.random.default_rng(0).normal(size=(3, 5)).astype("float32"))
    assert report.verdict == "equal", str(report)


class ActivatedNorm(torch.nn.LayerNorm):
    """A norm that holds the activation behind it, as those of timm do."""

    def __init__(self, width):
        super().__init__(width)
        self.act = torch.nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.head = torch.nn.Linear(8, 8), ActivatedNorm(8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.fc(x)).mean(1))


class FlaxPooled(nnx.Module):
    def __init__(self, pool, epsilon=1e-5):
        self.fc, self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(0))
        self.norm, self._pool = nnx.LayerNorm(8, epsilon=epsilon, rngs=nnx.Rngs(0)), pool

    def __call__(self, x):
        return self.head(self._pool(nnx.silu(self.norm(self.fc(x))), axis=1))


def test_code_behind_an_activation_that_one_side_has_in_its_norm_is_the_place():
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    assert parity.compare(Pooled(), FlaxPooled(jnp.mean), x, seeds=1).verdict == "equal"
    places = parity.compare(Pooled(), FlaxPooled(jnp.max), x, seeds=1).first_divergence.candidates
    assert [one.between or one.path for one in places] == [("norm", "head")]
    places = parity.compare(Pooled(), FlaxPooled(jnp.mean, 1e-3), x, seeds=1).first_divergence.candidates
    assert [one.between or one.path for one in places] == ["norm"]
