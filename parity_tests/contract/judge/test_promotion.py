"""Every way to ask for a lower precision inside a module gives float64 in the judge's float64 run."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from attn_parity.sides.subject import Arguments, CannotPromoteError

from .. import backends
from .promotion import PlannedError, X, cotangent_like

ADAPTERS = backends.adapters("promotion", __package__)
backend = backends.fixture(ADAPTERS)
UNTOUCHED = {adapter: adapter.state() for adapter in ADAPTERS.values()}


@backends.each(ADAPTERS, "way", "WAYS")
def test_a_way_to_ask_for_less_gives_float64(backend, way):
    outputs, gradients = backend.compute_exactly(way)
    cotangents = [cotangent_like(one) for one in outputs]
    with np.errstate(all="ignore"):
        found = backend.subject(backend.WAYS[way][0]).run({}, Arguments((X,)), cotangents, dtype="float64")
    for got, wanted in zip((*found.outputs, *found.input_gradients), (*outputs, *gradients), strict=True):
        assert got.dtype == wanted.dtype == np.float64
        np.testing.assert_allclose(got, wanted, rtol=1e-14, atol=1e-15)


@backends.each(ADAPTERS, "way", "LOSING")
def test_the_same_way_loses_digits_without_promotion(backend, way):
    found = backend.compute_unpromoted(way)
    if found is not None:
        low, exact = found
        assert not np.allclose(low, exact, rtol=1e-13, atol=1e-13)


@backends.each(ADAPTERS, "way", "REFUSED")
def test_functions_without_float64_are_refused_with_the_reason(backend, way):
    function, why = backend.REFUSED[way]
    with pytest.raises(CannotPromoteError, match=why):
        backend.subject(function).run({}, Arguments((X,)), dtype="float64")
    assert backend.state() == UNTOUCHED[backend]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_promoted(backend, fails):
    with pytest.raises(PlannedError) if fails else contextlib.nullcontext(), backend.promoted():
        assert str(backend.make_narrow().dtype).endswith("float64")
        assert backend.state() != UNTOUCHED[backend]
        if fails:
            raise PlannedError
    assert backend.state() == UNTOUCHED[backend]
