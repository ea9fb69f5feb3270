"""Keys chosen by an indexer: ties, few keys, masks and caches, the same in both frameworks and by the formula."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_attn
import torch_attn
from attn_bridge import backends, checkpoints, torch_to_flax
from attn_bridge.masks import documents
from attn_bridge.reference import multi_head_latent_attention
from attn_bridge.reference.sparse_indexed_attention import reference
from attn_bridge.specs import Indexer, MultiHeadLatentAttentionConfig, SparseIndexedAttentionConfig
from attn_bridge.specs.as_json import as_json, from_json
from jax_attn.backend import precision
from torch_attn.backend import to_numpy

from ...support.calls import cover

INDEXER = Indexer(6, 6, top_k=3)
CONFIG = SparseIndexedAttentionConfig(6, 3, 5, 4, 2, 3, query_dim=4, bias=True, indexer=INDEXER)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 8, 6))
LEFT = np.arange(8) >= np.array([0, 1, 5])[:, None]
RIGHT = np.arange(8) < np.array([8, 6, 2])[:, None]
DOCUMENTS = np.array([[0, 0, 0, 0, 0, 1, 1, 1]] * 3)
MASKS = {
    "no mask": None,
    "left padding": LEFT,
    "right padding": RIGHT,
    "one per head": RANDOM.random((3, 3, 8, 8)) > 0.4,
}


@pytest.fixture(autouse=True)
def _in_float64():
    with precision("float64"):
        yield


def draw_weights(config, seed=1):
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape) * 0.7 + 0.1 for row in config.parameters}


@functools.cache
def twins(config):
    modules = []
    for name in ("torch", "flax"):
        backend = backends.load(name)
        module = backend.build_blank("SparseIndexedAttention", config, "float64")
        weights = draw_weights(config)
        backend.set_weights(module, weights if name == "torch" else torch_to_flax(weights, config.rules()))
        modules.append(module)
    return modules


def call(module, x, **at):
    as_array = torch.tensor if isinstance(module, torch.nn.Module) else jnp.asarray
    at = {key: as_array(value) if isinstance(value, np.ndarray) else value for key, value in at.items()}
    with torch.no_grad():
        result = module(as_array(x), **at)
    first, *rest = result if isinstance(result, tuple) else (result,)
    return (to_numpy(first) if isinstance(first, torch.Tensor) else np.asarray(first), *rest)


def assert_same(ours, expected, limit=1e-12):
    assert np.abs(ours - expected).max() <= limit * np.abs(expected).max()


@cover.rotated(("name", "side"), list(MASKS), [0, 1])
def test_each_query_attends_to_its_best_visible_keys(name, side):
    expected, weights = reference(CONFIG, draw_weights(CONFIG), X, MASKS[name])
    assert 1 <= (np.abs(weights) > 0).sum(-1).max() <= INDEXER.top_k
    assert_same(call(twins(CONFIG)[side], X, attention_mask=MASKS[name])[0], expected)


@pytest.mark.parametrize("side", [0, 1])
def test_keys_of_other_documents_are_not_chosen(side):
    module = twins(CONFIG)[side]
    as_array = torch.tensor if side == 0 else jnp.asarray
    both = call(module, X, attention_mask=documents(as_array(DOCUMENTS)), positions=np.array([*range(5), *range(3)]))
    apart = [call(module, part)[0] for part in (X[:, :5], X[:, 5:])]
    assert_same(both[0], np.concatenate(apart, 1))


@cover.rotated(("side", "absorbed", "steps"), [(0, False), (0, True), (1, False), (1, True)], [(3, 1, 1, 3), (1,) * 8])
def test_decoding_chooses_the_keys_of_the_full_pass(side, absorbed, steps):
    module = twins(CONFIG)[side]
    full, cache, parts, stop = call(module, X, attention_mask=LEFT)[0], module.init_cache(3, 9), [], 0
    assert cache.value.shape == (3, 9, 1, INDEXER.head_dim)
    for tokens in steps:
        start, stop = stop, stop + tokens
        mask = np.pad(LEFT, ((0, 0), (0, 1)))
        out, cache = call(module, X[:, start:stop], cache=cache, attention_mask=mask, absorbed=absorbed)
        parts.append(out)
    assert_same(np.concatenate(parts, 1), full)


@pytest.mark.parametrize("side", [0, 1])
def test_as_many_keys_as_tokens_are_dense_attention(side):
    dense = MultiHeadLatentAttentionConfig(6, 3, 5, 4, 2, 3, query_dim=4, bias=True)
    sparse = SparseIndexedAttentionConfig.of(dense, Indexer(6, 6, top_k=8))
    expected = multi_head_latent_attention.reference(dense, draw_weights(sparse), X)[0]
    assert_same(call(twins(sparse)[side], X)[0], expected)


@pytest.mark.parametrize("largest", [torch_attn.lightning_indexer.largest, jax_attn.lightning_indexer.largest])
def test_of_equal_scores_the_earliest_keys_are_chosen(largest):
    inf, nan = np.inf, np.nan
    scores = [[0, -0.0, 1, 0, -0.0], [-1, -inf, -inf, -inf, -2], [2, 2, 2, 2, 2], [0, 1, 2, nan, 3]]
    array = (torch.tensor if largest is torch_attn.lightning_indexer.largest else jnp.asarray)(np.array(scores))
    expected = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert np.asarray(largest(array, 3)).astype(int).tolist() == expected


def test_no_gradient_flows_through_the_choice():
    module, x = twins(CONFIG)[0], torch.tensor(X, requires_grad=True)
    gradients = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()], allow_unused=True)
    names = ["x", *(name for name, _ in module.named_parameters())]
    unused = {name for name, gradient in zip(names, gradients, strict=True) if gradient is None}
    assert unused == {name for name in names if name.startswith("indexer.")}


def test_an_indexer_survives_json():
    assert from_json(as_json(CONFIG)) == CONFIG


def test_a_file_of_torch_becomes_one_of_flax_and_back(tmp_path):
    torch_attn.save(twins(CONFIG)[0], tmp_path / "torch.safetensors")
    checkpoints.convert(tmp_path / "torch.safetensors", tmp_path / "flax.safetensors", to_layout="flax")
    assert checkpoints.read(tmp_path / "flax.safetensors").keys() == {row.rule.flax for row in CONFIG.parameters}
    checkpoints.convert(tmp_path / "flax.safetensors", tmp_path / "back.safetensors", to_layout="torch")
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "torch.safetensors").read_bytes()
