"""`EncoderDecoderModel` in both backends against `transformers`: logits, hidden states, gradients, caches, tokens."""

from __future__ import annotations

import copy
import functools
import json
import operator
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import checkpoints, torch_to_flax
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.models import families
from attn_parity.frameworks.torch.running.promotion import promoted
from jax_attn.backend import get_weights as get_flax_weights
from jax_attn.random import TorchRngs
from torch_attn.backend import get_weights, to_numpy
from torch_attn.random import JaxRngs

from ...support.calls import cover
from ...support.calls.interpreted import by_numpy, run_by_numpy
from ...support.models.encoder_decoder_oracle import MODELS, SOURCE, TOKENS, VOCABULARY, Oracle, build, run

PACKAGES = {"torch": torch_attn, "flax": jax_attn}
NAMES = list(MODELS)
TIED = [name for name in NAMES if not name.endswith("-untied")]
"""A model of each kind: the head of others, which is no part of what is cached, has numbers of its own."""
FROZEN = ("encoder.pos_emb.weight", "logits_bias")
"""What `transformers` does not learn: Whisper's positions of the encoder, and what BART adds to its logits."""

pytestmark = pytest.mark.usefixtures("x64")


NUMBERED = np.arange(TOKENS, dtype=np.int32)
"""Positions of tokens as BART and Whisper of `transformers` count them, padding on the left included."""


@pytest.fixture(scope="module", params=PACKAGES)
def side(request):
    return request.param


@functools.cache
def load(side: str, name: str) -> Any:
    return PACKAGES[side].EncoderDecoderModel.from_pretrained(run(name).folder)


def given(side: str, *arrays: np.ndarray | None) -> list[Any]:
    """Return arrays as a backend takes them; None stays."""
    make = torch.tensor if side == "torch" else jnp.asarray
    return [None if array is None else make(array) for array in arrays]


def calling(side: str, name: str) -> Any:
    """Return the call of a model, which in Flax compiles nothing."""
    model = load(side, name)
    return model if side == "torch" else functools.partial(run_by_numpy, operator.call, model)


def _table_of(stack, block):
    takes = block.config.attention.takes_table
    return {"relative_bias": stack.trf_blocks[0].att.relative_bias[...]} if takes else {}


def _run_flax(model, source, ids, source_mask, mask):
    encoder, decoder = model.encoder, model.decoder
    x = encoder.convolve(source) if model.config.encoder.convolutions else model._table("encoder")(source)
    x, hidden = encoder.embed(x), []
    for block in encoder.trf_blocks:
        hidden.append(x)
        x = block(x, attention_mask=source_mask, **_table_of(encoder, block))
    context = encoder.final_norm(x) if model.config.encoder.norm else x
    hidden.append(context)
    x = decoder.embed(model._table("decoder")(ids))
    for block in decoder.trf_blocks:
        hidden.append(x)
        x = block(x, attention_mask=mask, context=context, context_mask=source_mask, **_table_of(decoder, block))
    hidden.append(decoder.final_norm(x) if model.config.decoder.norm else x)
    return model(source, ids, source_mask=source_mask, attention_mask=mask, positions=NUMBERED), hidden


@torch.no_grad()
def _run_torch(model, source, ids, source_mask, mask):
    hidden, hooks = [], []
    for stack in (model.encoder, model.decoder):
        hooks += [one.register_forward_pre_hook(lambda _, args: hidden.append(args[0])) for one in stack.trf_blocks]
        hooks.append(stack.register_forward_hook(lambda _, args, out: hidden.append(out)))
    logits = model(source, ids, source_mask=source_mask, attention_mask=mask, positions=torch.tensor(NUMBERED))
    for hook in hooks:
        hook.remove()
    return logits, hidden


def outputs(side: str, name: str, oracle: Oracle) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the logits, and what goes into each block and comes out of each stack."""
    call = _run_torch if side == "torch" else functools.partial(run_by_numpy, _run_flax)
    logits, hidden = call(load(side, name), *given(side, oracle.source, oracle.ids, oracle.source_mask, oracle.mask))
    return (to_numpy if side == "torch" else np.asarray)(logits), [np.asarray(one) for one in hidden]


def assert_close(found, wanted, rows, limit):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype == np.float64
    assert np.abs(found - wanted)[rows].max() <= limit * np.abs(wanted[rows]).max()


@cover.rotated(("name", "padded"), NAMES, ["left", "none", "right"])
def test_logits_and_hidden_states_are_those_of_transformers(side, name, padded):
    oracle = run(name, padded)
    logits, hidden = outputs(side, name, oracle)
    assert_close(logits, oracle.logits, oracle.mask, 1e-10)
    shown = np.ones(oracle.encoder_hidden[0].shape[:2], bool) if oracle.source_mask is None else oracle.source_mask
    wanted = [*((one, shown) for one in oracle.encoder_hidden), *((one, oracle.mask) for one in oracle.decoder_hidden)]
    assert len(hidden) == len(wanted) == 3 + 1 + 2 + 1
    for one, (state, rows) in zip(hidden, wanted, strict=True):
        assert_close(one, state, rows, 1e-10)


@cover.rotated(("name", "counts"), NAMES, [(4, 3), (1,) * TOKENS, (TOKENS,)], TIED)
def test_a_cache_changes_nothing(side, name, counts):
    model, oracle = load(side, name), run(name, "left")
    call = model if name == "bart" else calling(side, name)  # eagerly, caches take other ways than in a trace
    whole, _ = outputs(side, name, oracle)
    cache, parts, stop = model.init_cache(3, TOKENS + 2), [], 0
    with torch.no_grad():
        for count in counts:
            begin, stop = stop, stop + count
            source = oracle.source if begin == 0 else None
            source_mask = oracle.source_mask if begin == 0 else None
            arrays = given(side, source, oracle.ids[:, begin:stop], source_mask, oracle.mask[:, :stop])
            masks = {"source_mask": arrays[2], "attention_mask": arrays[3]}
            masks["positions"] = given(side, NUMBERED[begin:stop])[0]
            logits, cache = call(arrays[0], arrays[1], cache=cache, **masks)
            parts.append(np.asarray(logits))
    assert_close(np.concatenate(parts, 1), whole, oracle.mask, 1e-12)


@pytest.mark.parametrize("name", ["bart", "whisper", "t5"])
def test_a_row_padded_on_the_left_gets_its_own_logits(side, name):
    call, oracle = calling(side, name), run(name, "left")
    row = oracle.mask.sum(-1).argmin()
    source_mask = None if oracle.source_mask is None else oracle.source_mask[row : row + 1]
    arrays = given(side, oracle.source, oracle.ids, oracle.source_mask, oracle.mask)
    alone = given(side, oracle.source[row : row + 1], oracle.ids[row : row + 1, oracle.mask[row]], source_mask)
    with torch.no_grad():
        found = np.asarray(call(arrays[0], arrays[1], source_mask=arrays[2], attention_mask=arrays[3]))
        wanted = np.asarray(call(alone[0], alone[1], source_mask=alone[2]))
    assert 0 < wanted.shape[1] < TOKENS
    np.testing.assert_allclose(found[row : row + 1, oracle.mask[row]], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["bart", "whisper", "t5"])
def test_a_new_source_replaces_the_cached_one(side, name):
    model, call, oracle = load(side, name), calling(side, name), run(name)
    source, ids = given(side, oracle.source, oracle.ids)
    with torch.no_grad():
        wanted, _ = call(source, ids, cache=model.init_cache(3, TOKENS))
        other = source[::-1] if side == "flax" else source.flip(0)
        cache = model.init_cache(3, TOKENS)
        _, cache = call(other, ids[:, :1], cache=cache)
        cache = [(own.trim(0), held) for own, held in cache]
        found, _ = call(source, ids, cache=cache)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-12)


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_a_step_in_flax_compiles_once(name):
    model, call, oracle, traced = load("flax", name), calling("flax", name), run(name, "left"), []

    @jax.jit
    def step(model, ids, cache):
        traced.append(ids)
        return model(None, ids, cache=cache)

    cache = model.init_cache(3, TOKENS)
    masks = {"source_mask": oracle.source_mask, "attention_mask": oracle.mask[:, :4]}
    logits, cache = call(jnp.asarray(oracle.source), jnp.asarray(oracle.ids[:, :4]), cache=cache, **masks)
    parts = [np.asarray(logits)]
    for at in range(4, TOKENS):
        logits, cache = step(model, jnp.asarray(oracle.ids[:, at : at + 1]), cache)
        parts.append(np.asarray(logits))
    assert len(traced) == 1
    masks["attention_mask"] = oracle.mask
    whole = call(jnp.asarray(oracle.source), jnp.asarray(oracle.ids), **masks)
    assert_close(np.concatenate(parts, 1), np.asarray(whole), oracle.mask, 1e-12)


@cover.some("name", NAMES, ["bart", "whisper", "t5", "umt5-untied"])
def test_gradients_of_all_parameters_are_those_of_transformers(name):
    oracle = run(name, "left")
    cotangent = np.random.default_rng(3).standard_normal(oracle.logits.shape) * oracle.mask[:, :, None]
    theirs, ours = oracle.model, load("torch", name)
    with promoted():
        theirs.zero_grad()
        masks = {"decoder_attention_mask": torch.tensor(oracle.mask).long(), "use_cache": False}
        theirs(**oracle.call(**masks)).logits.backward(torch.tensor(cotangent))
    wanted = gradients_under_our_names(theirs, name)
    ours.zero_grad()
    source, ids, source_mask, mask = given("torch", oracle.source, oracle.ids, oracle.source_mask, oracle.mask)
    options = {"source_mask": source_mask, "attention_mask": mask, "positions": torch.tensor(NUMBERED)}
    ours(source, ids, **options).backward(torch.tensor(cotangent))
    found = {
        key: np.zeros(one.shape) if one.grad is None else to_numpy(one.grad) for key, one in ours.named_parameters()
    }
    for key in found.keys() - {"logits_bias"}:
        assert np.abs(found[key] - wanted[key]).max() <= 1e-10 * max(1e-3, np.abs(wanted[key]).max()), key
    still = [key for key in found if not found[key].any()]
    assert still == [key for key in found if key in FROZEN and (name.startswith("whisper") or key == "logits_bias")]
    flax = load("flax", name)
    graph, state, rest = nnx.split(flax, nnx.Param, ...)
    arrays = given("flax", oracle.source, oracle.ids, oracle.source_mask, oracle.mask)

    def loss(state):
        model = nnx.merge(graph, state, rest)
        options = {"source_mask": arrays[2], "attention_mask": arrays[3], "positions": NUMBERED}
        return (model(arrays[0], arrays[1], **options) * cotangent).sum()

    gradients = get_flax_weights(nnx.merge(graph, by_numpy(jax.grad(loss), state), rest))
    expected = torch_to_flax(found, flax.config.rules())
    assert gradients.keys() == expected.keys()
    for key, one in gradients.items():
        assert np.abs(one - expected[key]).max() <= 1e-10 * max(1e-3, np.abs(expected[key]).max()), key


def gradients_under_our_names(model: Any, name: str) -> dict[str, np.ndarray]:
    """Return the gradients of a model of `transformers`, read by the same way as the weights."""
    held = {key: parameter.data for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = get_weights(torch_attn.EncoderDecoderModel.from_pretrained(folder))
    for key, parameter in model.named_parameters():
        parameter.data = held[key]
    return found


@cover.rotated(("name", "padded"), NAMES, ["left", "right"], always=["bart", "whisper-untied", "t5-untied"])
def test_64_greedy_tokens_are_those_of_transformers(side, name, padded):
    oracle = run(name, padded)
    start = np.concatenate([np.ones((3, 1), np.int64), oracle.ids[:, :2]], 1)  # with another, transformers prepends it
    switched_off = dict.fromkeys(
        ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens")
    )
    with promoted(), torch.no_grad():
        options = {"max_new_tokens": 64, "do_sample": False, **switched_off}
        # Whisper's own `generate` cuts speech into segments and looks for tokens of time.
        wanted = transformers.GenerationMixin.generate(oracle.model, **oracle.call(torch.tensor(start)), **options)
    source, ids, source_mask = given(side, oracle.source, start, oracle.source_mask)
    found = load(side, name).generate(source, ids, 64, source_mask=source_mask)
    assert found.shape == (3, 3 + 64)
    np.testing.assert_array_equal(np.asarray(found), wanted.numpy())


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_sampled_tokens_are_the_same_from_the_same_stream(name):
    oracle = run(name, "right")
    options = {"temperature": 1.4, "top_k": 25, "top_p": 0.97}
    arrays = (oracle.source, oracle.ids[:, :1], oracle.source_mask)
    rows = [None if array is None else np.concatenate([array] * 4) for array in arrays]
    drawn = []
    for side, rng in (("torch", JaxRngs(draws=5).draws), ("flax", nnx.Rngs(draws=5).draws)):
        source, ids, mask = given(side, *rows)
        drawn.append(np.asarray(load(side, name).generate(source, ids, 63, rng=rng, source_mask=mask, **options)))
    np.testing.assert_array_equal(*drawn)
    assert len(np.unique(drawn[0])) > VOCABULARY // 2


def test_padding_before_the_prompt_changes_no_token(side):
    oracle, model = run("bart"), load(side, "bart")
    source, ids, mask = given(side, oracle.source, oracle.ids, np.arange(TOKENS) >= np.array([[0], [3], [5]]))
    found = np.asarray(model.generate(source, ids, 9, attention_mask=mask))
    alone = np.asarray(model.generate(source[1:2], ids[1:2, 3:], 9))
    np.testing.assert_array_equal(found[1, 3:], alone[0])


def test_fewer_frames_have_fewer_positions(side):
    oracle, model, call = run("whisper"), load(side, "whisper"), calling(side, "whisper")
    theirs = copy.deepcopy(oracle.model)
    theirs.config.max_source_positions = 7
    theirs.model.encoder.embed_positions = torch.nn.Embedding.from_pretrained(
        theirs.model.encoder.embed_positions.weight[:7]
    )
    frames = oracle.source[:, :, :14]
    with promoted(), torch.no_grad():
        wanted = theirs(torch.tensor(frames), decoder_input_ids=torch.tensor(oracle.ids), use_cache=False).logits
    everything = np.ones(oracle.ids.shape, bool)
    with torch.no_grad():
        assert_close(np.asarray(call(*given(side, frames, oracle.ids))), wanted.numpy(), everything, 1e-10)
        assert model.encode(*given(side, frames[:, :, :13])).shape == (3, 7, 24)
        mask = np.arange(7) < np.array([[7], [4], [2]])
        source, ids, source_mask = given(side, frames, oracle.ids, mask)
        masked = np.asarray(call(source, ids, source_mask=source_mask))
    np.testing.assert_allclose(masked[0], wanted[0].numpy(), rtol=1e-10)
    assert np.abs(masked[1:] - wanted[1:].numpy()).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_either_backend_reads_what_the_other_saved(name, tmp_path):
    load("torch", name).save_pretrained(tmp_path / "torch")
    load("flax", name).save_pretrained(tmp_path / "flax")
    for other, saved in (("flax", "torch"), ("torch", "flax")):
        model = PACKAGES[other].EncoderDecoderModel.from_pretrained(tmp_path / saved)
        assert model.config == load(other, name).config
        weights = (get_weights if other == "torch" else get_flax_weights)(model)
        known = (get_weights if other == "torch" else get_flax_weights)(load(other, name))
        assert weights.keys() == known.keys()
        for key, array in known.items():
            np.testing.assert_array_equal(weights[key], array)


@cover.rotated(("name", "drawn_by"), ["bart", "whisper"], ["jax", "torch"])
@jax.enable_x64(False)
def test_new_twins_start_and_drop_alike(name, drawn_by):
    oracle = run(name)
    rates = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4}
    document = {**json.loads((oracle.folder / "config.json").read_text()), **rates}
    config = families.find_encoder_decoder(document, ["final_logits_bias"] if name == "bart" else [])
    if drawn_by == "jax":
        torch_model = torch_attn.EncoderDecoderModel(config, rngs=JaxRngs(params=4, dropout=9))
        flax_model = jax_attn.EncoderDecoderModel(config, rngs=nnx.Rngs(params=4, dropout=9))
    else:
        flax_model = jax_attn.EncoderDecoderModel(config, rngs=TorchRngs(11))
        torch.manual_seed(11)
        torch_model = torch_attn.EncoderDecoderModel(config)
    expected = torch_to_flax(get_weights(torch_model), config.rules())
    found = get_flax_weights(flax_model)
    assert found.keys() == expected.keys()
    for key, array in found.items():
        np.testing.assert_allclose(array, expected[key], rtol=5e-7, atol=1e-7, err_msg=key)
    if name == "whisper":
        sines = transformers.models.whisper.modeling_whisper.sinusoids(SOURCE, 24).numpy()
        np.testing.assert_allclose(found["encoder.pos_emb.embedding"], sines, rtol=1e-5, atol=1e-6)
    source = oracle.source.astype(np.float32) if oracle.source.ndim == 3 else oracle.source
    outputs = []
    for _ in range(2):
        logits = torch_model(*given("torch", source, oracle.ids)).detach().numpy()
        np.testing.assert_allclose(flax_model(*given("flax", source, oracle.ids)), logits, rtol=1e-4, atol=2e-5)
        outputs.append(logits)
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-2


def test_bare_models_are_read_if_their_head_is_tied(tmp_path):
    """BartModel adds nothing to the logits, and its head is the table; `transformers` would draw an untied one."""
    oracle, model = run("bart", "left"), build("bart")
    with torch.no_grad():
        model.final_logits_bias.zero_()
    given_to_theirs = oracle.call()
    with promoted(), torch.no_grad():
        wanted = model(**given_to_theirs).logits.numpy()
    model.model.save_pretrained(tmp_path / "bare")
    ours = torch_attn.EncoderDecoderModel.from_pretrained(tmp_path / "bare")
    assert not ours.config.logits_bias
    source, ids, mask = given("torch", oracle.source, oracle.ids, oracle.source_mask)
    with torch.no_grad():
        np.testing.assert_allclose(ours(source, ids, source_mask=mask), wanted, rtol=1e-10, atol=1e-12)
    model.save_pretrained(tmp_path / "old")
    document = json.loads((tmp_path / "old" / "config.json").read_text())
    (tmp_path / "old" / "config.json").write_text(json.dumps({**document, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"holds no head.* does not tie one to model.shared.weight"):
        torch_attn.EncoderDecoderModel.from_pretrained(tmp_path / "old")


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_folder_converts_to_transformers_and_back(name, tmp_path):
    load("flax", name).save_pretrained(tmp_path / "own")
    layout = "hf-t5" if name == "mt5" else f"hf-{name.partition('-')[0]}"
    tie = {"tie": int("untied" not in name)}
    back = checkpoints.convert(tmp_path / "own", tmp_path / "hf", to_layout=layout, settings=tie).target
    before, after = (checkpoints.read(folder) for folder in (run(name).folder, back))
    unread = {"model.shared.weight"} if name == "bart-untied" else set()
    assert before.keys() - after.keys() == unread
    for key, array in after.items():
        np.testing.assert_array_equal(array, before[key], err_msg=key)
    for other in ("torch", "flax"):
        target = checkpoints.convert(run(name).folder, tmp_path / other, to_layout=other).target
        for package in PACKAGES.values():
            model = package.EncoderDecoderModel.from_pretrained(target)
            assert model.config == load("torch", name).config


def test_a_t5_head_that_is_saved_as_tied_is_loaded_as_it_is_and_converted_to_nothing(side, tmp_path):
    shutil.copytree(run("umt5-untied").folder, tmp_path / "saved")
    document = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps({**document, "tie_word_embeddings": True}))
    model = PACKAGES[side].EncoderDecoderModel.from_pretrained(tmp_path / "saved")
    assert model.config == load(side, "umt5-untied").config
    assert not model.config.tie
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight must hold the numbers of shared.weight.* set that to fal"
    ):
        checkpoints.convert(tmp_path / "saved", tmp_path / "ours", to_layout="torch")
