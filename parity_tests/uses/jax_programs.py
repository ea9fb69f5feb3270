"""What users of JAX compile, export, differentiate and distribute; each function fails if a number is wrong."""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn
from jax_attn.parallel import parallelize

from .jax_layers import CONFIG, IDS, USES, X, assert_close, layer, loss, model, same_slopes


@USES.add("compiled, with gradients")
def compiled() -> None:
    same_slopes(lambda module: nnx.jit(lambda module: module(X))(module))


@USES.add("exported for any batch and length")
def exported() -> None:
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 8"), "float32")
    assert_close(export.export(jax.jit(layer()))(shape).call(X[:1, :3]), layer()(X[:1, :3]))


@USES.add("a step of decoding exported, its cache an argument")
def exported_step() -> None:
    module = layer()
    leaves, tree = jax.tree.flatten(module(X, cache=module.init_cache(2, 9))[1])
    step = jax.jit(lambda x, *leaves: jax.tree.leaves(module(x, cache=tree.unflatten(leaves))))
    for found, wanted in zip(
        export.export(step)(X[:, :1], *leaves).call(X[:, :1], *leaves), step(X[:, :1], *leaves), strict=True
    ):
        assert_close(found, wanted)


@USES.add("data parallel (DDP, a mesh)")
def data_parallel() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    same_slopes(lambda module: module(jax.device_put(X, NamedSharding(mesh, P("data")))))


@USES.add("sharded parameters (FSDP2, a mesh)")
def sharded() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    module = layer()
    state = jax.tree.map(lambda one: jax.device_put(one, NamedSharding(mesh, P())), nnx.state(module, nnx.Param))
    nnx.update(module, state)
    assert_close(module(X), layer()(X))


@USES.add("adapters (peft)")
def adapters() -> None:
    module = layer()
    module.W_query = nnx.LoRA(8, 2, 8, base_module=module.W_query, rngs=nnx.Rngs(1))
    assert_close(module(X, cache=module.init_cache(2, 5))[0], layer()(X))


@USES.add("activations recomputed")
def recomputed() -> None:
    same_slopes(lambda module: nnx.remat(lambda module, x: module(x))(module, X))


@USES.add("gradients as a function")
def functional_gradients() -> None:
    graph, weights, rest = nnx.split(layer(), nnx.Param, ...)
    found = jax.grad(lambda weights: loss(nnx.merge(graph, weights, rest)))(weights)
    for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(nnx.grad(loss)(layer())), strict=True):
        assert_close(one, wanted)


@USES.add("vmap over inputs")
def vmapped() -> None:
    assert_close(jax.vmap(layer())(np.stack([X, 2 * X]))[1], layer()(2 * X))


@USES.add("vmap over weights (an ensemble)")
def ensemble() -> None:
    @nnx.vmap
    def make(key: Any) -> Any:
        return jax_attn.GroupedQueryAttention(CONFIG.replace(dropout=0.0), rngs=nnx.Rngs(key))

    found = nnx.vmap(lambda module, x: module(x), in_axes=(0, None))(make(jax.random.split(jax.random.key(0), 3)), X)
    assert found.shape == (3, 2, 5, 8)
    assert np.abs(found[0] - found[1]).max() > 1e-3


@USES.add("layers scanned")
def scanned() -> None:
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs: Any) -> Any:
        return jax_attn.GroupedQueryAttention(CONFIG.replace(dropout=0.0), rngs=rngs)

    layers = make(nnx.Rngs(0))
    found = nnx.scan(lambda x, module: module(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(jnp.asarray(X), layers)
    graph, state = nnx.split(layers)
    wanted = X
    for at in range(3):
        wanted = nnx.merge(graph, jax.tree.map(lambda one, at=at: one[at], state))(wanted)
    assert_close(found, wanted)


@USES.add("derivatives forward (jvp)")
def forward_derivatives() -> None:
    slope = jax.jvp(jax.jit(lambda x: loss(layer(), x)), (X,), (X,))[1]
    assert_close(slope, (jax.grad(lambda x: loss(layer(), x))(X) * X).sum())


@USES.add("second derivatives (hessian)")
def hessian() -> None:
    module = layer()
    assert np.isfinite(jax.hessian(jax.jit(lambda scale: loss(module, X * scale)))(1.0))


@USES.add("compiled ahead of time (AOTInductor)")
def compiled_ahead() -> None:
    assert_close(jax.jit(layer()).lower(X).compile()(X), layer()(X))


@USES.add("compiled with a static argument")
def static_argument() -> None:
    call = jax.jit(lambda module, x, weights: module(x, return_weights=weights), static_argnums=2)
    assert_close(call(layer(), X, True)[1].sum(-1), np.ones((2, 4, 5)))
    assert_close(call(layer(), X, False), layer()(X))


@USES.add("compiled steps with a cache (fullgraph)")
def scanned_steps() -> None:
    module = layer()

    def step(cache: Any, x: Any) -> Any:
        output, cache = module(x[:, None], cache=cache)
        return cache, output[:, 0]

    _, found = jax.lax.scan(step, module.init_cache(2, 5), jnp.moveaxis(X, 1, 0))
    assert_close(jnp.moveaxis(found, 0, 1), module(X))


@USES.add("memory of an argument used again (donated)")
def donated() -> None:
    @functools.partial(nnx.jit, donate_argnums=0)
    def step(module: Any) -> Any:
        slopes = nnx.grad(loss)(module)
        nnx.update(
            module, jax.tree.map(lambda weight, slope: weight - 1e-3 * slope, nnx.state(module, nnx.Param), slopes)
        )
        return loss(module)

    assert step(layer()) < loss(layer())


@USES.add("an exported program in a file", needs=("flatbuffers",))
def exported_file() -> None:
    written = export.export(jax.jit(layer()))(jax.ShapeDtypeStruct(X.shape, "float32")).serialize(vjp_order=1)
    program = export.deserialize(written)
    found = jax.grad(lambda x: (program.call(x) ** 2).sum())(X)
    assert_close(found, jax.grad(lambda x: loss(layer(), x))(X), atol=1e-4)


@USES.add("a whole model exported for any batch and length")
def exported_model() -> None:
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, t"), "int32")
    assert_close(export.export(jax.jit(model()))(shape).call(IDS[:1, :3]), model()(IDS[:1, :3]))


@USES.add("a program per device (pmap)")
def mapped() -> None:
    assert_close(jax.pmap(layer())(X[None])[0], layer()(X))


@USES.add("a program per part of a mesh (shard_map)")
def mapped_over_a_mesh() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    graph, state = nnx.split(layer())

    def part(state: Any, x: Any) -> Any:
        return jax.lax.psum((nnx.merge(graph, state)(x) ** 2).sum(), "data")

    found = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(state, X)
    assert_close(found, loss(layer()))


@USES.add("heads on several devices (parallelize, a mesh)")
def heads_shared() -> None:
    module = layer()
    parallelize(module, jax.make_mesh((1,), ("tensor",)), tensor="tensor")
    assert_close(module(X), layer()(X))


@USES.add("some activations recomputed (a policy)")
def recomputed_by_policy() -> None:
    policy = jax.checkpoint_policies.dots_saveable
    same_slopes(lambda module: jax.checkpoint(lambda x: module(x), policy=policy)(X))


@USES.add("gradients of each sample")
def sample_gradients() -> None:
    graph, weights, rest = nnx.split(layer(), nnx.Param, ...)
    found = jax.vmap(jax.grad(lambda weights, x: loss(nnx.merge(graph, weights, rest), x)), in_axes=(None, 0))(
        weights, X
    )
    for each, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(nnx.grad(loss)(layer())), strict=True):
        assert_close(each.sum(0), wanted, atol=1e-4)


@USES.add("a penalty on gradients")
def penalty() -> None:
    found = nnx.grad(lambda module: (jax.grad(lambda x: loss(module, x))(X) ** 2).sum())(layer())
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(found))


@USES.add("linearised")
def linearised() -> None:
    output, slope = jax.linearize(layer(), X)
    assert_close(output, layer()(X))
    assert_close(slope(X), jax.jvp(layer(), (X,), (X,))[1])


@USES.add("called by several threads")
def threads() -> None:
    call = jax.jit(layer())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: call(X), range(8)):
            assert_close(found, layer()(X))
