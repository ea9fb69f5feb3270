"""Implementations under transformations and compilers."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attn_bridge import masks
from jax_attn import functional
from jax_attn.implementations import blocked
from parity_tests.support.calls import cover

from ..attention_calls import arrays, loss

TRANSFORMS = {
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)),
    "jit": lambda f: jax.jit(jax.grad(f, (0, 1, 2))),
    "vmap": lambda f: jax.vmap(jax.grad(lambda q, k, v: f(q[None], k[None], v[None]), (0, 1, 2))),
    "vmap of query": lambda f: (
        lambda *xs: jax.vmap(jax.grad(f), (0, None, None))(jnp.stack([xs[0], 2 * xs[0]]), *xs[1:])
    ),
    "second order": lambda f: jax.grad(
        lambda *xs: sum((one**2).sum() for one in jax.grad(f, (0, 1, 2))(*xs)), (0, 1, 2)
    ),
}


@cover.rotated(("name", "loops"), list(TRANSFORMS), ["rolled", "written out"])
def test_transformations(name, loops, request):
    if loops == "rolled":
        request.getfixturevalue("rolled")
    inputs = arrays()
    transform = TRANSFORMS[name]
    found, want = (jax.tree.leaves(jax.jit(transform(loss(one)))(*inputs)) for one in ("blocked", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=2e-5 * np.abs(wanted).max())


LIMITS = {"float32": 3e-5, "bfloat16": 2e-2}


def test_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    query, key, value = arrays()

    def shared_key(name: str) -> Any:
        return lambda q, k, v: jax.grad(loss(name), (0, 1, 2))(q, jnp.broadcast_to(k, v.shape), v)[0]

    mapped = jax.shard_map(shared_key("blocked"), mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d"))
    np.testing.assert_allclose(
        jax.jit(mapped)(query, key[:1], value), shared_key("reference")(query, key[:1], value), rtol=0, atol=1e-4
    )


@cover.rotated(("cotangents", "dtype"), [(1.0, 0.0), (0.7, -0.4), (0.0, 1.0)], ["float32", "bfloat16"])
def test_the_logarithms_of_the_sums_have_gradients(cotangents, dtype, narrow):
    inputs, limit = [array.astype(dtype) for array in arrays(queries=140, keys=140)], LIMITS[dtype]
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


DERIVATIVES = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),)),
    "vmap of jvp": lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,))[1])(jnp.stack([x, jnp.sin(x)])),
    "jvp of vmap": lambda f, x: jax.jvp(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])), (x,), (x,)),
    "grad of jvp": lambda f, x: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1])(x),
    "grad of vmap": lambda f, x: jax.grad(lambda x: jax.vmap(lambda s: f(s * x))(jnp.arange(1.0, 3.0)).sum())(x),
}


@cover.some("name", list(DERIVATIVES), ["jvp of grad", "vmap of jvp", "grad of vmap"])
def test_derivatives_go_forward_at_any_length(name):
    query, key, value = arrays(queries=140, keys=140)

    def loss(query: jax.Array, name: str | None) -> jax.Array:
        return (
            functional.dot_product_attention(query, key, value, mask=masks.causal(), implementation=name) ** 2
        ).sum()

    want, *others = (
        jax.tree.leaves(DERIVATIVES[name](jax.jit(functools.partial(loss, name=one)), query))
        for one in ("reference", "blocked", "few_queries", None)
    )
    for got, wanted in itertools.chain.from_iterable(zip(found, want, strict=True) for found in others):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_programs_of_symbolic_lengths_are_exported():
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 2, 8"), "float32")
    attend = jax.jit(functools.partial(functional.dot_product_attention, mask=masks.causal()))
    program = export.export(attend)(shape, shape, shape)
    for tokens in (5, 300):
        inputs = arrays(queries=tokens, keys=tokens, heads=2)
        np.testing.assert_allclose(program.call(*inputs), attend(*inputs), rtol=1e-5, atol=1e-5)


OPEN = {
    "1": lambda array: None,
    "b, 1, 1, {keys}": lambda array: array > 0,
    "b, 1, {queries}, {keys}": lambda array: masks.causal() & (array > 0),
    "b, {keys}": lambda array: masks.documents(jnp.int32(array > 0)),
    "b,": lambda array: masks.padding(jnp.int32(3 + array)),
}
"""Shape of an array -> the mask that it makes: none, of keys, of pairs, documents, lengths."""


@cover.rotated(("spec", "sizes"), list(OPEN), [(1, 4096), (200, 200), (4, 40)])
def test_a_batch_may_be_left_open(spec, sizes):
    """A program of an open batch is exported and gives what one for a batch gives, whatever this machine picks."""
    (queries, keys), mask = sizes, OPEN[spec]
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


SHARDED = """
import jax, jax.numpy as jnp, pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attn_bridge import masks
from jax_attn import functional

def loss(name):
    options = {"mask": masks.causal(), "sinks": jnp.arange(4.0), "implementation": name}
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

query = jax.random.normal(jax.random.key(0), (4, 30, 4, 8))
key = query[:1] * 1.1
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
def mapped(name):
    options = {"mask": masks.causal(), "implementation": name}
    return lambda q, k: functional.dot_product_attention(q, jnp.broadcast_to(k, q.shape), q, **options) ** 2
blocks = jax.shard_map(mapped("blocked"), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
got = jax.jit(jax.grad(lambda q, k: blocks(q, k).sum(), (0, 1)))(query, key)
want = jax.grad(lambda q, k: mapped("reference")(q, k).sum(), (0, 1))(query, key)
for one, two in zip(got, want):
    assert jnp.abs(one - two).max() < 1e-4, jnp.abs(one - two).max()
"""


def test_a_batch_over_two_devices_stays_there():
    """Data parallelism: nobody gathers the batch, be the sharding in the type of an array or beside it, or mapped."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SHARDED], check=True, env=environment)
