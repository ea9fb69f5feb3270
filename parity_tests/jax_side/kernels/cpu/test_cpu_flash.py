"""The kernels for processors: what they compute, what they read and write, and how they are transformed."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import random as generators
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attn_bridge import masks
from attn_kernels import words
from attn_kernels.compiler import compiling, language
from attn_kernels.compiler.processor import LANES
from attn_kernels.flash import dropout, scores, softmax, tiles
from attn_kernels.vectors import exponentials, memory
from jax_attn import functional
from jax_attn.implementations import blocked, cpu_flash
from parity_tests.support.calls import cover

from ..attention_calls import arrays, attend, draw, some, squared


def call(routine: Any, *arguments: int) -> None:
    """Compile a function of the kernels for itself and call it."""
    module = compiling.module("test")
    code = language.Code(language.function(module, "test", [language.WORD] * len(arguments)))
    routine(code, *code.arguments)
    code.ret()
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))
    kind(compiling.address_of(module, "test"))(*arguments)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_numbers_are_rounded_as_numpy_rounds_them(kind):
    """The nearest, ties to even: beyond the largest it is infinity, below the least 0, and a NaN stays one."""
    bits = np.random.default_rng(3).integers(0, 2**32, 4099, dtype=np.uint32)
    ties = np.arange(256, dtype=np.uint32) * 0x8000 + 0x3F800000  # halfway between neighbours of bfloat16
    halves = np.arange(256, dtype=np.uint32) * 0x1000 + 0x3F800000  # and of float16
    edges = np.asarray([65519.9, 65520.0, 3.3961775e38, 6e-8, 2.9e-8, 1e-45, -0.0, np.inf, -np.inf], np.float32)
    payloads = np.asarray([0x7F800001, 0xFF80FFFF, 0x7FC00001, 0xFFFFFFFF], np.uint32)
    all_of_them = (bits, ties, ties + 1, halves, halves - 1, edges, payloads)
    numbers = np.concatenate([one.view(np.float32) for one in all_of_them])
    with np.errstate(all="ignore"):
        want = numbers.astype(jnp.dtype(kind))
    found, back = np.zeros_like(want), np.zeros_like(numbers)
    there, and_back = ({"to": kind}, numbers, found), ({"of": kind, "to": "float32"}, found, back)
    for known, source, target in (there, and_back):

        def copy(code: Any, source: Any, target: Any, known: dict[str, str] = known) -> None:
            memory.copy(code, source, len(numbers), 1.0, target, **known)

        call(copy, source.ctypes.data, target.ctypes.data)
    is_none = np.isnan(numbers)
    np.testing.assert_array_equal(np.isnan(found.astype("float32")), is_none)
    np.testing.assert_array_equal(found[~is_none].view("uint16"), want[~is_none].view("uint16"))
    np.testing.assert_array_equal(back, found.astype("float32"))


@pytest.mark.parametrize(("columns", "width"), [(1, 16), (LANES, LANES), (2 * LANES + 3, 2 * LANES + 5)])
def test_rows_become_columns(columns, width):
    """In squares as wide as a register, and one by one beyond them; what lies beyond the columns stays out."""
    rows = draw(softmax.QUERIES, width, seed=columns).astype("float32")
    out = np.zeros((columns + 1, softmax.QUERIES), np.float32)
    call(tiles.transpose, rows.ctypes.data, columns, width, out.ctypes.data)
    np.testing.assert_array_equal(out[:columns], rows[:, :columns].T)
    assert not out[columns].any()


def test_all_layouts_of_memory_will_do():
    inputs = [jnp.asarray(draw(3, 140, 4, 2, seed=n), "float32") for n in range(3)]

    def turned(*inputs: jax.Array) -> jax.Array:
        return attend(*(jnp.swapaxes(one, 2, 3) for one in inputs), mask=masks.causal())

    found = jax.jit(turned)(*inputs)
    want = attend(*(jnp.swapaxes(one, 2, 3) for one in inputs), mask=masks.causal(), name="reference")
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


# ---- numbers that are none, or large


@cover.rotated(
    ("place", "bits", "dtype"),
    [
        (("query", "key", "value")[(turn + start) % 3], bits)  # so that each place meets each dtype
        for start, bits in enumerate((0x7FC00000, 0x7FC00001, 0xFFFFFFFF))
        for turn in range(3)
    ],
    ["float32", "bfloat16", "float16"],
)
def test_nan_reaches_the_queries_that_see_it(place, bits, dtype):
    inputs = dict(zip(("query", "key", "value"), arrays(queries=140, keys=140, batch=1), strict=True))
    inputs = {name: one.astype(dtype) for name, one in inputs.items()}
    inputs[place] = inputs[place].at[0, 70, 1, 3].set(np.uint32(bits).view(np.float32).astype(jnp.dtype(dtype)))
    found, want = (
        np.isnan(attend(*inputs.values(), mask=masks.causal(), name=name).astype("float32"))
        for name in ("cpu_flash", "reference")
    )
    must = np.zeros_like(want)
    heads = [1] if place == "query" else [2, 3]  # of the second key head
    rows = slice(70, 71) if place == "query" else slice(70, None)
    must[:, rows, heads] = np.isnan(np.where(np.arange(8) == 3, np.nan, 0.0)) if place == "value" else True
    assert found[must].all()
    assert not found[~want].any(), "no more than in the reference"


def test_a_row_of_nan_has_nan_gradients():
    query, key, value = arrays(queries=140, keys=140, batch=1)
    key = key.at[0, 139, 0, :2].set(jnp.asarray([jnp.inf, -jnp.inf]))
    sinks = jnp.asarray([0.5, jnp.nan, 0.1, 0.2])

    def gradients(name: str) -> list[np.ndarray]:
        of_value = jax.grad(lambda value: attend(query, key, value, name=name).sum())(value)
        of_query = jax.grad(lambda query: attend(query, value, value, name=name, sinks=sinks).sum())(query)
        return [np.isnan(of_value), np.isnan(of_query)]

    for found, want in zip(gradients("cpu_flash"), gradients("reference"), strict=True):
        assert want.any()
        assert not want.all()
        np.testing.assert_array_equal(found, want)


def test_a_row_of_nan_has_a_nan_log_sum():
    query, key, value = arrays(queries=140, keys=140)
    call = functional._checked(query.at[0, 7].set(jnp.nan), key, value, None, None, None, None, None, 0.0, None, False)
    for implementation in (cpu_flash, blocked):
        sums = implementation.attend_with_lse(call)[1]
        assert np.isnan(sums[0, :, 7]).all()
        assert np.isfinite(sums[1]).all()


@pytest.mark.parametrize("name", ["cpu_flash", "blocked"])
def test_large_sinks_of_hidden_rows_have_no_gradient(name):
    inputs = arrays(queries=140, keys=140)
    options = {"mask": masks.causal().offset(-9)}
    sinks = jnp.asarray([100.0, 1.0, 0.2, 90.0])
    found, want = (
        jax.grad(lambda sinks, one=one: squared(one, sinks=sinks, **options)(*inputs))(sinks)
        for one in (name, "reference")
    )
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_positions_beyond_float32s_integers_are_distinct():
    start, job = 2**24 + 1, np.zeros(words.END, np.int64)
    intervals = np.stack(masks.sliding_window(3).interval(start + np.arange(64)))
    job[words.QUERIES], job[words.KEYS], job[words.BOUNDS] = 64, 2**25, intervals.ctypes.data
    block, bounds = np.ones(8 * softmax.QUERIES, np.float32), np.zeros(2 * softmax.QUERIES, np.float32)
    call(scores.hide_outside, job.ctypes.data, block.ctypes.data, 0, 64, start, 8, bounds.ctypes.data)
    seen = np.isfinite(block.reshape(8, -1)[:, :5].T)
    assert seen.tolist() == [[i - 3 < j <= i for j in range(8)] for i in range(5)]


# ---- transformations


OPTIONS = {
    "bias, softcap and dropout": {
        "bias": draw(1, 4, 70, 70, seed=4),
        "softcap": 2.0,
        "dropout": 0.3,
        "rng": jax.random.key(5),
    },
    "array": {"mask": masks.causal() & some(1, 1, 70, 70, seed=3)},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.sliding_window(9)},
}
TRANSFORMS = {
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)),
    "vmap": lambda f: jax.vmap(jax.grad(lambda q, k, v: f(q[None], k[None], v[None]), (0, 1, 2))),
    "vmap of query": lambda f: (
        lambda *xs: jax.vmap(jax.grad(f), (0, None, None))(jnp.stack([xs[0], 2 * xs[0]]), *xs[1:])
    ),
    "vmap of key": lambda f: (
        lambda q, k, v: jax.vmap(jax.grad(f, (0, 1, 2)), (None, 3, None))(q, jnp.stack([k, 2 * k], 3), v)
    ),
    "second order": lambda f: jax.grad(
        lambda *xs: sum((one**2).sum() for one in jax.grad(f, (0, 1, 2))(*xs)), (0, 1, 2)
    ),
    "vmap twice": lambda f: lambda *xs: jax.vmap(jax.vmap(jax.grad(f)))(*(jnp.stack([x, 3 * x])[None] for x in xs)),
}


@cover.rotated(("name", "label"), list(TRANSFORMS), list(OPTIONS))
def test_transformations(name, label):
    inputs, options, transform = arrays(), OPTIONS[label], TRANSFORMS[name]
    found, want = (jax.tree.leaves(transform(squared(one, **options))(*inputs)) for one in ("cpu_flash", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=2e-5 * np.abs(wanted).max())


@cover.rotated(
    ("shape", "axes"),
    [(2, 1, 1, 70), (1, 1, 70, 70), (1, 4, 70, 1)],
    [(0, None, None), (None, None, None), (0, 0, 0)],
)
def test_masks_are_vmapped(shape, axes):
    query, key, value = arrays()
    of_mask, of_query, of_key = axes
    inputs = [one if axis is None else jnp.stack([one, 2 * one]) for one, axis in ((query, of_query), (key, of_key))]
    array = jnp.asarray(some(*(shape if of_mask is None else (2, *shape)), seed=8))

    def loss(name: str) -> Any:
        def gradient(mask: jax.Array, query: jax.Array, key: jax.Array, scale: jax.Array) -> jax.Array:
            return jax.grad(squared(name, mask=masks.causal() & mask))(query * scale, key, value)

        return jax.vmap(gradient, (*axes, 0))(array, *inputs, jnp.asarray([0.5, 1.0]))

    found, want = loss("cpu_flash"), loss("reference")
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_numbers_of_tokens_hide_what_fills_up():
    inputs = arrays(queries=140, keys=140)
    for mask in (masks.padding([140, 9]), masks.causal() & masks.padding([3, 100])):
        found, want = (jax.grad(squared(name, mask=mask), (0, 1, 2))(*inputs) for name in ("cpu_flash", "reference"))
        for got, wanted in zip(found, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_key_of_nan_that_is_masked_stays_hidden():
    query, key, value = arrays(queries=140, keys=140)
    seen = np.arange(140) != 77
    for mask in (jnp.asarray(seen[None]), jnp.asarray(np.broadcast_to(seen, (1, 1, 140, 140)))):
        found = attend(query, key.at[:, 77].set(jnp.nan), value, mask=mask)
        np.testing.assert_array_equal(found, attend(query, key, value, mask=mask))


@cover.rotated(
    ("shape", "axes"), [(2, 1, 1, 70), (1, 4, 70, 70), (2, 4, 70, 70), (70, 70)], [(0, None), (None, 0), (0, 0)]
)
def test_biases_are_vmapped(shape, axes):
    query, key, value = arrays()
    of_bias, of_query = axes
    query = query if of_query is None else jnp.stack([query, 2 * query])
    bias = jnp.asarray(draw(*(shape if of_bias is None else (2, *shape)), seed=8), "float32")

    def gradients(name: str) -> Any:
        def of(bias: jax.Array, query: jax.Array) -> jax.Array:
            return squared(name, mask=masks.causal(), bias=bias)(query, key, value)

        return jax.vmap(jax.grad(of, (0, 1)), axes)(bias, query)

    for found, want in zip(gradients("cpu_flash"), gradients("reference"), strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_each_of_several_seeds_draws_its_own_dropout():
    inputs, seeds = arrays(queries=140, keys=140), jax.random.split(jax.random.key(2), 3)

    def gradients(name: str) -> jax.Array:
        def of(seed: jax.Array, factor: jax.Array) -> jax.Array:
            return jax.grad(squared(name, dropout=0.4, rng=seed))(factor * inputs[0], *inputs[1:])

        return jax.vmap(of)(seeds, jnp.asarray([1.0, 1.0, 0.5]))

    found, want = gradients("cpu_flash"), gradients("reference")
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert np.abs(found[0] - found[1]).max() > 0.1 * np.abs(want).max()


@cover.rotated(("rate", "key"), [0.001, 0.3, 0.999], [jax.random.key(5), jax.random.PRNGKey(2**32 - 1)])
def test_dropout_keeps_the_weights_that_the_reference_keeps(rate, key):
    """With values that name their key and all weights alike, the context tells which were kept."""
    query = jnp.zeros((2, 130, 3, 8))
    value = jnp.broadcast_to(jnp.eye(130)[None, :, None], (2, 130, 3, 130))
    options = {"dropout": rate, "rng": key}
    found, want = (attend(query, query, value, name=name, **options) for name in ("cpu_flash", "reference"))
    np.testing.assert_array_equal(found > 0, want > 0)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_places_of_dropout_beyond_32_bits():
    """The counter of a place is a number of 64 bits, as `jax.random.bits` counts large shapes."""
    job, heads, queries, keys = np.zeros(words.END, np.int64), 3, 70_000, 70_001
    seed = np.asarray([7, 2**31 + 5], np.uint32)
    job[words.BATCH], job[words.HEADS], job[words.QUERIES], job[words.KEYS] = 1, heads, queries, keys
    job[words.SEED], job[words.KEPT] = seed.ctypes.data, 2**22
    job[words.FACTOR] = np.float64(2.0).view(np.int64)
    factors, head, first, start = np.zeros((5, softmax.QUERIES), np.float32), 2, 69_900, 69_990
    call(dropout.draw, job.ctypes.data, head, factors.ctypes.data, first, softmax.QUERIES, start, 5)
    rows, columns = first + np.arange(softmax.QUERIES)[None, :], start + np.arange(5)[:, None]
    place = (head * queries + rows) * keys + columns
    assert place.min() > 2**32
    counters = [jnp.asarray(one.ravel(), jnp.uint32) for one in (place >> 32, place & 0xFFFFFFFF)]
    bits = generators.threefry_2x32(tuple(jnp.asarray(seed)), jnp.concatenate(counters)).reshape(2, *place.shape)
    np.testing.assert_array_equal(factors, np.where((bits[0] ^ bits[1]) >> 9 < 2**22, 2.0, 0.0))


@pytest.mark.parametrize(
    ("function", "formula", "rtol"),
    [
        (exponentials.tanh, np.tanh, 3e-7),
        (exponentials.slope_of_tanh, lambda x: np.cosh(np.minimum(np.abs(x), 99.0)) ** -2.0, 5e-7),
    ],
    ids=["itself", "slope"],
)
def test_the_tangent_is_precise_everywhere(function, formula, rtol):
    numbers = np.concatenate([sign * np.geomspace(1e-30, 200.0, 4096, dtype=np.float32) for sign in (1, -1)])
    numbers = np.concatenate([numbers, np.asarray([0.0, -0.0, np.inf, -np.inf], np.float32)] * 8)
    found = numbers.copy()
    assert len(found) % LANES == 0

    def write(code: Any, place: Any) -> None:
        vector = language.ir.VectorType(language.FLOAT, LANES)
        with code.loop(0, 4 * len(found), 4 * LANES) as at:
            code.store(function(code.load(place + at, vector)), place + at)

    call(write, found.ctypes.data)
    np.testing.assert_allclose(found, formula(numbers.astype("float64")), rtol=rtol, atol=1e-37)


@pytest.mark.parametrize("shape", [(1, 4, 70, 70), (2, 1, 1, 70), (1, 1, 70, 70)], ids=str)
def test_a_constant_bias_has_no_gradient_computed(shape):
    query, key, value = arrays()
    bias = jnp.asarray(draw(*shape, seed=3), "float32")

    def of(bias: jax.Array, query: jax.Array) -> jax.Array:
        return squared("cpu_flash", bias=bias, mask=masks.causal())(query, key, value)

    without, both = (str(jax.make_jaxpr(jax.grad(of, which))(bias, query)) for which in (1, (0, 1)))
    assert "attn_bridge_flash_backward" in without
    assert "differentiates_bias=True" not in without
    is_shared = shape == (1, 1, 70, 70)
    assert ("attn_bridge_flash" in both) is not is_shared
    assert ("differentiates_bias=True" in both) is not is_shared
    found, want = jax.grad(of, 1)(bias, query), jax.grad(of, (0, 1))(bias, query)[1]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_bias_has_second_derivatives():
    query, key, value = arrays()
    bias, sinks = jnp.asarray(draw(1, 4, 70, 70, seed=3), "float32"), jnp.asarray(draw(4, seed=5), "float32")

    def second(name: str) -> Any:
        def of(bias: jax.Array, query: jax.Array) -> jax.Array:
            return squared(name, bias=bias, sinks=sinks, mask=masks.causal())(query, key, value)

        def energy(*given: jax.Array) -> jax.Array:
            return sum((one**2).sum() for one in jax.grad(of, (0, 1))(*given))

        return jax.grad(energy, (0, 1))(bias, query)

    for got, wanted in zip(second("cpu_flash"), second("reference"), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_sinks_are_vmapped():
    inputs, sinks = arrays(), jnp.asarray(draw(3, 4, seed=5), "float32")

    def loss(name: str) -> Any:
        return jax.vmap(jax.grad(lambda sinks: squared(name, mask=masks.causal(), sinks=sinks)(*inputs)))

    np.testing.assert_allclose(loss("cpu_flash")(sinks), loss("reference")(sinks), rtol=0, atol=1e-3)


def test_the_logarithms_of_the_sums_have_gradients():
    inputs, sinks = arrays(queries=140, keys=140), jnp.asarray([0.3, -1.0, 2.0, 0.1])

    def ours(q, k, v, sinks):
        call = functional._checked(q, k, v, masks.causal(), None, None, None, sinks, 0.0, None, False)
        return cpu_flash.attend_with_lse(call)

    def plain(q, k, v, sinks):
        k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        scores = jnp.einsum("bthc,bshc->bhts", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        sums = jnp.logaddexp(jax.nn.logsumexp(scores, -1), sinks[:, None])
        return jnp.einsum("bhts,bshc->bthc", jnp.exp(scores - sums[..., None]), v), sums

    (found, pull), (want, pull_want) = (jax.vjp(one, *inputs, sinks) for one in (ours, plain))
    given = tuple(jnp.sin(jnp.arange(one.size)).reshape(one.shape) for one in found)
    for got, wanted in zip((*found, *pull(given)), (*want, *pull_want(given)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())


def test_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    inputs = arrays()
    gradients = jax.grad(squared("cpu_flash", mask=masks.causal()), (0, 1, 2))
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    want = jax.grad(squared("reference", mask=masks.causal()), (0, 1, 2))(*inputs)
    for got, wanted in zip(jax.jit(mapped)(*inputs), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_memory_grows_with_the_tokens_alone():
    shapes = [jax.ShapeDtypeStruct((1, 8192, 4, 8), "float32")] * 3
    for function in (squared("cpu_flash"), jax.grad(squared("cpu_flash"), (0, 1, 2))):
        memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 12 * 8192 * 4 * 8 * 4


def test_it_runs_without_jit():
    inputs = arrays(queries=140, keys=140)
    with jax.disable_jit():
        found = jax.grad(squared("cpu_flash", mask=masks.causal()))(*inputs)
    want = jax.grad(squared("cpu_flash", mask=masks.causal()))(*inputs)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())
