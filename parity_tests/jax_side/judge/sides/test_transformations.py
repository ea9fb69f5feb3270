"""Transformations and checkpoints inside a side's call change neither results nor gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_parity.frameworks.jax.subject import MODES, subject_of
from attn_parity.sides.subject import Arguments

from .modules import Layer, X, normal, relative, wide


class Transformed(nnx.Module):
    """Layers behind the transformations of NNX and JAX."""

    def __init__(self, way, rngs):
        self.way = way
        self.scale = nnx.Param(jnp.full(4, 0.7))
        if way == "scan":
            self.layers = nnx.split_rngs(splits=2)(nnx.vmap(Layer))(rngs)
        else:
            self.layer = Layer(rngs)

    def __call__(self, x):
        layer, way, scale = getattr(self, "layer", None), self.way, self.scale[...]
        if way == "remat":
            return nnx.remat(Layer.__call__)(layer, x) * scale
        if way == "scan":
            return nnx.scan(lambda x, one: one(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers) * scale
        if way == "nnx.vmap":
            return nnx.vmap(lambda one, x: one(x), in_axes=(None, 0))(layer, x) * scale
        if way == "nnx.jit":
            return nnx.jit(lambda one, x: one(x))(layer, x) * scale
        if way == "checkpoint":
            return jax.checkpoint(lambda x, scale: jnp.sin(x) * scale)(layer(x), scale)
        if way == "custom_vjp":
            return scaled(layer(x), scale)
        if way == "lax.scan":
            return jax.lax.scan(lambda h, row: (jnp.tanh(h + row * scale), h), x[0], layer(x))[1]
        if way == "while":
            steps = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.int32(0))
            return layer(x) * scale * steps
        if way == "cond":
            return jax.lax.cond(jnp.sum(x) > 0, lambda h: h * scale, jnp.sin, layer(x))
        return jax.vmap(lambda row: layer(row) * scale)(x)


@jax.custom_vjp
def scaled(x, scale):
    return jnp.sin(x) * scale


scaled.defvjp(
    lambda x, scale: (scaled(x, scale), (x, scale)),
    lambda kept, gradient: (gradient * jnp.cos(kept[0]) * kept[1], (gradient * jnp.sin(kept[0])).sum((0, 1))),
)


WAYS = ["remat", "scan", "nnx.vmap", "nnx.jit", "checkpoint", "custom_vjp", "lax.scan", "while", "cond", "vmap"]


@pytest.mark.parametrize("way", WAYS)
def test_transformed_nnx_modules_run_in_every_mode_with_right_gradients(way):
    module = Transformed(way, nnx.Rngs(1))
    subject, arguments = subject_of(module), Arguments((X,))
    weights, cotangent = subject.weights(), normal(2, 3, 4)
    exact = subject.run(weights, arguments, [cotangent], dtype="float64")
    step, name = 1e-6, "scale"
    ends = [
        subject.run({**weights, name: weights[name].astype(float) + sign * step}, arguments, dtype="float64").outputs[0]
        for sign in (1.0, -1.0)
    ]
    slope = ((ends[0] - ends[1]) * cotangent).sum() / (2 * step)
    np.testing.assert_allclose(exact.parameter_gradients[name].sum(), slope, rtol=1e-7)
    for mode in MODES:
        run = subject.run(weights, arguments, [cotangent], mode=mode, seed=2)
        # An operation that rounds at random is off by up to a unit in the last place, one to nearest by half of it.
        limit = 1e-12 if mode in ("tables", "flash") else 6e-6 if mode == "jitter" else 3e-6
        assert relative(run.outputs[0], exact.outputs[0]) < limit, mode
        for one in exact.parameter_gradients:
            assert relative(run.parameter_gradients[one], exact.parameter_gradients[one]) < limit, (mode, one)
        assert run.moved == 0
    calls = subject.substituted(weights, arguments, [cotangent], {})[1]
    paths = [call.path for call in calls]
    inside = [] if way in ("scan", "nnx.vmap", "vmap") else ["layer", "layer.up", "layer.down"]
    assert paths == inside
    for call in calls:
        alone = subject.run(wide(weights), call.arguments, call.cotangents, dtype="float64", path=call.path)
        np.testing.assert_allclose(alone.outputs[0], call.outputs[0], rtol=1e-13, atol=1e-15)
    up = next((one for one in calls if one.path == "layer.up"), None)
    if up is not None:
        gradient = np.einsum("btd,bth->dh", up.arguments.leaves[0], up.cotangents[0])
        np.testing.assert_allclose(gradient, exact.parameter_gradients["layer.up.kernel"], rtol=1e-9, atol=1e-12)
