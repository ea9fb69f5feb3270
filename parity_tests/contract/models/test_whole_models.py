"""What every backend does with the book's `GPTModel` and with `BertEncoder`: dropout, and what it refuses."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ...support.models.whole_models import BERT, GPT, WholeModel, draw
from .. import backends
from .test_decoder_model import as_array

backend = backends.fixture(backends.adapters("backend"))


def make(backend: ModuleType, model: WholeModel, **changes: Any) -> Any:
    """Return a model in eval mode with drawn weights."""
    config = model.spec_of(**changes)
    module = backend.build_blank(model.name, config, "float32")
    backend.load(module, {name: array.astype("float32") for name, array in draw(config).items()})
    return module


made = functools.cache(make)


def call(backend: ModuleType, function: Any, **inputs: Any) -> Any:
    return function(**{name: backend.as_argument(value) for name, value in inputs.items()})


RATES = [
    (GPT, {"drop_rate": 0.1}),
    (BERT, {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.0}),
    (BERT, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5}),
]


@pytest.mark.parametrize(("model", "rates"), RATES, ids=["GPTModel", "BertEncoder-hidden", "BertEncoder-weights"])
def test_dropout_acts_in_training_alone(backend, model, rates):
    module, ids = make(backend, model, **rates, **model.one_layer), model.inputs["ids"]
    np.testing.assert_array_equal(backend.output(module, ids), backend.output(module, ids))
    module.train()
    assert np.abs(backend.output(module, ids) - backend.output(module, ids)).max() > 1e-2


# ---- configs


@pytest.mark.parametrize("model", [GPT, BERT], ids=str)
def test_build_takes_config_objects_and_leaves_dicts_unchanged(backend, model):
    given = {**model.config, **model.one_layer}
    one = backend.build(model.name, config=given)
    assert given == {**model.config, **model.one_layer}
    assert one.config == backend.build(model.name, config=model.spec_of(**model.one_layer)).config


BAD_CONFIGS = [
    (GPT, {**GPT.config, "n_head": 3}, ValueError, "config does not fit GPTModelConfig: unknown keys: n_head"),
    (
        GPT,
        {"emb_dim": 4, "heads": 2, "layers": 1},
        ValueError,
        "config does not fit GPTModelConfig: missing keys: vocab_size, context_length, n_heads, n_layers; "
        "unknown keys: heads, layers",
    ),
    (GPT, {**GPT.config, "n_heads": 5}, ValueError, "emb_dim (12) must be a multiple of n_heads (5)"),
    (GPT, {**GPT.config, "n_layers": 0}, ValueError, "n_layers (0) must be at least 1"),
    (GPT, {**GPT.config, "vocab_size": 23.0}, TypeError, "vocab_size must be an integer, got float"),
    (GPT, {**GPT.config, "drop_rate": 1}, ValueError, "drop_rate (1) must be in [0, 1)"),
    (GPT, {**GPT.config, "qkv_bias": None}, TypeError, "qkv_bias must be a bool, got NoneType"),
    (GPT, list(GPT.config), TypeError, "config must be a dict or a GPTModelConfig, got list"),
    (
        BERT,
        {"hidden_size": 12, "num_hidden_layers": 1},
        ValueError,
        "config does not fit BertEncoderConfig: missing keys: vocab_size, num_attention_heads, intermediate_size, "
        "max_position_embeddings",
    ),
    (BERT, {**BERT.config, "hidden_act": "relu"}, ValueError, "hidden_act ('relu') must be 'gelu'"),
    (BERT, {**BERT.config, "model_type": "roberta"}, ValueError, "model_type ('roberta') must be 'bert'"),
    (
        BERT,
        {**BERT.config, "position_embedding_type": "relative_key"},
        ValueError,
        "position_embedding_type ('relative_key') must be 'absolute'",
    ),
    (BERT, {**BERT.config, "is_decoder": True}, ValueError, "is_decoder (True) must be False"),
    (
        BERT,
        {**BERT.config, "num_attention_heads": 5},
        ValueError,
        "hidden_size (12) must be a multiple of num_attention_heads (5)",
    ),
    (BERT, {**BERT.config, "layer_norm_eps": 0}, ValueError, "layer_norm_eps (0) must be positive and finite"),
    (BERT, {**BERT.config, "type_vocab_size": 0}, ValueError, "type_vocab_size (0) must be at least 1"),
    (BERT, {**BERT.config, "hidden_dropout_prob": 2}, ValueError, "hidden_dropout_prob (2) must be in [0, 1)"),
    (BERT, "bert", TypeError, "config must be a dict or a BertEncoderConfig, got str"),
]


@pytest.mark.parametrize(("model", "config", "error", "message"), BAD_CONFIGS, ids=lambda value: str(value)[:60])
def test_a_bad_config_gives_the_shared_error(backend, model, config, error, message):
    with pytest.raises(error) as caught:
        backend.build(model.name, config=config)
    assert (type(caught.value), str(caught.value)) == (error, message)


# ---- calls


BAD_IDS = [
    (np.ones((1, 9), np.int32), ValueError, "number of tokens (9) must be at most context_length (8)"),
    (np.ones(4, np.int32), ValueError, "ids must have shape (B, T), got (4,)"),
    (np.ones((2, 0), np.int32), ValueError, "ids must hold at least 1 token, got shape (2, 0)"),
    (np.ones((0, 2), np.int32), ValueError, "ids must hold at least 1 token, got shape (0, 2)"),
    (np.ones((2, 4), np.float32), TypeError, "ids must have an integer dtype, got float32"),
    (np.ones((2, 4), np.bool_), TypeError, "ids must have an integer dtype, got bool"),
    (np.array([[1, 23]]), ValueError, "ids (23) must be at least 0 and below 23"),
    (np.array([[1, 2**32]]), ValueError, "ids (4294967296) must be at least 0 and below 23"),
    (np.array([[-1, 5]]), ValueError, "ids (-1) must be at least 0 and below 23"),
]


@pytest.mark.parametrize(("ids", "error", "message"), BAD_IDS)
def test_bad_ids_give_the_shared_error(backend, ids, error, message):
    model = made(backend, GPT)
    with pytest.raises(error) as caught:
        call(backend, model, ids=ids)
    assert (type(caught.value), str(caught.value)) == (error, message)
    if ids.shape != (1, 9):  # a prompt that is too long is cropped
        with pytest.raises(error) as caught:
            model.generate_greedy(backend.as_argument(ids), 1)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (0, ValueError, "max_new_tokens (0) must be at least 1"),
        (-1, ValueError, "max_new_tokens (-1) must be at least 1"),
        (2.0, TypeError, "max_new_tokens must be an integer, got float"),
        (True, TypeError, "max_new_tokens must be an integer, got bool"),
    ],
)
def test_a_bad_number_of_tokens_gives_the_shared_error(backend, number, error, message):
    with pytest.raises(error) as caught:
        made(backend, GPT).generate_greedy(backend.as_argument(GPT.inputs["ids"]), number)
    assert (type(caught.value), str(caught.value)) == (error, message)


IDS, MASK, TYPES = (BERT.inputs[name] for name in ("ids", "attention_mask", "token_type_ids"))
BAD_INPUTS = [
    (
        {"ids": np.ones((1, 10), np.int32)},
        ValueError,
        "number of tokens (10) must be at most max_position_embeddings (9)",
    ),
    ({"ids": np.ones(4, np.int32)}, ValueError, "ids must have shape (B, T), got (4,)"),
    ({"ids": np.ones((2, 3), np.float32)}, TypeError, "ids must have an integer dtype, got float32"),
    ({"ids": np.ones((0, 3), np.int32)}, ValueError, "ids must hold at least 1 token, got shape (0, 3)"),
    ({"ids": np.ones((3, 0), np.int32)}, ValueError, "ids must hold at least 1 token, got shape (3, 0)"),
    ({"ids": IDS - 23}, ValueError, f"ids ({IDS.min() - 23}) must be at least 0 and below 23"),
    ({"ids": IDS + 23}, ValueError, f"ids ({IDS.max() + 23}) must be at least 0 and below 23"),
    ({"token_type_ids": TYPES - 1}, ValueError, "token_type_ids (-1) must be at least 0 and below 2"),
    ({"token_type_ids": TYPES + 2}, ValueError, f"token_type_ids ({TYPES.max() + 2}) must be at least 0 and below 2"),
    ({"token_type_ids": TYPES[:1]}, ValueError, "token_type_ids must have the shape of ids (3, 7), got (1, 7)"),
    ({"token_type_ids": TYPES == 1}, TypeError, "token_type_ids must have an integer dtype, got bool"),
    ({"attention_mask": MASK[:, :6]}, ValueError, "attention_mask must have the shape of ids (3, 7), got (3, 6)"),
    (
        {"attention_mask": MASK.astype(np.float32)},
        TypeError,
        "attention_mask must have dtype bool or an integer dtype, got float32",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_INPUTS)
def test_bad_inputs_of_bert_give_the_shared_error(backend, changes, error, message):
    inputs = {**BERT.inputs, **changes} if "ids" not in changes or changes["ids"].shape == (3, 7) else changes
    with pytest.raises(error) as caught:
        call(backend, made(backend, BERT), **inputs)
    assert (type(caught.value), str(caught.value)) == (error, message)


def test_dropout_of_a_loaded_model_acts_in_training(backend, tmp_path):
    module = make(backend, GPT, drop_rate=0.2, **GPT.one_layer)
    module.save_pretrained(tmp_path / "model")
    loaded = backend.package.GPTModel.from_pretrained(tmp_path / "model")
    ids = GPT.inputs["ids"]
    np.testing.assert_array_equal(backend.output_eagerly(loaded, ids), backend.output_eagerly(module, ids))
    loaded.train()
    first, second = (backend.output_eagerly(loaded, ids) for _ in range(2))
    assert np.isfinite(first).all()
    assert np.abs(first - second).max() > 1e-2


# ---- padding of the book's GPT

LENGTHS = np.array([[4], [7], [5]])
SHOWN = {"left": np.arange(7) >= 7 - LENGTHS, "right": np.arange(7) < LENGTHS}
"""Masks of three rows by the side that is padded."""


@pytest.mark.parametrize("dtype", ["bool", "int64"])
@pytest.mark.parametrize("side", SHOWN)
def test_padded_rows_of_gpt_get_their_own_logits(backend, side, dtype):
    model, ids, shown = made(backend, GPT), GPT.inputs["ids"][:, :7], SHOWN[side]
    mask = backend.as_argument(shown.astype(dtype))
    logits = as_array(model(backend.as_argument(ids), attention_mask=mask))
    for row in range(3):
        alone = backend.output(model, ids[row : row + 1, shown[row]])
        np.testing.assert_allclose(logits[row : row + 1, shown[row]], alone, rtol=1e-4, atol=1e-5)


def test_gpt_generates_from_padded_rows_as_from_rows_alone(backend):
    """The rows grow beyond the 8 positions of the model."""
    model, ids, shown = made(backend, GPT), GPT.inputs["ids"][:, :7], SHOWN["left"]
    mask = backend.as_argument(shown)
    tokens = np.asarray(model.generate_greedy(backend.as_argument(ids), 6, attention_mask=mask))
    streamed = [np.asarray(token) for token in model.stream(backend.as_argument(ids), 6, attention_mask=mask)]
    np.testing.assert_array_equal(np.stack(streamed, 1), tokens[:, 7:])
    for row in range(3):
        alone = model.generate_greedy(backend.as_argument(ids[row : row + 1, shown[row]]), 6)
        np.testing.assert_array_equal(tokens[row, 7:], np.asarray(alone)[0, -6:])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (SHOWN["right"], "attention_mask of row 0 must hide padding on the left alone, and show the last token"),
        (SHOWN["left"][:, 1:], "attention_mask must have the shape of tokens (3, 7), got (3, 6)"),
    ],
)
def test_gpt_refuses_prompts_padded_on_the_right(backend, mask, message):
    ids = backend.as_argument(GPT.inputs["ids"][:, :7])
    with pytest.raises(ValueError, match="attention_mask") as caught:
        made(backend, GPT).generate_greedy(ids, 2, attention_mask=backend.as_argument(mask))
    assert str(caught.value) == message
