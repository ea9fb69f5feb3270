"""Kernels that have gradients alone refuse forward-mode derivatives in a line that names others."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_attn import functional
from jax_attn.implementations import cudnn
from jax_attn.implementations.call import KernelCall

QUERY, KEY, VALUE = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 8)).astype("float32")
LINE = (
    "implementation 'cudnn' has no forward-mode derivatives (jax.jvp, jax.jacfwd, jax.hessian): name 'blocked' or "
    "'reference', by implementation= or functional.use_implementation"
)


def reference(query, key, value):
    return functional.dot_product_attention(query, key, value, implementation="reference", scale=0.5)


@pytest.fixture
def attend(monkeypatch):
    """Return cuDNN's implementation of a call on any machine, with a rule for gradients alone."""

    @jax.custom_vjp
    def fused(query, key, value):
        return reference(query, key, value)

    def forward(*operands):
        return jax.vjp(reference, *operands)

    fused.defvjp(forward, lambda pullback, cotangent: pullback(cotangent))
    monkeypatch.setattr("jax.nn.dot_product_attention", lambda query, key, value, **options: fused(query, key, value))
    return lambda query: cudnn.attend(KernelCall(query, KEY, VALUE, None, None, 0.5, None, None, 0.0, None, False))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_forward_mode_of_a_kernel_with_gradients_alone_is_one_line(attend, transform):
    for derivative in (
        lambda: jax.jvp(transform(attend), (QUERY,), (QUERY,)),
        lambda: jax.jit(lambda q: jax.jvp(transform(attend), (q,), (q,)))(QUERY),
        lambda: jax.hessian(transform(lambda scale: (attend(QUERY * scale) ** 2).sum()))(1.0),
    ):
        with pytest.raises(NotImplementedError) as caught:
            derivative()
        assert str(caught.value) == LINE


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_gradients_of_a_kernel_with_gradients_alone_are_as_before(attend, transform):
    def slope(function):
        return jax.grad(transform(lambda query: (function(query) ** 2).sum()))

    def plain(query):
        return reference(query, KEY, VALUE)

    np.testing.assert_allclose(slope(attend)(QUERY), slope(plain)(QUERY), rtol=1e-5, atol=1e-6)
    batch = np.stack([QUERY, 2 * QUERY])
    np.testing.assert_allclose(jax.vmap(slope(attend))(batch), jax.vmap(slope(plain))(batch), rtol=1e-5, atol=1e-6)
    remat = jax.grad(lambda query: (jax.checkpoint(transform(attend))(query) ** 2).sum())(QUERY)
    np.testing.assert_allclose(remat, slope(plain)(QUERY), rtol=1e-5, atol=1e-6)
