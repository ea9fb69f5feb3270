"""What `jax_attn.backend` does: loading arrays, building blank modules, compiling as users do or quickly."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_attn
from attn_bridge.specs import VARIANTS
from attn_parity.check.cases import cases_of
from jax_attn import backend


def test_options_that_this_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(backend, "_QUICK_TO_COMPILE", {"xla_no_such_option": 1, "xla_backend_optimization_level": 0})
    backend._known_options.cache_clear()
    try:
        assert backend._known_options() == {"xla_backend_optimization_level": 0}
    finally:
        backend._known_options.cache_clear()


def test_loading_an_array_copies_it_and_compiles_nothing(monkeypatch):
    array = np.arange(221.0, dtype=np.float32).reshape(13, 17)
    said: list[str] = []
    monkeypatch.setattr(logging.Logger, "handle", lambda _, record: said.append(record.getMessage()))
    with jax.log_compiles():
        jnp.array(array + 1.0)
        assert any(message.startswith("Compiling") for message in said)
        said.clear()
        loaded = backend.from_numpy(array)
    array[:] = 0.0
    assert not said
    assert (np.asarray(loaded).ravel() == np.arange(221.0)).all()


def test_runner_modes_agree_and_leave_the_module_unchanged():
    module = jax_attn.MultiHeadAttention(6, 8, 5, 0.1, 2, rngs=nnx.Rngs(0))
    module.eval()
    held = {name: array.copy() for name, array in backend.get_weights(module).items()}
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=array.shape).astype(np.float32) for name, array in held.items()}
    x, cotangent = (draw.normal(size=(2, 5, width)).astype(np.float32) for width in (6, 8))
    found = {}
    for mode in ("eager", "jit", "quick"):
        outputs, inputs, parameters = backend.Runner(module, mode=mode)(weights, {"x": x}, [cotangent])
        assert set(parameters) == set(weights)
        found[mode] = {"output": outputs[0], "x": inputs["x"]} | parameters
    expected = backend.Runner(module, mode="jit")(held, {"x": x}, [cotangent])[0][0]
    assert not np.allclose(found["jit"]["output"], expected), "the weights that are given count"
    for mode in ("jit", "quick"):
        for name, array in found[mode].items():
            np.testing.assert_allclose(array, found["eager"][name], rtol=1e-4, atol=1e-5, err_msg=f"{mode} {name}")
    for name, array in backend.get_weights(module).items():
        np.testing.assert_array_equal(array, held[name])


def test_a_runner_takes_no_array_that_jax_would_narrow():
    module = backend.build(VARIANTS[0], {}, "float32")
    with pytest.raises(TypeError, match="x of dtype float64 would narrow to float32"):
        backend.Runner(module, mode="jit")({}, {"x": np.ones((2, 3))}, [np.ones((2, 3))])


def test_only_quick_and_float64_programs_skip_optimizations():
    quick = backend._known_options() if jax.default_backend() == "cpu" else None
    assert backend._compiler_options(is_quick=False) is None
    assert backend._compiler_options(is_quick=True) == quick
    with backend.precision("float64"):
        assert backend._compiler_options(is_quick=False) == quick


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_blank_module_is_built_as_one_with_numbers(variant):
    if variant.is_function:
        return
    arguments = cases_of(variant)[0].arguments(variant)
    blank = backend.build(variant, arguments, "float32")
    full = getattr(jax_attn, variant.name)(**arguments, rngs=nnx.Rngs(0))
    full.eval()
    (graph, state), (wanted_graph, wanted_state) = nnx.split(blank), nnx.split(full)
    assert graph == wanted_graph
    assert jax.tree.map(lambda one: (one.shape, one.dtype), state) == jax.tree.map(
        lambda one: (one.shape, one.dtype), wanted_state
    )


def test_dropout_of_a_blank_module_draws_another_mask_every_time():
    module = backend.build(next(one for one in VARIANTS if one.name == "CausalAttention"), _CAUSAL, "float32")
    backend.set_weights(module, {name: np.ones_like(array) for name, array in backend.get_weights(module).items()})
    module.train()
    x = jnp.ones((1, 6, 4))
    assert not np.array_equal(module(x), module(x))


_CAUSAL = {"d_in": 4, "d_out": 4, "context_length": 6, "dropout": 0.5}
