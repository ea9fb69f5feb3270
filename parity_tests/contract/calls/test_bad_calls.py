"""Bad arguments: every row of the shared table raises the same error in every backend."""

from __future__ import annotations

import functools
import operator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ...support.calls.bad_calls import BAD_CALLS, BadCall
from .. import backends

backend = backends.fixture(backends.adapters("backend"))


@functools.cache
def _built(backend: ModuleType, target: str, arguments: tuple[tuple[str, Any], ...]) -> Any:
    return backend.build(target, **dict(arguments))


def _perform(backend: ModuleType, row: BadCall) -> None:
    if row.call is None:
        backend.build(row.target, **row.arguments)
        return
    if row.arguments is None:
        target = operator.attrgetter(row.target)(backend.package)
    else:
        target = _built(backend, row.target, tuple(row.arguments.items()))
    target(**{name: backend.as_argument(value) for name, value in row.call.items()})


@pytest.mark.parametrize("row", BAD_CALLS, ids=lambda row: row.id)
def test_a_bad_call_raises_the_shared_error(backend, row):
    with pytest.raises(row.error) as caught:
        _perform(backend, row)
    assert type(caught.value) is row.error
    names = ", ".join(map(repr, backend.package.functional.IMPLEMENTATIONS))
    assert str(caught.value) == row.message.replace("{IMPLEMENTATIONS}", names)


def test_a_random_source_of_another_library_is_refused(backend):
    query = backend.as_argument(np.ones((1, 2, 1, 3), np.float32))
    with pytest.raises(TypeError) as caught:
        backend.package.functional.dot_product_attention(query, query, query, dropout=0.5, rng=np.random.default_rng(0))
    assert str(caught.value) == f"rng must be {backend.SOURCES}, got Generator"
