"""A GRU whose gates are normalised by the unbiased standard deviation."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn


class StdNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.shift


class NormedGRU(nn.Module):
    def __init__(self, features=5, hidden=6):
        super().__init__()
        self.hidden = hidden
        self.inputs, self.states = nn.Linear(features, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.norm_inputs, self.norm_states = StdNorm(3 * hidden), StdNorm(3 * hidden)

    def forward(self, x, state):
        outputs = []
        for step in x.unbind(1):
            from_input = self.norm_inputs(self.inputs(step)).chunk(3, dim=-1)
            from_state = self.norm_states(self.states(state)).chunk(3, dim=-1)
            reset, update = ((a + b).sigmoid() for a, b in zip(from_input[:2], from_state[:2], strict=True))
            new = (from_input[2] + reset * from_state[2]).tanh()
            state = (1 - update) * new + update * state
            outputs.append(state)
        return torch.stack(outputs, dim=1)


def original():
    return NormedGRU()


class Norm(nnx.Module):
    def __init__(self, size):
        self.gain = nnx.Param(jnp.ones(size))
        self.shift = nnx.Param(jnp.zeros(size))

    def __call__(self, x):
        mean = x.mean(axis=-1, keepdims=True)
        std = x.std(axis=-1, keepdims=True, ddof=1)
        return self.gain * (x - mean) / (std + 1e-6) + self.shift


class GRU(nnx.Module):
    def __init__(self, n_in, hidden, *, rngs):
        self.proj_x = nnx.Linear(n_in, 3 * hidden, rngs=rngs)
        self.proj_h = nnx.Linear(hidden, 3 * hidden, rngs=rngs)
        self.norm_x = Norm(3 * hidden)
        self.norm_h = Norm(3 * hidden)

    def __call__(self, x, h):
        outs = []
        for t in range(x.shape[1]):
            xr, xz, xn = jnp.split(self.norm_x(self.proj_x(x[:, t])), 3, axis=-1)
            hr, hz, hn = jnp.split(self.norm_h(self.proj_h(h)), 3, axis=-1)
            r = jax.nn.sigmoid(xr + hr)
            z = jax.nn.sigmoid(xz + hz)
            n = jnp.tanh(xn + r * hn)
            h = (1 - z) * n + z * h
            outs.append(h)
        return jnp.stack(outs, axis=1)


def port(module):
    net = GRU(5, 6, rngs=nnx.Rngs(0))
    for mine, theirs in ((net.proj_x, module.inputs), (net.proj_h, module.states)):
        mine.kernel[...], mine.bias[...] = theirs.weight.detach().numpy().T, theirs.bias.detach().numpy()
    return net


def inputs(random, length=4):
    return tuple(random.normal(size=s).astype(np.float32) for s in ((3, length, 5), (3, 6)))
