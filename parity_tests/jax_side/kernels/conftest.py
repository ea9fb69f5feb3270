"""Fixtures that choose how the kernel in plain JAX runs."""

from __future__ import annotations

import pytest

from jax_attn.implementations import block_plan

from .attention_calls import program


@pytest.fixture
def anew():
    """Trace everything anew, since a program that is there would be of another plan."""
    program.cache_clear()
    yield
    program.cache_clear()


@pytest.fixture
def rolled(monkeypatch, anew):
    """Take the loops of long sequences, with blocks of which short ones have several."""
    monkeypatch.setattr(block_plan, "UNROLLED", 0)
    monkeypatch.setattr(block_plan, "LARGE_BLOCK", 64)


@pytest.fixture(params=[False, True], ids=["widened", "narrow"])
def narrow(request, monkeypatch, anew):
    """Take products of bfloat16 as they are, or widen their operands first, whatever the processor."""
    monkeypatch.setattr(block_plan, "multiplies_bfloat16", lambda: request.param)
    return request.param
