"""A few damaged checkpoints per parser; ``python -m parity_tests.fuzz.checkpoints --minutes 10`` tries more."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity_tests.fuzz.checkpoints import FORMATS, build, try_one


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """One checkpoint of every format."""
    return {format: build(format, tmp_path_factory.mktemp(format)) for format in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_a_damaged_checkpoint_is_read_or_refused_in_one_line(format, seed, valid, tmp_path):
    assert try_one(format, valid[format], tmp_path, seed) in ("read", "refused")
