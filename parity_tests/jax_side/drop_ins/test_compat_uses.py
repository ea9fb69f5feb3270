"""Uses of `flax.nnx.MultiHeadAttention` in models and transforms: the drop-in gives the same results, in float64."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_attn import backend, compat, functional

B, T, S, E, H = 2, 5, 7, 8, 4
CAUSAL = np.tril(np.ones((T, T), int))
PADDING = (np.arange(S) < np.array([[4], [7]])).astype(float)[:, None, None]
NORMAL = nnx.initializers.normal(1.0)
DROPOUT = {"dropout_rate": 0.5, "deterministic": False}


@pytest.fixture(autouse=True)
def _float64():
    with backend.precision("float64"):
        yield


def exact(query, key, value, dropout_rate=0.0, **options):
    """Compute Flax's attention with its weights: without dropout it calls JAX, whose softmax runs in float32."""
    weights = nnx.nn.attention.dot_product_attention_weights(query, key, dropout_rate=dropout_rate, **options)
    return jnp.einsum("...hqk,...khd->...qhd", weights, jnp.repeat(value, query.shape[-2] // value.shape[-2], -2))


def stock(*sizes, **options):
    return nnx.MultiHeadAttention(*sizes, attention_fn=exact, **options)


def make(kind, seed=0, **options):
    options = {"decode": False, "param_dtype": jnp.float64, "kernel_init": NORMAL, "bias_init": NORMAL, **options}
    return kind(H, E, rngs=nnx.Rngs(seed), **options)


def draw(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def different_lengths(kind):
    layer, q, k = make(kind), draw(B, T, E), draw(B, S, E)
    return layer(q, k, is_causal=True), layer(q, k, mask=PADDING), layer(q, k, k, mask=jnp.asarray(PADDING, int))


def mask_of_two_axes(kind):
    return make(kind)(draw(B, T, E), mask=CAUSAL), make(kind)(draw(3, B, T, E), mask=CAUSAL)


def without_tokens(kind):
    q, k, nothing = draw(B, T, E), draw(B, S, E), draw(B, 0, E)
    return [
        layer(*inputs)
        for layer in (make(kind), make(kind, **DROPOUT))
        for inputs in ((q, nothing), (nothing, k), (nothing,), (q[:0],))
    ]


def precisions(kind):
    names = ("highest", ("high", "high"), jax.lax.Precision.HIGH, (jax.lax.Precision.HIGHEST,) * 2, "float32")
    return [make(kind, precision=name)(draw(1, 2, E)) for name in names]


def initial_weights(kind):
    options = {"out_kernel_init": nnx.initializers.xavier_uniform(), "out_bias_init": nnx.initializers.ones_init()}
    layer = make(kind, qkv_features=12, out_features=6, num_kv_heads=2, kernel_metadata={"tag": "kernel"}, **options)
    return [*jax.tree.leaves(nnx.state(layer, nnx.Param)), len(layer.query.kernel.get_metadata()["tag"])]


def decoding_in_a_compiled_step(kind):
    layer, x = make(kind, decode=None, num_kv_heads=2), draw(B, T, E)
    layer.init_cache(x.shape, dtype=jnp.float64)
    step = nnx.jit(lambda layer, token, mask: layer(token, mask=mask, decode=True))
    masks = np.arange(T) != np.array([[9], [1]])[:, None, None]
    outputs = [step(layer, x[:, at : at + 1], jnp.asarray(masks)) for at in range(T)]
    return [*outputs, layer.cached_key[...], layer.cache_index[...]]


def streams_of_the_call(kind):
    layer, x = make(kind, keep_rngs=False, **DROPOUT), draw(B, T, E)
    return [layer(x, rngs=rngs) for rngs in (nnx.Rngs(dropout=1), nnx.Rngs(dropout=2).dropout)]


def train_and_eval(kind):
    layer, x = make(kind, dropout_rate=0.5), draw(B, T, E)
    layer.eval()
    outputs = [layer(x), nnx.view(layer, deterministic=False)(x)]
    layer.train()
    return [*outputs, layer(x), layer(x), layer(x, deterministic=True)]


def remat_with_dropout(kind):
    layer, call = make(kind, broadcast_dropout=False, **DROPOUT), nnx.remat(lambda layer, x: layer(x))
    return jax.tree.leaves(nnx.grad(lambda layer: jnp.sin(call(layer, draw(B, T, E))).sum())(layer))


def scan_over_layers(kind):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return kind(H, E, rngs=rngs, decode=False, param_dtype=jnp.float64)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return x + layer(x)

    return run(draw(B, T, E), stack(nnx.Rngs(0)))


def derivatives(kind):
    layer, x = make(kind), draw(3, 1, 2, E)

    def along(x):
        return jax.jvp(jax.grad(lambda x: jnp.sin(layer(x, is_causal=True)).sum()), (x,), (x,))

    return jax.jit(jax.vmap(along))(x)


def linen(kind):
    module, x = nnx.bridge.to_linen(kind, H, E, decode=False, param_dtype=jnp.float64), draw(B, T, E)
    return module.apply(module.init({"params": jax.random.key(0)}, x), x)


def exported_with_symbolic_sizes(kind):
    layer, sizes = make(kind), jax.export.symbolic_shape("b, t")
    program = jax.export.export(jax.jit(lambda x: layer(x)))(jax.ShapeDtypeStruct((*sizes, E), jnp.float64))
    return program.call(draw(B, T, E))


def copies(kind):
    layer, x = make(kind), draw(B, T, E)
    return [other(x) for other in (nnx.clone(layer), copy.deepcopy(layer), nnx.merge(*nnx.split(layer)))]


USES = [
    different_lengths, mask_of_two_axes, without_tokens, precisions, initial_weights,
    decoding_in_a_compiled_step, streams_of_the_call, train_and_eval, remat_with_dropout, scan_over_layers, derivatives,
    linen, exported_with_symbolic_sizes, copies,
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_use_gives_what_the_stock_layer_gives(use):
    expected, got = (jax.tree.leaves(use(kind)) for kind in (stock, compat.MultiHeadAttention))
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert np.shape(ours) == np.shape(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-11)


def test_biases_of_scores_get_the_gradients_of_flax():
    q, v, bias = draw(B, T, H, 2), draw(B, T, H, 2, seed=2), draw(1, H, T, T, seed=3)
    for shape in ((1, H, T, T), (H, T, T), (B, 1, T, T)):
        drawn = draw(*shape, seed=4)
        expected, got = (
            jax.value_and_grad(lambda bias, f=f: jnp.sin(f(q, q, v, bias=bias)).sum())(drawn)
            for f in (exact, compat.dot_product_attention)
        )
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-10, atol=1e-12)
    got = compat.dot_product_attention(q, q, v, bias, CAUSAL[None, None])
    np.testing.assert_allclose(got, exact(q, q, v, bias=bias, mask=CAUSAL[None, None]), rtol=1e-10)


@pytest.mark.parametrize("name", functional.IMPLEMENTATIONS)
def test_an_implementation_computes_the_calls_or_refuses(name):
    with jax.enable_x64(False):
        x = draw(B, T, E)
        layer = make(compat.MultiHeadAttention, param_dtype=jnp.float32, implementation=name)
        try:
            output = layer(x)
        except NotImplementedError:
            assert functional.explain(*[x.reshape(B, T, H, 2)] * 3)[name] is not None
        else:
            expected = make(nnx.MultiHeadAttention, param_dtype=jnp.float32)(x)
            np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)
        if name != "reference":
            with pytest.raises(NotImplementedError, match="does not support this call"):
                layer(x, sow_weights=True)


def test_layers_of_one_implementation_share_compiled_programs():
    first, second, other = (
        nnx.graphdef(make(compat.MultiHeadAttention, seed, implementation=name))
        for seed, name in ((0, "reference"), (1, "reference"), (0, None))
    )
    assert first == second
    assert first != other


def test_a_preset_precision_reaches_the_products():
    with jax.enable_x64(False):
        layer = make(compat.MultiHeadAttention, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32, param_dtype="float32")
        program = str(jax.make_jaxpr(layer)(draw(B, T, E)))
    assert program.count("F32_F32_F32") == program.count("dot_general")


def test_bad_implementations_and_precisions_are_refused():
    with pytest.raises(ValueError, match=r"^implementation \('fast'\) must be one of "):
        make(compat.MultiHeadAttention, implementation="fast")
    with pytest.raises(ValueError, match=r"^give attention_fn or implementation, not both$"):
        make(compat.MultiHeadAttention, implementation="reference", attention_fn=exact)
    with pytest.raises(ValueError, match=r"^precision must be the same for both operands of attention, got \('high', "):
        make(compat.MultiHeadAttention, precision=("high", "highest"))(draw(B, T, E))
