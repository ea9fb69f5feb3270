"""Calls as users of `transformers` write them: masks of 0 and 1, `input_ids`, `labels`, and streams of every model."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ...support.models.whole_models import BERT, GPT
from .. import backends, modules
from .test_decoder_model import CONFIG, IDS, TABLE, as_array, made
from .test_encoder_decoder_model import FRAMES, MASK, SOURCE
from .test_encoder_decoder_model import IDS as START
from .test_encoder_decoder_model import made as made_pair
from .test_whole_models import made as made_whole

backend = backends.fixture(backends.adapters("backend"))

LEFT = np.arange(4) >= np.array([[2], [0]])
VOCAB = 23


def call(backend: ModuleType, function: Any, *inputs: Any, **options: Any) -> Any:
    result = function(*map(backend.as_argument, inputs), **{n: backend.as_argument(o) for n, o in options.items()})
    return tuple(map(as_array, result)) if isinstance(result, tuple) else as_array(result)


def entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean cross entropy of logits with labels, without those that are -100."""
    kept = labels != -100
    logits = logits.astype(np.float64)[kept]
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(-np.take_along_axis(log, labels[kept][:, None], -1).mean())


# ---- masks of 0 and 1


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("name", [modules.MHA, modules.SIMPLE])
def test_a_padding_mask_of_0_and_1_is_a_mask(backend, name, dtype):
    module, x = modules.make(backend, name), modules.draw(2, 5, modules.D_IN)
    for found, wanted in zip(
        backend.run(module, x, modules.PADDING.astype(dtype)), backend.run(module, x, modules.PADDING), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "name",
    [
        "LinearAttention",
        "LightningAttention",
        "KimiDeltaAttention",
        "GatedDeltaNet",
        "GatedConvolution",
        "Mamba",
        "Mamba2",
        "MultiHeadLatentAttention",
        "CrossAttention",
    ],
)
def test_modern_variants_take_masks_of_0_and_1(backend, name):
    module, x = modules.make_example(backend, name)
    mask = np.ones(x.shape[:2], bool)
    mask[0, :2] = False
    context = {"context": x} if name == "CrossAttention" else {}
    found, wanted = (call(backend, module, x, attention_mask=one, **context) for one in (mask.astype("int64"), mask))
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(found - call(backend, module, x, **context)).max() > 1e-4


def test_a_cache_takes_a_mask_of_0_and_1(backend):
    module, x = modules.make_example(backend, "GroupedQueryAttention")
    mask = np.ones(x.shape[:2], bool)
    mask[1, :1] = False
    found, wanted = (
        as_array(
            module(
                backend.as_argument(x),
                attention_mask=backend.as_argument(one),
                cache=module.init_cache(*x.shape[:2]),
            )[0]
        )
        for one in (mask.astype("int64"), mask)
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("config", [CONFIG, TABLE], ids=["no table", "table"])
def test_a_decoder_takes_a_left_padded_mask_of_0_and_1(backend, config):
    model, mask = made(backend, config), LEFT.astype("int64")
    found = call(backend, model, IDS, attention_mask=mask)
    np.testing.assert_array_equal(found, call(backend, model, IDS, attention_mask=LEFT))
    drawn, wanted = (call(backend, model.generate, IDS, 2, attention_mask=one) for one in (mask, LEFT))
    np.testing.assert_array_equal(drawn, wanted)


def test_encoder_decoders_take_masks_of_0_and_1(backend):
    model, mask = made_pair(backend, "text"), MASK.copy()
    mask[0, 3:] = False
    both = {"source_mask": mask, "attention_mask": LEFT}
    numbers = {name: one.astype("int32") for name, one in both.items()}
    np.testing.assert_array_equal(*(call(backend, model, SOURCE, START, **masks) for masks in (numbers, both)))
    np.testing.assert_array_equal(
        *(call(backend, model.generate, SOURCE, START, 2, **masks) for masks in (numbers, both))
    )


def test_whole_numbers_other_than_0_and_1_are_refused(backend):
    mask = np.array([[1, 1, 2, 2], [1, 1, 1, 1]])
    bert = made_whole(backend, BERT)
    calls = {
        "attention_mask": (made(backend), (IDS,)),
        "attention mask": (modules.make(backend, modules.MHA), (modules.draw(2, 4, modules.D_IN),)),
    }
    for name, (function, inputs) in [*calls.items(), ("attention_mask", (bert, (IDS,)))]:
        with pytest.raises(ValueError, match="must hold") as caught:
            call(backend, function, *inputs, attention_mask=mask)
        assert str(caught.value) == f"{name} of integers must hold 0 (padding) and 1 (token) alone, got 2"


# ---- input_ids


def test_input_ids_is_another_name_of_the_tokens(backend):
    inputs = {name: array for name, array in BERT.inputs.items() if name != "ids"}
    bert, gpt = made_whole(backend, BERT), made_whole(backend, GPT)
    pairs = [
        (made(backend), (IDS,), {}),
        (bert, (BERT.inputs["ids"],), inputs),
        (gpt, (GPT.inputs["ids"],), {}),
    ]
    for model, (ids,), options in pairs:
        found = call(backend, model, input_ids=ids, **options)
        np.testing.assert_array_equal(found, call(backend, model, ids, **options))
    np.testing.assert_array_equal(
        call(backend, made(backend).generate, input_ids=IDS, max_new_tokens=3),
        call(backend, made(backend).generate, IDS, 3),
    )
    pair = made_pair(backend, "text")
    np.testing.assert_array_equal(call(backend, pair, SOURCE, input_ids=START), call(backend, pair, SOURCE, START))


def test_tokens_are_given_once_by_one_name(backend):
    gpt, bert = made_whole(backend, GPT), made_whole(backend, BERT)
    for model, name, inputs in (
        (made(backend), "tokens", ()),
        (gpt, "ids", ()),
        (bert, "ids", ()),
        (made_pair(backend, "text"), "tokens", (SOURCE,)),
    ):
        with pytest.raises(TypeError) as caught:
            call(backend, model, *inputs)
        assert str(caught.value) == f"{name} must be given"
        with pytest.raises(TypeError) as caught:
            call(backend, model, *inputs, IDS, input_ids=IDS)
        assert str(caught.value) == f"{name} and input_ids must not both be given"


# ---- labels


def test_labels_add_the_mean_loss_of_the_next_token(backend):
    labels = IDS.astype("int64").copy()
    labels[0, :2] = -100
    for model in (made(backend), made_whole(backend, GPT)):
        logits = call(backend, model, IDS)
        loss, again = call(backend, model, IDS, labels=labels)
        np.testing.assert_array_equal(again, logits)
        assert loss.shape == ()
        np.testing.assert_allclose(loss, entropy(logits[:, :-1], labels[:, 1:]), rtol=1e-5)


def test_labels_with_a_cache_give_loss_logits_and_cache(backend):
    model = made(backend)
    result = model(
        backend.as_argument(IDS), labels=backend.as_argument(IDS.astype("int64")), cache=model.init_cache(2, 6)
    )
    assert len(result) == 3
    np.testing.assert_allclose(
        as_array(result[0]), entropy(as_array(result[1])[:, :-1], IDS[:, 1:].astype("int64")), rtol=1e-5
    )
    assert len(result[2]) == 2


def test_labels_of_an_encoder_decoder_are_not_moved(backend):
    """As in `transformers`, where the decoder's input is the labels moved to the right."""
    model, labels = made_pair(backend, "text"), START[:, ::-1].astype("int64").copy()
    labels[1, 3] = -100
    loss, logits = call(backend, model, SOURCE, START, labels=labels)
    np.testing.assert_allclose(loss, entropy(logits, labels), rtol=1e-5)


BAD_LABELS = {
    "a token that is none": (
        np.array([[1, 11, 1, 1]] * 2),
        ValueError,
        "labels (11) must be -100 or at least 0 and below 11",
    ),
    "negative": (np.array([[1, -1, 1, 1]] * 2), ValueError, "labels (-1) must be -100 or at least 0 and below 11"),
    "floats": (np.ones((2, 4), "f4"), TypeError, "labels must have an integer dtype, got float32"),
    "other shape": (np.ones((2, 3), "i4"), ValueError, "labels must have the shape of tokens (2, 4), got (2, 3)"),
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_bad_labels_are_refused_by_value(backend, case):
    labels, error, message = BAD_LABELS[case]
    with pytest.raises(error) as caught:
        call(backend, made(backend), IDS, labels=labels)
    assert str(caught.value) == message


def test_labels_need_the_logits_of_every_token(backend):
    for model, inputs in ((made(backend), (IDS,)), (made_pair(backend, "text"), (SOURCE, START))):
        with pytest.raises(ValueError, match="last_only") as caught:
            call(backend, model, *inputs, labels=IDS, last_only=True)
        assert str(caught.value) == "last_only (True) must be False with labels"


# ---- streams


def test_a_book_model_ends_rows_and_streams(backend):
    model, ids = made_whole(backend, GPT), GPT.inputs["ids"][:2, :3]
    greedy = functools.partial(call, backend, model.generate_greedy, ids, 6)
    free = greedy()
    eos = int(free[0, 4])
    wanted = free.copy()
    for row in wanted:
        ends = np.flatnonzero(row[3:] == eos)
        row[3 + (ends[0] if len(ends) else 6) :] = eos
    np.testing.assert_array_equal(greedy(eos_token_id=eos), wanted)
    np.testing.assert_array_equal(greedy(eos=eos), wanted)
    streamed = np.stack([as_array(token) for token in model.stream(backend.as_argument(ids), 6)], 1)
    np.testing.assert_array_equal(streamed, free[:, 3:])
    alone = [int(as_array(token)[0]) for token in model.stream(backend.as_argument(ids[:1]), 6, eos_token_id=eos)]
    assert alone == free[0, 3 : 4 + list(free[0, 3:]).index(eos)].tolist()
    with pytest.raises(ValueError, match=r"^eos \(23\) must be at least 0 and below vocab_size \(23\)$"):
        model.stream(backend.as_argument(ids), 6, eos_token_id=VOCAB)


@pytest.mark.parametrize(("kind", "source"), [("text", SOURCE), ("sound", FRAMES)])
def test_an_encoder_decoder_streams_what_it_generates(backend, kind, source):
    model, start = made_pair(backend, kind), START[:, :1]
    whole = call(backend, model.generate, source, start, 5)
    given = map(backend.as_argument, (source, start))
    streamed = np.stack([as_array(token) for token in model.stream(*given, 5)], 1)
    np.testing.assert_array_equal(streamed, whole[:, 1:])
