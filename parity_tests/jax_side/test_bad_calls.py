"""The shared table of bad calls, on JAX."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest
from flax import nnx

import jax_attn

from ..support.bad_calls import BAD_CALLS, BadCall


@functools.cache
def _built(target: str, arguments: tuple[tuple[str, Any], ...]) -> nnx.Module:
    return getattr(jax_attn, target)(**dict(arguments), rngs=nnx.Rngs(0))


def _perform(row: BadCall) -> None:
    target = operator.attrgetter(row.target)(jax_attn)
    if row.call is None:
        target(**row.arguments, rngs=nnx.Rngs(0))
        return
    if row.arguments is not None:
        target = _built(row.target, tuple(row.arguments.items()))
    target(**row.call)


@pytest.mark.parametrize("row", BAD_CALLS, ids=lambda row: row.id)
def test_a_bad_call_raises_the_shared_error(row):
    with pytest.raises(row.error) as caught:
        _perform(row)
    assert type(caught.value) is row.error
    names = ", ".join(map(repr, jax_attn.functional.IMPLEMENTATIONS))
    assert str(caught.value) == row.message.replace("{IMPLEMENTATIONS}", names)


def test_dropout_without_a_random_source_is_refused():
    query = np.ones((1, 2, 1, 3), np.float32)
    with pytest.raises(ValueError, match="dropout") as caught:
        jax_attn.functional.dot_product_attention(query, query, query, dropout=0.5)
    assert str(caught.value) == "dropout (0.5) needs rng: a key, a stream, an nnx.Rngs or a TorchRngs"


def test_a_random_source_of_another_library_is_refused():
    query = np.ones((1, 2, 1, 3), np.float32)
    with pytest.raises(TypeError) as caught:
        jax_attn.functional.dot_product_attention(query, query, query, dropout=0.5, rng=np.random.default_rng(0))
    assert str(caught.value) == "rng must be a key, a stream, an nnx.Rngs or a TorchRngs, got Generator"
