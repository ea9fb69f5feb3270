"""What every module and `functional.dot_product_attention` do on torch; the mirror is ``jax_side/test_modules.py``."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import torch_attn
from attn_bridge import masks, specs
from attn_bridge.reference import find
from torch_attn import backend, functional
from torch_attn.implementations import reference

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
        return torch_attn.simple_self_attention
    module = build(name, **{**MODULES[name], **changes})
    load(module, draw_weights(module.config, seed, dtype))
    module.eval()
    return module


def build(name: str, seed: int = 0, **arguments: Any) -> nn.Module:
    torch.manual_seed(seed)
    return getattr(torch_attn, name)(**arguments)


def load(module: nn.Module, weights: dict[str, np.ndarray]) -> None:
    backend.set_weights(module, weights)


def output(module: Any, x: np.ndarray) -> np.ndarray:
    """Return what a plain call gives."""
    return backend.to_numpy(module(backend.from_numpy(x)))


def run(module: Any, x: np.ndarray, mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the context and the weights."""
    mask = torch.from_numpy(mask) if isinstance(mask, np.ndarray) else mask
    context, weights = module(backend.from_numpy(x), attention_mask=mask, return_weights=True)
    return backend.to_numpy(context), backend.to_numpy(weights)


run_eagerly = run


def gradients(module: Any, x: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the input and of every parameter, for a cotangent without symmetry."""
    source = torch.from_numpy(x).requires_grad_()
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    outputs = module(source, attention_mask=torch.from_numpy(mask), return_weights=True)
    return [gradient.numpy() for gradient in torch.autograd.grad(_loss(outputs), [source, *parameters])]


def parameter(module: nn.Module, name: str) -> np.ndarray:
    """Return a parameter by its torch name."""
    return module.get_parameter(name).detach().numpy()


def attend(*inputs: np.ndarray, **options: Any) -> Any:
    """Call `functional.dot_product_attention` on NumPy arrays."""
    result = functional.dot_product_attention(*map(torch.from_numpy, inputs), **_tensors(options))
    return tuple(part.numpy() for part in result) if isinstance(result, tuple) else result.numpy()


def attend_gradients(*inputs: np.ndarray, **options: Any) -> list[np.ndarray]:
    """Return the gradients of query, key, value and, if there are any, of the sinks."""
    tensors = [torch.from_numpy(array).requires_grad_() for array in inputs]
    options = _tensors(options)
    sources = tensors if options.get("sinks") is None else [*tensors, options["sinks"].requires_grad_()]
    loss = _loss([functional.dot_product_attention(*tensors, **options)])
    return [gradient.numpy() for gradient in torch.autograd.grad(loss, sources)]


def source(seed: int) -> torch.Generator:
    """Return a random source of `functional`."""
    return torch.Generator().manual_seed(seed)


def _loss(outputs: Any) -> torch.Tensor:
    return sum((part * torch.cos(torch.arange(part.numel())).reshape(part.shape)).sum() for part in outputs)


def _tensors(options: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(o) if isinstance(o, np.ndarray) else o for name, o in options.items()}


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
    reasons = functional.explain(*map(torch.from_numpy, inputs))
    assert tuple(reasons) == functional.IMPLEMENTATIONS
    for name, reason in reasons.items():
        if reason is None:
            np.testing.assert_allclose(attend(*inputs, implementation=name), attend(*inputs), rtol=0, atol=1e-6)
        else:
            with pytest.raises(NotImplementedError) as caught:
                attend(*inputs, implementation=name)
            assert str(caught.value) == f"implementation {name!r} does not support this call: {reason}"


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


def test_a_generator_of_ones_own_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    drop_uniform(0.25, source(1))
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_random_source_the_global_generator_decides():
    torch.manual_seed(3)
    one, other = drop_uniform(0.25, None), drop_uniform(0.25, None)
    torch.manual_seed(3)
    np.testing.assert_array_equal(one, drop_uniform(0.25, None))
    assert not np.array_equal(one, other)


def test_rate_zero_leaves_the_random_source_alone():
    rng = source(1)
    before = rng.get_state()
    np.testing.assert_allclose(drop_uniform(0.0, rng), 1 / 24, rtol=1e-6)
    assert torch.equal(before, rng.get_state())


# ---- torch only


def test_the_package_needs_no_other_framework():
    """With JAX and Flax blocked, all of it imports and runs."""
    program = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import torch, torch_attn, torch_attn.backend
torch_attn.MultiHeadAttention(4, 4, 6, num_heads=2)(torch.ones(5, 4))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@every_causal
def test_training_calls_differ_and_a_seed_repeats_them(name):
    module, x = make(name, dropout=0.5).train(), draw(2, 5, D_IN)
    torch.manual_seed(7)
    first, second = output(module, x), output(module, x)
    torch.manual_seed(7)
    np.testing.assert_array_equal(first, output(module, x))
    assert not np.array_equal(first, second)


@every_causal
@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (0.5, False)], ids=["rate zero", "evaluation"])
def test_without_dropout_no_random_number_is_drawn(name, rate, training):
    module = make(name, dropout=rate).train(training)
    before = torch.get_rng_state()
    output(module, draw(2, 5, D_IN))
    assert torch.equal(before, torch.get_rng_state())


@every_module
def test_a_module_compiles_into_one_graph(name):
    module, x = make(name), torch.from_numpy(draw(2, 5, D_IN))
    options = {} if name == "LayerNorm" else {"attention_mask": torch.from_numpy(PADDING), "return_weights": True}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, **options), module(x, **options))


def book_checkpoint(name: str, mask_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a state dict as the book's class of that name saves it: mask buffers beside the weights."""
    config = specs.find_variant(name).config(**MODULES[name])
    mask = torch.triu(torch.ones(CONTEXT_LENGTH, CONTEXT_LENGTH), diagonal=1).to(mask_dtype)
    places = [f"heads.{head}." for head in range(config.num_heads)] if name == WRAPPER else [""]
    weights = {key: torch.from_numpy(array) for key, array in draw_weights(config, 5).items()}
    return {**{f"{place}mask": mask.clone() for place in places}, **weights}


@every_causal
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bool], ids=str)
def test_a_checkpoint_of_the_book_loads_strictly(name, mask_dtype):
    checkpoint = book_checkpoint(name, mask_dtype)
    given = {key: tensor.clone() for key, tensor in checkpoint.items()}
    module = build(name, **MODULES[name])
    result = module.load_state_dict(checkpoint, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert list(checkpoint) == list(given)
    assert all(torch.equal(checkpoint[key], given[key]) for key in given)
    weights = {key: tensor for key, tensor in given.items() if not key.endswith("mask")}
    state = module.state_dict()
    assert sorted(state) == sorted(weights)
    assert all(torch.equal(state[key], weights[key]) for key in weights)


ONES = torch.ones(CONTEXT_LENGTH, CONTEXT_LENGTH)
NOT_CAUSAL = "must be the causal mask: non-zero above the diagonal, zero elsewhere"
WRONG_MASKS = {
    "inverted": (ONES.tril(), NOT_CAUSAL),
    "diagonal hidden": (ONES.triu(), NOT_CAUSAL),
    "one entry off": (ONES.triu(1) - ONES.triu(5), NOT_CAUSAL),
    "too large": (torch.ones(7, 7).triu(1), "must be the causal mask of shape (6, 6), got (7, 7)"),
    "with batch axis": (ONES.triu(1)[None], "must be the causal mask of shape (6, 6), got (1, 6, 6)"),
    "no tensor": ("causal", "must be the causal mask of shape (6, 6), got str"),
}


@every_causal
@pytest.mark.parametrize("label", WRONG_MASKS)
def test_a_checkpoint_with_another_mask_is_an_error_that_names_it(name, label):
    mask, message = WRONG_MASKS[label]
    key = "heads.1.mask" if name == WRAPPER else "mask"
    with pytest.raises(RuntimeError) as caught:
        build(name, **MODULES[name]).load_state_dict({**book_checkpoint(name), key: mask})
    assert str(caught.value) == f"Error(s) in loading state_dict for {name}:\n\t{key} {message}"


def test_a_checkpoint_of_the_book_loads_inside_a_larger_module():
    outer = nn.Sequential(nn.Linear(D_IN, D_IN), build(MHA, **MODULES[MHA]))
    inner = {f"1.{key}": tensor for key, tensor in book_checkpoint(MHA).items()}
    outer.load_state_dict({"0.weight": torch.ones(D_IN, D_IN), "0.bias": torch.ones(D_IN), **inner})
    assert torch.equal(outer[1].out_proj.bias, inner["1.out_proj.bias"])


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda module: pickle.loads(pickle.dumps(module))}


@every_module
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_stands_on_its_own(name, how):
    module, x = make(name), draw(2, 5, D_IN)
    wanted = output(module, x)
    copied = COPIES[how](module)
    for tensor in module.parameters():
        tensor.data.zero_()
    del module
    gc.collect()
    np.testing.assert_array_equal(output(copied, x), wanted)


@every_causal
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_still_loads_the_checkpoints_of_the_book(name, how):
    copied = COPIES[how](make(name))
    gc.collect()
    copied.load_state_dict(book_checkpoint(name))
    key = "heads.1.mask" if name == WRAPPER else "mask"
    with pytest.raises(RuntimeError, match=r"mask must be the causal mask of shape \(6, 6\), got \(2, 2\)"):
        copied.load_state_dict({**book_checkpoint(name), key: torch.ones(2, 2)})


@every_module
def test_a_state_dict_goes_round(name):
    given, target, x = make(name, 0), make(name, 1), draw(2, 5, D_IN)
    assert sorted(given.state_dict()) == sorted(row.rule.torch for row in given.config.parameters)
    assert not np.array_equal(output(given, x), output(target, x))
    target.load_state_dict(given.state_dict())
    np.testing.assert_array_equal(output(given, x), output(target, x))


@every_module
def test_parameters_have_the_dtype_and_the_device_asked_for(name):
    module = build(name, **MODULES[name], dtype=torch.float64, device="meta")
    assert {(tensor.dtype, tensor.device.type) for tensor in module.parameters()} == {(torch.float64, "meta")}


def test_self_attention_is_the_second_version():
    assert torch_attn.SelfAttention is torch_attn.SelfAttention_v2


def test_compiled_modules_take_a_mask_after_calls_of_other_lengths():
    torch.compiler.reset()
    module = torch_attn.CausalAttention(6, 4, 8).eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for batch, tokens in ((2, 3), (4, 5)):
        compiled(torch.randn(batch, tokens, 6))
    x, mask = torch.randn(3, 5, 6), torch.rand(3, 5) < 0.7
    torch.testing.assert_close(compiled(x, attention_mask=mask), module(x, attention_mask=mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_and_softmax_are_float32_for_16_bit_input(dtype, monkeypatch):
    seen = []
    right = reference.masked_softmax
    monkeypatch.setattr(
        reference, "masked_softmax", lambda scores, *rest: seen.append(scores.dtype) or right(scores, *rest)
    )
    torch_attn.CausalAttention(6, 4, 8, dtype=dtype).eval()(torch.randn(2, 3, 6, dtype=dtype), return_weights=True)
    assert seen == [torch.float32]
