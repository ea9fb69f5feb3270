"""What every backend's `DecoderModel` refuses, in one line each, and how its `generate` draws."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.generation import Options
from attn_bridge.specs import (
    Alibi,
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    LayerNormConfig,
    MixtureOfExpertsConfig,
    RMSNormConfig,
    Rotary,
    Router,
)

from .. import backends

backend = backends.fixture(backends.adapters("backend"))

NORM = RMSNormConfig(8)
BLOCK = DecoderBlockConfig(GroupedQueryAttentionConfig(8, 2), FeedForwardConfig(8, 12), NORM)
CONFIG = DecoderConfig(11, 8, (BLOCK, BLOCK), NORM)
TABLE = CONFIG.replace(num_positions=6)
IDS = np.array([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)


@functools.cache
def made(backend: ModuleType, config: DecoderConfig = CONFIG) -> Any:
    return backend.build("DecoderModel", config=config)


def generate(
    backend: ModuleType, ids: np.ndarray = IDS, new: Any = 3, config: DecoderConfig = CONFIG, **options: Any
) -> np.ndarray:
    given = {name: backend.as_argument(value) for name, value in options.items()}
    return np.asarray(made(backend, config).generate(backend.as_argument(ids), new, **given))


def added(run: Callable[[str, np.ndarray], np.ndarray], norms: str, scale: float, x: np.ndarray) -> np.ndarray:
    """Return what a block makes of its input, by the names of its layers."""
    if norms.startswith("parallel"):
        before = "norm1" if norms == "parallel" else "norm2"
        return x + scale * (run("att", run("norm1", x)) + run("ff", run(before, x)))
    if norms == "residual":
        x = run("post_norm1", x + scale * run("att", x))
        return run("post_norm2", x + scale * run("ff", x))
    for layer, before, behind in (("att", "norm1", "post_norm1"), ("ff", "norm2", "post_norm2")):
        result = run(layer, x if norms == "post" else run(before, x))
        is_bare = norms == "pre" or (norms == "pre_and_last" and layer == "att")
        x = x + scale * (result if is_bare else run(behind, result))
    return x


@pytest.mark.parametrize("norms", ["pre", "post", "sandwich", "pre_and_last", "parallel", "parallel_two", "residual"])
def test_a_block_adds_its_layers_with_norms_where_configured(backend, norms):
    config = BLOCK.replace(norms=norms, residual_scale=0.5)
    block, random = backend.build("DecoderBlock", config=config), np.random.default_rng(4)
    backend.load(block, {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in config.parameters})
    x = random.normal(size=(2, 5, 8)).astype("f4")
    expected = added(lambda name, array: backend.output(getattr(block, name), array), norms, 0.5, x)
    np.testing.assert_allclose(backend.output(block, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    begun, cache = block(backend.as_argument(x[:, :3]), cache=block.init_cache(2, 5))
    ended, _ = block(backend.as_argument(x[:, 3:]), cache=cache)
    found = np.concatenate([part.detach() if hasattr(part, "detach") else part for part in (begun, ended)], 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def normalised(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return a layer norm whose scale counts from 1."""
    centred = x - x.mean(-1, keepdims=True)
    return (1.0 + scale) * centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) + shift


def test_positions_types_and_the_layers_of_the_head_are_applied(backend):
    norm = LayerNormConfig(8, unit_offset=True)
    config = DecoderConfig(
        11, 8, (), norm, num_positions=6, position_offset=2, num_token_types=3, head_activation="relu2",
        head_norm=norm, head_bias=True, embedding_norm=norm, norm_tokens=True,
    )  # fmt: skip
    model, random = backend.build("DecoderModel", config=config), np.random.default_rng(4)
    arrays = {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in config.parameters}
    backend.load(model, arrays)
    x = normalised(arrays["tok_emb.weight"][IDS], arrays["emb_norm.scale"], arrays["emb_norm.shift"])
    x = x + arrays["pos_emb.weight"][2:6] + arrays["type_emb.weight"][0]
    x = normalised(x, arrays["final_norm.scale"], arrays["final_norm.shift"])
    x = np.maximum(x @ arrays["head_linear.weight"].T + arrays["head_linear.bias"], 0) ** 2
    x = normalised(x, arrays["head_norm.scale"], arrays["head_norm.shift"])
    expected = x @ arrays["out_head.weight"].T + arrays["out_bias"]
    found = backend.output(model, IDS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_ends_of_other_widths_meet_the_blocks_by_linear_layers(backend):
    config = DecoderConfig(
        11, 8, (), None, embedding_norm=LayerNormConfig(5, unit_offset=True), num_positions=6, num_token_types=2,
        embedding_width=5, head_activation="relu2", head_linear_bias=False, head_width=7,
    )  # fmt: skip
    model, random = backend.build("DecoderModel", config=config), np.random.default_rng(4)
    arrays = {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in config.parameters}
    backend.load(model, arrays)
    x = arrays["tok_emb.weight"][IDS] + arrays["pos_emb.weight"][:4] + arrays["type_emb.weight"][0]
    x = normalised(x, arrays["emb_norm.scale"], arrays["emb_norm.shift"])
    x = x @ arrays["emb_linear.weight"].T + arrays["emb_linear.bias"]
    x = np.maximum(x @ arrays["head_linear.weight"].T, 0) ** 2
    expected = x @ arrays["out_head.weight"].T
    found = backend.output(model, IDS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("kind", "steps"), [("transformer", 4), ("tensor2tensor", 3)])
def test_sines_of_positions_are_added_and_a_cache_goes_on_with_them(backend, kind, steps):
    config = DecoderConfig(11, 8, (BLOCK,), None, True, embedding_scale=0.5, sinusoids=kind, position_offset=2)
    model, random = backend.build("DecoderModel", config=config), np.random.default_rng(4)
    arrays = {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in config.parameters}
    backend.load(model, arrays)
    angles = np.arange(2, 6)[:, None] / 10000.0 ** (np.arange(4) / steps)
    x = 0.5 * arrays["tok_emb.weight"][IDS] + np.concatenate([np.sin(angles), np.cos(angles)], 1)
    x = backend.output(model.trf_blocks[0], x.astype("f4"))
    expected = x @ arrays["tok_emb.weight"].T
    np.testing.assert_allclose(backend.output(model, IDS), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    begun, cache = model(backend.as_argument(IDS[:, :3]), cache=model.init_cache(2, 5))
    ended, _ = model(backend.as_argument(IDS[:, 3:]), cache=cache)
    padded, mask = np.concatenate([np.zeros((2, 2), np.int32), IDS], 1), np.arange(6) >= np.array([[2], [2]])
    alone = model(backend.as_argument(padded), attention_mask=backend.as_argument(mask))[:, 2:]
    begun, ended, alone = (one.detach() if hasattr(one, "detach") else one for one in (begun, ended, alone))
    for found in (np.concatenate([begun, ended], 1), alone):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_numbers_of_xielu_are_learned(backend):
    config = DecoderBlockConfig(None, FeedForwardConfig(3, 5, "xielu", gated=False), RMSNormConfig(3))
    model, random = backend.build("DecoderBlock", config=config), np.random.default_rng(5)
    arrays = {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in config.parameters}
    arrays |= {name: np.asarray(array) for name, array in arrays.items()}  # numbers are of NumPy's scalar types
    arrays["ff.layers.1.eps"] = np.asarray(-0.4, "f4")  # far from 0, so that it matters
    backend.load(model, arrays)
    x = random.normal(size=(4, 3)).astype("f4")
    hidden = x @ arrays["ff.layers.0.weight"].T
    alpha_p, alpha_n, beta, eps = (arrays[f"ff.layers.1.{name}"] for name in ("alpha_p", "alpha_n", "beta", "eps"))
    positive = np.log1p(np.exp(alpha_p)) * hidden**2
    negative = (np.expm1(np.minimum(hidden, eps)) - hidden) * (beta + np.log1p(np.exp(alpha_n)))
    expected = (np.where(hidden > 0, positive, negative) + beta * hidden) @ arrays["ff.layers.2.weight"].T
    np.testing.assert_allclose(backend.output(model.ff, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def routed(logits: np.ndarray, correction: np.ndarray, router: Router, top_k: int) -> np.ndarray:
    """Return the weight of each expert for a token, from the router's formula."""
    scores = 1.0 / (1.0 + np.exp(-logits))
    weights, rest = np.zeros_like(logits), logits.copy()
    if router.scores != "sparse_mixer":
        preferred = (scores if router.corrects == "scores" else logits) + correction
        chosen = np.argsort(-preferred)[:top_k]
        weights[chosen] = scores[chosen]
        return weights
    for _ in range(top_k):
        best = rest.argmax()
        close = (rest[best] - logits) / np.maximum(np.abs(logits), rest[best]) <= 2.0 * router.tolerance
        weights[best] = np.exp(rest[best]) / np.exp(rest[close]).sum()
        rest[best] = -np.inf
    return router.scale * weights


ROUTERS = {
    "correction of scores": Router("sigmoid", normalise=False, correction=True),
    "logits": Router("sigmoid", normalise=False, corrects="logits"),
    "correction of logits": Router("sigmoid", normalise=False, correction=True, corrects="logits"),
    "sparse mixer": Router("sparse_mixer", normalise=False, scale=1.5, tolerance=0.3),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_weighs_the_experts_by_its_formula(backend, name):
    config = BLOCK.replace(feed_forward=MixtureOfExpertsConfig(FeedForwardConfig(8, 6), 5, 3, router=ROUTERS[name]))
    block, random = backend.build("DecoderBlock", config=config), np.random.default_rng(7)
    arrays = {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in config.parameters}
    backend.load(block, arrays)
    x = random.normal(size=(1, 40, 8)).astype("f4")
    correction = arrays.get("ff.router.correction_bias", np.zeros(5, "f4"))
    weights = [routed(row, correction, ROUTERS[name], 3) for row in x[0] @ arrays["ff.router.weight"].T]
    outputs = [backend.output(expert, x)[0] for expert in block.ff.experts]
    expected = sum(weight[:, None] * output for weight, output in zip(np.transpose(weights), outputs, strict=True))
    np.testing.assert_allclose(backend.output(block.ff, x)[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_experts_read_inputs_that_are_weighed(backend):
    router = ROUTERS["logits"]
    layers = MixtureOfExpertsConfig(FeedForwardConfig(8, 6), 5, 3, router=router, weighs="inputs")
    block, random = backend.build("DecoderBlock", config=BLOCK.replace(feed_forward=layers)), np.random.default_rng(8)
    arrays = {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in block.config.parameters}
    backend.load(block, arrays)
    x = random.normal(size=(1, 40, 8)).astype("f4")
    weights = [routed(row, np.zeros(5, "f4"), router, 3) for row in x[0] @ arrays["ff.router.weight"].T]
    weighed = [(x * weight[None, :, None]).astype("f4") for weight in np.transpose(weights)]
    expected = sum(backend.output(expert, part)[0] for expert, part in zip(block.ff.experts, weighed, strict=True))
    np.testing.assert_allclose(backend.output(block.ff, x)[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


BAD_CALLS = {
    "token": ({"tokens": np.array([[3, 11]])}, ValueError, "tokens (11) must be at least 0 and below 11"),
    "negative": ({"tokens": np.array([[-1, 2]])}, ValueError, "tokens (-1) must be at least 0 and below 11"),
    "no batch": ({"tokens": np.array([3, 1])}, ValueError, "tokens must have shape (B, T), got (2,)"),
    "empty": ({"tokens": np.zeros((2, 0), int)}, ValueError, "tokens must hold at least 1 token, got shape (2, 0)"),
    "no rows": ({"tokens": np.zeros((0, 2), int)}, ValueError, "tokens must hold at least 1 token, got shape (0, 2)"),
    "floats": ({"tokens": np.ones((1, 2), np.float32)}, TypeError, "tokens must have an integer dtype, got float32"),
    "bools": ({"tokens": np.ones((1, 2), bool)}, TypeError, "tokens must have an integer dtype, got bool"),
    "64 bits": (
        {"tokens": np.array([[3, 2**32 + 3]])},
        ValueError,
        "tokens (4294967299) must be at least 0 and below 11",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_tokens_are_refused_by_value(backend, case):
    inputs, error, message = BAD_CALLS[case]
    for function in (made(backend), lambda tokens: made(backend).generate(tokens, 2)):
        with pytest.raises(error) as caught:
            function(backend.as_argument(inputs["tokens"]))
        assert str(caught.value) == message


BAD_ARGUMENTS = {
    "mask too short": (
        {"attention_mask": np.ones((2, 3), bool)},
        ValueError,
        "2-D attention mask (2, 3) must broadcast to (B, S) = (2, 4); give a (T, S) mask as (1, 1, T, S)",
    ),
    "mask of 3 dimensions": (
        {"attention_mask": np.ones((2, 4, 4), bool)},
        ValueError,
        "attention mask of 3 dimensions (2, 4, 4) is ambiguous: "
        "give (B, S) or a shape that broadcasts to (B, H, T, S) = (2, 2, 4, 4)",
    ),
    "mask of numbers": (
        {"attention_mask": np.ones((2, 4), np.float32)},
        TypeError,
        "attention mask must have dtype bool (True = may be attended), got float32",
    ),
    "positions too few": (
        {"positions": np.arange(3)},
        ValueError,
        "positions must have shape (T,) or (B, T) = (2, 4), got (3,)",
    ),
    "positions of floats": (
        {"positions": np.zeros(4, np.float32)},
        TypeError,
        "positions must have an integer dtype, got float32",
    ),
    "positions beyond the table": (
        {"positions": np.array([0, 1, 2, 6], np.int32)},
        ValueError,
        "positions (6) must be at least 0 and below 6",
    ),
    "negative positions": (
        {"positions": np.array([-1, 0, 1, 2], np.int32)},
        ValueError,
        "positions (-1) must be at least 0 and below 6",
    ),
    "a number for a cache": ({"cache": 3}, TypeError, "cache must be what init_cache of the model returns, got int"),
    "numbers for caches": (
        {"cache": (3, 3)},
        TypeError,
        "cache must be what init_cache of the module returns, got int",
    ),
    "no caches": ({"cache": ()}, ValueError, "cache must hold one cache of each block (2), got 0"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_by_value(backend, case):
    arguments, error, message = BAD_ARGUMENTS[case]
    model = made(backend, TABLE if "position" in case else CONFIG)
    with pytest.raises(error) as caught:
        model(backend.as_argument(IDS), **{name: backend.as_argument(value) for name, value in arguments.items()})
    assert str(caught.value) == message


BAD_CACHES = {
    "more tokens than room": (
        CONFIG,
        (2, 3),
        "tokens in the cache (0) and new ones (4) must be at most capacity (3)",
    ),
    "other rows": (CONFIG, (3, 4), "batch of x (2) must be the batch of the cache (3)"),
    "no rows": (CONFIG, (0, 4), "batch_size (0) must be at least 1"),
    "more tokens than positions": (TABLE, (2, 9), "positions (7) must be at least 0 and below 6"),
}


@pytest.mark.parametrize("case", BAD_CACHES)
def test_caches_that_do_not_fit_are_refused_by_value(backend, case):
    config, sizes, message = BAD_CACHES[case]
    model, ids = made(backend, config), backend.as_argument(IDS)

    def call_twice() -> None:
        _, cache = model(ids, cache=model.init_cache(*sizes))
        model(ids, cache=cache)

    with pytest.raises(ValueError, match="must") as caught:
        call_twice()
    assert str(caught.value) == message


def test_a_table_of_positions_ends_before_the_program_runs(backend):
    mask = np.arange(4) >= np.array([[2], [1]])
    for ids, options, longest in ((IDS, {}, 3), (IDS, {"attention_mask": mask}, 4)):
        assert generate(backend, ids, longest, TABLE, **options).shape == (2, 4 + longest)
        with pytest.raises(ValueError, match="num_positions") as caught:
            generate(backend, ids, longest + 1, TABLE, **options)
        held = 7 - longest
        assert str(caught.value) == (
            f"tokens ({held}) and max_new_tokens ({longest + 1}) must be at most num_positions + 1 (7)"
        )


def test_another_source_of_numbers_is_refused(backend):
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(TypeError) as caught:
            generate(backend, rng=np.random.default_rng(0), **options)
        assert str(caught.value) == f"rng must be {backend.SOURCES}, got Generator"


BAD_OPTIONS = {
    "max_new_tokens": ({"new": 0}, ValueError, "max_new_tokens (0) must be at least 1"),
    "fewer than none": ({"new": -2}, ValueError, "max_new_tokens (-2) must be at least 1"),
    "half a token": ({"new": 1.5}, TypeError, "max_new_tokens must be an integer, got float"),
    "true tokens": ({"new": True}, TypeError, "max_new_tokens must be an integer, got bool"),
    "temperature": ({"temperature": -0.5}, ValueError, "temperature (-0.5) must be at least 0 and finite"),
    "temperature nan": ({"temperature": math.nan}, ValueError, "temperature (nan) must be at least 0 and finite"),
    "temperature inf": ({"temperature": math.inf}, ValueError, "temperature (inf) must be at least 0 and finite"),
    "temperature of 401 digits": (
        {"temperature": 10**400},
        ValueError,
        f"temperature ({'1' + '0' * 119}... (401 characters)) must be at least 0 and finite",
    ),
    "no temperature": ({"temperature": None}, TypeError, "temperature must be a number, got NoneType"),
    "top_k": ({"temperature": 1.0, "top_k": 0}, ValueError, "top_k (0) must be at least 1"),
    "top_k of greedy": ({"top_k": -1}, ValueError, "top_k (-1) must be at least 1"),
    "top_k of 2.0": ({"temperature": 1.0, "top_k": 2.0}, TypeError, "top_k must be an integer, got float"),
    "top_p": ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p (0.0) must be above 0 and at most 1"),
    "top_p above 1": ({"temperature": 1.0, "top_p": 1.5}, ValueError, "top_p (1.5) must be above 0 and at most 1"),
    "top_p nan": ({"temperature": 1.0, "top_p": math.nan}, ValueError, "top_p (nan) must be above 0 and at most 1"),
    "top_p true": ({"temperature": 1.0, "top_p": True}, TypeError, "top_p must be a number, got bool"),
    "eos": ({"eos": 11}, ValueError, "eos (11) must be at least 0 and below vocab_size (11)"),
    "eos negative": ({"eos": -1}, ValueError, "eos (-1) must be at least 0 and below vocab_size (11)"),
    "eos several": ({"eos": [1, 2]}, TypeError, "eos must be an integer, got list"),
    "mask": (
        {"attention_mask": np.ones((2, 3), bool)},
        ValueError,
        "attention_mask must have the shape of tokens (2, 4), got (2, 3)",
    ),
    "mask of one row": (
        {"attention_mask": np.ones((1, 4), bool)},
        ValueError,
        "attention_mask must have the shape of tokens (2, 4), got (1, 4)",
    ),
    "mask without rows": (
        {"attention_mask": np.ones(4, bool)},
        ValueError,
        "attention_mask must have the shape of tokens (2, 4), got (4,)",
    ),
    "mask of numbers": (
        {"attention_mask": np.ones((2, 4), np.float32)},
        TypeError,
        "attention_mask must be bool, got float32",
    ),
    "padding on the right": (
        {"attention_mask": np.arange(4) < np.array([[4], [3]])},
        ValueError,
        "attention_mask of row 1 must hide padding on the left alone, and show the last token",
    ),
    "a row of padding": (
        {"attention_mask": np.array([[True], [False]]).repeat(4, 1)},
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


ROTARY = CONFIG.replace(blocks=(BLOCK.replace(attention=GroupedQueryAttentionConfig(8, 2, position=Rotary())),))
ALIBI = CONFIG.replace(blocks=(BLOCK.replace(attention=GroupedQueryAttentionConfig(8, 2, position=Alibi())),) * 2)


def as_array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach() if hasattr(tensor, "detach") else tensor)


@pytest.mark.parametrize("config", [TABLE, ROTARY, ALIBI], ids=["table", "rotary", "alibi"])
@pytest.mark.parametrize("chunks", [(6,), (2, 1, 1, 2)], ids=["whole", "cached"])
def test_a_row_padded_on_the_left_gets_its_own_logits(backend, config, chunks):
    """The mask comes with the first tokens of the cache alone, which are padding in one row."""
    model, ids = made(backend, config), np.array([[7, 7, 7, 3, 1, 4], [7, 5, 9, 2, 6, 8]], np.int32)
    mask = np.arange(6) >= np.array([[3], [1]])
    cache, logits, begin = model.init_cache(2, 6) if len(chunks) > 1 else None, [], 0
    for count in chunks:
        options = {"attention_mask": backend.as_argument(mask)} if begin == 0 else {}
        tokens = backend.as_argument(ids[:, begin : begin + count])
        found = model(tokens, **options) if cache is None else model(tokens, cache=cache, **options)
        cache = None if cache is None else found[1]
        logits.append(as_array(found if cache is None else found[0]))
        begin += count
    for row, padding in enumerate((3, 1)):
        alone = backend.output(model, ids[row : row + 1, padding:])
        np.testing.assert_allclose(np.concatenate(logits, 1)[row : row + 1, padding:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [TABLE, ALIBI], ids=["table", "alibi"])
def test_given_positions_override_those_of_the_padding(backend, config):
    model, mask = made(backend, config), backend.as_argument(np.arange(4) >= np.array([[2], [0]]))
    ids, numbers = backend.as_argument(IDS), backend.as_argument(np.array([[0, 0, 2, 5], [0, 1, 2, 3]], np.int32))
    given = as_array(model(ids, attention_mask=mask, positions=numbers))
    counted = as_array(model(ids, attention_mask=mask))
    np.testing.assert_allclose(given[1], counted[1], rtol=1e-5, atol=1e-6)
    assert np.abs(given[0, 3] - counted[0, 3]).max() > 1e-4


def test_only_the_last_tokens_logits_can_be_computed(backend):
    model = made(backend)
    last = backend.output(functools.partial(model, last_only=True), IDS)
    assert last.shape == (2, 1, 11)
    np.testing.assert_allclose(last, backend.output(model, IDS)[:, -1:], rtol=1e-5, atol=1e-6)


def test_a_prompt_takes_the_logits_of_its_last_token_alone(backend, monkeypatch):
    model, widths = backend.build("DecoderModel", config=CONFIG), []
    right = type(model).head
    monkeypatch.setattr(type(model), "head", lambda self, x: widths.append(x.shape[1]) or right(self, x))
    model.generate(backend.as_argument(IDS[:, :3]), 2)
    assert widths
    assert set(widths) == {1}


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


def test_generation_switches_dropout_off_and_restores_it(backend):
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


def test_a_file_without_a_head_is_loaded_where_the_model_ties_it(backend, tmp_path):
    saved = backend.package.checkpoints
    saved.save(made(backend), tmp_path / "whole.safetensors", to_layout="hf-llama")
    arrays = {name: array for name, array in checkpoints.read(tmp_path / "whole.safetensors").items() if name[0] != "l"}
    safetensors.numpy.save_file(arrays, tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match=r"holds no head, lm_head\.weight, as a base model.s, and no config\.json"):
        saved.load(tmp_path / "base.safetensors", backend.build("DecoderModel", config=CONFIG))
    tied = backend.build("DecoderModel", config=CONFIG.replace(tie=True))
    saved.load(tmp_path / "base.safetensors", tied)
    np.testing.assert_array_equal(backend.parameter(tied, "tok_emb.weight"), arrays["model.embed_tokens.weight"])
