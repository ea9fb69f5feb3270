"""LinearAttention: both forms, both frameworks and the formula say the same, with a cache and without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attn_bridge import backends, masks, transfer
from attn_bridge.reference.linear_attention import reference
from attn_bridge.specs import LinearAttentionConfig
from jax_attn.recurrent import recurrence as jax_recurrence
from torch_attn.recurrent import recurrence as torch_recurrence

from .recurrent import call, check_masks_over_other_tokens, decode, left_and_right, tokens

CONFIG = LinearAttentionConfig(10, 2, head_dim=3, value_head_dim=4, d_out=7, qkv_bias=True, out_bias=True)


def draw_weights(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape) * 0.7 + 0.1 for row in CONFIG.parameters}


def twins(dtype: str = "float64"):
    ours, theirs = (backends.load(name).build_blank("LinearAttention", CONFIG, dtype) for name in ("torch", "flax"))
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in draw_weights().items()})
    transfer(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("length", [1, 6, 64, 130])
@pytest.mark.usefixtures("x64")
def test_both_forms_of_both_twins_are_the_formula(length):
    x = tokens(3, length, 10)
    mask = left_and_right(length) if length > 4 else None
    expected, weights = reference(CONFIG, draw_weights(), x, mask)
    for module in twins():
        for form in (None, "chunked", "recurrent"):
            got = call(module, x, attention_mask=mask, form=form)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)
        output, shown = call(module, x, attention_mask=mask, return_weights=True)
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)
        np.testing.assert_allclose(shown, weights, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_a_mask_may_differ_between_queries_and_heads():
    x, mask = tokens(2, 6, 10), np.random.default_rng(0).random((2, 2, 6, 6)) < 0.6
    mask[0, 1, 3] = False
    expected, weights = reference(CONFIG, draw_weights(), x, mask)
    assert (weights[0, 1, 3] == 0.0).all()
    for module in twins():
        np.testing.assert_allclose(call(module, x, attention_mask=mask), expected, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_a_description_of_a_mask_is_read():
    x, ids = tokens(2, 6, 10), np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    together = (ids[:, None, :, None] == ids[:, None, None, :]).repeat(2, 1)
    short = np.arange(6) < np.array([6, 4])[:, None]
    for module in twins():
        for mask, shown in ((masks.documents(ids), together), (masks.padding([6, 4]), short)):
            expected, _ = reference(CONFIG, draw_weights(), x, shown)
            np.testing.assert_allclose(call(module, x, attention_mask=mask), expected, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_a_query_without_visible_keys_gets_the_bias():
    x, mask = tokens(1, 5, 10), np.array([[False, False, True, True, True]])
    bias = draw_weights()["out_proj.bias"]
    for module in twins():
        for form in ("chunked", "recurrent"):
            out = np.asarray(call(module, x, attention_mask=mask, form=form))
            np.testing.assert_array_equal(out[0, :2], np.stack([bias, bias]))


@pytest.mark.parametrize("steps", [(1, 1, 2, 5), (66, 1, 5)], ids=str)
@pytest.mark.usefixtures("x64")
def test_cached_decoding_is_the_full_pass(steps):
    x = tokens(3, sum(steps), 10)
    for mask in (None, left_and_right(sum(steps))):
        for module in twins():
            full = decode(module, x, (sum(steps),), mask)
            np.testing.assert_allclose(decode(module, x, steps, mask), full, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_both_twins_refuse_impossible_cache_calls_alike():
    x = tokens(2, 3, 10)
    for module in twins():
        convert = torch.from_numpy if isinstance(module, torch.nn.Module) else np.asarray
        _, cache = call(module, x, cache=module.init_cache(2, 4))
        for wrong, arguments, error, message in (
            (x, {}, ValueError, "tokens in the cache (3) and new ones (3) must be at most capacity (4)"),
            (x[:1, :1], {}, ValueError, "batch of x (1) must be the batch of the cache (2)"),
            (
                x[:, :1],
                {"return_weights": True},
                NotImplementedError,
                "return_weights with a cache: it keeps a state, and no keys",
            ),
            (
                x[:, :1],
                {"form": "parallel"},
                ValueError,
                "form ('parallel') must be one of 'chunked', 'recurrent' or None",
            ),
            (
                x[:, :1],
                {"attention_mask": convert(np.ones((2, 1, 4, 4), bool))},
                ValueError,
                "attention mask (2, 1, 4, 4) must have shape (B, S) = (2, 1 to 4): "
                "a state shows every query the same tokens",
            ),
            (
                x[:, :1],
                {"attention_mask": convert(np.ones((2, 4)))},
                TypeError,
                "attention mask must have dtype bool (True = may be attended), got float64",
            ),
        ):
            with pytest.raises(error) as caught:
                module(convert(wrong), cache=cache, **arguments)
            assert str(caught.value) == message
            assert int(cache.length) == 3
        for name in ("batch_size", "capacity"):
            with pytest.raises(ValueError, match=name) as caught:
                module.init_cache(**{"batch_size": 1, "capacity": 1, name: 0})
            assert str(caught.value) == f"{name} (0) must be at least 1"


@pytest.mark.usefixtures("x64")
def test_a_mask_of_wrong_length_is_refused(monkeypatch):
    check_masks_over_other_tokens(monkeypatch, *twins())


def test_features_far_below_zero_keep_their_size():
    """``elu(x) + 1`` as it reads is 0 in float32 from -17 on, and a row of such keys has nothing to divide by."""
    ours, theirs = twins("float32")
    with torch.no_grad():
        ours.W_key.bias.fill_(-30.0)
    transfer(ours, theirs)
    x = tokens(1, 5, 10).astype(np.float32)
    expected, _ = reference(CONFIG, {n: p.detach().double().numpy() for n, p in ours.named_parameters()}, x)
    for got in (call(ours, x), jax.jit(lambda x: theirs(x))(x)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def gradients(name, query, key, value, dtype, form):
    """Return the context and the gradients of query, key and value under a fixed cotangent, computed in `dtype`."""
    cotangent = np.random.default_rng(9).normal(size=value.shape)
    arrays = [array.astype(dtype) for array in (query, key, value)]
    if name == "torch":
        inputs = [torch.from_numpy(array).requires_grad_() for array in arrays]
        context, _ = torch_recurrence.linear_attention(
            torch_recurrence.relative_features(inputs[0]),
            torch_recurrence.positive_features(inputs[1]),
            inputs[2],
            form=form,
        )
        found = torch.autograd.grad(context, inputs, torch.from_numpy(cotangent.astype(dtype)))
        return [context.detach().numpy(), *(one.numpy() for one in found)]

    def attend(query, key, value):
        features = jax_recurrence.relative_features(query), jax_recurrence.positive_features(key)
        return jax_recurrence.linear_attention(*features, value, form=form)[0]

    context, pull = jax.vjp(attend, *map(jnp.asarray, arrays))
    return [np.asarray(one) for one in (context, *pull(jnp.asarray(cotangent, dtype)))]


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize("name", ["torch", "flax"])
@pytest.mark.parametrize(("of_queries", "of_keys"), [(-300.0, 0.0), (200.0, -3.0), (0.0, -55.0), (-90.0, -70.0)])
def test_gradients_are_right_however_small_the_weights_are(name, form, of_queries, of_keys):
    random = np.random.default_rng(4)
    query, key, value = (random.normal(size=(2, 9, 2, 3)) for _ in range(3))
    query, key = (array + shift for array, shift in ((query, of_queries), (key, of_keys)))
    query, key, value = (array.astype(np.float32) for array in (query, key, value))
    found = gradients(name, query, key, value, "float32", form)
    expected = gradients("torch", query, key, value, "float64", form)
    for one, exact in zip(found, expected, strict=True):
        assert np.abs(exact).max() > 1e-3
        np.testing.assert_allclose(one, exact, rtol=0, atol=2e-4 * np.abs(exact).max())


@pytest.mark.usefixtures("x64")
def test_zero_tokens_have_the_formulas_gradient():
    """``elu(x) + 1`` goes on with slope 1 at 0, where a framework's own ``min`` may say a half."""
    x = np.zeros((1, 3))
    weights = np.array([1.0, 2.0, 3.0])
    given = torch.from_numpy(x).requires_grad_()
    (torch_recurrence.positive_features(given) * torch.from_numpy(weights)).sum().backward()
    np.testing.assert_array_equal(given.grad, weights[None])
    for features in (jax_recurrence.positive_features, jax_recurrence.relative_features):
        gradient = jax.grad(lambda x, features=features: (features(x) * weights).sum())(jnp.asarray(x))
        np.testing.assert_array_equal(gradient, weights[None])


@pytest.mark.parametrize("below", [90.0, 95.0, 101.0])
def test_keys_with_subnormal_features_are_ignored(below):
    """XLA takes such numbers for 0; elsewhere 1 over them overflows, and the gradient would be NaN."""
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(1, 4, 1, 2)).astype(np.float32) for _ in range(3))
    leaf = torch.from_numpy(key - np.float32(below)).requires_grad_()
    features = torch_recurrence.relative_features(torch.from_numpy(query)), torch_recurrence.positive_features(leaf)
    ours, _ = torch_recurrence.linear_attention(*features, torch.from_numpy(value))
    ours.sum().backward()

    def theirs(key):
        features = jax_recurrence.relative_features(jnp.asarray(query)), jax_recurrence.positive_features(key)
        return jax_recurrence.linear_attention(*features, jnp.asarray(value))[0]

    gradient = jax.grad(lambda key: theirs(key).sum())(jnp.asarray(leaf.detach().numpy()))
    np.testing.assert_allclose(ours.detach().numpy(), theirs(jnp.asarray(leaf.detach().numpy())), rtol=0, atol=1e-37)
    np.testing.assert_allclose(leaf.grad.numpy(), gradient, rtol=0, atol=1e-37)
