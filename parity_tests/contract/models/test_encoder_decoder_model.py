"""What every backend's `EncoderDecoderModel` refuses, in one line each, and what its configs do."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import masks
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.specs import (
    ConvolutionsConfig,
    CrossAttentionConfig,
    EncoderDecoderBlockConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    LayerNormConfig,
    RelativeBias,
    RMSNormConfig,
    StackConfig,
)
from attn_bridge.specs.as_json import as_json, from_json

from .. import backends

backend = backends.fixture(backends.adapters("backend"))

NORM, CROSS, FEED = LayerNormConfig(8), CrossAttentionConfig(8, 2), FeedForwardConfig(8, 12, "gelu", gated=False)
ENCODER_BLOCK = EncoderDecoderBlockConfig(GroupedQueryAttentionConfig(8, 4, mask=masks.full()), FEED, NORM)
DECODER_BLOCK = EncoderDecoderBlockConfig(GroupedQueryAttentionConfig(8, 2), FEED, NORM, CROSS)
DECODER = StackConfig(8, (DECODER_BLOCK, DECODER_BLOCK), 9, norm=NORM)
TEXT = EncoderDecoderConfig(11, StackConfig(8, (ENCODER_BLOCK,), 6, position_offset=2), DECODER)
SOUND = EncoderDecoderConfig(
    11, StackConfig(8, (ENCODER_BLOCK,), 6, convolutions=ConvolutionsConfig(3, 8)), DECODER, tie=False, logits_bias=True
)
CONFIGS = {"text": TEXT, "sound": SOUND}
IDS = np.array([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)
SOURCE = np.array([[2, 7, 1, 8, 2], [8, 4, 5, 9, 0]], np.int32)
FRAMES = np.random.default_rng(0).standard_normal((2, 3, 12)).astype(np.float32)
MASK = np.ones((2, 5), bool)
SOURCES = {"text": SOURCE, "sound": FRAMES}


@functools.cache
def made(backend: ModuleType, kind: str) -> Any:
    return backend.build("EncoderDecoderModel", config=CONFIGS[kind])


def call(backend: ModuleType, kind: str, how: str, **changes: Any) -> Any:
    """Call a model, or have it generate, with some arguments in the place of good ones."""
    arguments = {"source": SOURCES[kind], "tokens": IDS, **changes}
    given = {name: backend.as_argument(value) for name, value in arguments.items()}
    model = made(backend, kind)
    if how == "cached":
        return model(**given, cache=model.init_cache(2, 6))
    return model(**given) if how == "plain" else model.generate(**given, max_new_tokens=2)


BAD_CALLS = {
    "token": ("text", {"tokens": np.array([[3, 11]] * 2)}, ValueError, "tokens (11) must be at least 0 and below 11"),
    "no batch": ("text", {"tokens": np.array([3, 1])}, ValueError, "tokens must have shape (B, T), got (2,)"),
    "empty": (
        "text",
        {"tokens": np.zeros((2, 0), np.int32)},
        ValueError,
        "tokens must hold at least 1 token, got shape (2, 0)",
    ),
    "no rows": (
        "text",
        {"tokens": np.zeros((0, 2), np.int32)},
        ValueError,
        "tokens must hold at least 1 token, got shape (0, 2)",
    ),
    "floats": ("text", {"tokens": np.ones((2, 2), "f4")}, TypeError, "tokens must have an integer dtype, got float32"),
    "source": ("text", {"source": SOURCE + 3}, ValueError, "source (12) must be at least 0 and below 11"),
    "negative": ("text", {"source": SOURCE - 1}, ValueError, "source (-1) must be at least 0 and below 11"),
    "flat source": ("text", {"source": SOURCE[0]}, ValueError, "source must have shape (B, T), got (5,)"),
    "empty source": (
        "text",
        {"source": SOURCE[:, :0]},
        ValueError,
        "source must hold at least 1 token, got shape (2, 0)",
    ),
    "long source": (
        "text",
        {"source": np.ones((2, 7), np.int32)},
        ValueError,
        "number of tokens (7) must be at most num_positions of encoder (6)",
    ),
    "features": ("text", {"source": FRAMES}, TypeError, "source must have an integer dtype, got float32"),
    "other batch": ("text", {"source": SOURCE[:1]}, ValueError, "batch of source (1) must be the batch of tokens (2)"),
    "mask": (
        "text",
        {"source_mask": MASK[:, :4]},
        ValueError,
        "source_mask must have shape (B, S) = (2, 5), got (2, 4)",
    ),
    "mask of numbers": (
        "text",
        {"source_mask": MASK.astype(np.float32)},
        TypeError,
        "source_mask must be bool, got float32",
    ),
    "mels": ("sound", {"source": FRAMES[:, :2]}, ValueError, "source must have shape (B, 3, frames), got (2, 2, 12)"),
    "axes": ("sound", {"source": FRAMES[0]}, ValueError, "source must have shape (B, 3, frames), got (3, 12)"),
    "ids": ("sound", {"source": SOURCE}, TypeError, "source must have a floating-point dtype, got int32"),
    "no frame": (
        "sound",
        {"source": FRAMES[:, :, :0]},
        ValueError,
        "source must hold at least 1 frame, got shape (2, 3, 0)",
    ),
    "frames": (
        "sound",
        {"source": np.ones((2, 3, 13), "f4")},
        ValueError,
        "number of frames (13) must be at most 12",
    ),
    "mask of frames": (
        "sound",
        {"source_mask": np.ones((2, 12), bool)},
        ValueError,
        "source_mask must have shape (B, S) = (2, 6), got (2, 12)",
    ),
    "nothing": ("text", {"source": None}, ValueError, "source (None) must be given, or a cache that holds one"),
}


@pytest.mark.parametrize("how", ["plain", "cached", "generate"])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused_by_value(backend, case, how):
    kind, changes, error, message = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        call(backend, kind, how, **changes)
    assert (type(caught.value), str(caught.value)) == (error, message)


def test_more_tokens_than_positions_are_refused(backend):
    tokens = backend.as_argument(np.ones((2, 10), np.int32))
    model, source = made(backend, "text"), backend.as_argument(SOURCE)
    with pytest.raises(ValueError, match=r"^number of tokens \(10\) must be at most num_positions of decoder \(9\)$"):
        model(source, tokens)
    with pytest.raises(ValueError, match=r"^positions \(9\) must be at least 0 and below 9$"):
        model(source, tokens, cache=model.init_cache(2, 10))
    message = r"^tokens \(4\) and max_new_tokens \(7\) must be at most num_positions \+ 1 \(10\)$"
    with pytest.raises(ValueError, match=message):
        model.generate(source, tokens[:, :4], 7)
    assert model.generate(source, tokens[:, :4], 6).shape == (2, 10)


def test_more_tokens_than_a_cache_has_room_for_are_refused(backend):
    model, source, ids = made(backend, "text"), backend.as_argument(SOURCE), backend.as_argument(IDS)
    _, cache = model(source, ids, cache=model.init_cache(2, 5))
    message = r"^tokens in the cache \(4\) and new ones \(2\) must be at most capacity \(5\)$"
    with pytest.raises(ValueError, match=message):
        model(None, ids[:, :2], cache=cache)
    with pytest.raises(ValueError, match=r"^capacity \(0\) must be at least 1$"):
        model.init_cache(2, 0)


BAD_OPTIONS = {
    "max_new_tokens": ({"max_new_tokens": 0}, ValueError, "max_new_tokens (0) must be at least 1"),
    "half a token": ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens must be an integer, got float"),
    "top_p": ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p (0.0) must be above 0 and at most 1"),
    "eos": ({"eos": 11}, ValueError, "eos (11) must be at least 0 and below vocab_size (11)"),
    "padding on the right": (
        {"attention_mask": np.arange(4) < np.array([[4], [3]])},
        ValueError,
        "attention_mask of row 1 must hide padding on the left alone, and show the last token",
    ),
}


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (5, "cache must be what init_cache of the model returns, got int"),
        ([5, 5], "cache must be what init_cache of the model returns, got one of int"),
    ],
)
@pytest.mark.parametrize("source", [None, SOURCE], ids=["no source", "source"])
def test_a_cache_of_something_else_is_refused(backend, cache, message, source):
    given = None if source is None else backend.as_argument(source)
    with pytest.raises(TypeError) as caught:
        made(backend, "text")(given, backend.as_argument(IDS), cache=cache)
    assert str(caught.value) == message


def test_a_cache_beyond_any_index_is_refused(backend):
    with pytest.raises(ValueError, match=r"capacity \(9223372036854775808\) must be at most 9223372036854775807"):
        made(backend, "text").init_cache(1, 1 << 63)


@pytest.mark.parametrize("how", ["plain", "cached", "generate"])
@pytest.mark.parametrize("name", ["source", "tokens", "source_mask"])
def test_lists_are_arrays_or_refused_in_one_line(backend, name, how):
    """JAX takes lists for arrays in all its functions, torch in none."""
    model = made(backend, "text")
    values = {"source": SOURCE, "tokens": IDS, "source_mask": np.ones_like(SOURCE, bool)}
    given = {key: value.tolist() if key == name else backend.as_argument(value) for key, value in values.items()}
    more = {"generate": {"max_new_tokens": 2}, "cached": {"cache": model.init_cache(2, 6)}, "plain": {}}[how]
    run = model.generate if how == "generate" else model
    if backend.package.__name__ == "torch_attn":
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got list$"):
            run(**given, **more)
    else:
        run(**given, **more)


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_by_value(backend, case):
    options, error, message = BAD_OPTIONS[case]
    arguments = {"source": SOURCE, "tokens": IDS, "max_new_tokens": 3, **options}
    with pytest.raises(error) as caught:
        made(backend, "text").generate(**{name: backend.as_argument(value) for name, value in arguments.items()})
    assert str(caught.value) == message


def test_convolutions_see_as_many_frames_before_as_behind(backend):
    stack = SOUND.encoder.replace(convolutions=ConvolutionsConfig(3, 8, size=5))
    model, random = backend.build("EncoderDecoderModel", config=SOUND.replace(encoder=stack)), np.random.default_rng(5)
    for name, channels, stride in (("conv1", 3, 1), ("conv2", 8, 2)):
        weight, bias = (backend.parameter(model, f"encoder.{name}.{part}") for part in ("weight", "bias"))
        x = random.standard_normal((2, 7, channels)).astype(np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (2, 2), (0, 0))), 5, axis=1)
        expected = np.einsum("btck,ock->bto", windows[:, ::stride], weight) + bias
        found = backend.output_eagerly(getattr(model.encoder, name), x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_row_that_ended_holds_nothing_else(backend):
    given = backend.as_argument(FRAMES), backend.as_argument(IDS[:, :1])
    free = np.asarray(made(backend, "sound").generate(*given, 9))
    eos = int(free[0, 4])
    found = np.asarray(made(backend, "sound").generate(*given, 9, eos=eos))
    for row, plain in zip(found, free, strict=True):
        ends = np.flatnonzero(plain[1:] == eos)
        stop = 1 + ends[0] + 1 if len(ends) else len(plain)
        np.testing.assert_array_equal(row[:stop], plain[:stop])
        assert (row[stop:] == eos).all()


def test_generation_switches_dropout_off_and_restores_it(backend):
    rates = {"encoder": TEXT.encoder.replace(dropout=0.5), "decoder": TEXT.decoder.replace(dropout=0.4)}
    model = backend.build("EncoderDecoderModel", config=TEXT.replace(**rates))
    model.train()
    given = backend.as_argument(SOURCE), backend.as_argument(IDS)
    first, second = (np.asarray(model.generate(*given, 4)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    outputs = [backend.output_eagerly(model, SOURCE, IDS) for _ in range(2)]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


# ---- configs


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_survives_json(kind):
    assert from_json(as_json(CONFIGS[kind])) == CONFIGS[kind]


WIDE = EncoderDecoderBlockConfig(
    GroupedQueryAttentionConfig(6, 2), FeedForwardConfig(6, 4), RMSNormConfig(6), CrossAttentionConfig(6, 2)
)
BAD_CONFIGS = {
    "dict": (lambda: TEXT.replace(encoder={}), TypeError, "encoder must be a StackConfig, got dict"),
    "vocabulary": (lambda: TEXT.replace(vocab_size=0), ValueError, "vocab_size (0) must be at least 1"),
    "other table": (
        lambda: TEXT.replace(decoder=DECODER.replace(vocab_size=12)),
        ValueError,
        "vocab_size of decoder (12) must be vocab_size (11)",
    ),
    "no cross attention": (
        lambda: TEXT.replace(decoder=DECODER.replace(blocks=(ENCODER_BLOCK,))),
        ValueError,
        "cross_attention of decoder.blocks[0] must be a CrossAttentionConfig, got None",
    ),
    "cross attention": (
        lambda: TEXT.replace(encoder=TEXT.encoder.replace(blocks=(ENCODER_BLOCK, DECODER_BLOCK))),
        ValueError,
        "cross_attention of encoder.blocks[1] must be None",
    ),
    "context": (
        lambda: TEXT.replace(
            decoder=DECODER.replace(blocks=(DECODER_BLOCK.replace(cross_attention=CROSS.replace(d_context=7)),))
        ),
        ValueError,
        "d_context of decoder.blocks[0] (7) must be emb_dim of encoder (8)",
    ),
    "no block": (
        lambda: TEXT.replace(decoder=DECODER.replace(blocks=())),
        ValueError,
        "blocks of decoder must hold at least 1 block",
    ),
    "width": (lambda: DECODER.replace(blocks=(WIDE,)), ValueError, "width of blocks[0] (6) must be emb_dim (8)"),
    "widths": (
        lambda: TEXT.replace(decoder=StackConfig(6, (WIDE,), 9)),
        ValueError,
        "emb_dim of encoder (8) must be that of decoder (6)",
    ),
    "norm": (lambda: DECODER.replace(norm=RMSNormConfig(7)), ValueError, "emb_dim of norm (7) must be emb_dim (8)"),
    "norms": (
        lambda: DECODER_BLOCK.replace(norms="both"),
        ValueError,
        "norms ('both') must be one of 'pre', 'post'",
    ),
    "two inputs": (
        lambda: SOUND.encoder.replace(vocab_size=11),
        ValueError,
        "vocab_size (11) must be None beside convolutions",
    ),
    "odd sines": (
        lambda: StackConfig(7, (), 9, learned_positions=False),
        ValueError,
        "emb_dim (7) must be even for positions that are not learned",
    ),
    "offset": (lambda: DECODER.replace(position_offset=-1), ValueError, "position_offset (-1) must be at least 0"),
    "even": (lambda: ConvolutionsConfig(3, 8, size=4), ValueError, "size (4) must be odd"),
    "sound of a decoder": (
        lambda: TEXT.replace(decoder=DECODER.replace(convolutions=ConvolutionsConfig(3, 8))),
        ValueError,
        "convolutions of decoder must be None: it reads tokens",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configs_that_do_not_fit_are_refused_by_name(case):
    change, error, message = BAD_CONFIGS[case]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        change()


@pytest.mark.parametrize("config", [{}, "bart", TEXT.encoder], ids=["dict", "name", "stack"])
def test_a_config_of_something_else_is_refused(backend, config):
    with pytest.raises((TypeError, ValueError), match="EncoderDecoderConfig"):
        backend.build("EncoderDecoderModel", config=config)


# ---- folders


def write_config(folder: Path, document: Any) -> None:
    (folder / "config.json").write_text(json.dumps(document))


BAD_FOLDERS = {
    "nothing": ({}, "config.json: config has no model_type, which must be one of"),
    "decoder": (
        {"model_type": "llama"},
        "config.json: model_type (llama) is no encoder and decoder of ours, which are",
    ),
    "own decoder": (
        {"model_type": "attn-bridge-DecoderModel"},
        "config.json: model_type (attn-bridge-DecoderModel) must",
    ),
    "no config": (
        {"model_type": "attn-bridge-EncoderDecoderModel"},
        "config.json: config must be a EncoderDecoderConfig",
    ),
    "a part": (
        {"model_type": "attn-bridge-EncoderDecoderModel", "config": as_json(NORM)},
        "config.json: config must be a EncoderDecoderConfig, got LayerNormConfig",
    ),
    "huge": (
        {"model_type": "attn-bridge-EncoderDecoderModel", "config": as_json(TEXT.replace(vocab_size=10**12))},
        "config.json: vocab_size (1000000000000) is far too large for weights of",
    ),
    "wide": (
        {"model_type": "attn-bridge-EncoderDecoderModel", "config": as_json(TEXT) | {"logits_bias": 1}},
        "config.json: logits_bias must be a bool, got int",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_of_something_else_is_refused_in_one_line(backend, tmp_path, case):
    document, message = BAD_FOLDERS[case]
    made(backend, "text").save_pretrained(tmp_path / "model")
    write_config(tmp_path / "model", document)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        backend.package.EncoderDecoderModel.from_pretrained(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_missing_and_surplus_weights_are_all_named(backend, tmp_path):
    made(backend, "text").save_pretrained(tmp_path / "model")
    deeper = TEXT.replace(logits_bias=True, encoder=TEXT.encoder.replace(norm=NORM), decoder=DECODER.replace(norm=None))
    write_config(tmp_path / "model", {"model_type": "attn-bridge-EncoderDecoderModel", "config": as_json(deeper)})
    with pytest.raises(ValueError, match="weights do not match") as caught:
        backend.package.EncoderDecoderModel.from_pretrained(tmp_path / "model")
    for name in ("encoder.final_norm.scale", "encoder.final_norm.shift", "logits_bias", "decoder.final_norm.scale"):
        assert name in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_a_folder_keeps_its_dtype(backend, tmp_path, dtype):
    name = np.dtype(dtype).name
    model, random = backend.build_blank("EncoderDecoderModel", SOUND, name), np.random.default_rng(1)
    backend.load(model, {row.rule.torch: random.normal(size=row.shape).astype(dtype) for row in SOUND.parameters})
    model.save_pretrained(tmp_path / "model")
    again = backend.package.EncoderDecoderModel.from_pretrained(tmp_path / "model")
    found, wanted = (backend.output_eagerly(one, FRAMES.astype(dtype), IDS) for one in (again, model))
    assert found.dtype == wanted.dtype == dtype
    np.testing.assert_array_equal(found, wanted)
    assert np.ptp(wanted.astype("f4")) > 1


def test_a_table_of_biases_is_given_to_the_attention_that_shares_one_and_to_no_other(backend):
    x, table = np.ones((1, 3, 8), np.float32), np.arange(16, dtype=np.float32).reshape(8, 2) / 7
    own = GroupedQueryAttentionConfig(8, 2, position=RelativeBias(8, 9), scale=1.0)
    shared = own.replace(position=RelativeBias(8, 9, shared=True))
    random = np.random.default_rng(2)
    arrays = {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in shared.parameters}
    layers = {
        kind: backend.build("GroupedQueryAttention", config=config)
        for kind, config in {"own": own, "shared": shared, "none": own.replace(position=None)}.items()
    }
    for kind, layer in layers.items():
        backend.load(layer, {**arrays, **({"relative_bias": table} if kind == "own" else {})})
    found = layers["shared"](backend.as_argument(x), relative_bias=backend.as_argument(table))
    wanted = layers["own"](backend.as_argument(x))
    found, wanted = (np.asarray(one.detach() if hasattr(one, "detach") else one) for one in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    for kind, given, message in (
        ("shared", None, "relative_bias must be given to attention whose position shares it"),
        ("own", table, "relative_bias must be None: no position shares it"),
        ("none", table, "relative_bias must be None: no position shares it"),
        ("shared", table.T, "relative_bias must have shape (num_buckets, num_heads) = (8, 2), got (2, 8)"),
    ):
        bias = None if given is None else backend.as_argument(given)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            layers[kind](backend.as_argument(x), relative_bias=bias)
