"""Fixtures of the tests that run both frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def x64() -> Iterator[None]:
    """Give JAX 64 bits."""
    with jax.enable_x64(True):
        yield
