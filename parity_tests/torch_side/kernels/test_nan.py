"""NaN in a query or a key comes out of torch's attention: eager, compiled, exported and traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_bridge import masks
from torch_attn import functional

from .attention_calls import Options, draw, operands


def hidden_by(how: str, tokens: int) -> tuple[Options, Tensor]:
    """Return a mask or bias, and which queries see which keys."""
    allowed = torch.ones(tokens, tokens, dtype=torch.bool)
    if how == "causal":
        return {"mask": masks.causal()}, allowed.tril()
    if how == "mask":
        allowed[:, -1] = tokens == 1
        return {"mask": allowed[None, None]}, allowed
    if how == "bias":
        bias = draw(tokens, tokens, seed=3).masked_fill(~allowed.tril(), -torch.inf)
        return {"bias": bias}, allowed.tril()
    return {}, allowed


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 15, 16, 70])
@pytest.mark.parametrize("how", ["none", "causal", "mask", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nan_is_not_lost(tokens, how, dtype):
    """Torch's kernel on a CPU gives zeros to a row of nothing but NaN that is shorter than a vector."""
    query, key, value = (one.to(dtype) for one in operands(queries=tokens, keys=tokens))
    options, allowed = hidden_by(how, tokens)
    bad = query.clone()
    bad[1, -1, 2] = torch.nan
    lost = functional.dot_product_attention(bad, key, value, **options).isnan()
    assert lost[1, -1, 2].all()
    assert int(lost.sum()) == value.shape[-1], "no other row"
    for place in {0, tokens - 1}:
        bad = key.clone()
        bad[0, place, 1] = torch.nan
        lost = functional.dot_product_attention(query, bad, value, **options).isnan()
        assert lost[0, :, 2:][allowed[:, place]].all(), "in the heads that share the key"
        assert not lost[1].any()
        assert not lost[0, :, :2].any()
        if how == "causal":  # with a mask array torch's kernel adds minus infinity to NaN
            assert not lost[0][~allowed[:, place]].any(), "nobody else sees it"


def with_nan(tokens: int, place: int) -> list[Tensor]:
    """Return query, key and value with NaN in one query."""
    query, key, value = (one.float() for one in operands(queries=tokens, keys=tokens))
    query[0, place, 3, 0] = torch.nan
    return [query, key, value]


class Causal(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.dot_product_attention(query, key, value, mask=masks.causal())


LENGTHS = (5, 7, 15, 16, 20)


def check_lost(function: Any, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Check that a query of NaN gives NaN, and nothing else does, at one length after the other."""
    for tokens in lengths:
        for place in (0, tokens - 1):
            inputs = with_nan(tokens, place)
            context = function(*inputs)
            assert context[0, place, 3].isnan().all(), tokens
            assert int(context.isnan().sum()) == inputs[2].shape[-1], tokens
            torch.testing.assert_close(context, Causal()(*inputs), equal_nan=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("drawn_at", [5, 20])
def test_a_graph_exported_for_any_length_does_not_lose_nan(drawn_at, strict):
    tokens = torch.export.Dim("tokens", max=32)
    places = tuple({1: tokens} for _ in range(3))
    graph = torch.export.export(Causal(), tuple(with_nan(drawn_at, 0)), dynamic_shapes=places, strict=strict)
    check_lost(graph.module())


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_compiled_attention_does_not_lose_nan(dynamic):
    torch.compiler.reset()
    check_lost(torch.compile(Causal(), backend="eager", fullgraph=True, dynamic=dynamic))


@pytest.mark.parametrize("tokens", [5, 20])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_attention_does_not_lose_nan(tokens):
    check_lost(torch.jit.trace(Causal(), tuple(with_nan(tokens, 0)), check_trace=False), (tokens,))
