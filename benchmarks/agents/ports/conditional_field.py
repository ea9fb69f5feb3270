"""The loss of a linear-chain conditional random field, on sequences of several lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class ConditionalField(nn.Module):
    def __init__(self, features=6, tags=5):
        super().__init__()
        self.emit = nn.Linear(features, tags)
        self.start, self.end = nn.Parameter(torch.randn(tags)), nn.Parameter(torch.randn(tags))
        self.move = nn.Parameter(torch.randn(tags, tags))

    def forward(self, x, tags, mask):
        emissions, rows = self.emit(x), torch.arange(len(tags))
        total = self.start + emissions[:, 0]
        path = self.start[tags[:, 0]] + emissions[rows, 0, tags[:, 0]]
        for step in range(1, tags.shape[1]):
            longer = torch.logsumexp(total[:, :, None] + self.move, dim=1) + emissions[:, step]
            total = torch.where(mask[:, step, None], longer, total)
            gain = self.move[tags[:, step - 1], tags[:, step]] + emissions[rows, step, tags[:, step]]
            path = path + torch.where(mask[:, step], gain, torch.zeros_like(gain))
        last = tags[rows, mask.sum(1) - 1]
        return torch.logsumexp(total + self.end, dim=1) - path - self.end[last]


def original():
    return ConditionalField()


def path_score(params, unary, tags, mask):
    emit = jnp.take_along_axis(unary, tags[..., None], axis=-1)[..., 0]
    trans = params["move"][tags[:, :-1], tags[:, 1:]]
    last = jnp.take_along_axis(tags, mask.sum(1)[:, None] - 1, axis=1)[:, 0]
    score = params["start"][tags[:, 0]] + params["end"][last]
    return score + jnp.sum(emit * mask, axis=1) + jnp.sum(trans * mask[:, 1:], axis=1)


def crf(params, x, tags, mask):
    unary = x @ params["w"] + params["b"]

    def step(alpha, inputs):
        u, keep = inputs
        new = jax.nn.logsumexp(alpha[:, :, None] + params["move"], axis=1) + u
        return jnp.where(keep[:, None], new, alpha), None

    rest = (unary.swapaxes(0, 1)[1:], mask.T[1:])
    alpha, _ = jax.lax.scan(step, params["start"] + unary[:, 0], rest)
    return jax.nn.logsumexp(alpha + params["end"], axis=-1) - path_score(params, unary, tags, mask)


def port(module):
    params = {name: jnp.asarray(getattr(module, name).detach().numpy()) for name in ("start", "end", "move")}
    w, b = module.emit.weight.detach().numpy().T, module.emit.bias.detach().numpy()
    return crf, params | {"w": jnp.asarray(w), "b": jnp.asarray(b)}


def inputs(random, lengths=(7, 4, 5)):
    mask = np.arange(7) < np.array(lengths)[:, None]
    return random.normal(size=(3, 7, 6)).astype(np.float32), random.integers(0, 5, (3, 7)), mask
