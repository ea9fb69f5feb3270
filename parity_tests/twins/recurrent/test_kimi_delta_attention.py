"""KimiDeltaAttention: both forms, both frameworks, `transformers` and the formula give the same."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
import transformers
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention, KimiLinearDeltaAttention

import jax_attn
import torch_attn
from attn_bridge import backends, parity, transfer
from attn_bridge.models import families
from attn_bridge.reference.kimi_delta_attention import reference
from attn_bridge.specs import KimiDeltaAttentionConfig, find_variant
from attn_parity.frameworks.torch.running.promotion import promoted
from jax_attn.recurrent.recurrence import gated_delta_rule as jax_delta_rule
from torch_attn.recurrent.recurrence import gated_delta_rule

from .recurrent import (
    call,
    check_masks_over_other_tokens,
    decode,
    gradients_of_torch,
    left_and_right,
    run_hugging_face,
    tokens,
)

EXAMPLES = {example.name: example.config for example in find_variant("KimiDeltaAttention").examples}
CONFIG = KimiDeltaAttentionConfig(10, 3, 4, 3, 5, 7, conv_size=3, eps=1e-3)


def draw_weights(config: KimiDeltaAttentionConfig, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape) * 0.7 + 0.1 for row in config.parameters}


def twins(config: KimiDeltaAttentionConfig = CONFIG, dtype: str = "float64"):
    ours, theirs = (backends.load(name).build_blank("KimiDeltaAttention", config, dtype) for name in ("torch", "flax"))
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
def hugging_face(layer: int = 1):
    """Return the config.json, the config, a layer of a tiny model, and its tensors; layer 4 has full attention."""
    config = transformers.AutoConfig.for_model(
        "kimi_linear",
        hidden_size=12,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=5,
        qk_rope_head_dim=2,
        qk_nope_head_dim=4,
        v_head_dim=3,
        linear_head_dim=4,
        linear_num_heads=3,
        linear_conv_kernel_dim=3,
        rms_norm_eps=0.1,
        attn_implementation="eager",
    )
    with promoted():
        module = (KimiLinearDeltaAttention if layer == 1 else KimiLinearAttention)(config, layer).eval().double()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw) + 0.1)
    state = {f"model.layers.{layer}.self_attn.{name}": array.numpy() for name, array in module.state_dict().items()}
    return json.loads(config.to_json_string()), config, module, state


@pytest.mark.parametrize("steps", [(21,), (70,), (5, 1, 1, 3)], ids=str)
@pytest.mark.usefixtures("x64")
def test_transformers_gives_the_same(steps):
    raw, config, layer, state = hugging_face()
    x = tokens(3, sum(steps), 12)
    mask = left_and_right(sum(steps)) if len(steps) == 1 else None
    expected = run_hugging_face(layer, config, x, mask, steps)
    for backend in (torch_attn, jax_attn):
        got = decode(backend.from_hf(raw, 1, state), x, steps, mask)
        assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()


def test_gradients_are_those_of_transformers():
    raw, _, layer, state = hugging_face()
    x = tokens(2, 19, 12)
    weight = torch.from_numpy(tokens(2, 19, 12, seed=3))
    with promoted():
        loss = (layer(torch.from_numpy(x)) * weight).sum()
        expected = torch.autograd.grad(loss, list(layer.parameters()))
    gradients = gradients_of_torch(torch_attn.from_hf(raw, 1, state), x, None)
    gradients.pop("x")
    back = families.find_layer(raw, 1).to_theirs(gradients, prefix="")
    for (name, _), gradient in zip(layer.named_parameters(), expected, strict=True):
        limit = 1e-10 * gradient.abs().max().item()
        np.testing.assert_allclose(back[name], gradient, rtol=0, atol=limit, err_msg=name)


@pytest.mark.usefixtures("x64")
def test_full_attention_has_no_positions():
    raw, _, layer, state = hugging_face(4)
    x = tokens(2, 7, 12)
    later = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)
    with promoted(), torch.no_grad():
        expected = layer(torch.from_numpy(x), later)[0].numpy()
    for backend in (torch_attn, jax_attn):
        module = backend.from_hf(raw, 4, state)
        assert module.config.position is None
        np.testing.assert_allclose(call(module, x), expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_the_way_back_to_transformers_is_bit_exact():
    for layer in (1, 4):
        raw, _, _, state = hugging_face(layer)
        back = torch_attn.to_hf(raw, layer, torch_attn.from_hf(raw, layer, state))
        assert back.keys() == state.keys()
        for name, array in state.items():
            np.testing.assert_array_equal(back[name], array)


def test_the_published_config_counts_layers_from_1():
    published = {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 6,
            "num_heads": 5,
            "short_conv_kernel_size": 2,
        }
    }
    raw = {key: value for key, value in hugging_face()[0].items() if key != "layer_types"} | published
    layers = [families.find_layer(raw, layer) for layer in (0, 1, 2)]
    assert [layer.variant for layer in layers] == [
        "KimiDeltaAttention",
        "MultiHeadLatentAttention",
        "KimiDeltaAttention",
    ]
    config = layers[0].config
    assert (config.head_dim, config.num_heads, config.conv_size) == (6, 5, 2)
    with pytest.raises(
        ValueError, match=r"^layer 3 of kimi_linear must be in full_attn_layers or in kda_layers of linear"
    ):
        families.find_layer(raw, 3)


def test_another_activation_and_kind_of_layer_are_refused():
    raw = hugging_face()[0]
    with pytest.raises(
        ValueError, match=r"^hidden_act \('gelu'\) of kimi_linear is not supported, only 'silu' or 'swish'$"
    ):
        families.find_layer({**raw, "hidden_act": "gelu"}, 1)
    with pytest.raises(
        ValueError, match=r"^layer 1 of kimi_linear is of type x, which must be full_attention or linear_a"
    ):
        families.find_layer({**raw, "layer_types": ["x"] * 5}, 1)


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
    ours, theirs = twins(EXAMPLES["kimi-linear"], "float32")
    report = parity.compare(ours, theirs, tokens(2, 9, 8).astype(np.float32), dtypes=("bfloat16",))
    assert report.verdict == "equal", report


@pytest.mark.parametrize("length", [40, 7])
def test_strong_gates_neither_overflow_nor_hide_weak_ones(length):
    """Gates of some channels sum up to -1e5 in a chunk, those of others stay near 0; in float32."""
    random = np.random.default_rng(5)
    query, key = (random.normal(size=(2, length, 3, 4)) / 2 for _ in range(2))
    value, beta = random.normal(size=(2, length, 3, 5)), random.uniform(size=(2, length, 3))
    log_decay = -(10.0 ** random.uniform(-3, 4, size=(2, length, 3, 4)))
    arrays = [torch.from_numpy(array) for array in (query, key, value, log_decay, beta)]
    expected, left = gated_delta_rule(*arrays, form="recurrent")
    narrow = [array.float().requires_grad_() for array in arrays]
    context, state = gated_delta_rule(*narrow, form="chunked", chunk_size=16)
    torch.testing.assert_close(context.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(state.double(), left, rtol=0, atol=2e-6)
    for gradient in torch.autograd.grad(context.square().sum(), narrow):
        assert gradient.isfinite().all()
    theirs, _ = jax_delta_rule(*(np.asarray(array.detach()) for array in narrow), form="chunked", chunk_size=16)
    np.testing.assert_allclose(theirs, expected, rtol=0, atol=2e-6)


def test_gradients_stay_finite_where_nothing_is_left():
    ours, _ = twins(CONFIG, "float32")
    with torch.no_grad():
        ours.A_log.fill_(8.0)
        ours.dt_bias.fill_(30.0)
    x = tokens(2, 6, 10).astype(np.float32)
    x[0] = 0.0
    x[1, 2] = 1e4
    for name, gradient in gradients_of_torch(ours, x, "chunked").items():
        assert np.isfinite(gradient).all(), name


def test_initial_steps_and_decays_are_in_their_published_ranges():
    module = torch_attn.KimiDeltaAttention(KimiDeltaAttentionConfig(64, 32, 8))
    steps = torch.nn.functional.softplus(module.dt_bias)
    assert 0.001 <= steps.min() < 0.0015 < 0.07 < steps.max() <= 0.1
    assert 0.0 <= module.A_log.min() < module.A_log.max() <= np.log(16.0)
