"""Compiled calls whose sizes `torch.compile` leaves open: from the second call on, where those of a mask are not."""

from __future__ import annotations

import pytest
import torch

import torch_attn
from attn_bridge.specs import (
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    GroupedQueryAttentionConfig,
    LayerNormConfig,
    LightningAttentionConfig,
    Rotary,
)
from attn_bridge.specs.grouped_query_attention import Temperature

from ...support.calls import cover


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(module):
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def drawn(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.4 * torch.randn_like(parameter)
    return module.eval()


def left_padded(rows, tokens):
    return torch.arange(tokens) >= torch.arange(rows)[:, None] % 3


@cover.some("first", [(3, 4), (3, 5), (2, 7)], always=[(3, 4)])
@torch.no_grad()
def test_learned_positions_count_behind_left_padding(first):
    attention = GroupedQueryAttentionConfig(16, 2, num_kv_heads=1)
    block = DecoderBlockConfig(attention, FeedForwardConfig(16, 20), LayerNormConfig(16))
    config = DecoderConfig(31, 16, (block,), LayerNormConfig(16), num_positions=12)
    model = drawn(torch_attn.DecoderModel(config, dtype=torch.float64))
    call, mask = compiled(model), left_padded(2, 5)
    call(torch.randint(0, 31, first))
    ids = torch.randint(0, 31, mask.shape)
    found, expected = (run(ids, attention_mask=mask)[mask] for run in (call, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    alone = model(ids[1:, 1:])[0]
    torch.testing.assert_close(found[5:], alone, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_temperature_counts_behind_left_padding():
    config = GroupedQueryAttentionConfig(16, 2, num_kv_heads=1, temperature=Temperature(0.7, 2, 1))
    layer = drawn(torch_attn.GroupedQueryAttention(config, dtype=torch.float64))
    call, mask = compiled(layer), left_padded(2, 5)
    call(torch.randn(3, 4, 16, dtype=torch.float64))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(call(x, attention_mask=mask)[mask], layer(x, attention_mask=mask)[mask])


@torch.no_grad()
def test_rows_of_positions_are_taken():
    config = GroupedQueryAttentionConfig(16, 2, position=Rotary(axes=(2, 1, 1)))
    layer = drawn(torch_attn.GroupedQueryAttention(config, dtype=torch.float64))
    call = compiled(layer)
    call(torch.randn(3, 4, 16, dtype=torch.float64))
    x, positions = torch.randn(2, 5, 16, dtype=torch.float64), torch.randint(0, 9, (3, 2, 5))
    torch.testing.assert_close(call(x, positions=positions), layer(x, positions=positions))


@torch.no_grad()
def test_a_cache_takes_a_mask():
    config = GroupedQueryAttentionConfig(16, 2, position=Rotary())
    layer = drawn(torch_attn.GroupedQueryAttention(config, dtype=torch.float64))
    call, mask = compiled(layer), left_padded(2, 5)
    call(torch.randn(3, 4, 16, dtype=torch.float64), cache=layer.init_cache(3, 9))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    found, expected = (run(x, attention_mask=mask, cache=layer.init_cache(2, 9))[0][mask] for run in (call, layer))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_recurrent_layer_takes_a_mask():
    layer = drawn(torch_attn.GatedDeltaNet(GatedDeltaNetConfig(16, 2, 4, 2, 4), dtype=torch.float64))
    call, mask = compiled(layer), left_padded(2, 5)
    call(torch.randn(3, 4, 16, dtype=torch.float64))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    found, expected = (run(x, attention_mask=mask) for run in (call, layer))
    torch.testing.assert_close(found, expected)


def test_the_gradient_of_chunks_is_taken_at_every_open_length():
    config = LightningAttentionConfig(8, 2, head_dim=3)
    layer = drawn(torch_attn.LightningAttention(config, dtype=torch.float64))
    call = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (7, 64):
        x = torch.randn(2, tokens, 8, dtype=torch.float64, requires_grad=True)
        found, expected = (torch.autograd.grad(run(x).square().sum(), x) for run in (call, layer))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
