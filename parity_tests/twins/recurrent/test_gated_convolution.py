"""GatedConvolution: both frameworks, `transformers` and the formula give the same, with a cache and without."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

import jax_attn
import torch_attn
from attn_bridge import backends, transfer
from attn_bridge.reference.gated_convolution import reference
from attn_bridge.specs import GatedConvolutionConfig
from attn_parity.frameworks.torch.running.promotion import promoted

from .recurrent import call, decode, left_and_right, run_hugging_face, tokens

CONFIG = GatedConvolutionConfig(10, 6, 7, bias=True)


def draw_weights(config: GatedConvolutionConfig, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape) * 0.7 + 0.1 for row in config.parameters}


def twins():
    ours, theirs = (
        backends.load(name).build_blank("GatedConvolution", CONFIG, "float64") for name in ("torch", "flax")
    )
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in draw_weights(CONFIG).items()})
    transfer(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.usefixtures("x64")
def test_both_twins_are_the_formula(length):
    x = tokens(3, length, 10)
    mask = left_and_right(length) if length > 4 else None
    expected, _ = reference(CONFIG, draw_weights(CONFIG), x, mask)
    for module in twins():
        for form in (None, "chunked", "recurrent"):
            got = call(module, x, attention_mask=mask, form=form)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_a_form_that_is_unknown_is_refused():
    ours, _ = twins()
    with pytest.raises(ValueError, match=r"^form \('ring'\) must be one of 'chunked', 'recurrent' or None$"):
        ours(torch.zeros(1, 2, 10, dtype=torch.float64), form="ring")


@pytest.mark.usefixtures("x64")
def test_padding_on_the_left_gives_the_rows_own_result():
    """The projections have biases: without its mask behind them, the convolution would read them."""
    x, mask = tokens(3, 9, 10), left_and_right(9)
    for module in twins():
        shown = np.asarray(call(module, x, attention_mask=mask))
        np.testing.assert_allclose(shown[1:2, 3:], call(module, x[1:2, 3:]), rtol=0, atol=1e-14)


@pytest.mark.usefixtures("x64")
def test_cached_decoding_is_the_full_pass():
    x = tokens(3, 9, 10)
    for mask in (None, left_and_right(9)):
        for module in twins():
            full = decode(module, x, (9,), mask)
            np.testing.assert_allclose(decode(module, x, (1, 1, 2, 5), mask), full, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("steps", [(11,), (5, 1, 1)], ids=str)
@pytest.mark.usefixtures("x64")
def test_transformers_gives_the_same_and_takes_the_arrays_back(steps, bias):
    config = transformers.AutoConfig.for_model(
        "lfm2", hidden_size=12, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, conv_bias=bias,
        layer_types=["full_attention", "conv"],
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    with promoted(), torch.no_grad():
        layer = Lfm2ShortConv(config, 1).eval().double()
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw) + 0.1)

    def in_turn(x, cache_params, attention_mask):
        return layer(x, past_key_values=cache_params, attention_mask=attention_mask)

    state = {f"model.layers.1.conv.{name}": array.numpy() for name, array in layer.state_dict().items()}
    raw, x = json.loads(config.to_json_string()), tokens(3, sum(steps), 12)
    # With biases, the convolution of transformers reads those of padding on the left.
    mask = None if bias or len(steps) > 1 else left_and_right(sum(steps))
    expected = run_hugging_face(in_turn, config, x, mask, steps)
    for backend in (torch_attn, jax_attn):
        got = decode(backend.from_hf(raw, 1, state), x, steps, mask)
        assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()
    back = torch_attn.to_hf(raw, 1, torch_attn.from_hf(raw, 1, state))
    assert back.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)
