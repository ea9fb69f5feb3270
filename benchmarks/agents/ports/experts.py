"""A layer of experts: each token runs through the two that a router weighs most."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, width=10, hidden=7, experts=5, top=2):
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.randn(experts, width, hidden) / 3)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 3)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 3)

    def forward(self, x):
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = nn.functional.silu(torch.einsum("btd,edf->btef", x, self.gate))
        every = torch.einsum("btef,efd->bted", hidden * torch.einsum("btd,edf->btef", x, self.up), self.down)
        kept = every.gather(2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return (weights[..., None] * kept).sum(2), logits


def original():
    return Experts()


def moe(params, x, k=2):
    logits = x @ params["router"]
    probs = jax.nn.softmax(logits, axis=-1)
    top, idx = jax.lax.top_k(probs, k)
    top = top / top.sum(axis=-1, keepdims=True)
    combine = (jax.nn.one_hot(idx, logits.shape[-1]) * top[..., None]).sum(axis=-2)
    g = jnp.einsum("btd,edf->btef", x, params["gate"])
    u = jnp.einsum("btd,edf->btef", x, params["up"])
    y = jnp.einsum("btef,efd,bte->btd", jax.nn.silu(g) * u, params["down"], combine)
    return y, logits


def port(module):
    params = {name: jnp.asarray(getattr(module, name).detach().numpy()) for name in ("gate", "up", "down")}
    return moe, params | {"router": jnp.asarray(module.router.weight.detach().numpy().T)}


def inputs(random):
    return (random.normal(size=(2, 6, 10)).astype(np.float32),)
