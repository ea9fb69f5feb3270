"""The NumPy references against numbers worked out by hand and against the laws of attention."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attn_bridge import specs
from attn_bridge.reference import bert_encoder, directional_derivative, find, gpt_model

from ... import goldens
from ...support.models.references_by_hand import CASES, bert_case, gpt_case

SEEDS = (0, 1, 2)
BATCH, TOKENS, WIDTH = 2, 4, 3

CONFIGS = {
    "simple": specs.SimpleSelfAttentionConfig(),
    "v1": specs.SelfAttentionV1Config(WIDTH, 5),
    "v2": specs.SelfAttentionV2Config(WIDTH, 5),
    "v2-bias": specs.SelfAttentionV2Config(WIDTH, 5, qkv_bias=True),
    "causal": specs.CausalAttentionConfig(WIDTH, 5, TOKENS),
    "causal-bias": specs.CausalAttentionConfig(WIDTH, 5, TOKENS, qkv_bias=True),
    "wrapper": specs.MultiHeadAttentionWrapperConfig(WIDTH, 2, TOKENS, num_heads=3),
    "wrapper-bias": specs.MultiHeadAttentionWrapperConfig(WIDTH, 2, TOKENS, num_heads=3, qkv_bias=True),
    "mha": specs.MultiHeadAttentionConfig(WIDTH, 6, TOKENS, num_heads=2),
    "mha-bias": specs.MultiHeadAttentionConfig(WIDTH, 6, TOKENS, num_heads=3, qkv_bias=True),
    "norm": specs.LayerNormConfig(WIDTH, eps=0.1),
}
VARIANTS = {variant.config: variant for variant in specs.VARIANTS}
CAUSAL = ("causal", "causal-bias", "wrapper", "wrapper-bias", "mha", "mha-bias")
UNMASKED = ("simple", "v1", "v2", "v2-bias")
ATTENTIONS = (*UNMASKED, *CAUSAL)

seeded = pytest.mark.parametrize("seed", SEEDS)
batched = pytest.mark.parametrize("batch", [(), (BATCH,)], ids=["single", "batch"])


def configs(*names):
    return pytest.mark.parametrize("config", [CONFIGS[name] for name in names], ids=names)


def reference_of(config):
    return find(VARIANTS[type(config)])


def draw(config, seed, batch=(BATCH,)):
    rng = np.random.default_rng(seed)
    parameters = {row.rule.torch: rng.uniform(-1.5, 1.5, row.shape) for row in config.parameters}
    return parameters, rng.normal(size=(*batch, TOKENS, WIDTH)), rng


def padding(batch):
    """Hide the first key (so that a causal query 0 sees none) and, of the second sequence, every key."""
    mask = np.ones((*batch, TOKENS), dtype=bool).reshape(-1, TOKENS)
    mask[:, 0] = False
    mask[1:] = False
    return mask


def heads_of(config):
    return getattr(config, "num_heads", 1)


def test_simple_self_attention_by_hand():
    log3 = math.log(3)
    x = np.array([[0.0, 1.0], [log3, 0.0]])
    unit, square = math.e / (math.e + 1), math.exp(log3**2) / (math.exp(log3**2) + 1)
    output, weights = reference_of(CONFIGS["simple"])(CONFIGS["simple"], {}, x)
    np.testing.assert_allclose(weights, [[unit, 1 - unit], [1 - square, square]], rtol=1e-15)
    np.testing.assert_allclose(output, [[(1 - unit) * log3, unit], [square * log3, 1 - square]], rtol=1e-15)


def test_self_attention_v1_by_hand():
    config = specs.SelfAttentionV1Config(1, 4)
    parameters = {
        "W_query": np.full((1, 4), 0.5),
        "W_key": np.full((1, 4), math.log(3)),
        "W_value": np.array([[4.0, 8.0, 12.0, 16.0]]),
    }
    output, weights = reference_of(config)(config, parameters, np.array([[0.0], [1.0]]))
    np.testing.assert_allclose(weights, [[1 / 2, 1 / 2], [1 / 4, 3 / 4]], rtol=1e-14)
    np.testing.assert_allclose(output, [[2, 4, 6, 8], [3, 6, 9, 12]], rtol=1e-14)


def hand_head(copies):
    """One head of `copies` equal channels: scores ``[[2, 4], [1, 2]] * log(2)``, values 0 and 2."""
    gain = math.log(2) / math.sqrt(copies)
    rows = {
        "W_query": ([gain, 0.0], gain),
        "W_key": ([0.0, 1.0], 1.0),
        "W_value": ([1.0, 3.0], -1.0),
    }
    parameters = {}
    for name, (weight, bias) in rows.items():
        parameters[f"{name}.weight"] = np.tile(weight, (copies, 1))
        parameters[f"{name}.bias"] = np.full(copies, bias)
    return parameters


@pytest.mark.parametrize("copies", [1, 4])
def test_self_attention_v2_by_hand(copies):
    config = specs.SelfAttentionV2Config(2, copies, qkv_bias=True)
    output, weights = reference_of(config)(config, hand_head(copies), np.eye(2))
    np.testing.assert_allclose(weights, [[1 / 5, 4 / 5], [1 / 3, 2 / 3]], rtol=1e-14)
    np.testing.assert_allclose(output, np.tile([[8 / 5], [4 / 3]], copies), rtol=1e-14)


@pytest.mark.parametrize("copies", [1, 4])
def test_causal_attention_by_hand(copies):
    config = specs.CausalAttentionConfig(2, copies, 2, qkv_bias=True)
    output, weights = reference_of(config)(config, hand_head(copies), np.eye(2))
    np.testing.assert_allclose(weights, [[1, 0], [1 / 3, 2 / 3]], rtol=1e-14)
    np.testing.assert_allclose(output, np.tile([[0], [4 / 3]], copies), rtol=1e-14)


def test_causal_attention_with_a_hidden_first_key_by_hand():
    config = specs.CausalAttentionConfig(2, 1, 2, qkv_bias=True)
    output, weights = reference_of(config)(config, hand_head(1), np.eye(2), np.array([[False, True]]))
    np.testing.assert_array_equal(weights, [[0, 0], [0, 1]])
    np.testing.assert_array_equal(output, [[0], [2]])


def test_wrapper_by_hand():
    config = specs.MultiHeadAttentionWrapperConfig(2, 1, 2, num_heads=2, qkv_bias=True)
    indifferent = hand_head(1) | {"W_query.weight": np.zeros((1, 2)), "W_query.bias": np.zeros(1)}
    heads = (hand_head(1), indifferent)
    parameters = {f"heads.{i}.{name}": array for i, head in enumerate(heads) for name, array in head.items()}
    output, weights = reference_of(config)(config, parameters, np.eye(2))
    np.testing.assert_allclose(weights, [[[1, 0], [1 / 3, 2 / 3]], [[1, 0], [1 / 2, 1 / 2]]], rtol=1e-14)
    np.testing.assert_allclose(output, [[0, 0], [4 / 3, 1]], rtol=1e-14)


def hand_multi_head():
    """The two heads of the wrapper's case, then ``out = (a + 2 b + 10, b + 20)``."""
    head = hand_head(1)
    parameters = {name: np.concatenate([array, array]) for name, array in head.items()}
    parameters["W_query.weight"][1] = 0
    parameters["W_query.bias"][1] = 0
    return parameters | {
        "out_proj.weight": np.array([[1.0, 2.0], [0.0, 1.0]]),
        "out_proj.bias": np.array([10.0, 20.0]),
    }


def test_multi_head_attention_by_hand():
    config = specs.MultiHeadAttentionConfig(2, 2, 2, num_heads=2, qkv_bias=True)
    output, weights = reference_of(config)(config, hand_multi_head(), np.eye(2))
    np.testing.assert_allclose(weights, [[[1, 0], [1 / 3, 2 / 3]], [[1, 0], [1 / 2, 1 / 2]]], rtol=1e-14)
    np.testing.assert_allclose(output, [[10, 20], [10 + 4 / 3 + 2, 21]], rtol=1e-14)


def test_multi_head_attention_without_visible_keys_gives_the_bias():
    config = specs.MultiHeadAttentionConfig(2, 2, 2, num_heads=2, qkv_bias=True)
    output, weights = reference_of(config)(config, hand_multi_head(), np.eye(2), np.array([[False, False]]))
    np.testing.assert_array_equal(weights, np.zeros((2, 2, 2)))
    np.testing.assert_array_equal(output, [[10, 20], [10, 20]])


def test_layer_norm_by_hand():
    config = specs.LayerNormConfig(2, eps=3.0)
    parameters = {"scale": np.array([2.0, 4.0]), "shift": np.array([1.0, -1.0])}
    output, weights = reference_of(config)(config, parameters, np.array([[1.0, 3.0], [7.0, 5.0]]))
    np.testing.assert_array_equal(output, [[0, 1], [2, -3]])
    assert weights is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case.config).__name__}-{case.name}")
def test_modern_attention_by_hand(case):
    output, weights = reference_of(case.config)(case.config, case.parameters, np.array(case.x), **case.inputs)
    np.testing.assert_allclose(output, case.output, rtol=1e-13, atol=1e-14)
    if case.weights is None:
        assert weights is None
    else:
        np.testing.assert_allclose(weights, case.weights, rtol=1e-13, atol=1e-14)


def test_whole_models_by_hand():
    for module, (config, parameters, expected) in ((gpt_model, gpt_case()), (bert_encoder, bert_case())):
        np.testing.assert_allclose(module.reference(config, parameters, np.array([[1]])), expected, rtol=1e-12)


def test_every_reference_has_a_case_by_hand():
    assert {type(config) for config in (*CONFIGS.values(), *(case.config for case in CASES))} == VARIANTS.keys()


@configs(*CONFIGS)
@batched
def test_shapes_and_dtypes(config, batch):
    parameters, x, _ = draw(config, 0, batch)
    output, weights = reference_of(config)(config, parameters, x)
    single = {name: array.astype(np.float32) for name, array in parameters.items()}
    from_single, _ = reference_of(config)(config, single, x.astype(np.float32))
    width = {specs.MultiHeadAttentionWrapperConfig: 6, specs.MultiHeadAttentionConfig: 6}.get(
        type(config), getattr(config, "d_out", WIDTH)
    )
    assert output.shape == (*batch, TOKENS, width)
    assert output.dtype == from_single.dtype == np.float64
    if weights is not None:
        heads = (config.num_heads,) if hasattr(config, "num_heads") else ()
        assert weights.shape == (*batch, *heads, TOKENS, TOKENS)
        assert weights.dtype == np.float64


@seeded
@configs(*ATTENTIONS)
def test_a_batch_is_its_sequences(config, seed):
    parameters, x, _ = draw(config, seed)
    function, mask = reference_of(config), padding((BATCH,))
    outputs, weights = function(config, parameters, x, mask)
    for i in range(BATCH):
        output, weight = function(config, parameters, x[i], mask[i : i + 1])
        np.testing.assert_allclose(outputs[i], output, rtol=1e-13)
        np.testing.assert_allclose(weights[i], weight, rtol=1e-13)


@seeded
@batched
@configs(*ATTENTIONS)
def test_weights_sum_to_one_for_rows_with_visible_keys(config, batch, seed):
    parameters, x, rng = draw(config, seed, batch)
    mask = rng.random((*(batch or (1,)), heads_of(config), TOKENS, TOKENS)) < 0.6
    mask[..., 1, :] = False
    _, weights = reference_of(config)(config, parameters, x, mask)
    visible = mask & np.tri(TOKENS, dtype=bool) if hasattr(config, "context_length") else mask
    visible = visible.reshape(weights.shape)
    np.testing.assert_array_equal(weights > 0, visible)
    np.testing.assert_array_equal(weights[~visible], 0)
    np.testing.assert_allclose(weights.sum(-1), visible.any(-1), rtol=1e-14)


@configs(*ATTENTIONS)
def test_a_fully_masked_query_has_a_zero_context(config):
    parameters, x, _ = draw(config, 0)
    output, weights = reference_of(config)(config, parameters, x, padding((BATCH,)))
    bias = parameters.get("out_proj.bias", 0.0)
    np.testing.assert_array_equal(weights[1], 0)
    np.testing.assert_array_equal(output[1] - bias, np.zeros_like(output[1]))
    assert np.all(output[0, -1] != bias)


@seeded
@configs(*ATTENTIONS)
def test_masks_that_mean_the_same(config, seed):
    parameters, x, _ = draw(config, seed)
    function, mask = reference_of(config), padding((BATCH,))
    shape = (BATCH, heads_of(config), TOKENS, TOKENS)
    pairs = [
        (None, np.ones((BATCH, TOKENS), dtype=bool)),
        (mask, mask[:, None, None, :]),
        (mask, np.broadcast_to(mask[:, None, None, :], shape)),
    ]
    for left, right in pairs:
        for a, b in zip(function(config, parameters, x, left), function(config, parameters, x, right), strict=True):
            np.testing.assert_array_equal(a, b)


@configs("causal", "mha", "wrapper")
def test_causal_rule_is_a_mask(config):
    parameters, x, _ = draw(config, 0)
    function = reference_of(config)
    implied = function(config, parameters, x, None)
    given = function(config, parameters, x, np.tri(TOKENS, dtype=bool)[None, None])
    for a, b in zip(implied, given, strict=True):
        np.testing.assert_array_equal(a, b)


@seeded
@batched
@configs(*CAUSAL)
def test_later_tokens_do_not_reach_earlier_outputs(config, batch, seed):
    parameters, x, rng = draw(config, seed, batch)
    function = reference_of(config)
    output, weights = function(config, parameters, x)
    for changed in range(1, TOKENS):
        other = x.copy()
        other[..., changed, :] += rng.normal(size=WIDTH)
        moved, moved_weights = function(config, parameters, other)
        np.testing.assert_array_equal(moved[..., :changed, :], output[..., :changed, :])
        np.testing.assert_array_equal(moved_weights[..., :changed, :], weights[..., :changed, :])
        assert np.all(np.any(moved[..., changed:, :] != output[..., changed:, :], axis=-1))


@seeded
@configs(*ATTENTIONS)
def test_hidden_keys_do_not_matter(config, seed):
    parameters, x, rng = draw(config, seed, ())
    function, mask = reference_of(config), padding(())
    other = x.copy()
    other[0] = rng.normal(size=WIDTH)
    for a, b in zip(function(config, parameters, x, mask), function(config, parameters, other, mask), strict=True):
        np.testing.assert_array_equal(a[..., 1:, :], b[..., 1:, :])


@seeded
@configs(*UNMASKED)
def test_permuted_tokens_give_permuted_outputs(config, seed):
    parameters, x, rng = draw(config, seed)
    function, mask, order = reference_of(config), padding((BATCH,)), rng.permutation(TOKENS)
    output, weights = function(config, parameters, x, mask)
    permuted, permuted_weights = function(config, parameters, x[:, order], mask[:, order])
    np.testing.assert_allclose(permuted, output[:, order], rtol=1e-12)
    np.testing.assert_allclose(permuted_weights, weights[:, order][:, :, order], rtol=1e-12)


@seeded
@batched
@configs("wrapper", "wrapper-bias")
def test_wrapper_is_its_heads_side_by_side(config, batch, seed):
    parameters, x, rng = draw(config, seed, batch)
    mask = rng.random((1, config.num_heads, TOKENS, TOKENS)) < 0.7
    output, weights = reference_of(config)(config, parameters, x, mask)
    for head in range(config.num_heads):
        prefix = f"heads.{head}."
        own = {name.removeprefix(prefix): array for name, array in parameters.items() if name.startswith(prefix)}
        expected, expected_weights = reference_of(config.head)(config.head, own, x, mask[:, head : head + 1])
        columns = slice(head * config.d_out, (head + 1) * config.d_out)
        np.testing.assert_allclose(output[..., columns], expected, rtol=1e-13)
        np.testing.assert_allclose(weights[..., head, :, :], expected_weights, rtol=1e-13)


@seeded
@configs("mha", "mha-bias")
def test_multi_head_attention_is_a_projected_wrapper(config, seed):
    parameters, x, _ = draw(config, seed)
    wrapper = specs.MultiHeadAttentionWrapperConfig(
        WIDTH, config.head_dim, TOKENS, num_heads=config.num_heads, qkv_bias=config.qkv_bias
    )
    split = {
        f"heads.{head}.{name}": part
        for name, array in parameters.items()
        if not name.startswith("out_proj")
        for head, part in enumerate(np.split(array, config.num_heads))
    }
    identity = {"out_proj.weight": np.eye(config.d_out), "out_proj.bias": np.zeros(config.d_out)}
    mask = padding((BATCH,))
    expected, expected_weights = reference_of(wrapper)(wrapper, split, x, mask)
    output, weights = reference_of(config)(config, parameters | identity, x, mask)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-13)
    np.testing.assert_allclose(output, expected, rtol=1e-13)
    projected, _ = reference_of(config)(config, parameters, x, mask)
    by_hand = np.einsum("...i,oi->...o", expected, parameters["out_proj.weight"]) + parameters["out_proj.bias"]
    np.testing.assert_allclose(projected, by_hand, rtol=1e-12)


@pytest.mark.parametrize("entry", goldens.norms(), ids=lambda entry: entry["id"])
def test_a_norm_gives_its_golden_values(entry):
    config = specs.find_variant(entry["variant"]).config(**entry["constructor"])
    start = 0.0 if getattr(config, "unit_offset", False) else 1.0
    parameters = {"scale": np.full(config.emb_dim, start), "shift": np.zeros(config.emb_dim)} | entry["parameters"]
    output, _ = reference_of(config)(config, parameters, np.array(entry["input"]))
    goldens.assert_reproduced(output, entry)


@seeded
@batched
def test_layer_norm_moments(batch, seed):
    config = CONFIGS["norm"]
    parameters, x, _ = draw(config, seed, batch)
    output, _ = reference_of(config)(config, {"scale": np.ones(WIDTH), "shift": np.zeros(WIDTH)}, x)
    variance = x.var(axis=-1, ddof=0)
    np.testing.assert_allclose(output.mean(-1), 0, atol=1e-15)
    np.testing.assert_allclose(output.var(-1), variance / (variance + config.eps), rtol=1e-13)
    scaled, _ = reference_of(config)(config, parameters, x)
    np.testing.assert_array_equal(scaled, parameters["scale"] * output + parameters["shift"])


def test_layer_norm_of_a_large_offset_keeps_its_digits():
    config = specs.LayerNormConfig(2, eps=1e-5)
    unit = {"scale": np.ones(2), "shift": np.zeros(2)}
    output, _ = reference_of(config)(config, unit, np.array([[1e9, 1e9 + 2]]))
    np.testing.assert_allclose(output, [[-1 / math.sqrt(1 + 1e-5), 1 / math.sqrt(1 + 1e-5)]], rtol=1e-15)


def test_large_scores_do_not_overflow():
    config = CONFIGS["simple"]
    output, weights = reference_of(config)(config, {}, np.array([[1e3, 0.0], [0.0, 1e3]]))
    np.testing.assert_array_equal(weights, np.eye(2))
    np.testing.assert_array_equal(output, 1e3 * np.eye(2))


@seeded
@batched
@pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])
@configs(*CONFIGS)
def test_complex_step_is_the_derivative(config, masked, batch, seed):
    parameters, x, rng = draw(config, seed, batch)
    function = reference_of(config)
    mask = padding(batch) if masked and type(config) is not specs.LayerNormConfig else None
    cotangents = [None if y is None else rng.normal(size=y.shape) for y in function(config, parameters, x, mask)]

    def value(arrays):
        outputs = function(config, arrays, arrays["x"], mask)
        return sum(np.sum(c * y) for c, y in zip(cotangents, outputs, strict=True) if c is not None)

    arrays, step = parameters | {"x": x}, 1e-5
    for name, array in arrays.items():
        direction = rng.normal(size=array.shape)
        got = directional_derivative(function, config, parameters, x, mask, name, direction, cotangents)
        up, down = (value(arrays | {name: array + sign * step * direction}) for sign in (1, -1))
        assert isinstance(got, float)
        assert got == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-8), name


@configs(*CONFIGS)
def test_complex_step_leaves_the_value(config):
    parameters, x, rng = draw(config, 0)
    function = reference_of(config)
    plain, _ = function(config, parameters, x)
    stepped, _ = function(config, parameters, x + 1e-30j * rng.normal(size=x.shape))
    assert stepped.dtype == np.complex128
    np.testing.assert_allclose(stepped.real, plain, rtol=1e-12, atol=1e-14)


@configs("simple", "causal", "mha")
def test_a_fully_masked_sequence_has_zero_gradient(config):
    parameters, x, rng = draw(config, 0)
    function, mask = reference_of(config), padding((BATCH,))
    direction = np.zeros_like(x)
    direction[1] = rng.normal(size=x.shape[1:])
    output, weights = function(config, parameters, x, mask)
    cotangents = [np.ones_like(output), np.ones_like(weights)]
    assert directional_derivative(function, config, parameters, x, mask, "x", direction, cotangents) == 0


def test_cotangents_that_are_none_or_left_out_count_as_zero():
    config = CONFIGS["mha"]
    parameters, x, rng = draw(config, 0)
    function = reference_of(config)
    direction = rng.normal(size=x.shape)
    one, two = (rng.normal(size=y.shape) for y in function(config, parameters, x))

    def along(*cotangents):
        return directional_derivative(function, config, parameters, x, None, "x", direction, cotangents)

    assert along() == along(None, None) == 0
    assert along(one) == along(one, None)
    assert along(one, two) == pytest.approx(along(one) + along(None, two), rel=1e-14)


@pytest.mark.parametrize(
    ("name", "direction", "cotangents", "message"),
    [
        ("y", np.ones(WIDTH), [None], r"name \(y\) must be one of scale, shift, x"),
        ("scale", np.ones(1), [None], r"direction has shape \(1,\), must be \(3,\)"),
        ("scale", np.ones(WIDTH), [np.ones(WIDTH)], r"cotangents\[0\] has shape \(3,\), must be \(2, 4, 3\)"),
        ("scale", np.ones(WIDTH), [None, np.ones(1)], r"cotangents\[1\] must be None, there is no such output"),
        ("scale", np.ones(WIDTH), [None, None, None], r"cotangents \(3\) must be at most 2"),
    ],
)
def test_directional_derivative_refuses(name, direction, cotangents, message):
    config = CONFIGS["norm"]
    parameters, x, _ = draw(config, 0)
    with pytest.raises(ValueError, match=message):
        directional_derivative(reference_of(config), config, parameters, x, None, name, direction, cotangents)


def test_masks_that_are_refused():
    config = CONFIGS["simple"]
    function, x = reference_of(config), np.ones((BATCH, TOKENS, WIDTH))
    with pytest.raises(ValueError, match=r"\(2, 4, 4\) must be \(B, S\) or broadcastable to \(B, H, T, S\), not 3-D"):
        function(config, {}, x, np.ones((BATCH, TOKENS, TOKENS), dtype=bool))
    with pytest.raises(TypeError, match="attention_mask must be bool, got float64"):
        function(config, {}, x, np.ones((BATCH, TOKENS)))
    norm = CONFIGS["norm"]
    parameters, x, _ = draw(norm, 0)
    with pytest.raises(ValueError, match="attention_mask must be None, a norm attends to nothing"):
        reference_of(norm)(norm, parameters, x, np.ones((BATCH, TOKENS), dtype=bool))
