"""The cost of implementations: elements and memory that they allocate, and how often they compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from attn_bridge import masks
from torch_attn import functional
from torch_attn.implementations import by_rows, sdpa

from .attention_calls import operands, some, to


def test_blocks_of_rows_skip_keys_that_no_row_sees(monkeypatch):
    monkeypatch.setattr(by_rows, "MAX_ROWS", 10)
    inputs, _ = to(torch.float32, operands(queries=100, keys=100, batch=1, heads=1, key_heads=1), {})

    def cost(mask: masks.Mask) -> int:
        with Sizes() as found:
            functional.dot_product_attention(*inputs, mask=mask, softcap=2.0, implementation="by_rows")
        assert max(found.all) < 100 * 100
        return sum(found.all)

    assert cost(masks.causal()) < 0.65 * cost(masks.full())
    assert cost(masks.sliding_window(10)) < 0.35 * cost(masks.full())


def test_many_scores_make_small_blocks_but_not_too_small(monkeypatch):
    rows = []
    right = by_rows.masked_softmax
    monkeypatch.setattr(by_rows, "masked_softmax", lambda scores, *x: rows.append(scores.shape[2]) or right(scores, *x))
    inputs, bias = [one.float() for one in operands(queries=40, keys=40)], torch.zeros(40)
    for most, want in ((2**22, [40]), (20 * 2 * 4 * 40, [20, 20]), (1, [16, 16, 8])):
        monkeypatch.setattr(by_rows, "MAX_SCORES", most)
        functional.dot_product_attention(*inputs, bias=bias, implementation="by_rows")
        assert rows == want
        rows.clear()


def test_a_compiler_is_given_the_reference_and_no_blocks():
    inputs = [one.float() for one in operands(queries=300, keys=300)]
    counter = CompileCounter()
    program = torch.compile(
        lambda *x: functional.dot_product_attention(*x, softcap=2.0), backend=counter, fullgraph=True
    )
    torch.testing.assert_close(program(*inputs), functional.dot_product_attention(*inputs, softcap=2.0))
    assert counter.op_count < 40


class Sizes(TorchDispatchMode):
    """Notes how many elements the results of operations have."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.all += [
            one.numel() for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, Tensor)
        ]
        return result


def sizes(label_or_mask: Any, name: str | None = None, **shape: int) -> list[int]:
    inputs, _ = to(torch.float32, operands(**shape), {})
    with Sizes() as found:
        context = functional.dot_product_attention(*inputs, mask=label_or_mask, implementation=name)
        torch.autograd.grad(context.sum(), inputs)
    return found.all


@pytest.mark.parametrize("value_width", [8, 5, 12])
def test_causal_attention_makes_no_array_of_queries_times_keys(value_width):
    found = sizes(masks.causal(), queries=400, keys=400, value_width=value_width)
    assert max(found) <= 2 * 400 * 4 * 12 < 400 * 400


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_costs_in_proportion_to_the_tokens(padded):
    def cost(tokens: int) -> int:
        mask = masks.sliding_window(16)
        mask = mask & some(2, tokens, seed=0) if padded else mask
        return sum(sizes(mask, "windowed", queries=tokens, keys=tokens))

    assert cost(2048) < 2.1 * cost(1024)
    assert cost(1024) > 1.9 * cost(512)


def test_a_window_over_cached_keys_reads_only_its_keys():
    inputs = operands(queries=1, keys=4000)
    with Sizes() as found:
        functional.dot_product_attention(*inputs, mask=masks.sliding_window(16).offset(3999))
    assert max(one for one in found.all if one not in {array.numel() for array in inputs}) <= 4000


def test_bfloat16_runs_in_the_kernels_fast_dtype(monkeypatch):
    seen = []
    right = sdpa.scaled_dot_product_attention
    monkeypatch.setattr(
        sdpa,
        "scaled_dot_product_attention",
        lambda query, *rest, **more: seen.append(query.dtype) or right(query, *rest, **more),
    )
    inputs, _ = to(torch.bfloat16, operands(), {})
    for fast in ((torch.float32,), (torch.float32, torch.bfloat16)):
        monkeypatch.setattr(sdpa, "FAST_ON_CPU", fast)
        assert functional.dot_product_attention(*inputs).dtype == torch.bfloat16
    assert seen == [torch.float32, torch.bfloat16]
