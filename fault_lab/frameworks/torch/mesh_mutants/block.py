"""A transformer block whose parts each device computes alone, with faults by name.

The twin is `fault_lab.frameworks.jax.mesh_mutants.block`; `fault_lab.mesh` has configurations and faults. Letters: b
batch, t token, h head, c channel of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_attn import backend

from ....mesh.configs import MeshConfig
from ....planted.mutants import Arrays
from .attention import Keys, Setup, attend, rotate
from .devices import Devices, detach

EPS = 1e-6

GRADIENTS = {"gradient-averaged": "averaged", "gradient-summed-twice": "twice", "gradient-of-one-shard": "own"}
"""Faults of the gradient of every weight, and what `Devices.enter` calls them."""


class Layer(nn.Module):
    """The computation of each device with its part of some weights.

    Args:
        setup: configuration, devices and fault.
    """

    def __init__(self, setup: Setup):
        super().__init__()
        self.setup = setup

    def run(self, tokens: Sequence[Tensor | None]) -> Tensor:
        """Have each device compute its part of the tokens."""
        weights, cuts = {}, {}
        for name, weight in self.named_parameters():
            weights[name], cuts[name] = weight, self.setup.config.cut_axis(name)
        return self.setup.devices.run(self.body, weights, cuts, [one for one in tokens if one is not None])

    def body(self, weights: Mapping[str, Tensor], x: Tensor, *others: Tensor) -> Tensor:
        """Compute a device's part."""
        raise NotImplementedError

    def enter(self, weights: Mapping[str, Tensor], name: str) -> Tensor:
        """Return a weight of this device, whose gradients from all devices are to be added up."""
        setup = self.setup
        axes = ["context"]
        if name.startswith(("k_proj", "v_proj")) and not setup.config.cuts_keys:
            axes.append("tensor")
        weight = setup.devices.enter(weights[name], axes, GRADIENTS.get(setup.fault, ""))
        if setup.fault == "weight-shard-exchanged" and name == "fc_in.weight":
            weight = setup.devices.move(weight, "tensor")
        if setup.fault == "weight-stale-on-one-device" and name in ("q_proj.weight", "fc_in.weight"):
            axis = "context" if setup.devices.size("context") > 1 else "tensor"
            weight = weight * (1.0 + 0.01 * (setup.devices.rank(axis) == setup.devices.size(axis) - 1))
        return weight

    def multiply(self, weights: Mapping[str, Tensor], x: Tensor, name: str, *, bias: bool = True) -> Tensor:
        """Apply this device's part of a linear layer."""
        product = x @ self.enter(weights, f"{name}.weight").T
        return product + self.enter(weights, f"{name}.bias") if bias and f"{name}.bias" in weights else product

    def reduced(self, weights: Mapping[str, Tensor], x: Tensor, name: str, what: str, added: Tensor | None) -> Tensor:
        """Apply a linear layer whose inputs devices share, and sum their results."""
        setup, fault = self.setup, self.setup.fault.removeprefix(f"{what}-")
        reduce, size = setup.devices.reduce, setup.devices.size("tensor")
        early = fault == "bias-on-every-rank"
        out = self.multiply(weights, x, name, bias=early)
        out = out if added is None else out + added
        if fault == "reduction-over-wrong-axis":
            out = reduce(out, "context")
        elif fault != "reduction-missing":
            out = reduce(out, "tensor")
        if fault == "reduction-twice":
            out = reduce(out, "tensor")
        if fault == "reduction-averaged":
            out = out / size
        bias = f"{name}.bias"
        return out if early or bias not in weights else out + self.enter(weights, bias)


class Norm(Layer):
    """Root mean square norm over the last axis (arXiv 1910.07467).

    Args:
        width: width of the features.
        setup: configuration, devices and fault.
    """

    def __init__(self, width: int, setup: Setup):
        super().__init__(setup)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each token."""
        return self.run([x])

    def body(self, weights: Mapping[str, Tensor], x: Tensor, *others: Tensor) -> Tensor:
        """Normalise a device's tokens."""
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * self.enter(weights, "weight")


class Weight(nn.Module):
    """A weight of the layer around it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Attention(Layer):
    """Attention with grouped heads.

    Args:
        setup: configuration, devices and fault.
    """

    def __init__(self, setup: Setup):
        super().__init__(setup)
        c = setup.config
        inner, inner_kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.d_model, inner, bias=c.bias)
        self.k_proj = nn.Linear(c.d_model, inner_kv, bias=c.bias)
        self.v_proj = nn.Linear(c.d_model, inner_kv, bias=c.bias)
        if c.sinks:
            self.sinks = nn.Parameter(torch.zeros(c.num_heads))
        if c.inner_norm:
            self.inner_norm = Weight(inner)
        self.out_proj = nn.Linear(inner, c.d_model, bias=c.bias)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the contribution of attention to the residual stream."""
        return self.run([x, None if attention_mask is None else attention_mask.to(x.dtype)])

    def body(self, weights: Mapping[str, Tensor], x: Tensor, *others: Tensor) -> Tensor:
        """Compute the part of a device's tokens and heads."""
        c, devices, fault = self.setup.config, self.setup.devices, self.setup.fault
        size, rank = devices.size("context"), devices.rank("context")
        valid = self.padding(others[0]) if others else None
        x = devices.enter(x, ["tensor"], "own" if fault == "input-gradient-not-reduced" else "")
        layout = c.layout(size)
        places = devices.row(layout, rank)
        if c.balanced:
            x = devices.gather(x, "context", 1)[:, places]
            valid = None if valid is None else devices.gather(valid, "context", 1)[:, places]
        query, key, value = (
            rearrange(self.multiply(weights, x, name), "b t (h c) -> b t h c", c=c.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        heads = self.heads(query.shape[2], key.shape[2])
        key, value = key[:, :, heads], value[:, :, heads]
        if c.cuts_keys and fault == "key-head-of-wrong-rank":
            key, value = devices.move(key, "tensor"), devices.move(value, "tensor")
        if c.rope:
            turned = places
            if fault == "positions-counted-locally":
                turned = devices.row(np.arange(x.shape[1])[None], 0)
            elif fault == "positions-of-wrong-shard":
                turned = devices.row(layout, (rank + 1) % size)
            query, key = rotate(query, turned), rotate(key, turned)
        sinks = self.enter(weights, "sinks") if c.sinks else None
        out = attend(self.setup, query, Keys(key, value, places, valid), sinks)
        merged = rearrange(out, "b t h c -> b t (h c)")
        if c.inner_norm:
            merged = self.normalised(weights, merged)
        if fault == "heads-of-ranks-in-wrong-order":
            merged = devices.move(merged, "tensor")
        added = self.reduced(weights, merged, "out_proj", "attention", None)
        if c.balanced and fault != "balanced-order-not-restored":
            back = np.argsort(layout.ravel()).reshape(layout.shape)
            added = devices.gather(added, "context", 1)[:, devices.row(back, rank)]
        return added

    def padding(self, valid: Tensor) -> Tensor:
        """Return 1 for the keys of a device that are not padding, else 0."""
        devices, fault = self.setup.devices, self.setup.fault
        size, rank = devices.size("context"), devices.rank("context")
        if fault == "padding-of-first-shard":
            return devices.gather(valid, "context", 1)[:, : valid.shape[1]]
        if fault == "padding-cut-along-batch":
            part = valid.shape[0] // size
            return valid[rank * part + devices.row(np.arange(valid.shape[0])[None] % part, 0)]
        return valid

    def heads(self, count: int, key_heads: int) -> Tensor:
        """Return which of the key heads that a device holds each of its query heads reads."""
        c, devices, fault = self.setup.config, self.setup.devices, self.setup.fault
        size = devices.size("tensor")
        read = np.arange(c.num_heads).reshape(size, count) // c.groups
        if c.cuts_keys:
            read = read - key_heads * np.arange(size)[:, None]
        if fault == "key-head-of-wrong-rank":
            read = np.roll(read, 1, 0)
        return devices.row(read, devices.rank("tensor"))

    def normalised(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Normalise over a width that devices share."""
        devices, fault = self.setup.devices, self.setup.fault
        squares = (x * x).sum(-1, keepdim=True)
        width = x.shape[-1] * devices.size("tensor")
        if fault == "norm-of-shard-alone":
            mean = squares / x.shape[-1]
        elif fault == "norm-gradient-of-shard-alone":
            mean = (squares + detach(devices.total(squares, "tensor") - squares)) / width
        else:
            mean = devices.total(squares, "tensor") / width
        return x / torch.sqrt(mean + EPS) * self.enter(weights, "inner_norm.weight")


class FeedForward(Layer):
    """Two linear layers with GELU.

    Args:
        setup: configuration, devices and fault.
    """

    def __init__(self, setup: Setup):
        super().__init__(setup)
        self.fc_in = nn.Linear(setup.config.d_model, setup.config.hidden)
        self.fc_out = nn.Linear(setup.config.hidden, setup.config.d_model)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the residual stream plus the layer's output."""
        return self.run([x, residual])

    def body(self, weights: Mapping[str, Tensor], x: Tensor, *others: Tensor) -> Tensor:
        """Compute the part of a device's tokens and hidden units."""
        x = self.setup.devices.enter(x, ["tensor"])
        hidden = nn.functional.gelu(self.multiply(weights, x, "fc_in"))
        early = self.setup.fault == "residual-inside-reduction"
        out = self.reduced(weights, hidden, "fc_out", "mlp", others[0] if early else None)
        return out if early else others[0] + out


class MeshBlock(nn.Module):
    """Attention and an MLP, each behind a norm and with a residual connection.

    Args:
        config: its shape.
        mesh: the devices; None is a single one.
        fault: name of the fault; "" for none.
    """

    def __init__(self, config: MeshConfig, mesh: DeviceMesh | None = None, fault: str = ""):
        super().__init__()
        self.setup = setup = Setup(config, Devices(mesh), fault)
        self.attention_norm = Norm(config.d_model, setup)
        self.attention = Attention(setup)
        self.mlp_norm = Norm(config.d_model, setup)
        self.mlp = FeedForward(setup)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the block's output."""
        x = self.setup.devices.share(x)
        x = x + self.attention(self.attention_norm(x), attention_mask)
        return self.mlp(self.mlp_norm(x), x)


def build(config: MeshConfig, weights: Arrays, mesh: DeviceMesh | None = None, fault: str = "") -> MeshBlock:
    """Return a block that holds weights, given by torch names, on the devices of a mesh."""
    module = MeshBlock(config, mesh, fault)
    backend.set_weights(module, weights)
    for path, layer in module.named_modules():
        for name, weight in list(layer.named_parameters(recurse=False)):
            whole = f"{path}.{name}"
            placed = module.setup.devices.place(weight.detach(), config.cut_axis(whole))
            setattr(layer, name, nn.Parameter(placed))
    return module
