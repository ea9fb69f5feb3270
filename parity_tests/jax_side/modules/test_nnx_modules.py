"""What is NNX's own about attention modules: streams, state, transformations, views, Linen; and JAX's softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_attn
from attn_bridge import specs
from attn_parity.check.mesh.cases import MODELS
from jax_attn.implementations import reference

from ...contract import jax_backend, modules
from ...contract.jax_backend import build, output, random_state
from ...contract.modules import EYES, MHA, WRAPPER, draw, drop_uniform, every_causal, every_module
from ...support.calls.bad_calls import D_IN, MODULES


def make(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a module in eval mode with drawn weights."""
    return modules.make(jax_backend, name, seed, **changes)


# ---- random numbers


def test_a_key_a_stream_and_rngs_give_the_same_draw():
    of_stream = drop_uniform(jax_backend, 0.25, nnx.Rngs(dropout=3).dropout)
    np.testing.assert_array_equal(of_stream, drop_uniform(jax_backend, 0.25, nnx.Rngs(dropout=3).dropout()))
    np.testing.assert_array_equal(of_stream, drop_uniform(jax_backend, 0.25, nnx.Rngs(params=0, dropout=3)))
    np.testing.assert_array_equal(of_stream, drop_uniform(jax_backend, 0.25, nnx.Rngs(3)))


def test_a_key_gives_the_same_draw_every_time():
    key = jax.random.key(1)
    np.testing.assert_array_equal(drop_uniform(jax_backend, 0.25, key), drop_uniform(jax_backend, 0.25, key))


@every_causal
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_module_has_a_stream_for_each_dropout_that_drops(name, rate):
    module = build(name, **MODULES[name] | {"dropout": rate})
    assert len(random_state(module)) == (0 if rate == 0.0 else 3 if name == WRAPPER else 1)


@every_module
def test_building_without_dropout_touches_no_dropout_stream(name):
    rngs = nnx.Rngs(params=0, dropout=1)
    getattr(jax_attn, name)(**MODULES[name], rngs=rngs)
    assert int(rngs.dropout.count[...]) == 0
    assert int(rngs.params.count[...]) == (
        0 if name == "LayerNorm" else len(specs.find_variant(name).config(**MODULES[name]).parameters)
    )
    getattr(jax_attn, name)(**MODULES[name], rngs=nnx.Rngs(params=0))


# ---- state


@every_module
def test_the_state_has_the_paths_of_the_contract(name):
    linear = [f"{layer}.{leaf}" for layer in ("W_query", "W_key", "W_value") for leaf in ("kernel", "bias")]
    expected = {
        "SelfAttention_v1": ["W_query", "W_key", "W_value"],
        "SelfAttention_v2": linear,
        "CausalAttention": linear,
        WRAPPER: [f"heads.{head}.{leaf}" for head in range(2) for leaf in linear],
        MHA: [*linear, "out_proj.kernel", "out_proj.bias"],
        "LayerNorm": ["scale", "shift"],
    }
    state = nnx.to_flat_state(nnx.state(build(name, **MODULES[name])))
    assert sorted(".".join(map(str, path)) for path, _ in state) == sorted(expected[name])
    assert {type(leaf) for _, leaf in state} == {nnx.Param}


@every_module
def test_parameters_have_the_dtype_asked_for(name):
    module = nnx.eval_shape(lambda: build(name, **MODULES[name], param_dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module))} == {jnp.dtype(jnp.bfloat16)}


@every_module
@pytest.mark.parametrize(
    ("dtype", "given", "wanted"), [(None, "float16", "float32"), (jnp.bfloat16, "float32", "bfloat16")], ids=str
)
def test_modules_compute_in_the_given_or_common_dtype(name, dtype, given, wanted):
    module = build(name, **MODULES[name], dtype=dtype)
    assert jax.eval_shape(module, jax.ShapeDtypeStruct((2, 5, D_IN), given)).dtype.name == wanted
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))} == {jnp.dtype(jnp.float32)}


# ---- transformations


@every_module
def test_neither_jit_of_jax_nor_of_nnx_changes_a_thing(name):
    module, x = make(name), draw(2, 5, D_IN)
    eager = np.asarray(module(x))
    for compiled in (jax.jit(module)(x), output(module, x)):
        np.testing.assert_allclose(compiled, eager, rtol=0, atol=2e-6)


@every_module
def test_like_modules_share_one_compilation(name):
    """A jit cache is keyed on the structure of its arguments."""
    one, other = jax.tree.structure(make(name, 0)), jax.tree.structure(make(name, 1))
    assert one == other
    assert hash(one) == hash(other)


@every_module
def test_vmap_over_a_batch_is_a_batch(name):
    module, x = make(name), draw(2, 5, D_IN)
    np.testing.assert_allclose(jax.jit(jax.vmap(module))(x), output(module, x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["SelfAttention_v1", WRAPPER, MHA, "LayerNorm"])
def test_gradients_of_nnx_are_those_of_jax(name):
    module, x = make(name), draw(2, 5, D_IN)

    def loss(module: nnx.Module) -> jax.Array:
        return jnp.square(module(x)).sum()

    @nnx.jit
    def differentiate(module: nnx.Module) -> tuple[Any, Any, Any]:
        return nnx.grad(loss)(module), nnx.value_and_grad(loss)(module), jax.grad(loss)(module)

    found, (value, found_too), wanted = differentiate(module)
    np.testing.assert_allclose(value, np.square(output(module, x)).sum(), rtol=1e-5)
    for one, two, three in zip(*map(jax.tree.leaves, (found, found_too, wanted)), strict=True):
        np.testing.assert_allclose(one, three, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(two, three, rtol=1e-5, atol=1e-5)
        assert np.abs(three).max() > 0


def test_gradients_flow_with_dropout_through_split_and_merge():
    module, x = make(MHA, dropout=0.5), draw(2, 5, D_IN)
    module.train()
    graphdef, parameters, rest = nnx.split(module, nnx.Param, ...)
    differentiate = nnx.jit(nnx.grad(lambda parameters, rest: nnx.merge(graphdef, parameters, rest)(x).sum()))
    found = differentiate(parameters, rest)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert np.abs(np.asarray(jax.tree.leaves(found)[-1])).max() > 0


@every_module
def test_a_module_goes_through_split_and_merge(name):
    module, x = make(name), draw(2, 5, D_IN)
    merged = nnx.merge(*nnx.split(module))
    np.testing.assert_array_equal(output(merged, x), output(module, x))
    assert merged.config == module.config


@every_causal
def test_views_and_modes_switch_dropout(name):
    module = modules.make_transparent(jax_backend, name, 0.25)
    assert not np.array_equal(module(EYES), module(EYES))
    module.eval()
    plain = module(EYES)
    np.testing.assert_array_equal(module(EYES), plain)
    training = nnx.view(module, deterministic=False)
    assert not np.array_equal(training(EYES), plain)
    np.testing.assert_array_equal(module(EYES), plain)
    np.testing.assert_array_equal(nnx.view(training, deterministic=True)(EYES), plain)
    module.train()
    assert not np.array_equal(module(EYES), plain)


class LinenBlock(linen.Module):
    """A Linen model with our attention inside."""

    @linen.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(jax_attn.MultiHeadAttention, **MODULES[MHA], name="attn")(linen.Dense(D_IN)(x))


def test_a_linen_model_holds_our_module_and_its_weights():
    module, x = make(MHA), draw(2, 5, D_IN)
    model = LinenBlock()
    variables = model.init(jax.random.key(0), x)
    own = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert jax.tree.map(jnp.shape, variables["params"]["attn"]) == jax.tree.map(jnp.shape, own)
    identity = {"kernel": jnp.eye(D_IN), "bias": jnp.zeros(D_IN)}
    result = model.apply({"params": {"attn": own, "Dense_0": identity}}, x)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(module(x)))


# ---- softmax


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_softmax_gradients_are_as_precise_as_the_librarys(seed):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(2000, 5)).astype(np.float32)
    scores[:, 2] += 6.0
    pulled = (rng.normal(size=scores.shape) * 20).astype(np.float32)
    wide = np.exp(scores.astype(np.float64))
    weights = wide / wide.sum(-1, keepdims=True)
    exact = weights * (pulled - (weights * pulled).sum(-1, keepdims=True))

    def rms_error(softmax):
        _, pull_back = jax.vjp(softmax, jnp.asarray(scores))
        return np.sqrt(np.mean((np.asarray(pull_back(jnp.asarray(pulled))[0]) - exact) ** 2))

    assert rms_error(reference.softmax) < rms_error(jax.nn.softmax)


def test_softmax_has_forward_mode_derivatives():
    scores, tangent = jnp.array([0.3, -1.0, 2.0]), jnp.array([1.0, -0.5, 0.25])
    ours, theirs = (jax.jvp(softmax, (scores,), (tangent,)) for softmax in (reference.softmax, jax.nn.softmax))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def dtype_of(block: nnx.Module, config: specs.DecoderBlockConfig) -> jnp.dtype:
    """Return the dtype of a block's output for vectors in bfloat16; nothing is computed."""
    streams = () if config.updates is None else (config.updates.num_streams,)
    inputs = {"x": jax.ShapeDtypeStruct((2, 5, *streams, config.emb_dim), jnp.bfloat16)}
    if config.layer_input is not None:
        inputs["layer_input"] = jax.ShapeDtypeStruct((2, 5, config.layer_input.dim), jnp.bfloat16)
    graph, state = nnx.split(block)
    return jax.eval_shape(lambda state, inputs: nnx.merge(graph, state)(**inputs), state, inputs).dtype


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("DecoderModel")])
def test_blocks_compute_in_their_dtype_with_parameters_of_another(name):
    config = MODELS[name]
    blocks = nnx.eval_shape(lambda: jax_attn.DecoderModel(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)).trf_blocks
    alone = [number for number, block in enumerate(config.blocks) if block.keys_of is None]
    assert {dtype_of(blocks[number], config.blocks[number]) for number in alone} == {jnp.dtype(jnp.bfloat16)}


def test_a_cache_that_was_made_with_x64_goes_on_without_and_back():
    config = specs.GroupedQueryAttentionConfig(8, 2, position=specs.Alibi())
    module = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(1, 6, 8)).astype(np.float32)
    parts, cache = [], None
    for start, stop, x64 in ((0, 2, True), (2, 3, False), (3, 4, True), (4, 6, False)):
        with jax.enable_x64(x64):
            cache = module.init_cache(1, 6) if cache is None else cache
            part, cache = jax.jit(lambda x, cache: module(x, cache=cache))(x[:, start:stop], cache)
            parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), module(x), rtol=0, atol=1e-6)
