"""What the tours share: code of pages and cells runs here as it would in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parity_tests import settings


@pytest.fixture
def own_process() -> Iterator[None]:
    """Restore what a page may set for its own process: 64-bit numbers, under which JAX draws others."""
    before = settings.read()
    yield
    settings.restore(before)
