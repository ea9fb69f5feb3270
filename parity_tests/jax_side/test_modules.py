"""What every module and `functional.dot_product_attention` do on JAX; the mirror is ``torch_side/test_modules.py``."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx

import jax_attn
from attn_bridge import flax_to_torch, masks, specs, torch_to_flax
from attn_bridge.reference import find
from jax_attn import backend, functional
from jax_attn.implementations import reference, unavailable

from ..support.bad_calls import ATTENTION_MODULES, CONTEXT_LENGTH, D_IN, MODULES

SIMPLE, WRAPPER, MHA = "simple_self_attention", "MultiHeadAttentionWrapper", "MultiHeadAttention"
NAMES = (SIMPLE, *ATTENTION_MODULES)
CAUSAL = ("CausalAttention", WRAPPER, MHA)
WIDTHS = {SIMPLE: D_IN, "SelfAttention_v1": 3, "SelfAttention_v2": 3, "CausalAttention": 3, WRAPPER: 12, MHA: 6}
"""Width of the context that each gives, with the arguments of `MODULES`."""

HEADS = {WRAPPER: (2,), MHA: (2,)}
"""Axis of heads in the weights of those that have one."""

seeded = pytest.mark.parametrize("seed", [0, 1])
every_attention = pytest.mark.parametrize("name", NAMES)
every_module = pytest.mark.parametrize("name", MODULES)
every_causal = pytest.mark.parametrize("name", CAUSAL)


def draw(*shape: int, seed: int = 0, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def draw_weights(config: specs.Config, seed: int, dtype: Any = "float32") -> dict[str, np.ndarray]:
    """Return weights under their torch names, biases too."""
    rng = np.random.default_rng(1000 + seed)
    return {row.rule.torch: rng.uniform(-1.2, 1.2, row.shape).astype(dtype) for row in config.parameters}


def make(name: str, seed: int = 0, dtype: Any = "float32", **changes: Any) -> Any:
    """Return a module in eval mode with drawn weights, or the function of that name."""
    if name == SIMPLE:
        return jax_attn.simple_self_attention
    module = build(name, **{**MODULES[name], **changes})
    load(module, draw_weights(module.config, seed, dtype))
    module.eval()
    return module


def build(name: str, seed: int = 0, **arguments: Any) -> nnx.Module:
    return getattr(jax_attn, name)(**arguments, rngs=nnx.Rngs(seed))


def load(module: nnx.Module, weights: dict[str, np.ndarray]) -> None:
    backend.set_weights(module, torch_to_flax(weights, module.config.rules()))


def output(module: Any, x: np.ndarray) -> np.ndarray:
    """Return what a plain call gives."""
    return np.asarray(_plain(*_as_arguments(module), jnp.asarray(x)))


def run(module: Any, x: np.ndarray, mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the context and the weights."""
    described = isinstance(mask, masks.Mask)
    context, weights = _with_weights(
        *_as_arguments(module), x, None if described else mask, mask if described else None
    )
    return np.asarray(context), np.asarray(weights)


def run_eagerly(module: nnx.Module, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the context and the weights, compiling operation by operation."""
    return tuple(map(np.asarray, module(x, return_weights=True)))


def gradients(module: Any, x: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the input and of every parameter, for a cotangent without symmetry."""
    function, module = _as_arguments(module)
    graphdef, parameters, rest = nnx.split(module, nnx.Param, ...)
    found = _module_gradients(x, parameters, rest, mask, function, graphdef)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def parameter(module: nnx.Module, name: str) -> np.ndarray:
    """Return a parameter by its torch name."""
    return flax_to_torch(backend.get_weights(module), module.config.rules())[name]


def attend(*inputs: np.ndarray, **options: Any) -> Any:
    """Call `functional.dot_product_attention` on NumPy arrays."""
    call = _attention if options.get("rng") is None else functional.dot_product_attention
    result = call(*inputs, **options)
    return tuple(map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)


def attend_gradients(*inputs: np.ndarray, **options: Any) -> list[np.ndarray]:
    """Return the gradients of query, key, value and, if there are any, of the sinks."""
    found = _attention_gradients(inputs, options.pop("sinks", None), options)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def source(seed: int) -> nnx.RngStream:
    """Return a random source of `functional`."""
    return nnx.Rngs(dropout=seed).dropout


def _as_arguments(module: Any) -> tuple[Any, nnx.Module | None]:
    """Return the function and the module, one of them, as `_with_weights` takes them."""
    return (None, module) if isinstance(module, nnx.Module) else (module, None)


@functools.partial(nnx.jit, static_argnums=0)
def _plain(function: Any, module: nnx.Module | None, x: jax.Array) -> jax.Array:
    return (function or module)(x)


@functools.partial(nnx.jit, static_argnums=(0, 4))
def _with_weights(function: Any, module: nnx.Module | None, x: Any, mask: Any, described: masks.Mask | None) -> Any:
    mask = mask if described is None else described
    return (function or module)(x, attention_mask=mask, return_weights=True)


_attention = jax.jit(
    functional.dot_product_attention, static_argnames=("scale", "softcap", "return_weights", "implementation")
)


@functools.partial(jax.jit, static_argnums=(4, 5))
@functools.partial(jax.grad, argnums=(0, 1))
def _module_gradients(x: Any, parameters: Any, rest: Any, mask: Any, function: Any, graphdef: Any) -> Any:
    called = function or nnx.merge(graphdef, parameters, rest, copy=True)
    return _loss(called(x, attention_mask=mask, return_weights=True))


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1))
def _attention_gradients(inputs: Any, sinks: Any, options: dict[str, Any]) -> Any:
    return _loss([functional.dot_product_attention(*inputs, **options, sinks=sinks)])


def _loss(outputs: Any) -> jax.Array:
    return sum((part * jnp.cos(jnp.arange(part.size)).reshape(part.shape)).sum() for part in outputs)


# ---- shapes, dtypes, numbers


@every_attention
@pytest.mark.parametrize("shape", [(2, 5, D_IN), (5, D_IN), (1, D_IN)], ids=str)
def test_outputs_have_the_shapes_of_the_contract(name, shape):
    context, weights = run(make(name), draw(*shape))
    *batch, tokens, _ = shape
    assert context.shape == (*batch, tokens, WIDTHS[name])
    assert weights.shape == (*batch, *HEADS.get(name, ()), tokens, tokens)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


@every_attention
def test_weights_come_only_if_asked_for(name):
    module, x = make(name), draw(2, 5, D_IN)
    np.testing.assert_allclose(output(module, x), run(module, x)[0], rtol=0, atol=2e-6)


@every_attention
def test_a_sequence_alone_gives_what_it_gives_in_a_batch(name):
    module, x = make(name), draw(2, 5, D_IN)
    for alone, in_batch in zip(run(module, x[0]), run(module, x), strict=True):
        np.testing.assert_allclose(alone, in_batch[0], rtol=0, atol=2e-6)


@every_causal
def test_a_sequence_may_be_as_long_as_the_context_length(name):
    context, weights = run(make(name), draw(CONTEXT_LENGTH, D_IN))
    assert context.shape == (CONTEXT_LENGTH, WIDTHS[name])
    assert weights.shape == (*HEADS.get(name, ()), CONTEXT_LENGTH, CONTEXT_LENGTH)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in (*NAMES, "LayerNorm")), (SIMPLE, "float16"), (MHA, "float16")],
)
def test_half_precision_stays_half_precision(name, dtype):
    x = draw(2, 5, D_IN, dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    module = make(name, dtype=x.dtype)
    outputs = (output(module, x),) if name == "LayerNorm" else run(module, x)
    assert {part.dtype.name for part in outputs} == {dtype}


@pytest.mark.parametrize("name", [*NAMES, "LayerNorm"])
@seeded
def test_double_precision_is_really_double(name, seed):
    x, mask = draw(2, 5, D_IN, seed=seed, dtype="float64"), np.ones((2, 5), bool)
    mask[1, 1] = False
    module, variant = make(name), specs.find_variant(name)
    config = variant.config() if name == SIMPLE else module.config
    weights = draw_weights(config, seed, "float64")
    with backend.precision("float64"):
        if weights:
            load(module, weights)
        outputs = (output(module, x),) if name == "LayerNorm" else run(module, x, mask)
    expected = find(variant)(config, weights, x, None if name == "LayerNorm" else mask)
    for actual, wanted in zip(outputs, expected[: len(outputs)], strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-13)


def test_a_norm_of_far_off_features_takes_its_variance_in_two_passes():
    """At 1000 + x, the mean of squares minus the square of the mean would be off by some 10 percent."""
    x = draw(5, D_IN) + np.float32(1000.0)
    config = specs.LayerNormConfig(D_IN)
    wanted, _ = find(specs.find_variant("LayerNorm"))(config, draw_weights(config, 0), x)
    np.testing.assert_allclose(output(make("LayerNorm"), x), wanted, rtol=0, atol=1e-3)


@every_attention
def test_large_scores_give_no_nan(name):
    context, weights = run(make(name), draw(2, 5, D_IN) * np.float32(1e3))
    assert np.isfinite(context).all()
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


# ---- masks


@every_attention
@seeded
def test_a_fully_masked_row_gives_zeros_and_no_gradient(name, seed):
    """Nobody sees token 2 of the first sequence, and it sees nobody: it neither gets nor gives anything."""
    x = draw(2, 5, D_IN, seed=seed)
    mask = np.ones((2, 1, 5, 5), bool)
    mask[0, :, 2, :] = mask[0, :, :, 2] = False
    module = make(name, seed)
    context, weights = run(module, x, mask)
    assert not weights[0, ..., 2, :].any()
    np.testing.assert_array_equal(context[0, 2], parameter(module, "out_proj.bias") if name == MHA else 0.0)
    of_x, *of_parameters = gradients(module, x, mask)
    assert not of_x[0, 2].any()
    assert of_x.any(-1).sum() == 9, "every other token has a gradient"
    assert all(np.isfinite(gradient).all() for gradient in of_parameters)


@every_attention
@seeded
def test_a_padding_mask_hides_its_keys(name, seed):
    x = draw(2, 5, D_IN, seed=seed)
    changed = x.copy()
    changed[1, 0] += 10.0
    mask = np.ones((2, 5), bool)
    mask[1, 0] = False
    module = make(name, seed)
    before, after, unmasked = run(module, x, mask), run(module, changed, mask), run(module, changed)
    np.testing.assert_array_equal(before[0][1, 1:], after[0][1, 1:])
    np.testing.assert_array_equal(before[0][0], after[0][0])
    assert not before[1][1, ..., 0].any()
    assert np.abs(before[0][1, 1:] - unmasked[0][1, 1:]).max() > 1e-3, "the token matters where it is not hidden"


@every_causal
@seeded
def test_a_causal_token_sees_nothing_that_comes_later(name, seed):
    x = draw(2, 5, D_IN, seed=seed)
    changed = x.copy()
    changed[:, 3:] += 5.0
    module = make(name, seed)
    before, after = run(module, x), run(module, changed)
    np.testing.assert_array_equal(before[0][:, :3], after[0][:, :3])
    assert not np.triu(before[1], 1).any()


@pytest.mark.parametrize("name", HEADS)
def test_heads_can_have_masks_of_their_own(name):
    module, x = make(name), draw(2, 5, D_IN)
    mask = np.ones((1, 2, 1, 5), bool)
    mask[0, 0, 0, 0] = False
    weights, unmasked = run(module, x, mask)[1], run(module, x)[1]
    assert not weights[:, 0, :, 0].any()
    np.testing.assert_allclose(weights[:, 1], unmasked[:, 1], rtol=0, atol=1e-6)


PADDING = np.array([[True, True, False, True, True], [True, True, True, False, False]])
ROWS, COLUMNS = np.arange(5)[:, None], np.arange(5)[None, :]
DESCRIPTIONS = {
    "full": (masks.full(), np.ones((5, 5), bool)),
    "causal": (masks.causal(), COLUMNS <= ROWS),
    "window": (masks.sliding_window(2), (COLUMNS <= ROWS) & (COLUMNS > ROWS - 2)),
    "offset": (masks.causal().offset(2), COLUMNS <= ROWS + 2),
    "and": (masks.sliding_window(3) & PADDING, (COLUMNS <= ROWS) & (COLUMNS > ROWS - 3) & PADDING[:, None, None]),
    "or": (masks.causal() | PADDING, (COLUMNS <= ROWS) | PADDING[:, None, None]),
    "array": (masks.ArrayMask(PADDING), PADDING[:, None, None]),
}
"""Description, and the array that says the same."""


@pytest.mark.parametrize("label", DESCRIPTIONS)
def test_a_description_is_the_array_it_describes(label):
    description, array = DESCRIPTIONS[label]
    module, x = make("SelfAttention_v2"), draw(2, 5, D_IN)
    array = np.broadcast_to(array, (2, 1, 5, 5)).copy()
    for described, given in zip(run(module, x, description), run(module, x, array), strict=True):
        np.testing.assert_allclose(described, given, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(described == 0, given == 0)


def test_a_mask_may_leave_out_leading_axes():
    module, x = make(MHA), draw(2, 5, D_IN)
    keys = np.array([True, False, True, True, True])
    np.testing.assert_allclose(run(module, x, keys)[1], run(module, x, np.stack([keys, keys]))[1], rtol=0, atol=1e-6)


# ---- dropout


EYES = np.broadcast_to(np.eye(24, dtype="float32"), (16, 24, 24)).copy()


def make_transparent(name: str, rate: float, seed: int = 0) -> Any:
    """Return a module in training mode that turns `EYES` into the very weights that dropout left, head by head."""
    tokens = EYES.shape[-1]
    (heads,) = HEADS.get(name, (1,))
    d_out = heads * tokens if name == MHA else tokens
    arguments = {"d_in": tokens, "d_out": d_out, "context_length": tokens, "dropout": rate}
    module = build(name, seed, **arguments, **({"num_heads": heads} if name in HEADS else {}))
    weights = draw_weights(module.config, 0)
    for key, array in weights.items():
        if "W_value" in key:
            array[...] = np.tile(np.eye(tokens), (d_out // tokens, 1))
        elif key.startswith("out_proj"):
            array[...] = np.eye(d_out) if array.ndim == 2 else 0.0
    load(module, weights)
    module.train()
    return module


@pytest.mark.parametrize(("name", "rate"), [("CausalAttention", 0.25), (WRAPPER, 0.5), (MHA, 0.25)])
def test_training_drops_the_expected_part_of_the_weights_and_scales_the_rest(name, rate):
    (heads,) = HEADS.get(name, (1,))
    context, weights = run_eagerly(make_transparent(name, rate), EYES)
    batch, tokens, _ = context.shape
    left = context.reshape(batch, tokens, heads, tokens).transpose(0, 2, 1, 3)
    weights = weights.reshape(left.shape)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6, err_msg="weights come as they are before dropout")
    visible = np.broadcast_to(np.tri(tokens, dtype=bool), weights.shape)
    kept = left[visible] != 0
    np.testing.assert_allclose(left[visible][kept], weights[visible][kept] / (1 - rate), rtol=1e-5)
    assert abs(1 - kept.mean() - rate) < 5 * (rate * (1 - rate) / kept.size) ** 0.5
    spread = (rate / (1 - rate) * (weights**2).sum(-1).mean() / (batch * heads * tokens)) ** 0.5
    assert abs(left.sum(-1).mean() - 1.0) < 5 * spread, "the mean is kept"
    last_rows = (left[:, :, -1] != 0).reshape(-1, tokens)
    assert len(np.unique(last_rows, axis=0)) == batch * heads, "every sequence and head draws for itself"


@every_causal
def test_evaluation_drops_nothing(name):
    x = draw(2, 5, D_IN)
    module = make(name, dropout=0.5)
    for one, two, plain in zip(*(run_eagerly(each, x) for each in (module, module, make(name))), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, plain)


# ---- initial weights


def check_uniform(values: np.ndarray, low: float, high: float, tolerance: float) -> None:
    assert values.min() >= low
    assert values.max() <= high
    np.testing.assert_allclose(values.std(), (high - low) / 12**0.5, rtol=tolerance)
    np.testing.assert_allclose(values.mean(), (high + low) / 2, atol=tolerance * (high - low))


@seeded
def test_linear_layers_start_uniform_within_one_over_the_root_of_the_fan_in(seed):
    module = build(MHA, seed, d_in=64, d_out=512, context_length=4, num_heads=2, qkv_bias=True)
    for layer, fan_in in (("W_query", 64), ("W_key", 64), ("W_value", 64), ("out_proj", 512)):
        bound = np.float32(fan_in**-0.5)
        check_uniform(parameter(module, f"{layer}.weight"), -bound, bound, 0.03)
        check_uniform(parameter(module, f"{layer}.bias"), -bound, bound, 0.08)
    assert not np.array_equal(parameter(module, "W_query.weight"), parameter(module, "W_key.weight"))


@seeded
def test_bare_matrices_start_uniform_between_zero_and_one(seed):
    module = build("SelfAttention_v1", seed, d_in=64, d_out=512)
    matrices = [parameter(module, name) for name in ("W_query", "W_key", "W_value")]
    for matrix in matrices:
        check_uniform(matrix, 0.0, 1.0, 0.03)
        assert matrix.max() < 1.0
    assert not np.array_equal(*matrices[:2])


def test_a_norm_starts_with_ones_and_zeros():
    module = build("LayerNorm", emb_dim=5)
    np.testing.assert_array_equal(parameter(module, "scale"), np.ones(5, "float32"))
    np.testing.assert_array_equal(parameter(module, "shift"), np.zeros(5, "float32"))


# ---- functional.dot_product_attention


def formula(query, key, value, *, mask=None, bias=0.0, scale=None, softcap=None, sinks=None):
    """Attention in NumPy: scaled, soft-capped, biased, masked; a sink is one more column, dropped after the softmax."""
    group = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, group, 2), np.repeat(value, group, 2)
    scores = np.einsum("bthd,bshd->bhts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(True if mask is None else mask, scores + bias, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))], -1)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (exponentials / exponentials.sum(-1, keepdims=True))[..., : key.shape[1]]
    return np.einsum("bhts,bshd->bthd", weights, value), weights


def operands(seed: int, dtype: Any = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 3 queries of 4 heads, 5 keys and values of 2 heads, values wider than keys; scores of several units."""
    return (
        3 * draw(2, 3, 4, 6, seed=seed, dtype=dtype),
        draw(2, 5, 2, 6, seed=seed + 10, dtype=dtype),
        draw(2, 5, 2, 7, seed=seed + 20, dtype=dtype),
    )


BIAS = draw(4, 3, 5, seed=3, dtype="float64")
MASK = np.array([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]], bool) & np.array([1, 0], bool)[:, None, None, None]
MASK |= np.eye(3, 5, dtype=bool)
SINKS = np.array([0.5, -1.0, 2.0, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": BIAS},
    "mask": {"mask": MASK},
    "mask and bias": {"mask": MASK, "bias": BIAS[:, :1]},
    "sinks": {"sinks": SINKS},
    "all": {"mask": MASK, "bias": BIAS, "scale": 0.7, "softcap": 1.5, "sinks": SINKS},
}


@pytest.mark.parametrize("label", OPTIONS)
@seeded
def test_every_option_follows_the_formula(label, seed):
    inputs = operands(seed)
    with backend.precision("float64"):
        result = attend(*inputs, **OPTIONS[label], return_weights=True)
    for actual, wanted in zip(result, formula(*inputs, **OPTIONS[label]), strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-13)


def test_scores_are_capped_before_they_are_biased():
    query, key, value = operands(0, "float32")
    bias = BIAS.astype("float32")
    weights = attend(query, key, value, bias=bias, softcap=1.5, return_weights=True)[1]
    scores = np.einsum("bthd,bshd->bhts", query, np.repeat(key, 2, 2)) * 6**-0.5
    other_order = np.exp(1.5 * np.tanh((scores + bias) / 1.5))
    assert np.abs(weights - other_order / other_order.sum(-1, keepdims=True)).max() > 0.1


def test_shared_heads_are_the_heads_repeated():
    query, key, value = operands(0, "float32")
    shared = attend(query, key, value, return_weights=True)
    repeated = attend(query, np.repeat(key, 2, 2), np.repeat(value, 2, 2), return_weights=True)
    for one, two in zip(shared, repeated, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)


def test_sinks_get_a_gradient():
    *_, of_sinks = attend_gradients(*operands(0, "float32"), sinks=SINKS.astype("float32"))
    assert (np.abs(of_sinks) > 1e-4).all()


@pytest.mark.parametrize(
    ("hidden_by", "sinks"),
    [("bias", None), ("mask", None), ("bias", SINKS.astype("float32"))],
    ids=["bias", "mask", "bias with sinks"],
)
def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients(hidden_by, sinks):
    inputs = operands(0, "float32")
    bias = np.zeros((1, 4, 3, 5), "float32")
    bias[0, 1, 2] = -np.inf
    options = {"bias": bias} if hidden_by == "bias" else {"mask": bias == 0}
    context, weights = attend(*inputs, **options, sinks=sinks, return_weights=True)
    assert not weights[:, 1, 2].any()
    assert not context[:, 2, 1].any()
    found = attend_gradients(*inputs, **options, sinks=sinks)
    assert all(np.isfinite(gradient).all() for gradient in found)
    assert not found[0][:, 2, 1].any()
    assert found[0][:, 2, 0].any()


def test_scores_of_ten_thousand_give_no_nan():
    query, key, value = operands(0, "float32")
    query *= np.float32(1e4)
    context, weights = attend(query, key, value, return_weights=True)
    assert np.isfinite(context).all()
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in attend_gradients(query, key, value))


def test_a_nan_is_not_taken_for_a_hidden_row():
    query, key, value = operands(0, "float32")
    query[0, 1, 2] = np.nan
    context, weights = attend(query, key, value, return_weights=True)
    assert np.isnan(weights[0, 2, 1]).all()
    assert np.isnan(context[0, 1, 2]).all()
    assert np.isnan(weights).sum() == weights.shape[-1]


def test_softmax_of_half_precision_runs_in_single():
    inputs = [array.astype("float16") for array in operands(0, "float32")]
    exact = formula(*(array.astype("float64") for array in inputs))[1]
    weights = attend(*inputs, return_weights=True)[1]
    assert weights.dtype == np.float16
    np.testing.assert_allclose(weights, exact, rtol=2**-10, atol=2**-24)


def test_an_implementation_can_be_forced_by_name():
    inputs = operands(0, "float32")
    for name, reason in unavailable().items():
        if reason is None:
            np.testing.assert_allclose(attend(*inputs, implementation=name), attend(*inputs), rtol=0, atol=1e-6)
        else:
            with pytest.raises(NotImplementedError, match=f"implementation '{name}' does not support this call"):
                attend(*inputs, implementation=name)


def drop_uniform(rate: float, rng: Any) -> np.ndarray:
    """Return the equal weights of 24 keys as dropout leaves them."""
    query, key = np.zeros((16, 24, 2, 3), "float32"), np.zeros((16, 24, 1, 3), "float32")
    value = np.eye(24, dtype="float32")[None, :, None].repeat(16, 0)
    return attend(query, key, value, dropout=rate, rng=rng)


def test_the_random_source_decides_what_is_dropped():
    one, other, again = (drop_uniform(0.25, source(seed)) for seed in (1, 2, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert abs((one == 0).mean() - 0.25) < 5 * (0.25 * 0.75 / one.size) ** 0.5
    np.testing.assert_allclose(one[one != 0], 1 / 24 / 0.75, rtol=1e-6)


def test_a_random_source_moves_on_from_call_to_call():
    rng = source(1)
    assert not np.array_equal(drop_uniform(0.25, rng), drop_uniform(0.25, rng))


def test_a_key_a_stream_and_rngs_give_the_same_draw():
    of_stream = drop_uniform(0.25, nnx.Rngs(dropout=3).dropout)
    np.testing.assert_array_equal(of_stream, drop_uniform(0.25, nnx.Rngs(dropout=3).dropout()))
    np.testing.assert_array_equal(of_stream, drop_uniform(0.25, nnx.Rngs(params=0, dropout=3)))
    np.testing.assert_array_equal(of_stream, drop_uniform(0.25, nnx.Rngs(3)))


def test_a_key_gives_the_same_draw_every_time():
    key = jax.random.key(1)
    np.testing.assert_array_equal(drop_uniform(0.25, key), drop_uniform(0.25, key))


def test_rate_zero_leaves_the_random_source_alone():
    rng = source(1)
    np.testing.assert_allclose(drop_uniform(0.0, rng), 1 / 24, rtol=1e-6)
    assert int(rng.count[...]) == 0


# ---- JAX only


def test_the_package_needs_no_other_framework():
    """With torch blocked, all of it imports and runs."""
    program = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch",):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import jax, jax_attn, jax_attn.backend
from flax import nnx
module = jax_attn.MultiHeadAttention(4, 4, 6, num_heads=2, rngs=nnx.Rngs(0))
jax.eval_shape(module, jax.ShapeDtypeStruct((5, 4), "float32"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@every_causal
def test_training_calls_differ_and_a_seed_repeats_them(name):
    module, again, other = (make_transparent(name, 0.25, seed) for seed in (7, 7, 8))
    first, second = module(EYES), module(EYES)
    np.testing.assert_array_equal(first, again(EYES))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other(EYES))


@every_causal
@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (0.5, False)], ids=["rate zero", "evaluation"])
def test_without_dropout_no_random_number_is_drawn(name, rate, training):
    module = make(name, dropout=rate)
    module.train() if training else module.eval()
    before = random_state(module)
    assert len(before) == (0 if rate == 0.0 else 3 if name == WRAPPER else 1)
    module(draw(2, 5, D_IN))
    assert random_state(module) == before


def random_state(module: nnx.Module) -> list[int]:
    """Return the counts of all streams inside a module."""
    return [int(count) for count in jax.tree.leaves(nnx.state(module, nnx.RngCount))]


@every_module
def test_building_without_dropout_touches_no_dropout_stream(name):
    rngs = nnx.Rngs(params=0, dropout=1)
    getattr(jax_attn, name)(**MODULES[name], rngs=rngs)
    assert int(rngs.dropout.count[...]) == 0
    assert int(rngs.params.count[...]) == (
        0 if name == "LayerNorm" else len(specs.find_variant(name).config(**MODULES[name]).parameters)
    )
    getattr(jax_attn, name)(**MODULES[name], rngs=nnx.Rngs(params=0))


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
def test_the_computation_has_the_dtype_asked_for_or_the_common_one(name, dtype, given, wanted):
    module = build(name, **MODULES[name], dtype=dtype)
    assert jax.eval_shape(module, jax.ShapeDtypeStruct((2, 5, D_IN), given)).dtype.name == wanted
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))} == {jnp.dtype(jnp.float32)}


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
    module = make_transparent(name, 0.25)
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


def test_self_attention_is_the_second_version():
    assert jax_attn.SelfAttention is jax_attn.SelfAttention_v2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_gradient_of_softmax_is_at_least_as_precise_as_the_librarys(seed):
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


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_scores_and_softmax_are_float32_for_16_bit_input(dtype, monkeypatch):
    seen = []
    right = reference.masked_softmax
    monkeypatch.setattr(
        reference, "masked_softmax", lambda scores, *rest: seen.append(scores.dtype) or right(scores, *rest)
    )
    jax_attn.CausalAttention(6, 4, 8, rngs=nnx.Rngs(0), param_dtype=dtype)(
        jnp.ones((2, 3, 6), dtype), return_weights=True
    )
    assert seen == [jnp.float32]
