"""Every class under the transformations of JAX: derivatives forward and twice, `jax.vmap`, programs of open sizes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType

import jax_attn
from attn_bridge.specs import VARIANTS, BertEncoderConfig, FeedForwardConfig, MixtureOfExpertsConfig
from jax_attn import functional
from jax_attn.blocks.mixture_of_experts import MixtureOfExperts

from ...contract import jax_backend, modules
from ...support.calls import cover
from ...support.calls.bad_calls import D_IN, MODULES

LENGTH = 140
"""Tokens from which kernels with gradients of their own are picked."""

MODERN = [variant.name for variant in VARIANTS if variant.group == "modern"]
CLASSES = [*MODULES, *MODERN]
DISTINCT = [name for name in CLASSES if name not in modules.ALIKE]


@functools.cache
def made(name: str) -> tuple[Any, Any]:
    """Return a function of the input ``(B, T, d_in)`` that calls a module, and that width."""
    if name in MODULES:
        longer = {"context_length": LENGTH} if "context_length" in MODULES[name] else {}
        return modules.make(jax_backend, name, **longer), D_IN
    if name == "RMSNorm":
        return jax_attn.RMSNorm(D_IN, rngs=nnx.Rngs(0)), D_IN
    module, x = modules.make_example(jax_backend, name)
    call = (lambda x: module(x, context=x)) if name == "CrossAttention" else module
    return call, x.shape[-1]


def tokens(name: str, length: int, batch: int = 2) -> jax.Array:
    return 0.3 * modules.draw(batch, length, made(name)[1])


@cover.some("name", CLASSES, DISTINCT)
def test_a_jitted_module_has_derivatives_forward_and_twice(name):
    call, x = made(name)[0], tokens(name, LENGTH, 1)
    one = jnp.float32(1.0)

    @jax.jit
    def jitted(scale: jax.Array) -> jax.Array:
        return (call(x * scale) ** 2).mean()

    def plain(scale: jax.Array) -> jax.Array:
        with functional.use_implementation("reference"):
            return (call(x * scale) ** 2).mean()

    slope, curve = jax.jit(jax.value_and_grad(jax.grad(plain)))(one)
    found = jax.jit(lambda one: (jax.jvp(jitted, (one,), (one,))[1], jax.hessian(jitted)(one)))(one)
    np.testing.assert_allclose(found, (slope, curve), rtol=2e-4, atol=1e-6)


@cover.some("name", CLASSES, DISTINCT)
def test_vmap_gives_what_a_batch_gives(name):
    call, x = made(name)[0], jnp.asarray(tokens(name, 9, 3))
    alone, pairs, whole = jax.jit(lambda x: (jax.vmap(call)(x), jax.vmap(call)(jnp.stack([x, x])), call(x)))(x)
    np.testing.assert_allclose(alone, whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(pairs[1], whole, rtol=1e-4, atol=1e-5)


@cover.some("name", CLASSES, DISTINCT)
def test_devices_that_share_a_batch_give_what_one_does(name):
    """By `jax.shard_map`, and on a mesh whose axes are explicit, as those of `jax.make_mesh` are by default."""
    call, x = made(name)[0], jnp.asarray(tokens(name, 9))
    cut = jax.P("data")
    automatic, explicit = (jax.make_mesh((1,), ("data",), (kind,)) for kind in (AxisType.Auto, AxisType.Explicit))
    mapped = jax.shard_map(call, mesh=automatic, in_specs=cut, out_specs=cut)

    def slope(function: Any, x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: (function(x) ** 2).sum())(x)

    found, plain = jax.jit(lambda x: (slope(mapped, x), slope(call, x)))(x)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)
    with jax.set_mesh(explicit):
        traced = jax.jit(functools.partial(slope, call)).trace(jax.device_put(x, jax.NamedSharding(explicit, cut)))
    assert traced.out_info.sharding.spec[0] == "data"


@pytest.mark.parametrize("name", CLASSES)
def test_a_program_of_open_sizes_is_exported(name):
    call, width = made(name)
    shape = export.symbolic_shape(f"b, t, {width}", constraints=[f"t <= {LENGTH}"])
    program = export.export(jax.jit(call))(jax.ShapeDtypeStruct(shape, "float32"))
    x = tokens(name, 70)
    np.testing.assert_allclose(program.call(x), jax.jit(call)(x), rtol=1e-4, atol=1e-5)


def test_a_bert_of_open_sizes_is_exported():
    model = jax_attn.BertEncoder(BertEncoderConfig(11, 8, 1, 2, 12, LENGTH), rngs=nnx.Rngs(0))
    model.eval()
    graph, state = nnx.split(model)
    shape = export.symbolic_shape("b, t", constraints=[f"t <= {LENGTH}"])
    program = export.export(jax.jit(lambda ids: nnx.merge(graph, state)(ids)))(jax.ShapeDtypeStruct(shape, "int32"))
    ids = np.random.default_rng(0).integers(11, size=(3, 7), dtype="int32")
    np.testing.assert_allclose(program.call(ids), model(ids), rtol=1e-4, atol=1e-5)


def test_a_masked_cross_attention_of_open_sizes_is_exported():
    module = modules.make_example(jax_backend, "CrossAttention")[0]
    b, t, s = export.symbolic_shape("b, t, s")
    width = module.config.d_in
    shapes = [((b, t, width), "float32"), ((b, s, width), "float32"), ((b, s), "bool")]
    call = jax.jit(lambda x, context, mask: module(x, context=context, attention_mask=mask))
    program = export.export(call)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    for tokens_, keys in ((3, 6), (6, 3)):
        arrays = modules.draw(2, tokens_, width), modules.draw(2, keys, width, seed=1), np.arange(keys) < [[3], [2]]
        np.testing.assert_allclose(program.call(*arrays), call(*arrays), rtol=1e-4, atol=1e-5)


def test_an_exported_length_beyond_the_context_is_refused():
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(f"b, t, {D_IN}"), "float32")
    with pytest.raises(ValueError, match="context_length") as caught:
        export.export(jax.jit(made(modules.MHA)[0]))(shape)
    assert str(caught.value) == (
        f"number of tokens (t) must be at most context_length ({LENGTH}): "
        f'give jax.export.symbolic_shape constraints=["t <= {LENGTH}"]'
    )


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_a_function_takes_a_mask_of_integers_as_a_constant(array):
    call, x = made("GroupedQueryAttention")[0], tokens("GroupedQueryAttention", 5)
    mask = array(modules.PADDING.astype("int32"))
    found = jax.jit(lambda x: call(x, attention_mask=mask))(x)
    np.testing.assert_allclose(found, call(x, attention_mask=modules.PADDING), rtol=1e-5, atol=1e-5)
    doubled = 2 * mask  # before the trace, in which it would have no values
    with pytest.raises(
        ValueError, match=r"^attention mask of integers must hold 0 \(padding\) and 1 \(token\) alone, got 2\b"
    ):
        jax.jit(lambda x: call(x, attention_mask=doubled))(x)


def test_experts_that_overflow_for_tokens_of_others_change_nothing():
    config = MixtureOfExpertsConfig(FeedForwardConfig(2, 2), num_experts=2, top_k=1)
    module, x = MixtureOfExperts(config, rngs=nnx.Rngs(0)), jnp.asarray([[1.0, 1.0], [-1.0, 1e30]])
    module.router.kernel[...] = jnp.asarray([[1.0, -1.0], [0.0, 0.0]])
    for number, scale in enumerate((1.0, 1e-30)):
        scaled = jax.tree.map(functools.partial(jnp.full_like, fill_value=scale), nnx.state(module.experts[number]))
        nnx.update(module.experts[number], scaled)

    def loss(module, x):
        return module(x).sum()

    wanted = module(x), nnx.grad(loss)(module, x)
    found = nnx.jit(lambda module, x: (module(x), nnx.grad(loss)(module, x)))(module, x)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.isfinite(want).all()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
