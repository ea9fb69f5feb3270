"""The triangular system of the gated delta rule in JAX: solved by products, since XLA's solvers on CPUs can hang."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_attn.recurrent import recurrence


def below(*shape: int, seed: int = 0) -> np.ndarray:
    return np.tril(np.random.default_rng(seed).normal(size=shape), -1)


@pytest.mark.parametrize("size", [1, 3, 8, 9, 64, 100])
def test_it_solves_what_numpy_solves(size):
    matrix, right = below(2, 3, size, size) / size**0.5, np.random.default_rng(1).normal(size=(2, 3, size, 5))
    with jax.enable_x64(True):
        found = recurrence._inverse(jnp.asarray(matrix)) @ jnp.asarray(right)
    want = np.linalg.solve(np.eye(size) + matrix, right)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13 * np.abs(want).max())


def test_keys_that_are_all_alike_lose_no_precision():
    """Powers of this matrix reach 1e18: a series of them would leave nothing of float32."""
    matrix, right = np.tril(np.ones((64, 64), np.float32), -1), np.random.default_rng(2).normal(size=(64, 5))
    found = recurrence._inverse(jnp.asarray(matrix)) @ jnp.asarray(right, jnp.float32)
    np.testing.assert_allclose(found, np.linalg.solve(np.eye(64) + matrix, right), rtol=0, atol=1e-5)


def test_its_derivatives_are_those_of_the_solution():
    with jax.enable_x64(True):
        operands = jnp.asarray(below(20, 20)) / 4, jnp.asarray(np.random.default_rng(3).normal(size=(20, 3)))
        check_grads(
            lambda a, b: recurrence._inverse(a) @ b,
            operands,
            order=2,
            modes=("fwd", "rev"),
            atol=1e-6,
            rtol=1e-6,
        )


def test_no_solver_of_a_library_is_called():
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(1, 256, 2, 8)] * 3 + [(1, 256, 2)] * 2]

    def total(*operands: jax.Array) -> jax.Array:
        return (recurrence.gated_delta_rule(*operands)[0] ** 2).sum()

    program = jax.jit(jax.grad(total, (0, 1, 2, 3, 4))).lower(*shapes).as_text()
    assert "dot_general" in program
    assert "trsm" not in program
    assert "triangular_solve" not in program
