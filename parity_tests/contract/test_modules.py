"""What every attention module does: shapes, dtypes, numbers and masks."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import masks, specs
from attn_bridge.reference import find

from ..neutral.test_house import run_python
from ..support.calls.bad_calls import CONTEXT_LENGTH, D_IN
from . import backends
from .modules import (
    HEADS,
    MHA,
    NAMES,
    PADDING,
    RECURRENT,
    SIMPLE,
    WIDTHS,
    draw,
    draw_weights,
    every_attention,
    every_causal,
    make,
    make_example,
    seeded,
)

backend = backends.fixture(backends.adapters("backend"))

# ---- shapes, dtypes, numbers


@every_attention
@pytest.mark.parametrize("shape", [(2, 5, D_IN), (5, D_IN), (1, D_IN)], ids=str)
def test_outputs_have_the_shapes_of_the_contract(backend, name, shape):
    context, weights = backend.run(make(backend, name), draw(*shape))
    *batch, tokens, _ = shape
    assert context.shape == (*batch, tokens, WIDTHS[name])
    assert weights.shape == (*batch, *HEADS.get(name, ()), tokens, tokens)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


@every_attention
def test_weights_come_only_if_asked_for(backend, name):
    module, x = make(backend, name), draw(2, 5, D_IN)
    np.testing.assert_allclose(backend.output(module, x), backend.run(module, x)[0], rtol=0, atol=2e-6)


@every_attention
def test_a_sequence_alone_gives_what_it_gives_in_a_batch(backend, name):
    module, x = make(backend, name), draw(2, 5, D_IN)
    for alone, in_batch in zip(backend.run(module, x[0]), backend.run(module, x), strict=True):
        np.testing.assert_allclose(alone, in_batch[0], rtol=0, atol=2e-6)


@every_causal
def test_a_sequence_may_be_as_long_as_the_context_length(backend, name):
    context, weights = backend.run(make(backend, name), draw(CONTEXT_LENGTH, D_IN))
    assert context.shape == (CONTEXT_LENGTH, WIDTHS[name])
    assert weights.shape == (*HEADS.get(name, ()), CONTEXT_LENGTH, CONTEXT_LENGTH)


MODERN = {variant.name: variant.config for variant in specs.VARIANTS if variant.group == "modern" and variant.examples}


@pytest.mark.parametrize("name", MODERN)
def test_something_else_than_its_config_is_refused(backend, name):
    config = MODERN[name].__name__
    for given, kind in (({"d_in": 8}, f"dict; use {config}(**config)"), (8, "int"), (specs.LayerNormConfig(8), None)):
        with pytest.raises(TypeError) as caught:
            backend.build(name, config=given)
        assert str(caught.value) == f"config must be a {config}, got {kind or 'LayerNormConfig'}"


def test_a_norm_without_bias_scales_alone(backend):
    module, x = backend.build("LayerNorm", emb_dim=6, bias=False), draw(2, 5, 6)
    backend.load(module, {"scale": np.arange(1, 7, dtype=np.float32)})
    centred = x - x.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * np.arange(1, 7)
    np.testing.assert_allclose(backend.output(module, x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in (*NAMES, "LayerNorm")), (SIMPLE, "float16"), (MHA, "float16")],
)
def test_half_precision_stays_half_precision(backend, name, dtype):
    x = draw(2, 5, D_IN, dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    module = make(backend, name, dtype=x.dtype)
    outputs = (backend.output(module, x),) if name == "LayerNorm" else backend.run(module, x)
    assert {part.dtype.name for part in outputs} == {dtype}


@pytest.mark.parametrize("name", [*NAMES, "LayerNorm"])
@seeded
def test_double_precision_is_really_double(backend, name, seed):
    x, mask = draw(2, 5, D_IN, seed=seed, dtype="float64"), np.ones((2, 5), bool)
    mask[1, 1] = False
    module, variant = make(backend, name), specs.find_variant(name)
    config = variant.config() if name == SIMPLE else module.config
    weights = draw_weights(config, seed, "float64")
    with backend.precision("float64"):
        if weights:
            backend.load(module, weights)
        outputs = (backend.output(module, x),) if name == "LayerNorm" else backend.run(module, x, mask)
    expected = find(variant)(config, weights, x, None if name == "LayerNorm" else mask)
    for actual, wanted in zip(outputs, expected[: len(outputs)], strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-13)


def test_norms_of_large_means_compute_variance_in_two_passes(backend):
    """At 1000 + x, the mean of squares minus the square of the mean would be off by some 10 percent."""
    x = draw(5, D_IN) + np.float32(1000.0)
    config = specs.LayerNormConfig(D_IN)
    wanted, _ = find(specs.find_variant("LayerNorm"))(config, draw_weights(config, 0), x)
    np.testing.assert_allclose(backend.output(make(backend, "LayerNorm"), x), wanted, rtol=0, atol=1e-3)


@every_attention
def test_large_scores_give_no_nan(backend, name):
    context, weights = backend.run(make(backend, name), draw(2, 5, D_IN) * np.float32(1e3))
    assert np.isfinite(context).all()
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


# ---- masks


@every_attention
@seeded
def test_a_fully_masked_row_gives_zeros_and_no_gradient(backend, name, seed):
    """Nobody sees token 2 of the first sequence, and it sees nobody: it neither gets nor gives anything."""
    x = draw(2, 5, D_IN, seed=seed)
    mask = np.ones((2, 1, 5, 5), bool)
    mask[0, :, 2, :] = mask[0, :, :, 2] = False
    module = make(backend, name, seed)
    context, weights = backend.run(module, x, mask)
    assert not weights[0, ..., 2, :].any()
    np.testing.assert_array_equal(context[0, 2], backend.parameter(module, "out_proj.bias") if name == MHA else 0.0)
    of_x, *of_parameters = backend.gradients(module, x, mask)
    assert not of_x[0, 2].any()
    assert of_x.any(-1).sum() == 9, "every other token has a gradient"
    assert all(np.isfinite(gradient).all() for gradient in of_parameters)


@every_attention
@seeded
def test_a_padding_mask_hides_its_keys(backend, name, seed):
    x = draw(2, 5, D_IN, seed=seed)
    changed = x.copy()
    changed[1, 0] += 10.0
    mask = np.ones((2, 5), bool)
    mask[1, 0] = False
    module = make(backend, name, seed)
    before, after, unmasked = (
        backend.run(module, x, mask),
        backend.run(module, changed, mask),
        backend.run(module, changed),
    )
    np.testing.assert_array_equal(before[0][1, 1:], after[0][1, 1:])
    np.testing.assert_array_equal(before[0][0], after[0][0])
    assert not before[1][1, ..., 0].any()
    assert np.abs(before[0][1, 1:] - unmasked[0][1, 1:]).max() > 1e-3, "the token matters where it is not hidden"


@every_causal
@seeded
def test_a_causal_token_sees_nothing_that_comes_later(backend, name, seed):
    x = draw(2, 5, D_IN, seed=seed)
    changed = x.copy()
    changed[:, 3:] += 5.0
    module = make(backend, name, seed)
    before, after = backend.run(module, x), backend.run(module, changed)
    np.testing.assert_array_equal(before[0][:, :3], after[0][:, :3])
    assert not np.triu(before[1], 1).any()


@pytest.mark.parametrize("name", HEADS)
def test_heads_can_have_masks_of_their_own(backend, name):
    module, x = make(backend, name), draw(2, 5, D_IN)
    mask = np.ones((1, 2, 1, 5), bool)
    mask[0, 0, 0, 0] = False
    weights, unmasked = backend.run(module, x, mask)[1], backend.run(module, x)[1]
    assert not weights[:, 0, :, 0].any()
    np.testing.assert_allclose(weights[:, 1], unmasked[:, 1], rtol=0, atol=1e-6)


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
def test_a_description_is_the_array_it_describes(backend, label):
    description, array = DESCRIPTIONS[label]
    module, x = make(backend, "SelfAttention_v2"), draw(2, 5, D_IN)
    array = np.broadcast_to(array, (2, 1, 5, 5)).copy()
    for described, given in zip(backend.run(module, x, description), backend.run(module, x, array), strict=True):
        np.testing.assert_allclose(described, given, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(described == 0, given == 0)


def test_a_mask_may_leave_out_leading_axes(backend):
    module, x = make(backend, MHA), draw(2, 5, D_IN)
    keys = np.array([True, False, True, True, True])
    np.testing.assert_allclose(
        backend.run(module, x, keys)[1], backend.run(module, x, np.stack([keys, keys]))[1], rtol=0, atol=1e-6
    )


# ---- the package


def test_self_attention_is_the_second_version(backend):
    assert backend.package.SelfAttention is backend.package.SelfAttention_v2


def test_the_package_needs_no_other_framework(backend):
    """With the other one blocked, all of it imports and runs."""
    done = run_python("-c", backend.PROGRAM, blocked=backend.OTHERS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_and_softmax_are_float32_for_16_bit_input(backend, dtype, monkeypatch):
    seen = []
    right = backend.reference.masked_softmax
    monkeypatch.setattr(
        backend.reference, "masked_softmax", lambda scores, *rest: seen.append(scores.dtype) or right(scores, *rest)
    )
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    backend.run_eagerly(make(backend, "CausalAttention", dtype=dtype), draw(2, 3, D_IN, dtype=dtype))
    assert [str(one).removeprefix("torch.") for one in seen] == ["float32"]


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_takes_nothing_of_hidden_tokens(backend, name):
    module, x = make_example(backend, name)
    wanted, hidden = np.where(PADDING[..., None], x, 1.0), np.where(PADDING[..., None], x, np.nan)
    call = functools.partial(module, attention_mask=backend.as_argument(PADDING))
    found, plain = (backend.output(call, tokens) for tokens in (hidden, wanted))
    np.testing.assert_array_equal(found[PADDING], plain[PADDING])
