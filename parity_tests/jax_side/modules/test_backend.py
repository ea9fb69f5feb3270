"""What `jax_attn.backend` does: loading arrays and building blank modules."""

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
