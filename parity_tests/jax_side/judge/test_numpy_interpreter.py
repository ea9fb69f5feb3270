"""The interpreter of jaxprs against JAX itself in float64, operation by operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

from attn_parity.frameworks.jax.probes import numpy_interpreter
from attn_parity.frameworks.jax.probes.numpy_interpreter import OPAQUE, evaluate
from attn_parity.sides.subject import CannotPromoteError

RANDOM = np.random.default_rng(0)
A, B = RANDOM.normal(size=(3, 4)), RANDOM.normal(size=(4, 5))
Q, R = RANDOM.normal(size=(2, 3, 4)), RANDOM.normal(size=(2, 4, 5))
V = RANDOM.normal(size=6)
P = np.abs(V) + 0.5
IMAGE, KERNEL = RANDOM.normal(size=(2, 6, 6, 3)), RANDOM.normal(size=(3, 3, 3, 4))
I, J = np.array([5, -7, 3, 0, 2, -1]), np.array([2, 2, -2, 3, -5, 4])  # noqa: E741
BOOLS = np.array([True, False, True, True, False, False])
EDGES = np.array([np.nan, np.inf, -np.inf, 0.0, 2.5, -1.5])
OTHER_EDGES = np.array([1.0, np.nan, 2.0, np.inf, -np.inf, np.nan])
Z = RANDOM.normal(size=(3, 3)) + 1j * RANDOM.normal(size=(3, 3))
ONE, MANY, FEW = np.int64(1), np.int64(50), np.int64(-30)


def nhwc(image, kernel, strides, padding, **more):
    return lax.conv_general_dilated(image, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)


def scan_keys(rows):
    def step(key, row):
        key, used = jax.random.split(key)
        return key, row + jax.random.normal(used, row.shape)

    return lax.scan(step, jax.random.key(1), rows)[1]


def halve(x):
    return lax.while_loop(lambda c: jnp.abs(c).max() > 0.1, lambda c: c * 0.5, x)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, gradient: (gradient * jnp.exp(x),))

CASES = {
    # windows
    "conv": (lambda x, k: nhwc(x, k, (1, 2), "SAME"), IMAGE, KERNEL),
    "conv dilated": (
        lambda x, k: nhwc(x, k, (1, 1), ((1, 1), (0, 2)), lhs_dilation=(1, 2), rhs_dilation=(2, 1)),
        IMAGE,
        KERNEL,
    ),
    "conv grouped": (lambda x, k: nhwc(x, k[:, :, :1, :3], (1, 1), "VALID", feature_group_count=3), IMAGE, KERNEL),
    "average pool": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME"), IMAGE),
    # gather and scatter
    "gather": (lambda v, i: v[i], V, I),
    "gather rows": (lambda x, i: x[:, i % 4], Q, I),
    "gather along an axis": (lambda x, i: jnp.take_along_axis(x, i[None, :3, None] % 4, 2), Q, I),
    "gather pairs": (lambda x, i, j: x[i % 2, :, j % 4], Q, I, J),
    "gather clipped": (lambda v, i: v.at[i + 3].get(mode="clip"), V, I),
    "gather filled": (lambda v, i: jnp.nan_to_num(v.at[i + 3].get(mode="fill"), nan=9.0), V, I),
    "gather filled with a number": (lambda v, i: v.at[i + 3].get(mode="fill", fill_value=-2.0), V, I),
    "gather whole numbers filled": (lambda i, j: i.at[j + 4].get(mode="fill"), I, J),
    "gather slices": (lambda x, i: jax.vmap(lambda at: lax.dynamic_slice(x, (at, 0), (2, 3)))(i), A, I),
    "gather from each row": (jax.vmap(lambda row, at: row[at % 3, :2]), Q, I[:2]),
    "gather grad": (jax.grad(lambda v: (v[jnp.array([1, 1, 2])] ** 2).sum()), V),
    "take fill": (lambda v, i: jnp.take(v, i, mode="fill", fill_value=7.0), V, I * 3),
    "take clip": (lambda v, i: jnp.take(v, i, mode="clip"), V, I * 3),
    "take along axis": (lambda a, i: jnp.take_along_axis(a, i, axis=1), A, np.array([[0], [3], [1]])),
    "scatter set": (lambda v, i: v.at[i].set(9.0, mode="drop"), V, np.array([0, 99, 2])),
    "scatter add": (lambda v, i: v.at[i].add(2.0), V, np.array([1, 1, 2])),
    "scatter max": (lambda v, i: v.at[i].max(0.3), V, np.array([1, 1, 2])),
    "segment sum": (lambda v, i: jax.ops.segment_sum(v, i, 3), V, np.array([0, 2, 2, 1, 0, 0])),
    # order
    "sort": (jnp.sort, EDGES),
    "sort grad": (jax.grad(lambda v: (jnp.sort(v) * jnp.arange(6.0)).sum()), V),
    "argsort": (lambda v: jnp.argsort(v, descending=True), V),
    "sort by two keys": (lambda a, b: lax.sort((a, b), num_keys=2), I % 2, V),
    "top_k": (lambda a: lax.top_k(a, 2), A),
    "argmax": (lambda a: jnp.argmax(a, 1), A),
    "argmax of all": (jnp.argmax, A),
    "argmax of a tie": (jnp.argmax, np.array([1.0, 3.0, 3.0])),
    "argmax of nan": (jnp.argmax, EDGES),
    "argmin": (lambda a: jnp.argmin(a, 0), A),
    "searchsorted": (lambda v: jnp.searchsorted(jnp.sort(v), v), V),
    # sums along an axis
    "cumsum": (lambda a: lax.cumsum(a, 1), A),
    "cumsum reverse": (lambda a: lax.cumsum(a, 0, reverse=True), A),
    "cumsum of bools": (jnp.cumsum, BOOLS),
    "cumsum grad": (jax.grad(lambda v: (jnp.cumsum(v) ** 2).sum()), V),
    "cumprod reverse": (lambda a: lax.cumprod(a, 1, reverse=True), A),
    "cummax": (lambda a: lax.cummax(a, 0), A),
    "cummin reverse": (lambda a: lax.cummin(a, 1, reverse=True), A),
    "cumlogsumexp": (lambda a: lax.cumlogsumexp(a, 1), A),
    "max of nan": (jnp.max, EDGES),
    "min of ints": (jnp.min, I),
    "max of none": (lambda v: jnp.max(v[:0], initial=-3.0), V),
    "prod": (lambda a: jnp.prod(a, 0), A),
    "prod of ints": (jnp.prod, J),
    "sum over no axis": (lambda a: lax.reduce_sum(a, ()), A),
    "sum of bytes": (lambda a: lax.reduce_sum(a, (0,)), np.array([3, 250, 7], np.uint8)),
    "any and all": (lambda b: (jnp.any(b), jnp.all(b)), BOOLS),
    "xor of ints": (lambda i: lax.reduce_xor(i, (0,)), I),
    "logsumexp of -inf": (special.logsumexp, np.array([-np.inf, -np.inf])),
    # shapes
    "pad": (lambda a: lax.pad(a, 2.5, ((1, 2, 0), (0, 1, 0))), A),
    "pad negative": (lambda a: lax.pad(a, 2.5, ((-1, 2, 0), (1, -2, 0))), A),
    "pad inside": (lambda a: lax.pad(a, 2.5, ((0, 0, 1), (1, 0, 2))), A),
    "slice": (lambda a: lax.slice(a, (0, 1), (3, 4), (2, 2)), A),
    "reversed slice": (lambda a: a[::-1, ::2], A),
    "dynamic_slice": (lambda a, i: lax.dynamic_slice(a, (i, i), (2, 2)), A, ONE),
    "dynamic_slice clamped above": (lambda a, i: lax.dynamic_slice(a, (i, i), (2, 2)), A, MANY),
    "dynamic_slice clamped below": (lambda a, i: lax.dynamic_slice(a, (i, i), (2, 2)), A, FEW),
    "dynamic_slice batched": (jax.vmap(lambda a, i: lax.dynamic_slice(a, (i,), (2,))), A, np.array([0, 9, -1])),
    "dynamic_update_slice": (lambda a, i: lax.dynamic_update_slice(a, jnp.ones((2, 2)), (i, i)), A, ONE),
    "dynamic_update_slice clamped": (lambda a, i: lax.dynamic_update_slice(a, jnp.ones((2, 2)), (i, 0)), A, MANY),
    "broadcast_in_dim": (lambda v: lax.broadcast_in_dim(v, (2, 6, 3), (1,)), V),
    "reshape with dimensions": (lambda a: lax.reshape(a, (4, 3), (1, 0)), A),
    "transpose": (lambda q: q.transpose(2, 0, 1), Q),
    "squeeze and expand": (lambda a: jnp.expand_dims(jnp.squeeze(a[:, None]), (0, 2)), A),
    "concatenate": (lambda q: jnp.concatenate([q, q * 2], 1), Q),
    "split": (lambda v: lax.split(v, (1, 2, 3)), V),
    "roll, repeat and tile": (lambda v: (jnp.roll(v, 2), jnp.repeat(v, 2), jnp.tile(v, (2, 2))), V),
    "iota": (lambda a: a * lax.broadcasted_iota(jnp.float64, (3, 4), 1), A),
    "tril": (lambda a: jnp.tril(a, -1), A),
    # products
    "einsum": (lambda q, r: jnp.einsum("bij,bjk->bik", q, r), Q, R),
    "einsum, batch last": (lambda q, r: jnp.einsum("bij,bjk->kib", q, r), Q, R),
    "einsum, outer": (lambda q, r: jnp.einsum("bij,bkl->bijkl", q, r), Q, R),
    "einsum of a diagonal": (lambda a: jnp.einsum("ii->i", a[:, :3]), A),
    "dot over two axes": (lambda q: lax.dot_general(q, q, (((1, 2), (1, 2)), ((0,), (0,)))), Q),
    "dot over axes in another order": (
        lambda q, r: lax.dot_general(q, r, (((1, 2), (2, 1)), ((0,), (0,)))),
        Q,
        np.ascontiguousarray(Q.swapaxes(1, 2)[::-1]),
    ),
    "dot, batch in the middle": (
        lambda q, r: lax.dot_general(q, r, (((2,), (0,)), ((1,), (1,)))),
        Q,
        np.ascontiguousarray(Q[::-1].transpose(2, 1, 0)),
    ),
    "dot of ints": (lambda i, j: i @ j, I, J),
    "dot over nothing": (lambda a: a[:, :0] @ a[:0], A),
    "dot in float32": (lambda a, b: a @ b, A.astype(np.float32), B.astype(np.float32)),
    "matrix and vector": (lambda a, b: a @ b[:, 0], A, B),
    "product of complex numbers": (lambda z: z @ z, Z),
    # choices
    "select by bool": (lambda b, v: lax.select_n(b, v, -v), BOOLS, V),
    "select by int": (lambda i, v: lax.select_n(i, v, -v, v * 2), np.array([0, 1, 2, 0, 1, 2], np.int32), V),
    "where": (lambda b, v: jnp.where(b[:, None], v[None], 0.0), BOOLS, V),
    "clamp": (lambda v: lax.clamp(-0.5, v, 0.5), EDGES),
    "clamp between arrays": (lambda v, low: lax.clamp(low, v, low + 1), V, V[::-1].copy()),
    "maximum and minimum": (lambda a, b: (jnp.maximum(a, b), jnp.minimum(a, b)), EDGES, OTHER_EDGES),
    "maximum of bools": (lambda b: jnp.maximum(b, ~b), BOOLS),
    "comparisons": (lambda a, b: (a < b, a <= b, a > b, a >= b, a == b, a != b), EDGES, OTHER_EDGES),
    # functions
    "erf": (lambda v: (special.erf(v), special.erfc(v), special.erfinv(jnp.tanh(v))), V),
    "gamma": (lambda p: (special.gammaln(p), special.digamma(p)), P),
    "exponentials": (lambda v: (jnp.exp(v), jnp.expm1(v), jnp.exp2(v), jax.nn.sigmoid(v * 50)), V),
    "logarithms": (lambda p: (jnp.log(p), jnp.log1p(p), jnp.logaddexp(p, -p)), P),
    "roots": (lambda p: (jnp.sqrt(p), jnp.cbrt(-p), lax.rsqrt(p)), P),
    "rsqrt at its edges": (lax.rsqrt, np.array([0.0, -1.0, np.inf])),
    "powers": (lambda p, v: (p**v, v**3, v**-2, lax.integer_pow(v, 0)), P, V),
    "power by an int": (lambda v, i: lax.pow(v, i), V, J),
    "angles": (lambda v, p: (jnp.arctan2(v, p), jnp.arcsin(jnp.tanh(v)), jnp.arctanh(jnp.tanh(v)), jnp.tan(v)), V, P),
    "hyperbolic": (lambda v, p: (jnp.sinh(v), jnp.arcsinh(v), jnp.arccosh(p + 1), jnp.tanh(v)), V, P),
    "round": (lambda v: (jnp.round(v), lax.round(v), jnp.floor(v), jnp.ceil(v), jnp.trunc(v)), EDGES),
    "sign and abs": (lambda v, i: (jnp.sign(v), jnp.abs(v), jnp.sign(i), jnp.abs(i)), EDGES, I),
    "is_finite": (lambda v: (jnp.isfinite(v), jnp.isnan(v)), EDGES),
    "remainder": (lambda v, p: (lax.rem(v, p), lax.rem(v, -p), jnp.mod(v, p)), V, P),
    "division by zero": (lambda v: (v / 0.0, 1.0 / v), EDGES),
    "integer division": (lambda i, j: (lax.div(i, j), lax.rem(i, j), i // j, i % j), I, J),
    "integer division by zero": (lambda i: (lax.div(i, i * 0), lax.rem(i, i * 0)), I),
    "byte division": (
        lambda i, j: (lax.div(i, j), lax.rem(i, j)),
        np.array([250, 7], np.uint8),
        np.array([7, 3], np.uint8),
    ),
    "stack and tile": (lambda v, i: (jnp.stack([v, v + 1], 1), jnp.tile(i, (2, 3))), V, I),
    "integer power": (lambda i: (i**3, jnp.power(i, jnp.abs(i))), I),
    "wrapped integers": (lambda v: (v + v, v * v, -v), np.array([100, 250, 5], np.uint8)),
    "bits": (lambda i, j: (i & j, i | j, i ^ j, ~i, i << 2, i >> 1, lax.population_count(i)), I, J),
    "logic": (lambda b: (b & ~b, b | ~b, b ^ b, b + b, b * b), BOOLS),
    # dtypes
    "to int, saturated": (lambda v: v.astype(jnp.int8), np.array([300.0, -300.0, 1.7, -1.7, np.nan, np.inf])),
    "to int, wrapped": (lambda i: i.astype(jnp.int8), I * 100),
    "to bool and back": (lambda v: v.astype(bool).astype(jnp.float64), EDGES),
    "through bfloat16": (lambda v: v.astype(jnp.bfloat16).astype(jnp.float64), V),
    "through float16": (lambda v: v.astype(jnp.float16), np.array([1e6, -1e6, 1e-9])),
    "complex": (lambda z: (jnp.real(z), jnp.imag(z), jnp.conj(z), jnp.abs(z), z / z[::-1], jnp.exp(z)), Z),
    "complex to real grad": (jax.grad(lambda v: jnp.abs(v.astype(jnp.complex128) * (1 + 2j)).sum()), V),
    "fft": (lambda v: (jnp.fft.fft(v), jnp.fft.irfft(jnp.fft.rfft(v))), V),
    "int read as float": (lambda i: lax.bitcast_convert_type(i, jnp.float64), I),
    # random numbers
    "random bits": (lambda i: jax.random.bits(jax.random.key(3), (4,)) + i, np.uint32(1)),
    "normal along a scan over keys": (scan_keys, A[:2]),
    # control flow
    "scan": (lambda a: lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.zeros(4), a), A),
    "scan reverse": (lambda a: lax.scan(lambda c, x: (c * 0.5 + x, c - x), jnp.zeros(4), a, reverse=True), A),
    "scan over nothing": (lambda a: lax.scan(lambda c, x: (c + x, c * 2), jnp.ones(4), a[:0]), A),
    "scan by length": (lambda a: lax.scan(lambda c, _: (c * 1.5, c), a, None, length=3), A),
    "scan with a constant": (lambda a, b: lax.scan(lambda c, x: (c + x @ b, None), jnp.zeros(5), a), A, B),
    "scan grad": (jax.grad(lambda a: lax.scan(lambda c, x: (jnp.tanh(c + x), c), jnp.zeros(4), a)[1].sum()), A),
    "while": (halve, A),
    "while batched": (jax.vmap(halve), A),
    "while never": (lambda a: lax.while_loop(lambda c: False, lambda c: c * 0.5, a), A),
    "while with constants": (
        lambda a, b: lax.while_loop(lambda c: c[0] < len(b), lambda c: (c[0] + 1, c[1] + b[c[0]].sum()), (0, a)),
        A,
        B,
    ),
    "fori": (lambda a, n: lax.fori_loop(0, n, lambda i, c: c * i + 1, a), A, np.int64(3)),
    "cond": (lambda p, a: lax.cond(p, jnp.sin, jnp.cos, a), np.bool_(True), A),
    "cond not": (lambda p, a: lax.cond(p, jnp.sin, jnp.cos, a), np.bool_(False), A),
    "cond batched": (jax.vmap(lambda v: lax.cond(v > 0, jnp.sin, jnp.cos, v)), V),
    "switch": (lambda i, a: lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], a), ONE, A),
    "switch beyond": (lambda i, a: lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], a), MANY, A),
    "switch below": (lambda i, a: lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], a), FEW, A),
    "map": (lambda a: lax.map(lambda x: jnp.sin(x).sum(), a), A),
    # calls
    "jit in jit": (lambda v: jax.jit(lambda x: jax.jit(jnp.tanh)(x) * 2)(v), V),
    "checkpoint grad": (jax.grad(lambda v: jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))(v).sum()), V),
    "custom_vjp": (clipped, V),
    "custom_vjp grad": (jax.grad(lambda v: clipped(v).sum()), V),
    "custom_jvp grad": (jax.grad(lambda v: jax.nn.gelu(v, approximate=False).sum()), V),
    "softmax grad": (jax.grad(lambda a: (jax.nn.softmax(a) ** 2).sum()), A),
    "stop_gradient": (jax.grad(lambda v: (v * lax.stop_gradient(v)).sum()), V),
    "optimization_barrier": (lambda a: lax.optimization_barrier((a, a + 1)), A),
    "solve": (lambda a: jnp.linalg.solve(a @ a.T + jnp.eye(3), a), A),
}


QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def wanted():
    """What XLA gives for all cases, compiled as one program; a GPU's leaves out some roundings."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        operands = {name: arrays for name, (_, *arrays) in CASES.items()}
        everything = jax.jit(lambda given: {name: CASES[name][0](*arrays) for name, arrays in given.items()})
        program = everything.lower(operands).compile(QUICKLY)
        return {name: list(map(np.asarray, jax.tree.leaves(found))) for name, found in program(operands).items()}


@pytest.mark.parametrize("name", CASES)
def test_operations_match_jax(wanted, name):
    function, *arrays = CASES[name]
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(function)(*arrays)
    found = evaluate(closed, *arrays)
    assert len(found) == len(wanted[name]) > 0
    for got, expected in zip(found, wanted[name], strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        if got.dtype.kind in "fc":
            tolerance = 1e-6 if got.dtype == np.float32 else 1e-12
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(got, expected)


def test_loops_over_numbers_and_whole_numbers_are_left_to_numpy(monkeypatch):
    """Blocks of attention are loops with positions: JAX would take most of the time for these."""

    def step(total, one):
        number, count = one
        return total + number * jnp.exp(number), lax.div(count, 2) + lax.rem(count, 3)

    with jax.enable_x64(True):
        closed = jax.make_jaxpr(lambda v, i: lax.scan(step, v.sum(), (v, i)))(V, I)
        wanted = jax.jit(lambda v, i: lax.scan(step, v.sum(), (v, i)))(V, I)
    monkeypatch.setattr(numpy_interpreter, "_bind", lambda equation, args: pytest.fail(equation.primitive.name))
    total, counts = evaluate(closed, V, I)
    np.testing.assert_allclose(total, wanted[0], rtol=1e-12)
    np.testing.assert_array_equal(counts, wanted[1])


def test_operands_are_left_as_they_were():
    rows = A.copy()
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(lambda a: lax.dynamic_update_slice(a, a[:1] * 2, (1, 0)).at[0].add(1.0))(rows)
    evaluate(closed, rows)
    assert np.array_equal(rows, A)


def test_constants_are_part_of_the_program():
    table = jnp.asarray(A, jnp.float32)
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(lambda v: v @ table)(V[:3])
    np.testing.assert_allclose(evaluate(closed, V[:3])[0], V[:3] @ np.asarray(table), rtol=1e-6)


CALLBACK = jax.ShapeDtypeStruct((6,), np.float32)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda v: jax.pure_callback(np.sin, CALLBACK, v), "the operation pure_callback has a precision of its own"),
        (lambda v: lax.bitcast_convert_type(v, jnp.int32), "the bits of floating-point numbers are read"),
    ],
)
def test_operations_of_fixed_precision_are_refused(function, why):
    v = V.astype(np.float32)
    with pytest.raises(CannotPromoteError, match=why):
        evaluate(jax.make_jaxpr(function)(v), v)


def test_an_opaque_operation_on_integers_is_run():
    assert "pure_callback" in OPAQUE
    i = I.astype(np.int32)
    closed = jax.make_jaxpr(lambda i: jax.pure_callback(np.sort, jax.ShapeDtypeStruct((6,), np.int32), i))(i)
    assert np.array_equal(evaluate(closed, i)[0], np.sort(i))


def test_what_nothing_reads_is_not_run(monkeypatch):
    run = []
    original = numpy_interpreter._bind
    monkeypatch.setattr(numpy_interpreter, "_bind", lambda *given: run.append(given) or original(*given))

    def program(x):
        jax.random.fold_in(jax.random.key(0), 3)
        return jnp.cos(x)

    np.testing.assert_allclose(evaluate(jax.make_jaxpr(program)(V), V)[0], np.cos(V), rtol=1e-6)
    assert not run
