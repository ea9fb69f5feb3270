"""What users of JAX do with Flax's own attention layers, done with ours; each function fails if a number is wrong."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_attn
from jax_attn import compat, functional

from .jax_layers import CONFIG, IDS, PADDING, X, assert_close, layer, loss, model
from .jax_programs import USES
from .table import refusal


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


@USES.add("a state of several processes (DCP, Orbax)")
def state_of_drop_ins() -> None:
    import orbax.checkpoint as ocp

    stock = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    ours = compat.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(1))
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saver:
        saver.save(Path(folder) / "state", nnx.state(stock, nnx.Param))
        saver.wait_until_finished()
        nnx.update(ours, saver.restore(Path(folder) / "state", nnx.state(ours, nnx.Param)))
    assert_close(ours(X), stock(X))


@USES.add("float16 weights")
def half_precision() -> None:
    module = layer()
    nnx.update(module, jax.tree.map(lambda one: one.astype(jnp.float16), nnx.state(module, nnx.Param)))
    assert_close(module(X.astype(jnp.float16)).astype("f4"), layer()(X), rtol=0.02, atol=0.01)


@USES.add("the drop-in in place of NNX's layer")
def drop_in() -> None:
    ours, stock = (
        kind(2, 8, decode=False, rngs=nnx.Rngs(0)) for kind in (compat.MultiHeadAttention, nnx.MultiHeadAttention)
    )
    assert_close(ours(X), stock(X))


@USES.add("in a model of Linen")
def in_linen() -> None:
    config = CONFIG.replace(dropout=0.0)
    module = nnx.bridge.to_linen(jax_attn.GroupedQueryAttention, config)
    assert module.apply(module.init(jax.random.key(0), X), X).shape == X.shape


@USES.add("split, filtered and merged")
def filtered() -> None:
    graph, weights, rest = nnx.split(layer(), nnx.Param, ...)
    assert_close(nnx.merge(graph, weights, rest)(X), layer()(X))
    assert len(jax.tree.leaves(nnx.state(layer(), nnx.PathContains("W_query")))) == 1


@USES.add("gradients accumulated")
def accumulated() -> None:
    import optax

    module = layer()
    optimizer = nnx.Optimizer(module, optax.MultiSteps(optax.adam(1e-2), 2), wrt=nnx.Param)
    for _ in range(4):
        optimizer.update(module, nnx.grad(loss)(module))
    assert loss(module) < loss(layer())


@USES.add("a subclass that changes the call")
def subclassed() -> None:
    class Doubled(jax_attn.GroupedQueryAttention):
        def __call__(self, x: Any, **options: Any) -> Any:
            return 2 * super().__call__(x, **options)

    module = Doubled(CONFIG, rngs=nnx.Rngs(0))
    module.eval()
    assert_close(module(X), 2 * layer()(X))


@USES.add("initialisers given to the constructor")
def initialised() -> None:
    module = layer(kernel_init=nnx.initializers.constant(0.5))
    assert_close(module.W_query.kernel[...], np.full((8, 8), 0.5))


@USES.add("a precision of all products")
def precise() -> None:
    program = jax.jit(layer(precision="highest")).lower(X).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == sum("HIGHEST" in line for line in products) > 4
    assert_close(layer(precision="highest")(X), layer()(X))
