"""What every backend's `DecoderModel` refuses, in one line each, and how its `generate` draws."""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attn_bridge.generation import Options
from attn_bridge.specs import (
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    LayerNormConfig,
    RMSNormConfig,
)

from . import backends

backend = backends.fixture(backends.adapters("backend"))

NORM = RMSNormConfig(8)
BLOCK = DecoderBlockConfig(GroupedQueryAttentionConfig(8, 2), FeedForwardConfig(8, 12), NORM)
CONFIG = DecoderConfig(11, 8, (BLOCK, BLOCK), NORM)
IDS = np.array([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)


@functools.cache
def made(backend: ModuleType) -> Any:
    return backend.build("DecoderModel", config=CONFIG)


def generate(backend: ModuleType, ids: np.ndarray = IDS, new: Any = 3, **options: Any) -> np.ndarray:
    given = {name: backend.as_argument(value) for name, value in options.items()}
    return np.asarray(made(backend).generate(backend.as_argument(ids), new, **given))


BAD_CALLS = {
    "token": ({"tokens": np.array([[3, 11]])}, ValueError, "tokens (11) must be at least 0 and below 11"),
    "negative": ({"tokens": np.array([[-1, 2]])}, ValueError, "tokens (-1) must be at least 0 and below 11"),
    "no batch": ({"tokens": np.array([3, 1])}, ValueError, "tokens must have shape (B, T), got (2,)"),
    "empty": ({"tokens": np.zeros((2, 0), int)}, ValueError, "tokens must hold at least 1 token, got shape (2, 0)"),
    "no rows": ({"tokens": np.zeros((0, 2), int)}, ValueError, "tokens must hold at least 1 token, got shape (0, 2)"),
    "floats": ({"tokens": np.ones((1, 2), np.float32)}, TypeError, "tokens must have an integer dtype, got float32"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_tokens_are_refused_by_value(backend, case):
    inputs, error, message = BAD_CALLS[case]
    for function in (made(backend), lambda tokens: made(backend).generate(tokens, 2)):
        with pytest.raises(error) as caught:
            function(backend.as_argument(inputs["tokens"]))
        assert str(caught.value) == message


BAD_OPTIONS = {
    "max_new_tokens": ({"new": 0}, ValueError, "max_new_tokens (0) must be at least 1"),
    "half a token": ({"new": 1.5}, TypeError, "max_new_tokens must be an integer, got float"),
    "temperature": ({"temperature": -0.5}, ValueError, "temperature (-0.5) must be at least 0 and finite"),
    "top_k": ({"temperature": 1.0, "top_k": 0}, ValueError, "top_k (0) must be at least 1"),
    "top_p": ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p (0.0) must be above 0 and at most 1"),
    "eos": ({"eos": 11}, ValueError, "eos (11) must be at least 0 and below vocab_size (11)"),
    "mask": (
        {"attention_mask": np.ones((2, 3), bool)},
        ValueError,
        "attention_mask must have the shape of tokens (B, 4), got (2, 3)",
    ),
    "mask of numbers": (
        {"attention_mask": np.ones((2, 4), np.int32)},
        TypeError,
        "attention_mask must be bool, got int32",
    ),
    "padding on the right": (
        {"attention_mask": np.arange(4) < np.array([[4], [3]])},
        ValueError,
        "attention_mask of row 1 must hide padding on the left alone, and show the last token",
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_by_value(backend, case):
    options, error, message = BAD_OPTIONS[case]
    with pytest.raises(error) as caught:
        generate(backend, **options)
    assert str(caught.value) == message


def test_a_row_that_ended_holds_nothing_else(backend):
    free = generate(backend, new=12)
    eos = int(free[0, 6])
    found = generate(backend, new=12, eos=eos)
    assert found.shape == free.shape
    for row, plain in zip(found, free, strict=True):
        ends = np.flatnonzero(plain[4:] == eos)
        stop = 4 + ends[0] + 1 if len(ends) else len(plain)
        np.testing.assert_array_equal(row[:stop], plain[:stop])
        assert (row[stop:] == eos).all()


def test_padding_on_the_left_changes_no_token(backend):
    alone = generate(backend, IDS[1:, 2:], new=6)
    mask = np.arange(4) >= np.array([[0], [2]])
    np.testing.assert_array_equal(generate(backend, new=6, attention_mask=mask)[1, 2:], alone[0])


def test_dropout_is_off_while_tokens_are_drawn_and_on_again_behind(backend):
    config = CONFIG.replace(blocks=(BLOCK.replace(dropout=0.5),), dropout=0.5)
    model = backend.build("DecoderModel", config=config)
    model.train()
    first, second = (np.asarray(model.generate(backend.as_argument(IDS), 5)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    outputs = [backend.output_eagerly(model, IDS) for _ in range(2)]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


def frequencies(backend: ModuleType, logits: np.ndarray, draws: int = 4000, **options: Any) -> np.ndarray:
    """Return how often each token is picked where the numbers are spread evenly."""
    picked = backend.pick(np.tile(logits, (draws, 1)), (np.arange(draws) + 0.5) / draws, Options(1, **options))
    return np.bincount(picked, minlength=len(logits)) / draws


LOGITS = np.log(np.array([0.05, 0.3, 0.1, 0.35, 0.2]))
DRAWN = {
    "all": ({"temperature": 1.0}, [0.05, 0.3, 0.1, 0.35, 0.2]),
    "flatter": (
        {"temperature": 2.0},
        np.sqrt([0.05, 0.3, 0.1, 0.35, 0.2]) / np.sqrt([0.05, 0.3, 0.1, 0.35, 0.2]).sum(),
    ),
    "top_k": ({"temperature": 1.0, "top_k": 2}, np.array([0, 0.3, 0, 0.35, 0]) / 0.65),
    "top_p": ({"temperature": 1.0, "top_p": 0.8}, np.array([0, 0.3, 0, 0.35, 0.2]) / 0.85),
    "top_p of one": ({"temperature": 1.0, "top_p": 0.01}, [0, 0, 0, 1, 0]),
    "both": ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, np.array([0, 0.3, 0, 0.35, 0]) / 0.65),
    "greedy": ({"temperature": 0.0}, [0, 0, 0, 1, 0]),
}


@pytest.mark.parametrize("case", DRAWN)
def test_tokens_are_drawn_as_often_as_the_options_say(backend, case):
    options, wanted = DRAWN[case]
    np.testing.assert_allclose(frequencies(backend, LOGITS, **options), wanted, atol=1e-3)


BAD_CONFIGS = {
    "width": ({"emb_dim": 9}, "width of blocks[0] (8) must be emb_dim (9)"),
    "norm": ({"norm": LayerNormConfig(7)}, "emb_dim of norm (7) must be emb_dim (8)"),
    "scale": ({"embedding_scale": 0.0}, "embedding_scale (0.0) must be positive and finite"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configs_that_do_not_fit_are_refused_by_name(case):
    changes, message = BAD_CONFIGS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        CONFIG.replace(**changes)
