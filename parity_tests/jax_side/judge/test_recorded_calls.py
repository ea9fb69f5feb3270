"""`parity.record` on NNX and Linen modules, in plain, compiled and differentiated code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from attn_bridge import parity


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, deterministic=None):
        return self.dropout(self.out(x), deterministic=deterministic)


class Dense(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x, deterministic=True):
        return linen.Dropout(0.5)(linen.Dense(self.width)(x), deterministic=deterministic)


def paths(recording):
    return [(call.path, call.shapes[0], call.training) for call in recording.calls]


def test_an_nnx_module_and_its_submodules_are_recorded():
    block = Block(4, nnx.Rngs(0))
    attributes = set(vars(block))
    with parity.record(block) as recording:
        nnx.jit(lambda block, x: block(x))(block, jnp.ones((3, 4)))
        nnx.grad(lambda block, x: block(x).sum())(block, jnp.full((5, 4), 2.0))
        block.eval()
        block(jnp.zeros((1, 4)), deterministic=True)
    block(jnp.zeros((1, 4)))
    calls = [one for one in paths(recording) if one[0] == ""]
    assert calls == [("", (3, 4), True), ("", (5, 4), True), ("", (1, 4), False)]
    assert [one[:2] for one in paths(recording) if one[0] == "out"] == [
        ("out", (3, 4)),
        ("out", (5, 4)),
        ("out", (1, 4)),
    ]
    assert np.array_equal(recording.calls[3].args[0], np.full((5, 4), 2.0))
    assert dict(recording.calls[-3].inputs.kwargs) == {}, "the mode is noted instead"
    assert (set(vars(block)), recording.left_out) == (attributes, [])


def test_compiled_code_that_outlives_the_context_stores_nothing():
    block = Block(4, nnx.Rngs(0))
    run = nnx.jit(lambda block, x: block(x))
    with parity.record(Block) as recording:
        run(block, jnp.ones((3, 4)))
    run(block, jnp.ones((3, 4)))  # the same program, callback included
    jax.effects_barrier()
    assert paths(recording) == [("", (3, 4), True)]


def test_a_class_of_nnx_is_recorded_with_its_constructor_arguments():
    with parity.record(Block) as recording:
        Block(4, rngs=nnx.Rngs(0))(jnp.ones((1, 4)))
    assert (recording.constructor["width"], paths(recording)) == (4, [("", (1, 4), True)])


def test_a_linen_module_is_recorded_by_its_interceptor():
    module = Dense(4)
    variables = module.init(jax.random.key(0), jnp.ones((2, 4)))
    with parity.record((module, variables)) as recording:
        module.init(jax.random.key(0), jnp.ones((2, 4)))
        rngs = {"dropout": jax.random.key(1)}
        jax.jit(lambda x: module.apply(variables, x, deterministic=False, rngs=rngs))(jnp.ones((3, 4)))
    wanted = [("", (3, 4), True), ("Dense_0", (3, 4), None), ("Dropout_0", (3, 4), True)]
    assert paths(recording) == wanted
    assert recording.constructor == {"width": 4}
    with parity.record(Dense) as recording:
        module.apply(variables, jnp.ones((2, 4)))
    assert paths(recording) == [("", (2, 4), None)]


def test_a_call_with_a_random_key_is_left_out():
    class Drawing(nnx.Module):
        def __call__(self, x, key):
            return x

    with parity.record(Drawing) as recording:
        Drawing()(jnp.ones(2), jax.random.key(0))
        Drawing()(jnp.ones(2), nnx.Rngs(0))
    assert recording.left_out == [
        "Drawing: 1 call not stored: an argument is a random key",
        "Drawing: 1 call not stored: argument[1] is a Rngs",
    ]
