"""An LSTM whose gates also see the cell, over a sequence in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class Direction(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.hidden = hidden
        self.inner = nn.Linear(features + hidden, 4 * hidden)
        self.peep = nn.Parameter(torch.randn(3, hidden) / 2)

    def forward(self, x):
        state = cell = x.new_zeros(x.shape[0], self.hidden)
        outputs = []
        for step in x.unbind(1):
            i, f, g, o = self.inner(torch.cat([step, state], -1)).chunk(4, dim=-1)
            cell_next = (f + self.peep[1] * cell).sigmoid() * cell + (i + self.peep[0] * cell).sigmoid() * g.tanh()
            state = (o + self.peep[2] * cell_next).sigmoid() * cell_next.tanh()
            cell = cell_next
            outputs.append(state)
        return torch.stack(outputs, dim=1)


class Bidirectional(nn.Module):
    def __init__(self, features=4, hidden=5, out=3):
        super().__init__()
        self.forwards, self.backwards = Direction(features, hidden), Direction(features, hidden)
        self.out = nn.Linear(2 * hidden, out)

    def forward(self, x):
        return self.out(torch.cat([self.forwards(x), self.backwards(x.flip(1)).flip(1)], dim=-1))


def original():
    return Bidirectional()


def run(p, xs):
    def cell(carry, x):
        h, c = carry
        zi, zf, zg, zo = jnp.split(jnp.concatenate([x, h], -1) @ p["kernel"] + p["bias"], 4, axis=-1)
        i = jax.nn.sigmoid(zi + p["peep"][0] * c)
        f = jax.nn.sigmoid(zf + p["peep"][1] * c)
        c = f * c + i * jnp.tanh(zg)
        h = jax.nn.sigmoid(zo + p["peep"][2] * c) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((xs.shape[1], p["peep"].shape[1]), xs.dtype)
    return jax.lax.scan(cell, (zeros, zeros), xs)[1]


def bilstm(params, x):
    xs = x.swapaxes(0, 1)
    left = run(params["forwards"], xs)
    right = run(params["backwards"], xs[::-1])[::-1]
    return (jnp.concatenate([left, right], -1) @ params["w"] + params["b"]).swapaxes(0, 1)


def port(module):
    def direction(side):
        weights = {"kernel": side.inner.weight.T, "bias": side.inner.bias, "peep": side.peep}
        return {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in weights.items()}

    params = {"forwards": direction(module.forwards), "backwards": direction(module.backwards)}
    w, b = (jnp.asarray(t.detach().numpy()) for t in (module.out.weight.T, module.out.bias))
    return bilstm, params | {"w": w, "b": b}


def inputs(random, length=6):
    return (random.normal(size=(2, length, 4)).astype(np.float32),)
