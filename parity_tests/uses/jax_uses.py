"""What users of JAX do with Flax's own attention layers, done with ours; each function fails if a number is wrong."""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn
from attn_bridge import specs
from jax_attn import functional

from .table import Uses, refusal

USES = Uses()
CONFIG = specs.GroupedQueryAttentionConfig(8, 4, num_kv_heads=2, position=specs.Rotary(), dropout=0.2)
BLOCK = specs.DecoderBlockConfig(
    specs.GroupedQueryAttentionConfig(8, 2), specs.FeedForwardConfig(8, 12), specs.RMSNormConfig(8)
)
MODEL = specs.DecoderConfig(11, 8, (BLOCK, BLOCK), specs.RMSNormConfig(8))
X, IDS = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("f4"), np.array([[3, 1, 4, 1], [5, 9, 2, 6]], "i4")
PADDING = np.array([[False, False, True, True, True], [True] * 5])
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def layer(seed: int = 0, **options: Any) -> Any:
    module = jax_attn.GroupedQueryAttention(CONFIG, rngs=nnx.Rngs(seed), **options)
    module.eval()
    return module


def model() -> Any:
    module = jax_attn.DecoderModel(MODEL, rngs=nnx.Rngs(0))
    module.eval()
    return module


def loss(module: Any, x: Any = X) -> Any:
    return (module(x) ** 2).sum()


def same_slopes(call: Any) -> None:
    """Check that a way of calling gives the gradients of plain calls."""
    plain, found = nnx.grad(loss)(layer()), nnx.grad(lambda module: (call(module) ** 2).sum())(layer())
    for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        assert_close(one, wanted, atol=1e-4)


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


@USES.add("a deep copy")
def copied() -> None:
    module = layer()
    other, clone = copy.deepcopy(module), nnx.clone(module)
    module.W_query.kernel[...] = jnp.zeros_like(module.W_query.kernel)
    assert_close(other(X), layer()(X))
    assert_close(clone(X), layer()(X))


@USES.add("pickled")
def pickled() -> None:
    assert_close(pickle.loads(pickle.dumps(layer()))(X), layer()(X))


@USES.add("a state saved and loaded")
def saved() -> None:
    import orbax.checkpoint as ocp

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saver:
        saver.save(Path(folder) / "state", nnx.state(layer(), nnx.Param))
        saver.wait_until_finished()
        module = layer(1)
        nnx.update(module, saver.restore(Path(folder) / "state", nnx.state(module, nnx.Param)))
    assert_close(module(X), layer()(X))


@USES.add("built without memory, then filled")
def abstract() -> None:
    module = nnx.eval_shape(layer)
    nnx.update(module, nnx.state(layer(), nnx.Param))
    assert nnx.state(module, nnx.Param)["W_query"]["kernel"].shape == (8, 8)


@USES.add("shapes without numbers")
def shapes() -> None:
    assert jax.eval_shape(layer(), jax.ShapeDtypeStruct((2, 5, 8), "float32")).shape == (2, 5, 8)


@USES.add("bfloat16 weights")
def half() -> None:
    module = layer()
    nnx.update(module, jax.tree.map(lambda one: one.astype(jnp.bfloat16), nnx.state(module, nnx.Param)))
    found = module(X.astype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    assert_close(found.astype("f4"), layer()(X), rtol=0.1, atol=0.05)


@USES.add("float64 weights")
def double() -> None:
    with jax.enable_x64(True):
        module = layer(param_dtype=jnp.float64)
        assert module(X.astype("f8")).dtype == jnp.float64


@USES.add("float32 weights, bfloat16 computation")
def mixed() -> None:
    found = layer(dtype=jnp.bfloat16)(X)
    assert found.dtype == jnp.bfloat16
    assert_close(found.astype("f4"), layer()(X), rtol=0.1, atol=0.05)


@USES.add("input of another dtype than the weights")
def other_dtype() -> None:
    assert layer()(X.astype(jnp.bfloat16)).dtype == jnp.float32


@USES.add("weights tied between layers")
def tied() -> None:
    first, second = layer(), layer()
    second.W_query.kernel = first.W_query.kernel
    pair = nnx.List([first, second])
    found = nnx.grad(lambda pair: (pair[1](pair[0](X)) ** 2).sum())(pair)
    assert len(jax.tree.leaves(found)) == 7


@USES.add("in a Sequential")
def sequential() -> None:
    assert_close(nnx.Sequential(layer(), layer())(X), layer()(layer()(X)))


@USES.add("a projection replaced")
def replaced() -> None:
    module = layer()
    module.W_query = nnx.Sequential(module.W_query)
    assert_close(module(X, cache=module.init_cache(2, 5))[0], layer()(X))


@USES.add("weights frozen")
def frozen() -> None:
    kept = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("W_query")))
    found = nnx.grad(loss, argnums=nnx.DiffState(0, kept))(layer())
    assert len(jax.tree.leaves(found)) == 3


@USES.add("trained by an optimizer")
def trained() -> None:
    import optax

    module = layer()
    optimizer = nnx.Optimizer(module, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any) -> Any:
        value, slopes = nnx.value_and_grad(loss)(module)
        optimizer.update(module, slopes)
        return value

    losses = [float(step(module, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]


@USES.add("an average of weights (EMA)")
def averaged() -> None:
    import optax

    weights = nnx.state(layer(), nnx.Param)
    average = optax.ema(0.9)
    found, _ = average.update(weights, average.init(weights))
    module = layer(1)
    nnx.update(module, found)
    assert_close(module(X), layer()(X))


@USES.add("weights as one vector")
def vector() -> None:
    from jax.flatten_util import ravel_pytree

    module = layer(1)
    flat, unravel = ravel_pytree(nnx.state(layer(), nnx.Param))
    nnx.update(module, unravel(flat))
    assert_close(module(X), layer()(X))


@USES.add("dropout in training alone")
def dropout() -> None:
    module = layer()
    assert_close(module(X), module(X))
    module.train()
    assert np.abs(module(X) - module(X)).max() > 1e-3


@USES.add("dropout drawn again from a seed")
def seeded() -> None:
    modules = [jax_attn.GroupedQueryAttention(CONFIG, rngs=nnx.Rngs(0, dropout=3)) for _ in range(2)]
    assert_close(*(module(X) for module in modules))


@USES.add("NaN looked for")
def anomalies() -> None:
    with jax.debug_nans(True):
        nnx.grad(loss)(layer())


@USES.add("weights of attention returned")
def weights() -> None:
    module = jax_attn.MultiHeadAttention(8, 8, 6, num_heads=2, rngs=nnx.Rngs(0))
    assert_close(module(X, return_weights=True)[1].sum(-1), np.ones((2, 2, 5)))


@USES.add("input without a batch axis")
def no_batch() -> None:
    assert_close(layer()(X[0]), layer()(X)[0])


@USES.add("a batch of 0")
def empty() -> None:
    assert layer()(X[:0]).shape == (0, 5, 8)


@USES.add("no token")
def no_token() -> str:
    return refusal(lambda: layer()(X[:, :0]), ValueError)


@USES.add("padding as a bool mask")
def bool_mask() -> None:
    assert_close(layer()(X, attention_mask=PADDING)[0, 2:], layer()(X[:1, 2:])[0])


@USES.add("padding as a tokenizer's mask of 0 and 1")
def integer_mask() -> None:
    assert_close(layer()(X, attention_mask=PADDING.astype("i4")), layer()(X, attention_mask=PADDING))


@USES.add("documents as a mask of 1, 2, 3")
def documents() -> str:
    return refusal(lambda: layer()(X, attention_mask=np.arange(10).reshape(2, 5) % 5), ValueError)


@USES.add("a mask of floats")
def float_mask() -> str:
    return refusal(lambda: layer()(X, attention_mask=np.zeros((2, 5), "f4")), TypeError)


@USES.add("a mask of three axes")
def ambiguous_mask() -> str:
    return refusal(lambda: layer()(X, attention_mask=np.ones((2, 5, 5), bool)), ValueError)


@USES.add("query, key and value by position")
def three_arguments() -> str:
    return refusal(lambda: layer()(X, X, X), TypeError)


@USES.add("a config given as a dict")
def config_as_dict() -> str:
    return refusal(lambda: jax_attn.GroupedQueryAttention({"d_in": 8}, rngs=nnx.Rngs(0)), TypeError)


@USES.add("an array of another library")
def other_array() -> None:
    assert_close(layer()(np.asarray(X)), layer()(jnp.asarray(X)))


@USES.add("a kernel chosen by name")
def chosen() -> None:
    with functional.use_implementation("reference"):
        found = layer()(X)
    assert_close(found, layer(implementation="reference")(X))


@USES.add("a kernel that is none")
def unknown_kernel() -> str:
    return refusal(lambda: layer(implementation="flash"), ValueError)


@USES.add("decoding with a cache")
def decoded() -> None:
    module, cache, parts = layer(), layer().init_cache(2, 5), []
    step = jax.jit(lambda x, cache: module(x, cache=cache), donate_argnums=1)
    for at in range(5):
        part, cache = step(X[:, at : at + 1], cache)
        parts.append(part)
    assert_close(jnp.concatenate(parts, 1), module(X))


@USES.add("a cache that is full")
def full_cache() -> str:
    return refusal(lambda: layer()(X, cache=layer().init_cache(2, 4)), ValueError)


@USES.add("rows of a cache in another order (beams)")
def reordered() -> None:
    cache = layer()(X, cache=layer().init_cache(2, 6))[1].reorder(jnp.array([1, 1]))
    assert layer()(X[:, :1], cache=cache)[0].shape == (2, 1, 8)


@USES.add("a cache cut back (speculative decoding)")
def trimmed() -> None:
    cache = layer()(X, cache=layer().init_cache(2, 6))[1].trim(3)
    assert_close(layer()(X[:, 3:], cache=cache)[0], layer()(X)[:, 3:])


@USES.add("a whole model called with input_ids and labels")
def labelled() -> None:
    found, logits = model()(input_ids=IDS, labels=IDS)
    log = jax.nn.log_softmax(logits[:, :-1])
    assert_close(found, -jnp.take_along_axis(log, IDS[:, 1:, None], -1).mean())


@USES.add("a label that is no token")
def bad_label() -> str:
    return refusal(lambda: model()(IDS, labels=IDS + 9), ValueError)


@USES.add("a token that is none")
def bad_token() -> str:
    return refusal(lambda: model()(IDS + 9), ValueError)


@USES.add("tokens generated")
def generated() -> None:
    assert model().generate(input_ids=IDS, max_new_tokens=3, attention_mask=np.ones_like(IDS)).shape == (2, 7)


@USES.add("tokens sampled from a seed")
def sampled() -> None:
    first, second = (model().generate(IDS, 4, temperature=0.9, top_k=5, rng=jax.random.key(5)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@USES.add("tokens streamed")
def streamed() -> None:
    found = np.stack(list(model().stream(IDS, 3)), 1)
    np.testing.assert_array_equal(found, model().generate(IDS, 3)[:, 4:])


@USES.add("rows padded on the left")
def left_padded() -> None:
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert_close(model()(IDS, attention_mask=mask)[:1, 2:], model()(IDS[:1, 2:]))


@USES.add("a model in a folder")
def folder() -> None:
    with tempfile.TemporaryDirectory() as path:
        model().save_pretrained(Path(path) / "model")
        assert_close(jax_attn.DecoderModel.from_pretrained(Path(path) / "model")(IDS), model()(IDS))


@USES.add("a module printed")
def printed() -> None:
    assert "W_query" in repr(layer())
