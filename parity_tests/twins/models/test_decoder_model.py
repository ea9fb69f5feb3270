"""`DecoderModel` in both backends against `transformers`: logits, hidden states, gradients, caches, tokens."""

from __future__ import annotations

import copy
import functools
import json
import operator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import backends, torch_to_flax, transfer
from attn_bridge.specs import (
    AlternatingUpdatesConfig,
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    RMSNormConfig,
)
from attn_parity.frameworks.torch.running.promotion import promoted
from jax_attn.backend import get_weights as get_flax_weights
from jax_attn.blocks.decoder_block import DecoderBlock
from torch_attn.backend import get_weights, to_numpy

from ...support.calls import cover
from ...support.calls.interpreted import by_numpy, run_by_numpy
from ...support.models.decoder_oracle import DECODERS, TOKENS, Oracle, build, run

PACKAGES = {"torch": torch_attn, "flax": jax_attn}
NAMES = list(DECODERS)
KINDS = (
    *("llama-3.2", "gemma2", "bloom", "gpt-oss", "deepseek-v3", "qwen3-next", "phi3-long", "diffllama"),
    *("mamba2", "bamba", "falcon-h1", "minimax", "gemma3n", "gemma4", "gemma4-moe"),
)
"""Decoders that hold every kind of attention, position, feed-forward layer and norm between them."""
GENERATING = ("gemma2", "qwen3-next", "bamba")
"""Decoders whose tokens are held to those of `transformers`, which they draw with a cache."""
CACHED = [name for name in KINDS if name not in GENERATING]
PARTS_OF_OTHERS = ("llama-3.2", "gemma2", "phi3-long", "mamba2")
"""Of `KINDS`, those without a layer that no other has: what their gradients go through, those of the others do."""

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module", params=PACKAGES)
def side(request):
    return request.param


@functools.cache
def load(side: str, name: str) -> Any:
    return PACKAGES[side].DecoderModel.from_pretrained(run(name).folder)


def _run_flax(model, ids, mask, positions):
    call, hidden = DecoderBlock.__call__, []

    def record(block, x, **arguments):
        hidden.append(x)
        return call(block, x, **arguments)

    with mock.patch.object(DecoderBlock, "__call__", record):
        return model(ids, attention_mask=mask, positions=positions), hidden


@torch.no_grad()
def _run_torch(model, ids, mask, positions):
    hidden = []
    hooks = [block.register_forward_pre_hook(lambda _, args: hidden.append(args[0])) for block in model.trf_blocks]
    logits = model(ids, attention_mask=mask, positions=positions)
    for hook in hooks:
        hook.remove()
    return logits, hidden


def outputs(side: str, name: str, oracle: Oracle) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the logits, and what goes into each block."""
    given = oracle.ids, oracle.mask, oracle.positions
    if side == "torch":
        logits, hidden = _run_torch(load(side, name), *map(torch.tensor, given))
        return to_numpy(logits), list(map(to_numpy, hidden))
    logits, hidden = run_by_numpy(_run_flax, load(side, name), *map(jnp.asarray, given))
    return np.asarray(logits), list(map(np.asarray, hidden))


def assert_close(found, wanted, rows, limit):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype == np.float64
    assert np.abs(found - wanted)[rows].max() <= limit * np.abs(wanted[rows]).max()


@cover.rotated(("name", "padded"), NAMES, ["left", "none", "right"], KINDS)
def test_logits_and_hidden_states_are_those_of_transformers(side, name, padded):
    oracle = run(name, padded)
    logits, hidden = outputs(side, name, oracle)
    assert_close(logits, oracle.logits, oracle.mask, 1e-10)
    assert len(hidden) == len(oracle.hidden) - 1
    for one, wanted in zip(hidden, oracle.hidden, strict=False):
        assert_close(one, wanted, oracle.mask, 1e-10)


def test_models_do_not_change_sizes_that_others_share():
    before = copy.deepcopy(DECODERS)
    build("phi4-multimodal")
    assert before == DECODERS


def test_a_base_without_a_head_is_refused(side, tmp_path):
    run("llama").model.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^.* holds no head, .* to embed_tokens\.weight \(tie_word_embeddings\); .*$"):
        PACKAGES[side].DecoderModel.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert PACKAGES[side].DecoderModel.from_pretrained(tmp_path).config.tie


@cover.some("name", NAMES, CACHED)
def test_a_cache_changes_nothing(side, name):
    model, oracle = load(side, name), run(name, "left")
    # One model of Flax is called eagerly: known numbers take other ways through caches and experts than traced ones.
    is_eager = side == "torch" or name == "gpt-oss"
    call = model if is_eager else functools.partial(run_by_numpy, operator.call, model)
    whole, _ = outputs(side, name, oracle)
    as_array = torch.tensor if side == "torch" else jnp.asarray
    cache, parts, stop = model.init_cache(3, TOKENS + 2), [], 0
    with torch.no_grad():
        for count in (9, 1, 1, TOKENS - 11):  # the first beyond the context that LongRoPE calls short
            begin, stop = stop, stop + count
            mask, at = as_array(oracle.mask[:, :stop]), as_array(oracle.positions[:, begin:stop])
            ids = as_array(oracle.ids[:, begin:stop])
            logits, cache = call(ids, attention_mask=mask, positions=at, cache=cache)
            parts.append(np.asarray(logits))
    assert_close(np.concatenate(parts, 1), whole, oracle.mask, 1e-12)


@cover.some("name", NAMES, [name for name in KINDS if name not in PARTS_OF_OTHERS])
def test_gradients_of_all_parameters_are_those_of_transformers(name):
    oracle = run(name, "left")
    cotangent = np.random.default_rng(3).standard_normal(oracle.logits.shape) * oracle.mask[:, :, None]
    mask, positions = torch.tensor(oracle.mask), torch.tensor(oracle.positions)
    at = {} if DECODERS[name][0] == "bloom" else {"position_ids": positions}
    theirs, ours = oracle.model, load("torch", name)
    with promoted():
        theirs.zero_grad()
        logits = theirs(torch.tensor(oracle.ids), attention_mask=mask.long(), **at, use_cache=False).logits
        logits.backward(torch.tensor(cotangent))
    held = {key: parameter.data for key, parameter in theirs.named_parameters()}
    for parameter in theirs.parameters():  # read under the names of ours, by the same way as the weights
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    wanted = ours_of(theirs, name)
    for key, parameter in theirs.named_parameters():
        parameter.data = held[key]
    ours.zero_grad()
    logits = ours(torch.tensor(oracle.ids), attention_mask=mask, positions=positions)
    logits.backward(torch.tensor(cotangent))
    found = {
        key: np.zeros(one.shape) if one.grad is None else to_numpy(one.grad) for key, one in ours.named_parameters()
    }
    learned = [key for key in found if not key.endswith(("correction_bias", ".scalar"))]
    for key in learned:
        assert np.abs(found[key] - wanted[key]).max() <= 1e-10 * max(1e-3, np.abs(wanted[key]).max()), key
    flax = load("flax", name)
    graph, state, rest = nnx.split(flax, nnx.Param, ...)

    def loss(state):
        given = jnp.asarray(oracle.ids), jnp.asarray(oracle.mask), jnp.asarray(oracle.positions)
        out = nnx.merge(graph, state, rest)(given[0], attention_mask=given[1], positions=given[2])
        return (out * cotangent).sum()

    gradients = get_flax_weights(nnx.merge(graph, by_numpy(jax.grad(loss), state), rest))
    wanted = torch_to_flax(found, flax.config.rules())
    for key, one in gradients.items():
        assert np.abs(one - wanted[key]).max() <= 1e-10 * max(1e-3, np.abs(wanted[key]).max()), key


def ours_of(model: Any, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a model of `transformers` under our names."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return get_weights(torch_attn.DecoderModel.from_pretrained(folder))


@cover.some("name", NAMES, GENERATING)
def test_64_greedy_tokens_are_those_of_transformers(side, name):
    oracle = run(name, "left")
    with promoted(), torch.no_grad():
        wanted = oracle.model.generate(
            torch.tensor(oracle.ids),
            attention_mask=torch.tensor(oracle.mask).long(),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            use_cache=DECODERS[name][0] != "minimax",  # whose cache passes over windows, and padding on the left
        )
    model = load(side, name)
    ids, mask = (torch.tensor if side == "torch" else jnp.asarray)(oracle.ids), oracle.mask
    mask = torch.tensor(mask) if side == "torch" else jnp.asarray(mask)
    found = model.generate(ids, 64, attention_mask=mask)
    np.testing.assert_array_equal(np.asarray(found), wanted.numpy())


@cover.some("name", NAMES, KINDS)
def test_either_backend_reads_what_the_other_saved(name, tmp_path):
    load("torch", name).save_pretrained(tmp_path / "torch")
    load("flax", name).save_pretrained(tmp_path / "flax")
    for other, saved in (("flax", "torch"), ("torch", "flax")):
        model = PACKAGES[other].DecoderModel.from_pretrained(tmp_path / saved)
        assert model.config == load(other, name).config
        weights = (get_weights if other == "torch" else get_flax_weights)(model)
        known = (get_weights if other == "torch" else get_flax_weights)(load(other, name))
        for key, array in known.items():
            np.testing.assert_array_equal(weights[key], array)


@pytest.mark.usefixtures("x64")
def test_a_sparse_gate_of_equal_numbers_passes_no_gradient_of_its_deviation():
    """The row of a padding token may be zeros; the deviation of its gate is 0, where a root has no slope."""
    config = DecoderBlockConfig(None, FeedForwardConfig(6, 9, "gelu_tanh", sparsity=0.7), RMSNormConfig(6))
    ours, theirs = (backends.load(name).build_blank("DecoderBlock", config, "float64") for name in ("torch", "flax"))
    random = np.random.default_rng(0)
    ours.load_state_dict({row.rule.torch: torch.from_numpy(random.normal(size=row.shape)) for row in config.parameters})
    transfer(ours, theirs)
    x = random.normal(size=(2, 4, 6))
    x[0, 1] = 0.0
    given = torch.from_numpy(x).requires_grad_()
    ours(given).sin().sum().backward()
    gradient = jax.grad(lambda x: jnp.sin(theirs(x)).sum())(jnp.asarray(x))
    np.testing.assert_allclose(gradient, given.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_the_active_stream_is_scaled_where_the_config_has_it_so(is_scaled):
    config = AlternatingUpdatesConfig(2, 3, active=1, scale_corrected=is_scaled)
    ours = torch_attn.blocks.alternating_updates.AlternatingUpdates(config)
    theirs = jax_attn.blocks.alternating_updates.AlternatingUpdates(config, rngs=nnx.Rngs(0))
    with torch.no_grad():
        ours.corrected_scale.copy_(torch.tensor([2.0, -1.0]))
    theirs.corrected_scale[...] = jnp.array([2.0, -1.0], jnp.float32)
    streams = np.arange(1.0, 7.0, dtype=np.float32).reshape(1, 1, 3, 2)
    wanted = [[[6.0, -4.0]]] if is_scaled else [[[3.0, 4.0]]]
    np.testing.assert_array_equal(ours.scaled(torch.from_numpy(streams)).detach(), wanted)
    np.testing.assert_array_equal(theirs.scaled(jnp.asarray(streams)), wanted)


@pytest.mark.usefixtures("x64")
def test_a_token_whose_embedding_is_zeros_gives_gradients_that_are_numbers():
    """Streams have the magnitude of the embedding, the root of its mean square: at 0 a root has no slope."""
    updates = AlternatingUpdatesConfig(6, 3)
    norm, attention = RMSNormConfig(6), GroupedQueryAttentionConfig(6, 2)
    block = DecoderBlockConfig(attention, FeedForwardConfig(6, 9, "gelu_tanh"), norm, updates=updates)
    config = DecoderConfig(11, 6, (block, block), norm)
    ours, theirs = (backends.load(name).build_blank("DecoderModel", config, "float64") for name in ("torch", "flax"))
    random = np.random.default_rng(0)
    state = {row.rule.torch: torch.from_numpy(random.normal(size=row.shape)) for row in config.parameters}
    state["tok_emb.weight"][0] = 0.0
    ours.load_state_dict(state)
    transfer(ours, theirs)
    tokens = np.array([[3, 0, 1, 0], [5, 9, 2, 6]])
    ours(torch.from_numpy(tokens)).sin().sum().backward()
    used = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    gradients = nnx.grad(lambda model: jnp.sin(model(jnp.asarray(tokens))).sum())(theirs)
    got = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradients)}
    assert len(used) > 20
    for rule in [rule for rule in config.rules() if rule.torch in used]:
        wanted = rule.convert(used[rule.torch].numpy(), "torch")
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(got[rule.flax], wanted, rtol=0, atol=1e-11 * np.abs(wanted).max())
