"""Each test of the sides draws from a generator of its own, so that its numbers do not depend on what ran before."""

from __future__ import annotations

import numpy as np
import pytest

from . import modules


@pytest.fixture(autouse=True)
def own_numbers(monkeypatch):
    """Give the test a generator in its first state."""
    monkeypatch.setattr(modules, "RANDOM", np.random.default_rng(7))
