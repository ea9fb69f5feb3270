"""The cost of implementations: elements and memory that they allocate, and how often they compile."""

from __future__ import annotations

import jax
import pytest

from attn_bridge import masks
from jax_attn import functional
from jax_attn.implementations import block_plan
from jax_attn.implementations.derivatives import differentiation

from .attention_calls import arrays, loss, padding


@pytest.mark.parametrize(("length", "squares"), [(2048, 3.0), (4096, 0.25)])
def test_memory_does_not_grow_with_the_scores_of_all_heads(length, squares):
    query, key, value = (jax.ShapeDtypeStruct((1, length, 16, 8), "float32") for _ in range(3))
    arrays = 16 * length * 8 * 4
    for function in (loss("blocked"), jax.grad(loss("blocked"), (0, 1, 2))):
        memory = jax.jit(function).lower(query, key, value).compile().memory_analysis()
        assert memory.temp_size_in_bytes < squares * length * length * 4 + 12 * arrays


def test_eager_calls_compile_once():
    inputs, mask = arrays(), padding(2, 70, 0)

    def attend(mask):
        return functional.dot_product_attention(*inputs, mask=masks.causal() & mask, implementation="blocked")

    attend(mask)
    before = differentiation.attention._cache_size()
    attend(~mask)
    assert differentiation.attention._cache_size() == before


def test_a_window_visits_its_blocks_only():
    shape = block_plan.Shape(1, 1, 1, 8192, 8192)
    plan = block_plan.BlockPlan(shape, masks.sliding_window(256), 1.0, None, 0.0, 1, 256, 256, unrolled=False)
    listed, begins, _, ends = plan.tables
    assert len(listed) < 3 * len(begins)
    assert max(end - begin for begin, end in zip(begins, ends, strict=True)) <= 3
    for i in range(plan.row_blocks):
        assert sum(columns.width for _, columns in plan.runs(i)) <= 3 * 256


def test_at_most_eight_blocks_of_rows_are_written_out(monkeypatch):
    monkeypatch.setattr(block_plan, "usable_cores", lambda: 1)
    for queries in (8, 1024, 1500, 2048):
        sizes = block_plan.block_sizes(block_plan.Shape(1, 2, 2, queries, 2048), has_bias=True)
        assert sizes["unrolled"]
        assert -(-queries // sizes["rows"]) <= 8
    sizes = block_plan.block_sizes(block_plan.Shape(1, 2, 2, 64, 2049), has_bias=True)
    assert not sizes["unrolled"]


def test_vmap_does_not_hold_the_scores_of_all():
    query, key, value = (jax.ShapeDtypeStruct((9, 1, 1024, 2, 8), "float32") for _ in range(3))
    sides = 9 * 1024 * 2 * 8 * 4
    for function in (loss("blocked"), jax.grad(loss("blocked"), (0, 1, 2))):
        memory = jax.jit(jax.vmap(function)).lower(query, key, value).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 3 * 1024 * 1024 * 4 + 12 * sides
