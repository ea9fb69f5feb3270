"""What `jax_attn.backend` does beyond running modules: loading arrays, and compiling the float64 runs."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn import backend


def test_options_that_this_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(backend, "_QUICK_TO_COMPILE", {"xla_no_such_option": 1, "xla_backend_optimization_level": 0})
    backend._known_options.cache_clear()
    try:
        assert backend._known_options() == {"xla_backend_optimization_level": 0}
    finally:
        backend._known_options.cache_clear()


def test_an_array_that_is_loaded_compiles_nothing_and_is_a_copy(monkeypatch):
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
