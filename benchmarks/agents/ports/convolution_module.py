"""A depthwise convolution over time with an even kernel, a gate and batch statistics that are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class ConvolutionModule(nn.Module):
    def __init__(self, width=8, kernel=4):
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(width)
        self.expand, self.project = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.depthwise = nn.Conv1d(width, width, kernel, groups=width)
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x):
        value, gate = self.expand(self.norm(x)).chunk(2, dim=-1)
        hidden = nn.functional.pad((value * gate.sigmoid()).mT, (self.kernel // 2, self.kernel // 2 - 1))
        hidden = nn.functional.silu(self.statistics(self.depthwise(hidden))).mT
        return x + self.project(hidden)


def original():
    torch.manual_seed(7)
    module = ConvolutionModule()
    module.statistics.running_mean.normal_()
    module.statistics.running_var.uniform_(0.4, 1.8)
    return module.eval()


def layer_norm(x, scale, bias, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    var = x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + eps) * scale + bias


def conv_module(params, x):
    h = layer_norm(x, *params["norm"])
    value, gate = jnp.split(h @ params["expand"][0] + params["expand"][1], 2, axis=-1)
    h = value * jax.nn.sigmoid(gate)
    kernel, bias = params["depthwise"]
    size = kernel.shape[0]
    h = jax.lax.conv_general_dilated(
        h, kernel, (1,), [(size // 2, size // 2 - 1)],
        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=h.shape[-1],
    ) + bias  # fmt: skip
    scale, shift, mean, var = params["bn"]
    h = (h - mean) / jnp.sqrt(var + 1e-5) * scale + shift
    return x + jax.nn.silu(h) @ params["project"][0] + params["project"][1]


def port(module):
    bn = module.statistics
    tensors = {
        "norm": (module.norm.weight, module.norm.bias),
        "expand": (module.expand.weight.T, module.expand.bias),
        "depthwise": (module.depthwise.weight.permute(2, 1, 0), module.depthwise.bias),
        "bn": (bn.weight, bn.bias, bn.running_mean, bn.running_var),
        "project": (module.project.weight.T, module.project.bias),
    }
    return conv_module, jax.tree.map(lambda t: jnp.asarray(t.detach().numpy()), tensors)


def inputs(random):
    return (random.normal(size=(2, 9, 8)).astype(np.float32),)
