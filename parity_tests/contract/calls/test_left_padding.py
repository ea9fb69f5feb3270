"""A sequence with padding in front of it gets what it gets alone, whatever the mask counts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator

import numpy as np
import pytest

from attn_bridge import specs
from attn_bridge.masks import (
    as_mask,
    block_causal,
    block_diffusion,
    causal,
    chunked,
    counting_tokens,
    documents,
    full,
    padding,
    prefix,
    sliding_window,
)

from ...support.calls import cover
from .. import backends
from ..modules import CAUSAL, NAMES, draw, draw_weights, make, make_example

backend = backends.fixture(backends.adapters("backend"))

TOKENS, FRONT = 8, 3
PADDING = np.arange(TOKENS) >= np.array([FRONT, 0])[:, None]
"""Of two sequences, the first begins with padding."""

LENGTH = 4
"""Of chunks and blocks: a divisor of the padding's length would have both count alike."""

MASKS = {
    "block_causal": block_causal(LENGTH),
    "causal": causal(),
    "chunked": chunked(LENGTH),
    "chunked or prefix": chunked(LENGTH) | prefix(2),
    "chunked and window": chunked(LENGTH) & sliding_window(2),
    "full": full(),
    "prefix": prefix(2),
    "sliding_window": sliding_window(2),
}
DESCRIBED = pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
FORWARD = ["causal", "chunked", "chunked and window", "sliding_window"]
"""Masks that hide later tokens, which a cache has not yet."""

MODERN = [
    variant.name
    for variant in specs.VARIANTS
    if "mask" in {field.name for field in dataclasses.fields(variant.config)} and variant.examples
]


def module_of(backend, name, mask):
    config = specs.find_variant(name).examples[0].config.replace(mask=mask)
    module = backend.build(name, config=config)
    backend.load(module, draw_weights(config, 0))
    module.eval()
    return module, draw(2, TOKENS, config.d_in)


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=2e-4, atol=2e-5)


def numbers(array):
    return array.detach().numpy() if hasattr(array, "detach") else np.asarray(array)


def attend(backend, *arrays, mask):
    return numbers(backend.package.functional.dot_product_attention(*map(backend.as_argument, arrays), mask=mask))


def check(backend, call, x, padding=PADDING):
    """Check both sequences of a batch against themselves alone."""
    both = numbers(call(backend.as_argument(x), attention_mask=backend.as_argument(padding)))
    close(both[0, FRONT:], numbers(call(backend.as_argument(x[:1, FRONT:])))[0])
    close(both[1], numbers(call(backend.as_argument(x[1:])))[0])


@DESCRIBED
@pytest.mark.parametrize("name", MODERN)
def test_a_padded_sequence_gets_what_it_gets_alone(backend, name, mask):
    module, x = module_of(backend, name, mask)
    check(backend, functools.partial(backend.call_once, module), x)


@DESCRIBED
@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_a_call_counts_tokens_behind_padding(backend, name, mask):
    module = make(backend, name)

    def call(x, attention_mask=None):
        return module(x, attention_mask=mask if attention_mask is None else mask & attention_mask)

    check(backend, call, draw(2, 6 if name in CAUSAL else TOKENS, 4), PADDING[:, : 6 if name in CAUSAL else TOKENS])


@DESCRIBED
def test_a_mask_of_linear_attention_counts_tokens_behind_padding(backend, mask):
    module, x = make_example(backend, "LinearAttention")

    def call(x, attention_mask=None):
        return module(x, attention_mask=mask if attention_mask is None else mask & attention_mask)

    check(backend, call, draw(2, TOKENS, x.shape[-1]))


def test_lengths_of_another_batch_are_refused_by_linear_attention(backend):
    module, x = make_example(backend, "LinearAttention")
    with pytest.raises(ValueError, match=r"lengths of masks\.padding \(3\) must be as many as sequences in the batch"):
        module(backend.as_argument(x), attention_mask=padding([3, 5, 1]))


@DESCRIBED
def test_the_function_counts_tokens_behind_padding(backend, mask):
    query, key, value = (draw(2, TOKENS, 2, 8, seed=seed) for seed in range(3))
    both = attend(backend, query, key, value, mask=mask & backend.as_argument(PADDING))
    alone = attend(backend, *(array[:1, FRONT:] for array in (query, key, value)), mask=mask)
    close(both[0, FRONT:], alone[0])
    close(both[1], attend(backend, *(array[1:] for array in (query, key, value)), mask=mask)[0])


def test_halves_of_block_diffusion_each_begin_with_padding(backend):
    query, key, value = (draw(2, 2 * TOKENS, 2, 8, seed=seed) for seed in range(3))
    twice = backend.as_argument(np.tile(PADDING, 2))
    both = attend(backend, query, key, value, mask=block_diffusion(3, TOKENS) & twice)
    kept = np.flatnonzero(np.tile(PADDING, 2)[0])
    arrays = (array[:1, kept] for array in (query, key, value))
    close(both[0, kept], attend(backend, *arrays, mask=block_diffusion(3, TOKENS - FRONT))[0])


def test_documents_have_the_places_of_their_tokens(backend):
    query, key, value = (draw(2, TOKENS, 2, 8, seed=seed) for seed in range(3))
    ids = np.array([[0, 0, 0, 1, 1, 2, 2, 2], [1, 1, 1, 1, 2, 2, 2, 2]])
    both = attend(backend, query, key, value, mask=documents(ids) & chunked(2) & backend.as_argument(PADDING))
    arrays = (array[:1, FRONT:] for array in (query, key, value))
    close(both[0, FRONT:], attend(backend, *arrays, mask=documents(ids[:1, FRONT:]) & chunked(2))[0])


def steps(backend, call, module, x, padding, sizes, rolling):
    """Return what a cached module gives for parts of these sizes, the padding given with the first alone."""
    cache, parts, at = module.init_cache(len(x), TOKENS, **({"rolling": True} if rolling else {})), [], 0
    for size in sizes:
        options = {} if padding is None or at else {"attention_mask": backend.as_argument(padding[:, :size])}
        part, cache = call(module, backend.as_argument(x[:, at : at + size]), cache=cache, **options)
        parts.append(numbers(part))
        at += size
    return np.concatenate(parts, 1)


def check_steps(backend, call, module, x, sizes, rolling=False):
    padded, full = steps(backend, call, module, x, PADDING, sizes, rolling)
    close(padded[FRONT:], numbers(call(module, backend.as_argument(x[:1, FRONT:])))[0])
    close(full, numbers(call(module, backend.as_argument(x[1:])))[0])


@cover.rotated(("mask", "name"), list(MASKS), MODERN)
def test_a_cached_sequence_gets_what_it_gets_alone(backend, name, mask):
    check_steps(backend, backend.call_once, *module_of(backend, name, MASKS[mask]), (TOKENS,))


@cover.rotated(
    ("name", "mask", "sizes"), list(itertools.product(MODERN, FORWARD)), [(4, 1, 2, 1), (7, 1), (3, *[1] * 5)]
)
def test_a_cache_remembers_the_padding_that_a_mask_counts_behind(backend, name, mask, sizes):
    module, x = module_of(backend, name, MASKS[mask])
    # Known numbers take other ways through a cache than traced ones, the same for all modules.
    call = operator.call if name == "GroupedQueryAttention" else backend.call_once
    check_steps(backend, call, module, x, sizes)
    if MASKS[mask].reach is not None and "rolling" in inspect.signature(module.init_cache).parameters:
        check_steps(backend, call, module, x, sizes, rolling=True)


def test_a_cache_of_other_rows_keeps_their_padding(backend):
    module, x = module_of(backend, "GroupedQueryAttention", chunked(LENGTH))
    options = {"attention_mask": backend.as_argument(PADDING[:, :4])}
    _, cache = module(backend.as_argument(x[:, :4]), cache=module.init_cache(2, TOKENS, rolling=True), **options)
    cache = cache.reorder(backend.as_argument(np.array([1, 0])))
    out, _ = module(backend.as_argument(x[::-1, 4:].copy()), cache=cache)
    close(numbers(out)[1], numbers(module(backend.as_argument(x[:1, FRONT:])))[0, 4 - FRONT :])


def test_padding_on_the_right_keeps_the_kernels_of_descriptions():
    mask = chunked(3) & as_mask(PADDING[:, ::-1])
    assert counting_tokens(mask, lambda shown: not shown.all()) is mask
    mask = sliding_window(3) & as_mask(PADDING)
    assert counting_tokens(mask, lambda shown: not shown.all()) is mask


@pytest.mark.parametrize("start", [0, 100])
@pytest.mark.parametrize("masked", ["all calls", "the last call"])
def test_a_mask_continues_the_positions_of_a_cache(backend, start, masked):
    config = specs.GroupedQueryAttentionConfig(8, 2, position=specs.Rotary())
    module = backend.build("GroupedQueryAttention", config=config)
    backend.load(module, draw_weights(config, 0))
    module.eval()
    x = draw(2, TOKENS, 8)
    at = np.maximum(np.cumsum(PADDING, 1) - 1, 0) if masked == "all calls" else np.tile(np.arange(TOKENS), (2, 1))
    at = (start + at).astype("int32")
    positions, mask = (backend.as_argument(array) for array in (at, PADDING))
    wanted = numbers(module(backend.as_argument(x), positions=positions, attention_mask=mask))
    first = {"positions": positions[:, :4]} | ({"attention_mask": mask[:, :4]} if masked == "all calls" else {})
    _, cache = module(backend.as_argument(x[:, :4]), cache=module.init_cache(2, TOKENS), **first)
    last, _ = module(backend.as_argument(x[:, 4:]), cache=cache, attention_mask=mask)
    close(numbers(last), wanted[:, 4:])
