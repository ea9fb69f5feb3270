"""LightningAttention: both forms, both frameworks, `transformers` and the formula give the same."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
import transformers
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention

import jax_attn
import torch_attn
from attn_bridge import backends, parity, transfer
from attn_bridge.models import families
from attn_bridge.reference.lightning_attention import reference
from attn_bridge.specs import LightningAttentionConfig, find_variant
from attn_parity.frameworks.torch.running.promotion import promoted

from .recurrent import call, check_masks_over_other_tokens, decode, gradients_of_torch, left_and_right, tokens

EXAMPLES = {example.name: example.config for example in find_variant("LightningAttention").examples}
CONFIG = LightningAttentionConfig(10, 3, 4, 7, (0.9, 0.0, 30.0), eps=1e-3)
COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def draw_weights(config: LightningAttentionConfig, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape) * 0.7 + 0.1 for row in config.parameters}


def twins(config: LightningAttentionConfig = CONFIG, dtype: str = "float64"):
    ours, theirs = (backends.load(name).build_blank("LightningAttention", config, dtype) for name in ("torch", "flax"))
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in draw_weights(config).items()})
    transfer(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("length", [1, 6, 130])
@pytest.mark.usefixtures("x64")
def test_both_forms_of_both_twins_are_the_formula(length):
    x = tokens(3, length, 10)
    mask = left_and_right(length) if length > 4 else None
    expected, _ = reference(CONFIG, draw_weights(CONFIG), x, mask)
    for form in (None, "chunked", "recurrent"):
        for module in twins():
            got = call(module, x, attention_mask=mask, form=form)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_padding_on_the_left_gives_the_rows_own_result():
    x, mask = tokens(3, 9, 10), left_and_right(9)
    for module in twins():
        shown = np.asarray(call(module, x, attention_mask=mask))
        np.testing.assert_allclose(shown[1:2, 3:], call(module, x[1:2, 3:]), rtol=0, atol=1e-13)
        other = np.where(mask[..., None], x, np.nan)
        np.testing.assert_array_equal(call(module, other, attention_mask=mask), shown)


@pytest.mark.parametrize("steps", [(1, 1, 2, 5), (66, 1, 5)], ids=str)
@pytest.mark.usefixtures("x64")
def test_cached_decoding_is_the_full_pass(steps):
    x = tokens(3, sum(steps), 10)
    for mask in (None, left_and_right(sum(steps))):
        for module in twins():
            full = decode(module, x, (sum(steps),), mask)
            np.testing.assert_allclose(decode(module, x, steps, mask), full, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_masks_over_other_tokens_are_refused(monkeypatch):
    check_masks_over_other_tokens(monkeypatch, *twins())


# ---- against transformers


@functools.cache
def hugging_face():
    """Return the config.json, layer 1 of three of a tiny model, and its tensors."""
    config = transformers.AutoConfig.for_model(
        "minimax",
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        block_size=8,
        rms_norm_eps=0.1,
    )
    with promoted():
        layer = MiniMaxLightningAttention(config, 1).eval().double()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw) + 0.1)
    state = {f"model.layers.1.self_attn.{name}": array.numpy() for name, array in layer.state_dict().items()}
    return json.loads(config.to_json_string()), layer, state


@pytest.mark.parametrize("steps", [(21,), (5, 1, 3)], ids=str)
@pytest.mark.usefixtures("x64")
def test_transformers_gives_the_same(steps):
    raw, layer, state = hugging_face()
    x = tokens(3, sum(steps), 12)
    mask = left_and_right(sum(steps)) if len(steps) == 1 else None
    cache, outputs, stop = MiniMaxCache() if len(steps) > 1 else None, [], 0
    with promoted(), torch.no_grad():
        for count in steps:
            begin, stop = stop, stop + count
            shown = None if mask is None else torch.from_numpy(mask)
            outputs.append(layer(torch.from_numpy(x[:, begin:stop]), None, shown, cache)[0].numpy())
    expected = np.concatenate(outputs, 1)
    for backend in (torch_attn, jax_attn):
        got = decode(backend.from_hf(raw, 1, state), x, steps, mask)
        assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()


def test_gradients_are_those_of_transformers():
    raw, layer, state = hugging_face()
    x = tokens(2, 19, 12)
    weight = torch.from_numpy(tokens(2, 19, 12, seed=3))
    with promoted():
        loss = (layer(torch.from_numpy(x), None, None)[0] * weight).sum()
        expected = torch.autograd.grad(loss, list(layer.parameters()))
    gradients = gradients_of_torch(torch_attn.from_hf(raw, 1, state), x, None)
    gradients.pop("x")
    back = families.find_layer(raw, 1).to_theirs(gradients, prefix="")
    for (name, _), gradient in zip(layer.named_parameters(), expected, strict=True):
        np.testing.assert_allclose(back[name], gradient, rtol=0, atol=1e-10 * gradient.abs().max().item(), err_msg=name)


def test_the_way_back_to_transformers_is_bit_exact():
    raw, _, state = hugging_face()
    back = torch_attn.to_hf(raw, 1, torch_attn.from_hf(raw, 1, state))
    trained = {name: array for name, array in state.items() if not name.endswith(COMPUTED)}
    assert back.keys() == trained.keys()
    for name, array in trained.items():
        np.testing.assert_array_equal(back[name], array)
    assert families.find_layer(raw, 2).variant == "GroupedQueryAttention"


def test_another_activation_and_kind_of_layer_are_refused():
    raw, _, _ = hugging_face()
    with pytest.raises(
        ValueError, match=r"^hidden_act \('gelu'\) of minimax is not supported, only 'silu' or 'swish'$"
    ):
        families.find_layer({**raw, "hidden_act": "gelu"}, 1)
    with pytest.raises(ValueError, match=r"^layer 1 of minimax is of type x, which must be full_attention or linear_a"):
        families.find_layer({**raw, "layer_types": ["x", "x", "x"]}, 1)


# ---- gradients and precision


@pytest.mark.usefixtures("x64")
def test_gradients_of_both_forms_agree():
    ours, _ = twins()
    x = tokens(2, 70, 10)
    chunked, recurrent = (gradients_of_torch(ours, x, form) for form in ("chunked", "recurrent"))
    for name, gradient in chunked.items():
        scale = np.abs(recurrent[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(gradient, recurrent[name], rtol=0, atol=1e-12 * max(scale, 1.0), err_msg=name)


def test_the_judge_finds_the_twins_equal():
    ours, theirs = twins(EXAMPLES["minimax"], "float32")
    report = parity.compare(ours, theirs, tokens(2, 9, 8).astype(np.float32), dtypes=("bfloat16",))
    assert report.verdict == "equal", report
