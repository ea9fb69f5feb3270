"""The shared table of bad calls, on torch."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest
import torch

import torch_attn

from ..support.bad_calls import BAD_CALLS, BadCall


@functools.cache
def _built(target: str, arguments: tuple[tuple[str, Any], ...]) -> torch.nn.Module:
    return getattr(torch_attn, target)(**dict(arguments))


def _perform(row: BadCall) -> None:
    target = operator.attrgetter(row.target)(torch_attn)
    if row.call is None:
        target(**row.arguments)
        return
    if row.arguments is not None:
        target = _built(row.target, tuple(row.arguments.items()))
    target(
        **{name: torch.tensor(value) if isinstance(value, np.ndarray) else value for name, value in row.call.items()}
    )


@pytest.mark.parametrize("row", BAD_CALLS, ids=lambda row: row.id)
def test_a_bad_call_raises_the_shared_error(row):
    with pytest.raises(row.error) as caught:
        _perform(row)
    assert type(caught.value) is row.error
    names = ", ".join(map(repr, torch_attn.functional.IMPLEMENTATIONS))
    assert str(caught.value) == row.message.replace("{IMPLEMENTATIONS}", names)


@pytest.mark.parametrize("name", ["SelfAttention_v1", "SelfAttention_v2", "CausalAttention", "MultiHeadAttention"])
def test_an_array_of_another_library_is_refused(name):
    module = getattr(torch_attn, name)(4, 4, *([6] if name.startswith(("Causal", "Multi")) else []))
    with pytest.raises(TypeError) as caught:
        module(np.ones((5, 4), np.float32))
    assert str(caught.value) == "x must be a torch.Tensor, got ndarray"


def test_an_input_of_another_dtype_than_the_weights_is_refused():
    module = torch_attn.MultiHeadAttention(4, 4, 6)
    with pytest.raises(TypeError) as caught:
        module(torch.ones(5, 4, dtype=torch.bfloat16))
    assert str(caught.value) == "x must have the dtype of the weights (float32), got bfloat16"


def test_a_random_source_of_another_library_is_refused():
    query = torch.ones(1, 2, 1, 3)
    with pytest.raises(TypeError) as caught:
        torch_attn.functional.dot_product_attention(query, query, query, dropout=0.5, rng=np.random.default_rng(0))
    assert str(caught.value) == "rng must be a torch.Generator, a stream, a JaxRngs or None, got Generator"
