"""Programs of a thread are lowered in one MLIR context, as `parity_tests/contexts.py` has the suite do it."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir

from ... import contexts


@pytest.fixture
def shared(monkeypatch):
    """Have programs share contexts, two each."""
    monkeypatch.setattr(contexts, "PROGRAMS", 2)
    monkeypatch.setattr(mlir.ModuleContext, "__init__", mlir.ModuleContext.__init__)  # put back afterwards
    contexts.share(mlir)


def lowered(size):
    return jax.jit(lambda x: x * 2 + size).lower(np.ones(size, "float32")).compiler_ir().context


def test_two_programs_share_a_context_and_the_third_gets_another(shared):
    first, second, third = (lowered(size) for size in (3, 4, 5))
    assert first is second
    assert third is not first


def test_threads_do_not_share_a_context(shared):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(lowered(3)))
    thread.start()
    thread.join()
    assert seen[0] is not lowered(4)


def test_programs_of_one_context_give_their_own_results(shared):
    for size in (6, 7, 8):
        np.testing.assert_array_equal(
            jax.jit(lambda x, size=size: x * 2 + size)(np.ones(size, "float32")), np.full(size, 2 + size)
        )
