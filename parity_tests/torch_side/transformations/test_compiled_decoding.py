"""torch.compile(fullgraph=True) of decoding with a cache: a few graphs for all steps, the numbers of plain steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import torch_attn
from attn_bridge import masks
from attn_bridge.specs import (
    Alibi,
    DifferentialAttentionConfig,
    GroupedQueryAttentionConfig,
    MultiHeadLatentAttentionConfig,
    Rotary,
)

TOKENS, WIDTH = 9, 8
X = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SHOWN = torch.tensor([[False, False] + [True] * 7, [True] * 9])
IDS = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0]])

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grouped": (GroupedQueryAttentionConfig(WIDTH, 4, 2), {}),
    "rotary": (GroupedQueryAttentionConfig(WIDTH, 4, position=Rotary(), sinks=True), {}),
    "alibi": (GroupedQueryAttentionConfig(WIDTH, 4, position=Alibi()), {}),
    "window": (GroupedQueryAttentionConfig(WIDTH, 4, 2, mask=masks.sliding_window(3)), {}),
    "rolling": (GroupedQueryAttentionConfig(WIDTH, 4, 2, mask=masks.sliding_window(3)), {"rolling": True}),
    "rolling chunks": (GroupedQueryAttentionConfig(WIDTH, 4, 2, mask=masks.chunked(4)), {"rolling": True}),
    "latent": (MultiHeadLatentAttentionConfig(WIDTH, 2, latent_dim=6, nope_dim=4, rope_dim=2, value_dim=4), {}),
    "differential": (DifferentialAttentionConfig(WIDTH, 4), {}),
}


COVER = ("rotary", "rolling chunks", "latent")
"""Cases of each kind of cache; with the two below, the other cases only in `make full`."""

MASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "padding": {"attention_mask": SHOWN},
    "documents": {"attention_mask": masks.documents(IDS)},
}


@pytest.mark.parametrize(
    ("label", "first", "given"),
    [
        *(pytest.param(label, 1, "nothing", marks=[] if label in COVER else [pytest.mark.full]) for label in CASES),
        ("grouped", 3, "padding"),
        ("rolling", 3, "documents"),
    ],
)
def test_a_few_graphs_serve_all_steps(label, first, given):
    config, options = CASES[label]
    torch.manual_seed(1)
    name = type(config).__name__.removesuffix("Config")
    module = getattr(torch_attn, name)(config, dtype=torch.float64).eval()

    def decode(step: Any) -> torch.Tensor:
        cache, outputs, start = module.init_cache(2, TOKENS, **options), [], 0
        for stop in range(first, TOKENS + 1):
            output, cache = step(X[:, start:stop], cache=cache, **MASKED[given])
            outputs.append(output)
            start = stop
        return torch.cat(outputs, 1)

    torch.compiler.reset()
    counter = CompileCounter()
    with torch.no_grad():
        found, want = decode(torch.compile(module, fullgraph=True, backend=counter)), decode(module)
    torch.compiler.reset()
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    assert counter.frame_count <= 4, "for the first call, for the others, where a window fills, at the capacity"
