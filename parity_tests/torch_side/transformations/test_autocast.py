"""What is computed in float32 under `torch.autocast`: scores, softmax, choices and sums over tokens and streams."""

from __future__ import annotations

import pytest
import torch

from attn_bridge import masks
from attn_bridge.specs import (
    FeedForwardConfig,
    HyperConnectionConfig,
    Indexer,
    MixtureOfExpertsConfig,
    Router,
)
from torch_attn import HyperConnection, SelfAttention_v2, functional
from torch_attn.blocks.mixture_of_experts import MixtureOfExperts
from torch_attn.lightning_indexer import LightningIndexer
from torch_attn.recurrent import recurrence

from ...contract import modules

LENGTHS = pytest.mark.parametrize("tokens", [7, 200])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(modules.draw(*shape, seed=seed))


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


OPTIONS = {
    "plain": {},
    "window": {"mask": masks.sliding_window(5)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": draw(4, seed=3)},
    "bias": {"bias": draw(4, 1, 1, seed=4)},
}


@LENGTHS
@pytest.mark.parametrize("options", OPTIONS)
def test_attention_gives_what_it_gives_outside(options, tokens):
    query, key = (4.0 * draw(2, tokens, heads, 16, seed=heads).requires_grad_() for heads in (4, 2))
    reasons = functional.explain(query, key, key, **OPTIONS[options])
    served = [None, "reference", *(name for name, reason in reasons.items() if reason is None)]
    assert len(served) > 2
    for implementation in served:
        given = {**OPTIONS[options], "implementation": implementation}
        wanted = functional.dot_product_attention(query, key, key, **given)
        with autocast():
            got = functional.dot_product_attention(query, key, key, **given)
        slopes = (torch.autograd.grad(each.square().sum(), [query, key]) for each in (got, wanted))
        for each, other in zip([got, *next(slopes)], [wanted, *next(slopes)], strict=True):
            torch.testing.assert_close(each, other, rtol=0.0, atol=0.0)


@LENGTHS
@pytest.mark.parametrize("implementation", ["cpu_flash", "by_rows", "reference"])
def test_scores_of_16_bit_operands_are_in_float32(implementation, tokens):
    query, key = (4.0 * draw(2, tokens, heads, 16, seed=heads) for heads in (4, 2))
    operands = [array.bfloat16() for array in (query, key, key)]
    wanted = functional.dot_product_attention(*(array.double() for array in operands), sinks=draw(4).double())
    with autocast():
        got = functional.dot_product_attention(*operands, sinks=draw(4), implementation=implementation)
    assert got.dtype == torch.bfloat16
    assert (got.double() - wanted).abs().max() < 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("weighs", ["inputs", "outputs"])
def test_experts_are_chosen_by_scores_in_float32(weighs):
    torch.manual_seed(0)
    expert, router = FeedForwardConfig(d_in=8, hidden_dim=12), Router(scores="sigmoid", normalise=False)
    layer = MixtureOfExperts(MixtureOfExpertsConfig(expert, num_experts=4, top_k=1, router=router, weighs=weighs))
    x = draw(64, 8)
    chosen, weights = layer.choose(x)
    with autocast():
        found, shares = layer.choose(x)
        out = layer(x)
    assert torch.equal(found, chosen)
    assert torch.equal(shares, weights)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, layer(x), rtol=0.02, atol=0.02)


def test_an_indexer_chooses_the_same_keys():
    torch.manual_seed(0)
    indexer = LightningIndexer(Indexer(num_heads=2, head_dim=4, top_k=3), 8, 8)
    x = draw(2, 40, 8)
    key = indexer.keys(x, None)
    query, weights = indexer.W_index_query(x).bfloat16(), indexer.W_index_weights(x).bfloat16()
    for layer, output in ((indexer.W_index_query, query), (indexer.W_index_weights, weights)):
        layer.register_forward_hook(lambda *_, output=output: output)  # roundings of the projections are the user's
    call = {"asking": x, "x": x, "key": key, "tables": None, "mask": masks.causal(), "num_heads": 2}
    wanted = indexer(**call)
    with autocast():
        assert torch.equal(indexer(**call), wanted)


def test_hyper_connections_keep_their_streams():
    torch.manual_seed(0)
    connection = HyperConnection(HyperConnectionConfig(8, 3, writes=True))
    streams, output = draw(2, 5, 3, 8), draw(2, 5, 8, seed=1)
    read = connection.read(streams)
    written = connection.write(streams, output, *read[1:])
    with autocast():
        got = connection.read(streams)
        for each, wanted in zip(got, read, strict=True):
            assert torch.equal(each, wanted)
        assert torch.equal(connection.write(streams, output, *read[1:]), written)
        assert connection.write(streams, output.bfloat16(), *read[1:]).dtype == torch.float32


def test_linear_attention_keeps_its_weights():
    features, value = draw(2, 40, 3, 4).exp(), draw(2, 40, 3, 5)
    weights = recurrence.linear_weights(features, features, masks.causal())
    context = recurrence.average(weights, value)
    with autocast():
        assert torch.equal(recurrence.linear_weights(features, features, masks.causal()), weights)
        assert torch.equal(recurrence.average(weights, value), context)


@pytest.mark.parametrize(
    ("weights", "tokens"), [("float64", "float32"), ("float32", "float64"), ("float64", "bfloat16")]
)
def test_float64_is_refused_beside_another_dtype(weights, tokens):
    module = SelfAttention_v2(4, 4, dtype=getattr(torch, weights))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=rf"weights \({weights}\), got {tokens}$"),
    ):
        module(torch.ones(5, 4, dtype=getattr(torch, tokens)))
