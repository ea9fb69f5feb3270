"""Tokens that are handed out while they are drawn, and the names that `transformers` has for arguments."""

from __future__ import annotations

import numpy as np
import pytest

from . import backends
from .models.test_decoder_model import IDS, as_array, made

backend = backends.fixture(backends.adapters("backend"))


def test_a_stream_yields_the_tokens_of_generate(backend):
    model, ids = made(backend), backend.as_argument(IDS)
    mask = backend.as_argument(np.arange(IDS.shape[1]) >= np.array([[1], [0]]))
    options = {"temperature": 0.8, "attention_mask": mask}
    streamed = [as_array(token) for token in model.stream(ids, 5, rng=backend.source(3), **options)]
    assert all(token.shape == (2,) for token in streamed)
    whole = as_array(model.generate(ids, 5, rng=backend.source(3), **options))
    np.testing.assert_array_equal(np.stack(streamed, 1), whole[:, IDS.shape[1] :])


def test_a_stream_ends_where_all_rows_have_ended(backend):
    model, ids = made(backend), backend.as_argument(IDS[:1])
    whole = as_array(model.generate(ids, 6))[0, IDS.shape[1] :]
    streamed = [int(as_array(token)[0]) for token in model.stream(ids, 6, eos_token_id=int(whole[2]))]
    assert streamed == whole[: list(whole).index(whole[2]) + 1].tolist()


def test_a_stream_leaves_the_mode_of_the_model_between_tokens(backend):
    model, ids = made(backend), backend.as_argument(IDS)
    model.train()
    before = backend.output_eagerly(model, IDS)
    tokens = model.stream(ids, 3)
    next(tokens)
    np.testing.assert_allclose(backend.output_eagerly(model, IDS), before, rtol=1e-6)


def test_a_stream_checks_its_arguments_at_once(backend):
    with pytest.raises(ValueError, match="max_new_tokens"):
        made(backend).stream(backend.as_argument(IDS), 0)


def test_eos_token_id_is_another_name_of_eos(backend):
    model, ids = made(backend), backend.as_argument(IDS)
    named, plain = (as_array(model.generate(ids, 6, **{name: 4})) for name in ("eos_token_id", "eos"))
    np.testing.assert_array_equal(named, plain)
    with pytest.raises(ValueError, match=r"^eos \(4\) and eos_token_id \(5\) must be the same token$"):
        model.generate(ids, 6, eos=4, eos_token_id=5)
