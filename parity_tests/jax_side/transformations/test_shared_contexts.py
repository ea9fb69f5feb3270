"""Programs of a thread are lowered in one MLIR context, as `parity_tests/contexts.py` has the suite do it.

What an operation was lowered to in one of them is copied into the others, which are what they would be without.
"""

from __future__ import annotations

import inspect
import re
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir

from ... import contexts


@pytest.fixture
def shared(monkeypatch):
    """Have programs share contexts, two each."""
    monkeypatch.setattr(contexts, "PROGRAMS", 2)
    monkeypatch.setattr(mlir.ModuleContext, "__init__", mlir.ModuleContext.__init__)  # put back afterwards
    contexts.share(mlir)


def lowered(size):
    return jax.jit(lambda x: x * 2 + size).lower(np.ones(size, "float32")).compiler_ir().context


def test_two_programs_share_a_context_and_the_third_gets_another(shared):
    first, second, third = (lowered(size) for size in (3, 4, 5))
    assert first is second
    assert third is not first


def test_threads_do_not_share_a_context(shared):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(lowered(3)))
    thread.start()
    thread.join()
    assert seen[0] is not lowered(4)


def test_programs_of_one_context_give_their_own_results(shared):
    for size in (6, 7, 8):
        np.testing.assert_array_equal(
            jax.jit(lambda x, size=size: x * 2 + size)(np.ones(size, "float32")), np.full(size, 2 + size)
        )


def drawn(key, x):
    return jax.random.normal(key, x.shape) + jnp.cumsum(jax.nn.softmax(x), 0)


def sorted_and_solved(key, x):
    return jnp.linalg.solve(x @ x.T + 9 * jnp.eye(4), jnp.sort(x)), jnp.argmax(x), jax.lax.top_k(x, 2)


def looped(key, x):
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.where(y > 0, y @ x, jnp.exp(y)), x)


def differentiated(key, x):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x) * x.T))(x)


def reduced_over_devices(key, x, first=lambda x: x):
    mesh = jax.make_mesh((1,), ("devices",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spread = jax.P("devices")

    def reduced(x):
        return jnp.exp(jax.lax.psum(jnp.exp(first(x)), "devices") + jax.lax.axis_index("devices"))

    return jnp.exp(jax.shard_map(reduced, mesh=mesh, in_specs=spread, out_specs=spread)(x))


def reduced_twice(key, x):
    """Use another channel for the sum than the function above."""
    return reduced_over_devices(key, x, lambda x: jax.lax.pmax(x, "devices"))


FUNCTIONS = (drawn, sorted_and_solved, looped, differentiated, reduced_over_devices, reduced_twice)


def texts():
    """Return the texts of the programs of each function, under two settings, and of one for open sizes."""
    jax.clear_caches()
    arguments, found = (jax.random.key(0), jnp.ones((4, 4))), []
    for is_partitionable in (True, False, True):
        with jax.threefry_partitionable(is_partitionable):
            found += [jax.jit(lambda *a, one=one: one(*a)).lower(*arguments).as_text() for one in FUNCTIONS]
    rows, columns = jax.export.symbolic_shape("rows, columns")
    for sizes in ((rows, 4), (rows, 4), (columns, rows)):  # of which programs have one, one and two
        shapes = [jax.ShapeDtypeStruct(size, "float32") for size in (sizes, (rows, 4))]
        exported = jax.export.export(jax.jit(lambda x, y: jnp.exp(x).sum() + jnp.exp(y) + x.shape[0]))(*shapes)
        found.append(exported.mlir_module())
    return [re.sub("^#loc.*$", "", text, flags=re.MULTILINE) for text in found]  # which have the lines of callers


def test_programs_are_what_they_are_in_contexts_of_their_own(monkeypatch):
    monkeypatch.setattr(mlir.ModuleContext, "__init__", inspect.unwrap(mlir.ModuleContext.__init__))
    alone = texts()
    assert len(set(alone)) > len(FUNCTIONS)
    contexts.share(mlir)
    assert texts() == alone


def test_programs_call_back_their_own_functions(shared):
    for function in (np.sin, np.cos, np.exp, np.tanh):
        np.testing.assert_allclose(
            jax.jit(lambda x, one=function: jax.pure_callback(one, x, x))(jnp.ones(3)), function(np.ones(3, "float32"))
        )


def test_an_operation_is_lowered_once_in_a_context(monkeypatch):
    monkeypatch.setattr(mlir.ModuleContext, "__init__", inspect.unwrap(mlir.ModuleContext.__init__))
    lowered, lower = [], mlir._cached_lowering_miss
    monkeypatch.setattr(
        mlir,
        "_cached_lowering_miss",
        lambda ctx, eqn, *a, **o: lowered.append(eqn.primitive.name) or lower(ctx, eqn, *a, **o),
    )
    contexts.share(mlir)
    for _ in range(3):
        jax.jit(lambda x: jnp.exp(x) * 2).lower(np.ones(3, "float32"))
    assert lowered == ["exp", "mul"]
