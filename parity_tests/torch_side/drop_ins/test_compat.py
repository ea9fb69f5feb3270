"""`torch_attn.compat.MultiheadAttention` gives what torch's own layer gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from torch_attn import compat

SIZES = {
    "plain": {},
    "other widths": {"kdim": 6, "vdim": 10},
    "appended keys": {"add_bias_kv": True, "add_zero_attn": True},
    "no biases": {"bias": False, "batch_first": True},
}
N, L, S, H = 2, 5, 7, 4
HIDDEN = torch.arange(S) >= torch.tensor([[5], [7]])
FLOATS = torch.linspace(-1, 2, N * H * L * S, dtype=torch.float64).reshape(N * H, L, S).sin()
LATER = torch.ones(L, S, dtype=torch.bool).triu(3)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": HIDDEN},
    "2-D bool": {"attn_mask": LATER},
    "2-D float": {"attn_mask": torch.zeros(L, S, dtype=torch.float64).masked_fill(LATER, -torch.inf)},
    "3-D bool and padding": {"attn_mask": (FLOATS > 0.6).logical_and(torch.arange(S) > 0), "key_padding_mask": HIDDEN},
    "3-D float and padding": {"attn_mask": FLOATS, "key_padding_mask": HIDDEN.double() * -2},
    "causal": {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1), "is_causal": True},
}


def pair(dtype=torch.float64, **options):
    """Return the stock layer and ours with its weights, all of them drawn."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, H, dtype=dtype, **options)
    for weight in stock.parameters():
        nn.init.normal_(weight)
    ours = compat.MultiheadAttention(8, H, dtype=dtype, **options)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def results(layer, inputs, **options):
    """Return output, weights and all gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    output, weights = layer(*inputs, **options)
    loss = (output * torch.arange(output.numel()).reshape(output.shape).cos()).sum()
    found = torch.autograd.grad(loss, [*inputs, *layer.parameters()])
    return [output, *([] if weights is None else [weights]), *found]


def draw(layer, dtype=torch.float64):
    torch.manual_seed(1)
    shapes = [(L, N, 8), (S, N, layer.kdim), (S, N, layer.vdim)]
    return [
        x.transpose(0, 1) if layer.batch_first else x for x in (torch.randn(shape, dtype=dtype) for shape in shapes)
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_those_of_the_stock_layer(sizes, mask):
    stock, ours = pair(**SIZES[sizes])
    for need_weights, average in itertools.product((True, False), repeat=2):
        if mask == "causal" and not need_weights and sizes == "appended keys":
            continue  # the stock layer then hides the appended keys from all queries but the last
        options = {"need_weights": need_weights, "average_attn_weights": average, **MASKS[mask]}
        expected, got = (results(layer, draw(stock), **options) for layer in (stock, ours))
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_float32_is_as_near_as_rounding_allows():
    stock, ours = pair(torch.float32)
    inputs = draw(stock, torch.float32)
    torch.testing.assert_close(results(ours, inputs), results(stock, inputs), rtol=2e-5, atol=2e-5)


def test_a_sequence_without_a_batch_is_taken():
    stock, ours = pair()
    inputs = [x[:, 0] for x in draw(stock)]
    options = {"key_padding_mask": HIDDEN[0], "attn_mask": FLOATS[:H], "average_attn_weights": False}
    with pytest.warns(UserWarning, match="mismatched"):
        expected = results(stock, inputs, **options)
    torch.testing.assert_close(results(ours, inputs, **options), expected, rtol=1e-10, atol=1e-12)


def test_dropped_weights_are_those_of_the_stock_layer():
    stock, ours = pair(dropout=0.5)
    inputs = draw(stock)
    found = []
    for layer in (stock, ours):
        torch.manual_seed(3)
        found.append(results(layer, inputs))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert not torch.equal(ours(*inputs, need_weights=False)[0], ours(*inputs, need_weights=False)[0])


def test_causal_without_a_mask_applies_the_causal_mask():
    for sizes in ({}, {"add_zero_attn": True}):
        _, ours = pair(**sizes)
        mask = torch.ones(L, S, dtype=torch.bool).triu(1)
        inputs = draw(ours)
        got, expected = ours(*inputs, is_causal=True), ours(*inputs, attn_mask=mask)
        torch.testing.assert_close(got, expected)


def test_a_query_without_keys_gets_zeros():
    _, ours = pair(bias=False)
    output, weights = ours(*draw(ours), key_padding_mask=torch.ones(N, S, dtype=torch.bool))
    assert not output.any()
    assert not weights.any()


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers_of_transformers_take_it_and_its_weights(kind):
    torch.manual_seed(0)
    stock, ours = (kind(8, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64) for _ in range(2))
    for name in ("self_attn", "multihead_attn"):
        if hasattr(ours, name):
            setattr(ours, name, compat.MultiheadAttention(8, H, batch_first=True, dtype=torch.float64))
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    x, mask = torch.randn(N, L, 8, dtype=torch.float64), torch.ones(L, L, dtype=torch.bool).triu(1)
    inputs = [x] if kind is nn.TransformerEncoderLayer else [x, x.flip(1)]
    name = "src" if len(inputs) == 1 else "tgt"
    options = {f"{name}_mask": mask, f"{name}_key_padding_mask": HIDDEN[:, 2:]}
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(ours(*inputs, **options), stock(*inputs, **options), rtol=1e-10, atol=1e-12)
        stock, ours = stock.eval(), ours.eval()


def test_bad_calls_are_refused_in_one_line():
    _, ours = pair()
    inputs = draw(ours)
    with pytest.raises(ValueError, match=r"^attn_mask must have the shape \(5, 7\) or \(8, 5, 7\), got \(7, 5\)$"):
        ours(*inputs, attn_mask=LATER.T)
    with pytest.raises(TypeError, match=r"^key_padding_mask must be bool or floating point, got int64$"):
        ours(*inputs, key_padding_mask=HIDDEN.long())
