"""A transformer block whose parts each device computes alone, with faults by name.

The twin is `fault_lab.frameworks.torch.mesh_mutants.block`; `fault_lab.mesh` has configurations and faults. Letters: b
batch, t token, h head, c channel of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jax_attn import backend

from ....mesh.configs import MeshConfig
from ....planted.mutants import Arrays, block_rules
from .attention import Keys, Setup, attend, rotate
from .devices import Devices, detach

EPS = 1e-6

GRADIENTS = {"gradient-averaged": "averaged", "gradient-summed-twice": "twice", "gradient-of-one-shard": "own"}
"""Faults of the gradient of every weight, and what `Devices.enter` calls them."""


class Layer(nnx.Module):
    """The computation of each device with its part of some weights.

    Args:
        setup: configuration, devices and fault.
    """

    def __init__(self, setup: Setup):
        self.setup = setup

    def run(self, tokens: Sequence[Array | None]) -> Array:
        """Have each device compute its part of the tokens."""
        weights, cuts = {}, {}
        for path, leaf in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            name, axis = ".".join(map(str, path)), self.setup.config.cut_axis(_torch_name(path))
            weights[name] = leaf.get_value()
            cuts[name] = 1 - axis if name.endswith("kernel") and axis is not None else axis
        return self.setup.devices.run(self.body, weights, cuts, [one for one in tokens if one is not None])

    def body(self, weights: Mapping[str, Array], x: Array, *others: Array) -> Array:
        """Compute a device's part."""
        raise NotImplementedError

    def enter(self, weights: Mapping[str, Array], name: str) -> Array:
        """Return a weight of this device, whose gradients from all devices are to be added up."""
        setup = self.setup
        axes = ["context"]
        if name.startswith(("k_proj", "v_proj")) and not setup.config.cuts_keys:
            axes.append("tensor")
        weight = setup.devices.enter(weights[name], axes, GRADIENTS.get(setup.fault, ""))
        if setup.fault == "weight-shard-exchanged" and name == "fc_in.kernel":
            weight = setup.devices.move(weight, "tensor")
        if setup.fault == "weight-stale-on-one-device" and name in ("q_proj.kernel", "fc_in.kernel"):
            axis = "context" if setup.devices.size("context") > 1 else "tensor"
            weight = weight * (1.0 + 0.01 * (setup.devices.rank(axis) == setup.devices.size(axis) - 1))
        return weight

    def multiply(self, weights: Mapping[str, Array], x: Array, name: str, *, bias: bool = True) -> Array:
        """Apply this device's part of a linear layer."""
        product = x @ self.enter(weights, f"{name}.kernel")
        return product + self.enter(weights, f"{name}.bias") if bias and f"{name}.bias" in weights else product

    def reduced(self, weights: Mapping[str, Array], x: Array, name: str, what: str, added: Array | None) -> Array:
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
        self.weight = nnx.Param(jnp.ones(width))

    def __call__(self, x: Array) -> Array:
        """Normalise each token."""
        return self.run([x])

    def body(self, weights: Mapping[str, Array], x: Array, *others: Array) -> Array:
        """Normalise a device's tokens."""
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * self.enter(weights, "weight")


class Weight(nnx.Module):
    """A weight of the layer around it."""

    def __init__(self, width: int):
        self.weight = nnx.Param(jnp.ones(width))


class Attention(Layer):
    """Attention with grouped heads.

    Args:
        setup: configuration, devices and fault.
        rngs: source of the initial weights.
    """

    def __init__(self, setup: Setup, *, rngs: nnx.Rngs):
        super().__init__(setup)
        c = setup.config
        inner, inner_kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = nnx.Linear(c.d_model, inner, use_bias=c.bias, rngs=rngs)
        self.k_proj = nnx.Linear(c.d_model, inner_kv, use_bias=c.bias, rngs=rngs)
        self.v_proj = nnx.Linear(c.d_model, inner_kv, use_bias=c.bias, rngs=rngs)
        if c.sinks:
            self.sinks = nnx.Param(jnp.zeros(c.num_heads))
        if c.inner_norm:
            self.inner_norm = Weight(inner)
        self.out_proj = nnx.Linear(inner, c.d_model, use_bias=c.bias, rngs=rngs)

    def __call__(self, x: Array, attention_mask: Array | None = None) -> Array:
        """Return the contribution of attention to the residual stream."""
        return self.run([x, None if attention_mask is None else jnp.asarray(attention_mask, x.dtype)])

    def body(self, weights: Mapping[str, Array], x: Array, *others: Array) -> Array:
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

    def padding(self, valid: Array) -> Array:
        """Return 1 for the keys of a device that are not padding, else 0."""
        devices, fault = self.setup.devices, self.setup.fault
        size, rank = devices.size("context"), devices.rank("context")
        if fault == "padding-of-first-shard":
            return devices.gather(valid, "context", 1)[:, : valid.shape[1]]
        if fault == "padding-cut-along-batch":
            part = valid.shape[0] // size
            return valid[rank * part + devices.row(np.arange(valid.shape[0])[None] % part, 0)]
        return valid

    def heads(self, count: int, key_heads: int) -> Array:
        """Return which of the key heads that a device holds each of its query heads reads."""
        c, devices, fault = self.setup.config, self.setup.devices, self.setup.fault
        size = devices.size("tensor")
        read = np.arange(c.num_heads).reshape(size, count) // c.groups
        if c.cuts_keys:
            read = read - key_heads * np.arange(size)[:, None]
        if fault == "key-head-of-wrong-rank":
            read = np.roll(read, 1, 0)
        return devices.row(read, devices.rank("tensor"))

    def normalised(self, weights: Mapping[str, Array], x: Array) -> Array:
        """Normalise over a width that devices share."""
        devices, fault = self.setup.devices, self.setup.fault
        squares = (x * x).sum(-1, keepdims=True)
        width = x.shape[-1] * devices.size("tensor")
        if fault == "norm-of-shard-alone":
            mean = squares / x.shape[-1]
        elif fault == "norm-gradient-of-shard-alone":
            mean = (squares + detach(devices.total(squares, "tensor") - squares)) / width
        else:
            mean = devices.total(squares, "tensor") / width
        return x / jnp.sqrt(mean + EPS) * self.enter(weights, "inner_norm.weight")


class FeedForward(Layer):
    """Two linear layers with GELU.

    Args:
        setup: configuration, devices and fault.
        rngs: source of the initial weights.
    """

    def __init__(self, setup: Setup, *, rngs: nnx.Rngs):
        super().__init__(setup)
        self.fc_in = nnx.Linear(setup.config.d_model, setup.config.hidden, rngs=rngs)
        self.fc_out = nnx.Linear(setup.config.hidden, setup.config.d_model, rngs=rngs)

    def __call__(self, x: Array, residual: Array) -> Array:
        """Return the residual stream plus the layer's output."""
        return self.run([x, residual])

    def body(self, weights: Mapping[str, Array], x: Array, *others: Array) -> Array:
        """Compute the part of a device's tokens and hidden units."""
        x = self.setup.devices.enter(x, ["tensor"])
        hidden = jax.nn.gelu(self.multiply(weights, x, "fc_in"), approximate=False)
        early = self.setup.fault == "residual-inside-reduction"
        out = self.reduced(weights, hidden, "fc_out", "mlp", others[0] if early else None)
        return out if early else others[0] + out


class MeshBlock(nnx.Module):
    """Attention and an MLP, each behind a norm and with a residual connection.

    Args:
        config: its shape.
        mesh: the devices; None is a single one.
        fault: name of the fault; "" for none.
        rngs: source of the initial weights.
    """

    def __init__(self, config: MeshConfig, mesh: Mesh | None = None, fault: str = "", *, rngs: nnx.Rngs):
        self.setup = setup = Setup(config, Devices(mesh), fault)
        self.attention_norm = Norm(config.d_model, setup)
        self.attention = Attention(setup, rngs=rngs)
        self.mlp_norm = Norm(config.d_model, setup)
        self.mlp = FeedForward(setup, rngs=rngs)

    def __call__(self, x: Array, attention_mask: Array | None = None) -> Array:
        """Return the block's output."""
        x = self.setup.devices.share(x)
        x = x + self.attention(self.attention_norm(x), attention_mask)
        return self.mlp(self.mlp_norm(x), x)


def build(config: MeshConfig, weights: Arrays, mesh: Mesh | None = None, fault: str = "") -> MeshBlock:
    """Return a block that holds weights, given by torch names, on the devices of a mesh."""
    module = MeshBlock(config, mesh, fault, rngs=nnx.Rngs(0))
    backend.set_weights(
        module, block_rules({name: one.shape for name, one in weights.items()}).convert(weights, "torch")
    )
    for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        axis = config.cut_axis(_torch_name(path))
        axis = 1 - axis if path[-1] == "kernel" and axis is not None else axis
        leaf.set_value(module.setup.devices.place(leaf.get_value(), axis))
    return module


def _torch_name(path: Sequence[object]) -> str:
    """Return the torch name of a leaf."""
    name = ".".join(map(str, path))
    return f"{name.removesuffix('kernel')}weight" if name.endswith("kernel") else name
