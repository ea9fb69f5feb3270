"""Tables, and float64 inside low precision, move by a unit of float32; nothing else does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.function import Function
from attn_parity.sides.subject import Arguments

from .modules import NO_TABLES, UNIT, X, normal, relative, wide

ANGLES = np.outer(np.arange(6), 10000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float32)


class Rotary(nnx.Module):
    """Half-split rotary positions, the table as a constant, a variable, or computed in the call."""

    def __init__(self, way):
        self.way, self.proj = way, nnx.Linear(8, 8, rngs=nnx.Rngs(2))
        self.table = nnx.Cache(jnp.stack([jnp.cos(ANGLES), jnp.sin(ANGLES)])) if way == "variable" else None

    def __call__(self, x):
        if self.way == "constant":
            cos, sin = np.cos(ANGLES), np.sin(ANGLES)
        elif self.way == "variable":
            cos, sin = self.table[0], self.table[1]
        else:
            angles = jnp.outer(jnp.arange(6), 10000.0 ** -(jnp.arange(0, 8, 2) / 8))
            cos, sin = jnp.cos(angles), jnp.sin(angles)
        one, two = jnp.split(self.proj(x), 2, -1)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


@pytest.mark.parametrize("way", ["constant", "variable", "call"])
def test_tables_move_by_a_float32_unit(way):
    subject, arguments = subject_of(Rotary(way)), Arguments((normal(2, 6, 8),))
    weights, cotangents = subject.weights(), [normal(2, 6, 8)]
    exact = subject.run(weights, arguments, cotangents, dtype="float64")
    moved = subject.run(weights, arguments, cotangents, mode="tables", seed=1)
    assert moved.moved > 0
    assert moved.outputs[0].dtype == np.float64
    for one, other in (
        (moved.outputs[0], exact.outputs[0]),
        (moved.input_gradients[0], exact.input_gradients[0]),
        (moved.parameter_gradients["proj.kernel"], exact.parameter_gradients["proj.kernel"]),
    ):
        assert UNIT / 10 < relative(one, other) < 10 * UNIT
    again = subject.run(weights, arguments, cotangents, mode="tables", seed=1)
    np.testing.assert_array_equal(again.outputs[0], moved.outputs[0])
    other = subject.run(weights, arguments, cotangents, mode="tables", seed=2)
    assert not np.array_equal(other.outputs[0], moved.outputs[0])


@pytest.mark.parametrize("case", NO_TABLES)
def test_modules_without_tables_do_not_move(case):
    subject, arguments = subject_of(NO_TABLES[case]()), Arguments((X,))
    weights, cotangents = subject.weights(), [normal(2, 3, 4)]
    exact = subject.run(weights, arguments, cotangents, dtype="float64")
    moved = subject.run(weights, arguments, cotangents, mode="tables")
    assert moved.moved == 0 or case == "a bucket"  # what picks a bucket may move, the bucket may not
    np.testing.assert_array_equal(moved.outputs[0], exact.outputs[0])
    np.testing.assert_array_equal(moved.input_gradients[0], exact.input_gradients[0])


def test_inputs_move_only_where_named_as_tables():
    subject = subject_of(Function(lambda w, x, cos: x * w * cos, jnp.ones(4)))
    arguments = Arguments((X, normal(3, 4)))
    assert subject.run(subject.weights(), arguments, mode="tables").moved == 0
    exact = subject.run(subject.weights(), arguments, dtype="float64").outputs[0]
    found = subject.run(subject.weights(), arguments, mode="tables", tables=(1,))
    assert found.moved == 1
    assert 0 < relative(found.outputs[0], exact) < 2 * UNIT


def test_tables_inside_loops_and_branches_move():
    def looped(weights, x):
        table = jnp.sin(jnp.arange(4.0) / 3)

        def step(state, row):
            state = jax.lax.cond(row[0] > 0, lambda h: h * table, lambda h: h + jnp.cos(table), state)
            return state * weights, state

        return jax.lax.scan(jax.checkpoint(step), x[0], x)[1]

    subject, arguments = subject_of(Function(looped, jnp.full(4, 0.8))), Arguments((normal(5, 4),))
    exact = subject.run(subject.weights(), arguments, [np.ones((5, 4))], dtype="float64")
    found = subject.run(subject.weights(), arguments, [np.ones((5, 4))], mode="tables")
    assert found.moved > 0
    assert 0 < relative(found.outputs[0], exact.outputs[0]) < 20 * UNIT
    assert 0 < relative(found.input_gradients[0], exact.input_gradients[0]) < 20 * UNIT


@pytest.mark.parametrize("mode", ["jitter", "logsumexp", "tables"])
def test_a_probe_is_traced_once_for_all_seeds(mode):
    traces = []

    def inner(weights, x):
        traces.append(mode)
        return jax.nn.softmax(weights * x)

    subject = subject_of(Function(inner, jnp.ones(4)))

    def run(seed):
        subject.run(subject.weights(), Arguments((X,)), [normal(*X.shape)], mode=mode, seed=seed)

    run(1)
    once = len(traces)
    run(2)
    assert once > 0
    assert len(traces) == once


def test_float64_inside_float32_modules_moves_by_a_float32_unit():
    def inner(weights, x):
        with jax.enable_x64(True):
            return jnp.sin(jax.lax.convert_element_type(x, jnp.float64) * 3.3)

    subject = subject_of(Function(inner, jnp.ones(4)))
    with jax.enable_x64(True):
        exact = subject.run(subject.weights(), Arguments((X,))).outputs[0]
        moved = subject.run(subject.weights(), Arguments((X,)), mode="jitter").outputs[0]
        double = subject.run(wide(subject.weights()), Arguments((X.astype(np.float64),)), mode="jitter").outputs[0]
    assert exact.dtype == np.float64
    assert UNIT / 20 < relative(moved, exact) < 20 * UNIT
    assert 0 < relative(double, exact) < 1e-14
