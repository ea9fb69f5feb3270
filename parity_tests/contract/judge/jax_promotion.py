"""The adapter of JAX's promotion to float64: ways to ask for less inside a module, and what they compute exactly."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.extend import core

from attn_parity.frameworks.jax.running.promotion import promoted
from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.subject import Subject

from .promotion import THIRD, Exact, PlannedError, X, cotangent_like, third

__all__ = ["promoted"]

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
PLAIN = jnp.asarray([1.1, 0.7, 0.3], F32)
NARROW = np.array([1.1, 0.7, 0.3], np.float32)
IDS = jnp.array([2, 0, 1])


class Module(nnx.Module):
    """A module of one function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def growth(x):
    return jnp.exp(x) * THIRD


@jax.custom_vjp
def thirds(x):
    return (jnp.exp(x.astype(F32)) * THIRD).astype(x.dtype)


def thirds_forward(x):
    return thirds(x), x.astype(BF16)


def thirds_backward(x, gradient):
    return ((gradient.astype(F16) * jnp.exp(x.astype(F32)) * THIRD).astype(gradient.dtype),)


thirds.defvjp(thirds_forward, thirds_backward)


@jax.custom_jvp
def pushed(x):
    return (jnp.exp(x.astype(F16)) * THIRD).astype(x.dtype)


@pushed.defjvp
def pushed_tangent(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return pushed(x), (tangent.astype(BF16) * jnp.exp(x.astype(F32)) * THIRD).astype(tangent.dtype)


def scanned(x):
    def step(total, row):
        total = (total.astype(F32) + row.astype(BF16) * THIRD).astype(F16)
        return total, total

    return lax.scan(step, jnp.zeros((), F16), x)[1]


def looped(x):
    def body(state):
        number, value = state
        return number + 1, (value.astype(BF16) * THIRD).astype(F32)

    return lax.while_loop(lambda state: state[0] < 2, body, (0, lax.stop_gradient(x).astype(F32)))[1] * x


def attention(x, dtype):
    return jax.nn.dot_product_attention(*[x.reshape(1, 3, 1, 1).astype(dtype)] * 3)


def convolution(x, dtype):
    kernel = jnp.full((1, 1, 2), 0.5, dtype)
    return lax.conv_general_dilated(x.reshape(1, 1, 3).astype(dtype), kernel, (1,), "VALID", preferred_element_type=F32)


def drawn(x, dtype):
    return x * jax.random.uniform(jax.random.key(0), (3,), F32).astype(dtype) * THIRD


WAYS = {
    "astype": (lambda x: x.astype(BF16) * THIRD, third),
    "astype by name": (lambda x: x.astype("float16") * THIRD, third),
    "convert_element_type": (lambda x: lax.convert_element_type(x, F16) * THIRD, third),
    "asarray": (lambda x: jnp.asarray(x, BF16) * THIRD, third),
    "float32()": (lambda x: jnp.float32(x) * THIRD, third),
    "result_type": (lambda x: x.astype(jnp.promote_types(BF16, F16)) * THIRD, third),
    "zeros": (lambda x: (jnp.zeros(3, BF16) + x.astype(BF16)) * THIRD, third),
    "full of another": (lambda x: jnp.full(3, x[0], F16) * THIRD, lambda x: third(jnp.full(3, x[0]))),
    "full_like": (lambda x: jnp.full_like(x, x[0], dtype=F32) * THIRD, lambda x: third(jnp.full(3, x[0]))),
    "ones_like": (lambda x: jnp.ones_like(x, BF16) * x.astype(BF16) * THIRD, third),
    "linspace": (lambda x: jnp.linspace(0, THIRD, 3, dtype=F32) * x, lambda x: x * jnp.array([0, 0.5, 1]) * THIRD),
    "arange": (lambda x: jnp.exp(jnp.arange(3, dtype=F32) / 7) * x, lambda x: jnp.exp(jnp.arange(3) / 7) * x),
    "at set": (
        lambda x: jnp.zeros(3, BF16).at[IDS].set((x * THIRD).astype(BF16)),
        lambda x: third(x)[jnp.array([1, 2, 0])],
    ),
    "at add": (
        lambda x: jnp.zeros(3, F32).at[IDS].add((x * THIRD).astype(F32)),
        lambda x: third(x)[jnp.array([1, 2, 0])],
    ),
    "attribute": (lambda x: x.astype(F32) * PLAIN * THIRD, lambda x: x * NARROW.astype(float) * THIRD),
    "NumPy attribute": (lambda x: x.astype(F32) * NARROW * THIRD, lambda x: x * NARROW.astype(float) * THIRD),
    "attributes in a list": (
        lambda x: jnp.concatenate([PLAIN, x.astype(F32) * THIRD]),
        lambda x: jnp.concatenate([NARROW.astype(float), third(x)]),
    ),
    "where": (
        lambda x: jnp.where(x > 0, x.astype(F32) * THIRD, PLAIN),
        lambda x: jnp.where(x > 0, third(x), NARROW.astype(float)),
    ),
    "einsum(preferred_element_type=)": (
        lambda x: jnp.einsum("i,j->ij", x.astype(BF16), x.astype(BF16), preferred_element_type=F32),
        lambda x: jnp.outer(x, x),
    ),
    "matmul(precision=)": (
        lambda x: jnp.matmul(x.astype(F32)[:, None], x.astype(F32)[None], precision="bfloat16"),
        lambda x: jnp.outer(x, x),
    ),
    "dot by an algorithm": (
        lambda x: lax.dot(x.astype(F32), x.astype(F32), precision=lax.DotAlgorithmPreset.BF16_BF16_F32),
        lambda x: jnp.dot(x, x),
    ),
    "convolution": (lambda x: convolution(x, BF16), lambda x: ((x[1:] + x[:-1]) / 2)[None, None]),
    "sum(dtype=)": (lambda x: jnp.sum(x, dtype=BF16) * THIRD, lambda x: jnp.sum(x) * THIRD),
    "mean(dtype=)": (lambda x: jnp.mean(x, dtype=F32), jnp.mean),
    "cumsum(dtype=)": (lambda x: jnp.cumsum(x, dtype=BF16), jnp.cumsum),
    "softmax in float32": (lambda x: jax.nn.softmax(x.astype(F32)).astype(x.dtype), jax.nn.softmax),
    "dot_product_attention": (
        lambda x: attention(x, BF16),
        lambda x: (jax.nn.softmax(jnp.outer(x, x)) @ x).reshape(1, 3, 1, 1),
    ),
    "one_hot(dtype=)": (
        lambda x: jax.nn.one_hot(IDS, 3, dtype=BF16) @ (x * THIRD).astype(BF16),
        lambda x: third(x)[IDS],
    ),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7) * THIRD, third),
    "complex64": (lambda x: jnp.real(x.astype(jnp.complex64)) * THIRD, third),
    "fft": (lambda x: jnp.fft.irfft(jnp.fft.rfft(x.astype(F32)), 3) * THIRD, third),
    "random numbers": (lambda x: drawn(x, F32), lambda x: drawn(x, jnp.float64)),
    "custom_vjp": (thirds, growth),
    "custom_jvp": (pushed, growth),
    "jit": (lambda x: jax.jit(lambda h: h.astype(BF16) * THIRD)(x), third),
    "checkpoint": (jax.checkpoint(lambda x: jnp.exp(x.astype(BF16)) * THIRD), growth),
    "vmap": (jax.vmap(lambda x: x.astype(F16) * THIRD), third),
    "grad": (lambda x: jax.grad(lambda h: jnp.sum(h.astype(BF16) ** 3))(x), lambda x: 3 * x**2),
    "scan": (scanned, lambda x: jnp.cumsum(x) * THIRD),
    "while_loop": (looped, lambda x: lax.stop_gradient(x) / 9 * x),
    "fori_loop": (
        lambda x: lax.fori_loop(0, 2, lambda i, h: (h.astype(BF16) * THIRD).astype(h.dtype), x),
        lambda x: x / 9,
    ),
    "cond": (lambda x: lax.cond(x[0] > 0, lambda h: h.astype(BF16) * THIRD, lambda h: h.astype(BF16), x), third),
    "map": (lambda x: lax.map(lambda h: h.astype(BF16) * THIRD, x), third),
    "a value looked at": (lambda x: x.astype(BF16) * THIRD if jnp.sum(x) < 1 else x, third),
}
"""Way -> a function that asks for less, and the same function without that."""

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
NOT_ALONE = {"a value looked at", "dot by an algorithm"}
"""Ways that XLA can't compile here; for the judge they are no obstacle."""

NO_LOSS = {"matmul(precision=)", "random numbers"}
LOSING = set(WAYS) - NOT_ALONE - NO_LOSS
"""Ways that lose digits by themselves, on a CPU."""


def callback(x):
    return x + lax.stop_gradient(jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, F32), lax.stop_gradient(x)))


def fail(x):
    raise PlannedError("no")


REFUSED = {
    "a callback": (callback, "pure_callback"),
    "bits of floats": (lambda x: lax.bitcast_convert_type(x.astype(F32), jnp.int32) + x, "Flax module|bits"),
    "an error": (fail, "Flax module Module raised PlannedError: no"),
}
"""Way -> a function whose promotion is refused, and the reason."""


def subject(function: Any) -> Subject:
    """Return a side of the judge whose module is a function."""
    return subject_of(Module(function))


def compute_exactly(way: str) -> Exact:
    """Return the outputs of the exact function in float64, and their gradients."""
    output, gradient, _ = _results()[way]
    return [output], [gradient]


def compute_unpromoted(way: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of both functions for the same float64 numbers."""
    output, _, low = _results()[way]
    return low.astype(np.float64), output


@functools.cache
def _results() -> dict[str, Any]:
    """Return output and gradient of each exact function, and the output of each low one, all in one program."""

    def compute(x):
        found = {}
        for way, (low, exact) in WAYS.items():
            output, pull = jax.vjp(exact, x)
            less = None if way in NOT_ALONE else low(x)
            found[way] = output, pull(jnp.asarray(cotangent_like(output), output.dtype))[0], less
        return found

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(compute).lower(X).compile(QUICKLY)(X))


def make_narrow() -> jax.Array:
    """Return an array of bfloat16."""
    return jnp.ones(2, BF16)


def state() -> Any:
    """Return what promotion changes while it lasts."""
    config = jax.config
    return (
        core.Primitive.bind,
        config.jax_enable_x64,
        config.jax_disable_jit,
        jnp.ones(2).dtype,
        jnp.ones(2, F32).astype(BF16).dtype,
        [vars(kind).get("__call__") for kind in (nnx.Linear, Module)],
    )
