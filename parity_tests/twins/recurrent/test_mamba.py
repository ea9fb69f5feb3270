"""Mamba: both forms, both frameworks, `transformers` and the formula give the same, with a cache and without."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer

import jax_attn
import torch_attn
from attn_bridge import backends, parity, transfer
from attn_bridge.reference.mamba import reference
from attn_bridge.specs import MambaConfig, find_variant
from attn_parity.frameworks.torch.running.promotion import promoted

from .recurrent import call, decode, gradients_of_torch, left_and_right, run_hugging_face, tokens

EXAMPLES = {example.name: example.config for example in find_variant("Mamba").examples}
CONFIG = MambaConfig(10, 6, 4, 3, 7, conv_size=3, bias=True, latent_norms="scaled", eps=1e-3)
SIZES = {"state_size": 5, "time_step_rank": 3}
HF = {
    "mamba": (MambaMixer, "backbone.layers.1.mixer.", {**SIZES, "use_bias": True}),
    "falcon_mamba": (FalconMambaMixer, "backbone.layers.1.mixer.", {**SIZES, "mixer_rms_eps": 1e-3}),
    "jamba": (
        JambaMambaMixer,
        "model.layers.1.mamba.",
        {"mamba_d_state": 5, "mamba_dt_rank": 3, "mamba_d_conv": 3, "mamba_conv_bias": False, "rms_norm_eps": 1e-3,
         "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
}  # fmt: skip
"""Model type -> its layer, the prefix of its tensors, sizes of a tiny model."""


def draw_weights(config: MambaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape) * 0.7 + 0.1 for row in config.parameters}


def twins(config: MambaConfig = CONFIG, dtype: str = "float64"):
    ours, theirs = (backends.load(name).build_blank("Mamba", config, dtype) for name in ("torch", "flax"))
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in draw_weights(config).items()})
    transfer(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("length", [1, 6, 16, 35])
@pytest.mark.usefixtures("x64")
def test_both_forms_of_both_twins_are_the_formula(length):
    x = tokens(3, length, 10)
    mask = left_and_right(length) if length > 4 else None
    expected, _ = reference(CONFIG, draw_weights(CONFIG), x, mask)
    for form in (None, "chunked", "recurrent"):
        for module in twins():
            got = call(module, x, attention_mask=mask, form=form)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_padding_on_the_left_gives_the_rows_own_result():
    """The projections have biases: without its mask behind them, the convolution would read them."""
    x, mask = tokens(3, 9, 10), left_and_right(9)
    for module in twins():
        shown = np.asarray(call(module, x, attention_mask=mask))
        np.testing.assert_allclose(shown[1:2, 3:], call(module, x[1:2, 3:]), rtol=0, atol=1e-14)
        other = np.where(mask[..., None], x, 1e3)
        np.testing.assert_array_equal(call(module, other, attention_mask=mask), shown)


@pytest.mark.parametrize("steps", [(1, 1, 2, 5), (18, 1, 5)], ids=str)
@pytest.mark.usefixtures("x64")
def test_cached_decoding_is_the_full_pass(steps):
    x = tokens(3, sum(steps), 10)
    for mask in (None, left_and_right(sum(steps))):
        for module in twins():
            full = decode(module, x, (sum(steps),), mask)
            np.testing.assert_allclose(decode(module, x, steps, mask), full, rtol=0, atol=1e-13)


# ---- against transformers


@functools.cache
def hugging_face(model_type: str):
    """Return the config.json, the config, and layer 1 of a tiny model, with weights that hide nothing."""
    kind, prefix, sizes = HF[model_type]
    config = transformers.AutoConfig.for_model(model_type, hidden_size=12, num_hidden_layers=2, **sizes)
    with promoted():
        layer = (
            kind(config, 1, **({} if model_type == "jamba" else {"initialize_mixer_weights": False})).eval().double()
        )
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in layer.parameters():
                spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
                parameter.copy_(spread * torch.randn(parameter.shape, generator=draw) + 0.1)
    state = {prefix + name: array.numpy() for name, array in layer.state_dict().items()}
    return json.loads(config.to_json_string()), config, layer, state


@pytest.mark.parametrize("steps", [(11,), (40,), (5, 1, 1)], ids=str)
@pytest.mark.parametrize("model_type", HF)
@pytest.mark.usefixtures("x64")
def test_transformers_gives_the_same(model_type, steps):
    raw, config, layer, state = hugging_face(model_type)
    x = tokens(3, sum(steps), 12)
    # With biases, the convolution of transformers reads those of padding on the left.
    mask = left_and_right(sum(steps)) if model_type != "mamba" and len(steps) == 1 else None
    expected = run_hugging_face(layer, config, x, mask, steps)
    for backend in (torch_attn, jax_attn):
        got = decode(backend.from_hf(raw, 1, state), x, steps, mask)
        assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("model_type", HF)
def test_the_way_back_to_transformers_is_bit_exact(model_type):
    raw, _, _, state = hugging_face(model_type)
    back = torch_attn.to_hf(raw, 1, torch_attn.from_hf(raw, 1, state))
    assert back.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)


# ---- gradients and precision


@pytest.mark.usefixtures("x64")
def test_gradients_of_both_forms_agree():
    ours, _ = twins()
    x = tokens(2, 35, 10)
    chunked, recurrent = (gradients_of_torch(ours, x, form) for form in ("chunked", "recurrent"))
    for name, gradient in chunked.items():
        scale = np.abs(recurrent[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(gradient, recurrent[name], rtol=0, atol=1e-12 * max(scale, 1.0), err_msg=name)


def test_the_judge_finds_the_twins_equal():
    ours, theirs = twins(EXAMPLES["mamba"], "float32")
    report = parity.compare(ours, theirs, tokens(2, 9, 6).astype(np.float32), dtypes=("bfloat16",))
    assert report.verdict == "equal", report


def test_gradients_stay_finite_where_nothing_is_left():
    """Decays that underflow, padding, zero vectors and huge ones."""
    ours, _ = twins(CONFIG, "float32")
    with torch.no_grad():
        ours.A_log.fill_(8.0)
        ours.dt_bias.fill_(30.0)
    x = tokens(2, 6, 10).astype(np.float32)
    x[0] = 0.0
    x[1, 2] = 1e4
    for name, gradient in gradients_of_torch(ours, x, "chunked").items():
        assert np.isfinite(gradient).all(), name


# ---- initial weights


def test_initial_steps_and_decays_are_as_published():
    module = torch_attn.Mamba(MambaConfig(64, 256, 5))
    steps = torch.nn.functional.softplus(module.dt_bias)
    assert 0.001 <= steps.min() < 0.0015 < 0.07 < steps.max() <= 0.1
    torch.testing.assert_close(module.A_log.exp(), torch.arange(1.0, 6.0).expand(256, 5))
    assert (module.D == 1.0).all()


@pytest.mark.optimized
def test_both_twins_start_alike_from_the_numbers_of_jax():
    theirs = jax_attn.Mamba(CONFIG, rngs=nnx.Rngs(5))
    ours = torch_attn.Mamba(CONFIG, rngs=torch_attn.random.JaxRngs(5))
    copy = torch_attn.Mamba(CONFIG)
    transfer(theirs, copy)
    for name, array in copy.state_dict().items():
        # The logarithms and exponentials of the two frameworks round differently.
        tolerance = 1e-6 if name in ("A_log", "dt_bias") else 0.0
        np.testing.assert_allclose(ours.state_dict()[name], array, rtol=tolerance, atol=tolerance)
