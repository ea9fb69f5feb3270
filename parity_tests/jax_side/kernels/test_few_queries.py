"""Attention of few queries, key block by key block, against the reference; its gradient; what it does not do."""

from __future__ import annotations

import functools
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attn_bridge import masks
from jax_attn import functional
from jax_attn.implementations import few_queries

from ...support.calls import cover

RANDOM = np.random.default_rng(0)
CASES = {
    "one token": (1, 700, masks.causal().offset(690), {}),
    "per head": (3, 1030, RANDOM.random((2, 4, 3, 1030)) < 0.3, {"softcap": 2.0, "sinks": RANDOM.normal(size=4)}),
    "window": (2, 600, masks.sliding_window(5).offset(300), {"bias": RANDOM.normal(size=(4, 1, 600))}),
    "all hidden": (1, 600, np.zeros((1, 1, 1, 600), bool), {}),
    "no mask": (2, 513, None, {}),
}


@cover.some("name", list(CASES), ["per head", "window", "all hidden"])
def test_few_queries_matches_the_reference(name):
    queries, keys, mask, options = CASES[name]
    shapes = ((2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 5))
    arrays = [jnp.asarray(RANDOM.normal(size=shape), jnp.float32) for shape in shapes]
    found = []
    for one in ("few_queries", "reference"):

        def attend(*arrays, one=one):
            return functional.dot_product_attention(*arrays, mask=mask, implementation=one, **options)

        context, pull = jax.jit(lambda *arrays, attend=attend: jax.vjp(attend, *arrays))(*arrays)
        found.append([context, *pull(jnp.ones_like(context))])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert functional.explain(*arrays, mask=mask, **options)["few_queries"] is None


@pytest.mark.parametrize("mask", [masks.causal().offset(690), masks.padding(np.array([700]))], ids=str)
def test_devices_of_a_shard_map_attend_by_themselves(mask):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    query, key = (jnp.asarray(RANDOM.normal(size=(1, size, 2, 8)), jnp.float32) for size in (1, 700))
    sinks = jnp.asarray([0.3, -1.0])

    def loss(query, key, sinks, name=None):
        context = functional.dot_product_attention(query, key, key, mask=mask, sinks=sinks, implementation=name)
        return jnp.sin(context).sum(keepdims=True)

    of_all = functools.partial(loss, name="reference")
    assert functional.explain(query, key, key, mask=mask, sinks=sinks)["few_queries"] is None
    specs = (P("d"), P(), P())  # keys and sinks are the same for all devices
    mapped = jax.shard_map(functools.partial(loss, name="few_queries"), mesh=mesh, in_specs=specs, out_specs=P("d"))
    found, wanted = (
        jax.jit(jax.value_and_grad(lambda *operands, run=run: run(*operands).sum(), (0, 1, 2)))(query, key, sinks)
        for run in (mapped, of_all)
    )
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def test_it_says_what_it_does_not_do():
    query, key = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 600, 2, 4))
    with pytest.raises(NotImplementedError, match="it has no dropout"):
        functional.dot_product_attention(query, key, key, dropout=0.5, implementation="few_queries")


@pytest.mark.parametrize(("queries", "keys", "heads", "picked"), [
    (1, 65_536, 4, "reference"),
    (few_queries.MAX_QUERIES, 4096, 4, "reference"),
    (1, 4096, 1 << 17, "few_queries"),  # scores that a GPU has no room to spare for
    (few_queries.MAX_QUERIES + 1, 4096, 4, "blocked"),
    (1, 4096, None, "few_queries"),  # of a batch that is left open
])  # fmt: skip
def test_a_gpu_computes_few_queries_at_once(queries, keys, heads, picked, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = {}

    def ask(*operands):
        found.update(functional.explain(*operands))
        return 0

    batch = jax.export.symbolic_shape("b")[0] if heads is None else 1
    shapes = [jax.ShapeDtypeStruct((batch, size, heads or 4, 8), jnp.bfloat16) for size in (queries, keys, keys)]
    jax.eval_shape(ask, *shapes)
    del found["cpu_flash"]  # it has asked before where it runs
    assert next(name for name, reason in found.items() if reason is None) == picked


@pytest.mark.parametrize("open_one", [None, "query", "key", "value"])
def test_a_call_is_open_if_any_size_is(open_one):
    size = jax.export.symbolic_shape("n")[0]
    shapes = {
        name: jax.ShapeDtypeStruct((1, size if name == open_one else 5, 2, 8), jnp.float32)
        for name in ("query", "key", "value")
    }
    assert few_queries.is_open(types.SimpleNamespace(**shapes)) == (open_one is not None)


def test_symbolic_heads_may_have_one_mask_each():
    batch, heads = jax.export.symbolic_shape("b, h")
    shapes = [jax.ShapeDtypeStruct((batch, size, heads, 8), jnp.float32) for size in (2, 4096, 4096)]
    shapes.append(jax.ShapeDtypeStruct((batch, heads, 1, 4096), jnp.float32))

    @jax.jit
    def attend(query, key, value, array):
        return functional.dot_product_attention(query, key, value, mask=array > 0, implementation="few_queries")

    draw = np.random.default_rng(0)
    inputs = [draw.standard_normal(size, "float32") for size in ((3, 2, 4, 8), *2 * [(3, 4096, 4, 8)], (3, 4, 1, 4096))]
    program = jax.export.export(attend)(*shapes)
    np.testing.assert_allclose(program.call(*inputs), attend(*inputs), rtol=1e-4, atol=1e-5)
