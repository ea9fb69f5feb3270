"""Every way to ask JAX for a lower precision inside a module gives float64 in the judge's float64 run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend import core

from attn_bridge.parity.compare.sides.subject import Arguments, CannotPromoteError
from jax_attn._parity.running.promotion import promoted
from jax_attn._parity.subject import subject_of

X = np.array([0.12345678901234567, 0.7654321987654321, -1.1111111111111112])
THIRD = 1.0 / 3.0
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


def third(x):
    return x * THIRD


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
ROUNDED = {
    "full": lambda x: x * jnp.full(3, THIRD, F32),
    "array": lambda x: x * jnp.array([THIRD] * 3, F32),
    "float32()": lambda x: x * jnp.float32(THIRD),
}
"""Constants that JAX rounds itself when they are made, before any operation."""

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
NOT_ALONE = {"a value looked at", "dot by an algorithm"}
"""Ways that XLA can't compile here; for the judge they are no obstacle."""

NO_LOSS = {"matmul(precision=)", "random numbers"}
"""Ways that lose nothing on a CPU."""


def cotangent_like(output):
    return np.random.default_rng(1).normal(size=output.shape)


@pytest.fixture(scope="module")
def references():
    """Output and gradient of each exact function, and the output of each low one, all in one program."""

    def compute(x):
        found = {}
        for way, (low, exact) in WAYS.items():
            output, pull = jax.vjp(exact, x)
            less = None if way in NOT_ALONE else low(x)
            found[way] = output, pull(jnp.asarray(cotangent_like(output), output.dtype))[0], less
        return found

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(compute).lower(X).compile(QUICKLY)(X))


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_ask_for_less_gives_float64(references, way):
    output, gradient, _ = references[way]
    subject = subject_of(Module(WAYS[way][0]))
    found = subject.run({}, Arguments((X,)), [cotangent_like(output)], dtype="float64")
    assert found.outputs[0].dtype == found.input_gradients[0].dtype == np.float64
    np.testing.assert_allclose(found.outputs[0], output, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(found.input_gradients[0], gradient, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("way", sorted(set(WAYS) - NOT_ALONE - NO_LOSS))
def test_the_same_way_loses_digits_without_the_lift(references, way):
    output, _, low = references[way]
    assert not np.allclose(low.astype(np.float64), output, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("way", ROUNDED)
@pytest.mark.xfail(reason="JAX rounds a Python number to a dtype without an operation that could be lifted")
def test_a_constant_is_as_precise_as_it_was_written(way):
    found = subject_of(Module(ROUNDED[way])).run({}, Arguments((X,)), dtype="float64").outputs[0]
    np.testing.assert_allclose(found, third(X), rtol=1e-14)


STOCK = {
    "Linear": (lambda **low: nnx.Linear(3, 4, rngs=nnx.Rngs(0), **low), X[None]),
    "LinearGeneral": (lambda **low: nnx.LinearGeneral(3, (2, 2), rngs=nnx.Rngs(0), **low), X[None]),
    "Conv": (lambda **low: nnx.Conv(3, 4, (2,), rngs=nnx.Rngs(0), **low), np.stack([X, 2 * X])[None]),
    "Embed": (lambda **low: nnx.Embed(5, 3, rngs=nnx.Rngs(0), **low), np.array([[1, 4]])),
    "LayerNorm": (lambda **low: nnx.LayerNorm(3, rngs=nnx.Rngs(0), **low), X[None]),
    "RMSNorm": (lambda **low: nnx.RMSNorm(3, rngs=nnx.Rngs(0), **low), X[None]),
    "GroupNorm": (lambda **low: nnx.GroupNorm(6, 3, rngs=nnx.Rngs(0), **low), np.stack([X, X**2], 1).reshape(1, 6)),
    "BatchNorm": (lambda **low: nnx.BatchNorm(3, rngs=nnx.Rngs(0), **low), X[None]),
    "MultiHeadAttention": (
        lambda **low: nnx.MultiHeadAttention(1, 3, decode=False, rngs=nnx.Rngs(0), **low),
        np.stack([X, X**2])[None],
    ),
}


@pytest.mark.parametrize("layer", STOCK)
def test_a_dtype_that_a_stock_layer_was_built_with_is_lifted(layer):
    build, x = STOCK[layer]
    results = []
    for low in ({}, {"dtype": BF16}):
        module = build(**low)
        subject, dtype = subject_of(module), module.dtype if hasattr(module, "dtype") else None
        random = np.random.default_rng(2)
        weights = {name: random.uniform(0.5, 1.5, size=one.shape) for name, one in subject.parameters().items()}
        results.append(subject.run(weights, Arguments((x,)), dtype="float64").outputs[0])
        assert getattr(module, "dtype", None) == dtype
    assert results[1].dtype == np.float64
    np.testing.assert_allclose(results[1], results[0], rtol=1e-14)


def state():
    config = jax.config
    return (
        core.Primitive.bind,
        config.jax_enable_x64,
        config.jax_disable_jit,
        jnp.ones(2).dtype,
        jnp.ones(2, F32).astype(BF16).dtype,
        [vars(kind).get("__call__") for kind in (nnx.Linear, Module)],
    )


class PlannedError(Exception):
    """Raised by a test itself."""


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_lifted(fails):
    before = state()

    def work():
        with promoted():
            assert jnp.ones(2, BF16).dtype == jnp.float64
            if fails:
                raise PlannedError

    if fails:
        with pytest.raises(PlannedError):
            work()
    else:
        work()
    assert state() == before


@jax.jit
def halved(x):
    return (x * THIRD).astype(BF16).astype(x.dtype)


def test_what_was_traced_lifted_stays_apart_from_what_was_not():
    with jax.enable_x64(True):
        rounded = halved(jnp.asarray(X))
        with promoted():
            np.testing.assert_allclose(halved(jnp.asarray(X)), third(X), rtol=1e-14)
        np.testing.assert_array_equal(halved(jnp.asarray(X)), rounded)
        halved.clear_cache()
        with promoted():
            halved(jnp.asarray(X))
        np.testing.assert_array_equal(halved(jnp.asarray(X)), rounded)


@pytest.mark.parametrize(("carried", "most"), [(lambda x: x[0], 4), (lambda x: np.float32(0.0), 1000)])
def test_a_loop_is_traced_once_where_what_it_carries_can_be_lifted(carried, most):
    seen = []

    def step(total, one):
        seen.append(one)
        return total + third(one).astype(F32), one * THIRD

    def function(x):
        total, each = lax.scan(step, carried(x), jnp.repeat(x, 100))
        return total - carried(x), each.sum()

    outputs = subject_of(Module(function)).run({}, Arguments((X,)), dtype="float64").outputs
    for found in outputs:
        np.testing.assert_allclose(found, 100 * third(X).sum(), rtol=1e-12)
    assert 0 < len(seen) <= most


def test_nothing_stays_lifted_after_a_module_that_fails():
    def fail(x):
        raise PlannedError("no")

    before = state()
    subject = subject_of(Module(fail))
    with pytest.raises(CannotPromoteError, match="Flax module Module raised PlannedError: no"):
        subject.run({}, Arguments((X,)), dtype="float64")
    assert state() == before


def test_variables_that_are_no_weights_are_lifted_and_stay_what_they_are():
    class Holder(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.asarray([1.3, -0.4, 0.9], BF16))
            self.table = nnx.Variable(jnp.asarray([0.1, 0.2, 0.3], F32))
            self.count = nnx.Variable(jnp.array([1, 2, 3]))

        def __call__(self, x):
            self.table[...] = self.table[...] * 2
            return x.astype(F16) * self.weight[...].astype(F32) + self.table[...] + self.count[...]

    module = Holder()
    values = {name: np.array(getattr(module, name)[...]) for name in ("weight", "table", "count")}
    subject = subject_of(module)
    found = subject.run(subject.weights(), Arguments((X,)), [np.ones(3)], dtype="float64")
    expected = X * values["weight"].astype(float) + 2.0 * values["table"].astype(float) + values["count"]
    np.testing.assert_allclose(found.outputs[0], expected, rtol=1e-15)
    np.testing.assert_allclose(found.parameter_gradients["weight"], X, rtol=1e-15)
    for name, value in values.items():
        kept = np.array(getattr(module, name)[...])
        assert kept.dtype == value.dtype
        assert np.array_equal(kept, value)


def callback(x):
    return x + lax.stop_gradient(jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, F32), lax.stop_gradient(x)))


REFUSED = {
    "a callback": (callback, "pure_callback"),
    "bits of floats": (lambda x: lax.bitcast_convert_type(x.astype(F32), jnp.int32) + x, "Flax module|bits"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_can_not_be_lifted_is_refused(way):
    function, why = REFUSED[way]
    before = state()
    with pytest.raises(CannotPromoteError, match=why):
        subject_of(Module(function)).run({}, Arguments((X,)), dtype="float64")
    assert state() == before


def test_numpy_indices_are_what_they_were_after_a_run_in_float64():
    """JAX remembers what a NumPy array became, and would give int64 to code that runs without x64 later."""
    index = np.arange(6).reshape(2, 3)

    def look_up(table):
        return table[index] + jnp.asarray(index)[..., None]

    table = np.ones((7, 2), np.float32)
    with promoted():
        jax.make_jaxpr(look_up)(table.astype(np.float64))
    assert jax.eval_shape(look_up, table).dtype == jnp.float32
    assert jnp.asarray(index).dtype == jnp.int32
