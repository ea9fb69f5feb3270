"""Ways to compile a side: as users do, quickly, or not at all; all of them compute the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_attn
from attn_parity.frameworks.jax.running import execution
from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.function import function
from attn_parity.sides.subject import Arguments
from jax_attn import backend


def test_options_that_this_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(execution, "_QUICK_TO_COMPILE", {"xla_no_such_option": 1, "xla_backend_optimization_level": 0})
    execution._known_options.cache_clear()
    try:
        assert execution._known_options() == {"xla_backend_optimization_level": 0}
    finally:
        execution._known_options.cache_clear()


def test_ways_to_run_agree_and_leave_the_module_unchanged():
    module = jax_attn.MultiHeadAttention(6, 8, 5, 0.1, 2, rngs=nnx.Rngs(0))
    module.eval()
    subject = subject_of(module)
    held = subject.weights()
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=array.shape).astype(np.float32) for name, array in held.items()}
    x, cotangent = (draw.normal(size=(2, 5, width)).astype(np.float32) for width in (6, 8))
    found = {}
    for mode in ("untraced", "jit", "quick"):
        run = subject.run(weights, Arguments((x,)), [cotangent], mode=mode)
        assert set(run.parameter_gradients) == set(weights)
        found[mode] = {"output": run.outputs[0], "x": run.input_gradients[0]} | run.parameter_gradients
    expected = subject.run(held, Arguments((x,)), [cotangent], mode="jit").outputs[0]
    assert not np.allclose(found["jit"]["output"], expected), "the weights that are given count"
    for mode in ("jit", "quick"):
        for name, array in found[mode].items():
            np.testing.assert_allclose(array, found["untraced"][name], rtol=1e-4, atol=1e-5, err_msg=f"{mode} {name}")
    for name, array in backend.get_weights(module).items():
        np.testing.assert_array_equal(array, held[name])


def test_untraced_runs_have_values_where_traced_ones_have_none():
    seen = []

    def call(weights, x):
        seen.append(isinstance(jax.lax.stop_gradient(x), jax.core.Tracer))
        return x * weights["scale"]

    subject = subject_of(function(call, {"scale": jnp.full((), 3.0)}))
    x = np.ones((2, 3), np.float32)
    for mode in ("untraced", "eager"):
        np.testing.assert_array_equal(subject.run(subject.weights(), Arguments((x,)), mode=mode).outputs[0], 3.0 * x)
    assert seen == [False, True]
