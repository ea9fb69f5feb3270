"""Every way in which JAX computes attention: against the reference in float64, its transformations, its limits."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import attn_bridge
import jax_attn
from attn_bridge import masks
from jax_attn import functional
from jax_attn.implementations import block_operands, block_plan, blocked, differentiation

from .attention_calls import CASES, FLOAT32, arrays, draw, hold, loss, operands, padding, program, results


@pytest.mark.parametrize("label", CASES)
def test_blocked_computes_what_the_reference_does(label):
    for seed in (0, 1):
        hold(label, seed, "float32", FLOAT32)


@pytest.fixture
def anew():
    """Trace everything anew, since a program that is there would be of another plan."""
    program.cache_clear()
    yield
    program.cache_clear()


@pytest.fixture
def rolled(monkeypatch, anew):
    """Take the loops of long sequences, with blocks of which short ones have several."""
    monkeypatch.setattr(block_plan, "UNROLLED", 0)
    monkeypatch.setattr(block_plan, "LARGE_BLOCK", 64)


@pytest.fixture(params=[False, True], ids=["widened", "narrow"])
def narrow(request, monkeypatch, anew):
    """Take products of bfloat16 as they are, or widen their operands first, whatever the processor."""
    monkeypatch.setattr(block_plan, "multiplies_bfloat16", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    "label",
    [
        "no mask, odd sizes",
        "causal",
        "causal with padding",
        "per head",
        "bias, per head",
        "one key head",
        "window",
        "softcap",
        "sinks",
    ],
)
def test_rolled_loops_compute_what_the_reference_does(label, rolled):
    hold(label, 2, "float32", FLOAT32)


@pytest.mark.parametrize("label", ["causal", "sinks", "bias, per head", "window with padding", "one key head"])
def test_blocked_computes_in_float16_what_the_reference_does(label):
    hold(label, 0, "float16", float(jnp.finfo("float16").eps))


@pytest.mark.parametrize(
    "label",
    [
        "causal",
        "causal, long",
        "softcap",
        "sinks",
        "bias, per head",
        "window with padding",
        "one key head",
        "head_dim 40",
        "all hidden",
    ],
)
def test_blocked_computes_in_bfloat16_what_the_reference_does(label, narrow):
    hold(label, 0, "bfloat16", float(jnp.finfo("bfloat16").eps))


@pytest.mark.parametrize("label", ["softcap", "sinks", "head_dim 40", "window with padding"])
def test_rolled_loops_compute_in_bfloat16_what_the_reference_does(label, rolled):
    hold(label, 0, "bfloat16", float(jnp.finfo("bfloat16").eps))


@pytest.mark.parametrize(("of_keys", "of_values"), [(3.0, 3.0), (0.0, 30.0), (10.0, 30.0)])
@pytest.mark.parametrize("loops", ["unrolled", "rolled"])
def test_gradients_in_bfloat16_lose_no_more_where_all_keys_have_much_in_common(
    of_keys, of_values, loops, narrow, request
):
    if loops == "rolled":
        request.getfixturevalue("rolled")
    inputs = operands(queries=300, keys=300, batch=1)
    inputs = [one + shift for one, shift in zip(inputs, (0.0, of_keys, of_values), strict=True)]
    inputs = [np.asarray(jnp.asarray(one, "bfloat16")).astype("float64") for one in inputs]
    options = {"mask": masks.causal()}
    with jax.enable_x64(True):
        exact = results(inputs, options, "reference", "float64")
    plain, found = (results(inputs, options, name, "bfloat16") for name in ("reference", "blocked"))
    for got, want, other in zip(found, exact, plain, strict=True):
        assert np.abs(got - want).max() <= 1.5 * np.abs(other - want).max() + 2.0**-9 * np.abs(want).max()


@pytest.mark.parametrize("scale", [0.0, -0.3, -0.25, 1e-40])
def test_any_finite_scale_is_taken(scale, narrow):
    inputs = [jnp.asarray(one, "bfloat16") for one in operands(queries=140, keys=140)]
    found, want = (
        functional.dot_product_attention(*inputs, scale=scale, implementation=name).astype("float32")
        for name in ("blocked", "reference")
    )
    np.testing.assert_allclose(found, want, rtol=0, atol=2.0**-7 * np.abs(want).max())


def test_products_are_narrow_where_the_processor_has_them_and_all_operands_are(narrow):
    inputs = [jnp.asarray(one, jnp.bfloat16) for one in operands()]
    call = functools.partial(functional.dot_product_attention, implementation="blocked")

    jaxpr = str(jax.make_jaxpr(lambda *inputs: call(*inputs))(*inputs))
    assert ("bf16[70,70]" in jaxpr) == narrow  # the weights, rounded for their product
    mixed = str(jax.make_jaxpr(lambda *inputs: call(*inputs))(inputs[0], inputs[1].astype(jnp.float32), inputs[2]))
    assert "bf16[70,70]" not in mixed


@pytest.mark.parametrize("label", ["causal, long", "softcap", "sinks", "bias, per head", "window with padding"])
def test_blocked_is_really_float64(label):
    sizes, choose = CASES[label]
    inputs, options = operands(**sizes), choose(0)
    with jax.enable_x64(True):
        found, exact = (results(inputs, options, name, "float64") for name in ("blocked", "reference"))
    for got, want in zip(found, exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=0.0, atol=1e-13 * max(np.abs(one).max() for one in exact))


@pytest.mark.parametrize(
    "label", ["padding", "per head", "all hidden", "bias that hides", "window past the keys", "sinks"]
)
def test_hidden_rows_give_zeros_without_gradient(label):
    sizes, choose = CASES[label]
    inputs, options = operands(**sizes), choose(0)
    bias, mask = options.get("bias"), options.get("mask")
    batch, queries, heads, _ = inputs[0].shape
    allowed = np.ones((1, 1, 1, 1), bool)
    if mask is not None:
        positions = np.arange(1000)
        allowed = masks.as_mask(mask).allowed(positions[:queries, None], positions[None, : inputs[1].shape[1]])
    if bias is not None:
        allowed = allowed & (bias > -np.inf)
    hidden = ~np.broadcast_to(allowed, (batch, heads, queries, inputs[1].shape[1])).any(-1).swapaxes(1, 2)
    assert hidden.any()
    context, *gradients = results(inputs, options, "blocked", "float32")
    assert not context[hidden].any()
    assert not gradients[0][hidden].any()
    assert all(np.isfinite(one).all() for one in gradients)


@pytest.mark.parametrize("name", ["cpu_flash", "blocked"])
def test_scores_of_10_000_are_finite(name):
    inputs = operands(queries=300, keys=300)
    for got in results([50 * inputs[0], 50 * inputs[1], inputs[2]], {"mask": masks.causal()}, name, "float32"):
        assert np.isfinite(got).all()


def test_rows_that_only_fill_a_block_up_give_no_gradient():
    """Their weights would be as large as the exponential of the bias."""
    inputs, options = operands(queries=130, keys=129), {"bias": np.where(np.arange(129) == 3, 100.0, 0.0)}
    found, want = (results(inputs, options, name, "float32") for name in ("blocked", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-4 * max(1.0, np.abs(wanted).max()))


def test_scores_of_minus_a_billion_in_a_row_have_gradients():
    """The way in which many models hide a row; adding a number to a row changes no gradient but rounds its scores."""
    inputs = operands(queries=130, keys=130)
    bias = np.zeros((1, 1, 130, 130))
    bias[:, :, 5] = bias[:, :, 129] = np.finfo("float32").min / 2
    found, want = (results(inputs, {"bias": bias}, name, "float32") for name in ("blocked", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("queries", [1, 140])
@pytest.mark.parametrize("name", ["few_queries", "cpu_flash", "blocked", "reference"])
def test_a_query_of_nan_gives_nan(name, queries):
    query, key, value = arrays(queries=queries, keys=140)
    for sinks in (None, jnp.ones(4)):
        found = functional.dot_product_attention(
            query.at[0, 0].set(jnp.nan), key, value, sinks=sinks, implementation=name
        )
        assert np.isnan(found[0, 0]).all()
        assert not np.isnan(found[1]).any()


# ---- dropout


@pytest.mark.parametrize("key", [jax.random.key(5), jax.random.PRNGKey(6)], ids=["typed", "raw"])
@pytest.mark.parametrize("loops", ["written out", "rolled"])
@pytest.mark.parametrize("label", ["causal, more keys", "padding"])
def test_dropout_drops_what_the_reference_drops(label, key, loops, request):
    if loops == "rolled":
        request.getfixturevalue("rolled")
    sizes, choose = CASES[label]
    inputs, options = operands(**sizes), {**choose(0), "dropout": 0.3, "rng": key}
    found, want = (results(inputs, options, name, "float32") for name in ("blocked", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("make", [lambda: nnx.Rngs(7), lambda: nnx.Rngs(dropout=8).dropout], ids=["rngs", "stream"])
def test_dropout_counts_as_the_reference_does(make):
    inputs, (one, two) = arrays(), (make(), make())
    for _ in range(2):
        found, want = (
            functional.dot_product_attention(*inputs, dropout=0.4, rng=rng, implementation=name)
            for rng, name in ((one, "blocked"), (two, "reference"))
        )
        np.testing.assert_allclose(found, want, rtol=0.0, atol=1e-5)


def test_places_beyond_32_bits_have_their_own_dropout():
    words = jnp.asarray([1, 77_777, 2**32 - 1], jnp.uint32)
    for factor in (1, 300, 65_537, 2**31 + 12_345):
        high, low = block_operands.multiply(words, factor)
        whole = [int(word) * factor for word in words]
        assert [int(one) for one in high] == [one >> 32 for one in whole]
        assert [int(one) for one in low] == [one & 0xFFFFFFFF for one in whole]


# ---- transformations


@pytest.mark.parametrize("loops", ["written out", "rolled"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)),
        lambda f: jax.jit(jax.grad(f, (0, 1, 2))),
        lambda f: jax.vmap(jax.grad(lambda q, k, v: f(q[None], k[None], v[None]), (0, 1, 2))),
        lambda f: lambda *xs: jax.vmap(jax.grad(f), (0, None, None))(jnp.stack([xs[0], 2 * xs[0]]), *xs[1:]),
        lambda f: jax.grad(lambda *xs: sum((one**2).sum() for one in jax.grad(f, (0, 1, 2))(*xs)), (0, 1, 2)),
    ],
    ids=["checkpoint", "jit", "vmap", "vmap of query", "second order"],
)
def test_transformations(transform, loops, request):
    if loops == "rolled":
        request.getfixturevalue("rolled")
    inputs = arrays()
    found, want = (jax.tree.leaves(jax.jit(transform(loss(name)))(*inputs)) for name in ("blocked", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=2e-5 * np.abs(wanted).max())


def test_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    query, key, value = arrays()

    def shared_key(name: str) -> Any:
        return lambda q, k, v: jax.grad(loss(name), (0, 1, 2))(q, jnp.broadcast_to(k, v.shape), v)[0]

    mapped = jax.shard_map(shared_key("blocked"), mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d"))
    np.testing.assert_allclose(
        jax.jit(mapped)(query, key[:1], value), shared_key("reference")(query, key[:1], value), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 3e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("cotangents", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.4)])
def test_the_logarithms_of_the_sums_have_gradients(cotangents, dtype, limit, narrow):
    inputs = [array.astype(dtype) for array in arrays(queries=140, keys=140)]
    sinks = jnp.asarray([0.3, -1.0, 2.0, 0.1])

    def plain(q, k, v, sinks):
        k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        scores = jnp.einsum("bthc,bshc->bhts", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        sums = jnp.logaddexp(jax.nn.logsumexp(scores, -1), sinks[:, None])
        return jnp.einsum("bhts,bshc->bthc", jnp.exp(scores - sums[..., None]), v), sums

    def ours(q, k, v, sinks):
        call = functional._checked(q, k, v, masks.causal(), None, None, None, sinks, 0.0, None, False)
        return blocked.attend_with_lse(call)

    (found, pull), (want, pull_want) = (
        jax.vjp(ours, *inputs, sinks),
        jax.vjp(plain, *(array.astype("float32") for array in inputs), sinks),
    )
    given = tuple(
        (factor * jnp.sin(jnp.arange(one.size)).reshape(one.shape)).astype(one.dtype)
        for factor, one in zip(cotangents, found, strict=True)
    )
    wide = tuple(one.astype("float32") for one in given)
    for got, wanted in zip((*found, *pull(given)), (*want, *pull_want(wide)), strict=True):
        np.testing.assert_allclose(got.astype("float32"), wanted, rtol=0, atol=limit * max(1e-3, np.abs(wanted).max()))


@pytest.mark.parametrize(("length", "squares"), [(2048, 3.0), (4096, 0.25)])
def test_memory_does_not_grow_with_the_scores_of_all_heads(length, squares):
    query, key, value = (jax.ShapeDtypeStruct((1, length, 16, 8), "float32") for _ in range(3))
    arrays = 16 * length * 8 * 4
    for function in (loss("blocked"), jax.grad(loss("blocked"), (0, 1, 2))):
        memory = jax.jit(function).lower(query, key, value).compile().memory_analysis()
        assert memory.temp_size_in_bytes < squares * length * length * 4 + 12 * arrays


def test_eager_calls_compile_once():
    inputs, mask = arrays(), padding(2, 70, 0)

    def attend(mask):
        return functional.dot_product_attention(*inputs, mask=masks.causal() & mask, implementation="blocked")

    attend(mask)
    before = differentiation.attention._cache_size()
    attend(~mask)
    assert differentiation.attention._cache_size() == before


def test_a_window_visits_its_blocks_only():
    shape = block_plan.Shape(1, 1, 1, 8192, 8192)
    plan = block_plan.Plan(shape, masks.sliding_window(256), 1.0, None, 0.0, 1, 256, 256, unrolled=False)
    listed, begins, _, ends = plan.tables
    assert len(listed) < 3 * len(begins)
    assert max(end - begin for begin, end in zip(begins, ends, strict=True)) <= 3
    for i in range(plan.row_blocks):
        assert sum(columns.width for _, columns in plan.runs(i)) <= 3 * 256


def test_vmap_does_not_hold_the_scores_of_all():
    query, key, value = (jax.ShapeDtypeStruct((9, 1, 1024, 2, 8), "float32") for _ in range(3))
    sides = 9 * 1024 * 2 * 8 * 4
    for function in (loss("blocked"), jax.grad(loss("blocked"), (0, 1, 2))):
        memory = jax.jit(jax.vmap(function)).lower(query, key, value).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 3 * 1024 * 1024 * 4 + 12 * sides


# ---- choice


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, x: jax.jvp(f, (x,), (jnp.cos(x),)),
        lambda f, x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),)),
        lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,))[1])(jnp.stack([x, jnp.sin(x)])),
        lambda f, x: jax.jvp(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])), (x,), (x,)),
    ],
    ids=["jvp", "jvp of grad", "vmap of jvp", "jvp of vmap"],
)
def test_derivatives_go_forward_at_any_length(derivative):
    query, key, value = arrays(queries=140, keys=140)

    def loss(query: jax.Array, name: str | None) -> jax.Array:
        return (
            functional.dot_product_attention(query, key, value, mask=masks.causal(), implementation=name) ** 2
        ).sum()

    found, want = (
        jax.tree.leaves(derivative(functools.partial(loss, name=name), query)) for name in (None, "reference")
    )
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivatives \(jax.jvp, jax.jacfwd\)"):
        derivative(functools.partial(loss, name="blocked"), query)


def test_gradients_do_not_take_the_reference():
    picked = []

    def loss(query: jax.Array) -> jax.Array:
        picked.append(next(name for name, reason in functional.explain(query, query, query).items() if reason is None))
        return functional.dot_product_attention(query, query, query).sum()

    for transform in (jax.grad, lambda f: jax.grad(jax.checkpoint(f)), jax.jacrev, lambda f: jax.grad(jax.jit(f))):
        transform(loss)(jnp.ones((1, 200, 2, 8)))
    assert set(picked) == {"cpu_flash"}


def test_programs_of_symbolic_lengths_are_exported():
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 2, 8"), "float32")
    attend = jax.jit(functools.partial(functional.dot_product_attention, mask=masks.causal()))
    program = export.export(attend)(shape, shape, shape)
    for tokens in (5, 300):
        inputs = arrays(queries=tokens, keys=tokens, heads=2)
        np.testing.assert_allclose(program.call(*inputs), attend(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("spec", "mask"), [
    ("1", lambda array: None),
    ("b, 1, 1, {keys}", lambda array: array > 0),
    ("b, 1, {queries}, {keys}", lambda array: masks.causal() & (array > 0)),
    ("b, {keys}", lambda array: masks.documents(jnp.int32(array > 0))),
    ("b,", lambda array: masks.padding(jnp.int32(3 + array))),
], ids=["none", "keys", "pairs", "documents", "lengths"])  # fmt: skip
@pytest.mark.parametrize(("queries", "keys"), [(1, 4096), (4, 40), (200, 200)])
def test_a_batch_may_be_left_open(queries, keys, spec, mask):
    """A program of an open batch is exported and gives what one for a batch gives, whatever this machine picks."""
    specs = ("b, {queries}, 4, 8", "b, {keys}, 2, 8", "b, {keys}, 2, 8", spec)
    specs = [one.format(queries=queries, keys=keys) for one in specs]
    scope, draw = export.SymbolicScope(), np.random.default_rng(0)
    shapes = [jax.ShapeDtypeStruct(export.symbolic_shape(one, scope=scope), "float32") for one in specs]

    @jax.jit
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, array: jax.Array) -> jax.Array:
        return functional.dot_product_attention(query, key, value, mask=mask(array))

    program = export.export(attend)(*shapes)
    for batch in (1, 3):
        sizes = [
            [batch if size == "b" else int(size) for size in one.replace(" ", "").split(",") if size] for one in specs
        ]
        inputs = [draw.standard_normal(size, "float32") for size in sizes]
        np.testing.assert_allclose(program.call(*inputs), attend(*inputs), rtol=1e-4, atol=1e-5)


def test_what_is_picked_and_why():
    long, short = arrays(queries=200, keys=200), arrays(queries=20, keys=20)
    reasons = attn_bridge.explain_attention(*long, mask=masks.causal())
    assert next(name for name, reason in reasons.items() if reason is None) == "cpu_flash"
    assert reasons["blocked"] is None
    assert reasons == attn_bridge.explain_attention(*long, mask=masks.causal(), implementation="blocked")
    either = attn_bridge.explain_attention(*long, mask=masks.causal() | jnp.ones((2, 200), bool), softcap=3.0)
    assert next(name for name, reason in either.items() if reason is None) == "blocked"
    assert "NVIDIA GPU" in reasons["cudnn"] or "16" in reasons["cudnn"]
    reasons = functional.explain(*short)
    assert "fewer scores" in reasons["blocked"]
    assert functional.explain(*long, return_weights=True)["reference"] is None
    assert "weights" in functional.explain(*long, return_weights=True)["blocked"]


def test_a_forced_implementation_says_what_it_lacks():
    with pytest.raises(
        NotImplementedError, match="implementation 'blocked' does not support this call: it never holds"
    ):
        functional.dot_product_attention(*arrays(), return_weights=True, implementation="blocked")
    inputs, options = arrays(), {"dropout": 0.5, "rng": jax.random.key(0), "implementation": "blocked"}
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="partitionable Threefry"):
        functional.dot_product_attention(*inputs, **options)


def test_modules_reach_the_kernels():
    module = jax_attn.MultiHeadAttention(16, 16, 256, num_heads=2, rngs=nnx.Rngs(0))
    text = str(jax.make_jaxpr(lambda x: nnx.clone(module)(x))(jnp.ones((2, 256, 16))))
    assert "attn_bridge_flash_forward" in text
    assert "256,256]" not in text


def test_shard_map_over_two_devices():
    program = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from attn_bridge import masks
from jax_attn import functional
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
q = jax.random.normal(jax.random.key(0), (4, 30, 4, 8))
k = q[:1] * 1.1
def loss(name):
    options = {"mask": masks.causal(), "implementation": name}
    return lambda q, k: functional.dot_product_attention(q, jnp.broadcast_to(k, q.shape), q, **options) ** 2
mapped = jax.shard_map(loss("blocked"), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
got = jax.jit(jax.grad(lambda q, k: mapped(q, k).sum(), (0, 1)))(q, k)
want = jax.grad(lambda q, k: loss("reference")(q, k).sum(), (0, 1))(q, k)
for one, two in zip(got, want):
    assert jnp.abs(one - two).max() < 1e-4, jnp.abs(one - two).max()
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | flags)


SHARDED = """
import jax, jax.numpy as jnp, pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attn_bridge import masks
from jax_attn import functional

def loss(name):
    options = {"mask": masks.causal(), "implementation": name}
    return lambda *heads: (functional.dot_product_attention(*heads, **options) ** 2).sum()

heads = [jax.random.normal(jax.random.key(i), (4, 160, 4, 8)) for i in range(3)]
want = jax.grad(loss("reference"))(*heads)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        parts = [jax.device_put(one, NamedSharding(mesh, P("d"))) for one in heads]
        got = jax.jit(jax.grad(loss(None)))(*parts)
        assert got.sharding.spec[0] == "d", (kind, got.sharding)
        assert jnp.abs(got - want).max() < 1e-4
        if kind == AxisType.Explicit:
            with pytest.raises(NotImplementedError, match="call it inside jax.shard_map"):
                loss("blocked")(*parts)
        else:
            text = jax.jit(jax.grad(loss("blocked"))).lower(*parts).compile().as_text()
            assert "all-gather" not in text and "all-reduce" not in text
"""


def test_a_batch_over_two_devices_stays_there():
    """Data parallelism: nobody gathers the batch, be the sharding in the type of an array or beside it."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SHARDED], check=True, env=os.environ | flags)


@pytest.mark.parametrize("fast", ["cpu_flash", "blocked"])
def test_what_all_keys_have_in_common_does_not_cost_precision(fast):
    """Gradients of a row's scores add up to zero; what rounding leaves of that is multiplied with the common part."""
    ratios = []
    for seed in range(3):
        query, key, value, cotangent = (draw(1, 1024, 2, 16, seed=10 * seed + n) for n in range(4))
        key, value = (one + 4.0 * draw(16, seed=50 + 2 * seed + n) for n, one in enumerate((key, value)))
        held = [one.astype(np.float32) for one in (query, key, value, cotangent + 1.0)]

        def gradient(dtype: Any, name: str, held: list[np.ndarray] = held) -> np.ndarray:
            query, key, value, cotangent = (jnp.asarray(one, dtype) for one in held)

            def loss(query):
                options = {"mask": masks.causal(), "implementation": name}
                return (functional.dot_product_attention(query, key, value, **options) * cotangent).sum()

            return np.asarray(jax.grad(loss)(query), np.float64)

        with jax.enable_x64(True):
            exact = gradient(jnp.float64, "reference")
        errors = [np.square(gradient(jnp.float32, name) - exact).mean() ** 0.5 for name in (fast, "reference")]
        ratios.append(errors[0] / errors[1])
    assert np.mean(ratios) < 1.6, "of the reference, which adds up what it rounded; the context's gave 2 and more"
