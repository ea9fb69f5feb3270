"""Decoding with a cache equals the full pass, in both frameworks and under jit, and what a cache must refuse."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import masks
from attn_bridge.reference.grouped_query_attention import reference
from attn_bridge.specs import Alibi, GroupedQueryAttentionConfig, QKNorm, RelativeBias, Rotary, Temperature

from ...support.calls import cover

BATCH, TOKENS, WIDTH = 3, 9, 10
STEPS = (4, 2, 1, 1, 1)
SIZES = (WIDTH, 6, 2, 4)

CONFIGS = {
    "rotary": GroupedQueryAttentionConfig(*SIZES, position=Rotary(), qk_norm=QKNorm(), qkv_bias=True),
    "norms with means": GroupedQueryAttentionConfig(*SIZES, position=Rotary(), qk_norm=QKNorm(kind="layer")),
    "temperature": GroupedQueryAttentionConfig(*SIZES, position=Rotary(), temperature=Temperature(0.6, 2, 1)),
    "norms behind rotary": GroupedQueryAttentionConfig(*SIZES, position=Rotary(), qk_norm=QKNorm(rotated=True)),
    "alibi, window": GroupedQueryAttentionConfig(*SIZES, position=Alibi(), mask=masks.sliding_window(3), sinks=True),
    "relative bias, window": GroupedQueryAttentionConfig(
        *SIZES, position=RelativeBias(6, 5), mask=masks.sliding_window(7), scale=1.0
    ),
    "chunked": GroupedQueryAttentionConfig(*SIZES, position=Rotary(dim=2), mask=masks.chunked(4), softcap=2.0),
}


@functools.cache
def twins(name: str) -> tuple[torch_attn.GroupedQueryAttention, jax_attn.GroupedQueryAttention]:
    """Return a torch module and its Flax twin in float64, with numbers of one kind."""
    config, random = CONFIGS[name], np.random.default_rng(len(name))
    module = torch_attn.GroupedQueryAttention(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=parameter.shape) * 0.6))
    with jax.enable_x64(True):
        twin = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        twin.eval()
        attn_bridge.transfer(module, twin)
    return module, twin


def expected(name: str, x: np.ndarray, mask: np.ndarray | None, positions: np.ndarray) -> np.ndarray:
    parameters = {key: value.detach().numpy() for key, value in twins(name)[0].state_dict().items()}
    return reference(CONFIGS[name], parameters, x, mask, positions=positions)[0]


def padded() -> tuple[np.ndarray, np.ndarray]:
    """Return a mask that pads a row on the left and one on the right, and the positions of each row."""
    mask = np.ones((BATCH, TOKENS), bool)
    mask[1, :3] = mask[2, 2:4] = False
    return mask, np.maximum(np.cumsum(mask, 1) - 1, 0)


@jax.jit(static_argnums=0, donate_argnums=4)
def flax_step(graphdef, state, x, options, cache):
    return nnx.merge(graphdef, state)(x, **options, cache=cache)


@cover.rotated(
    ("name", "rolling", "padding", "framework"),
    [(name, *way) for name in CONFIGS for way in ((False, False), (False, True), (True, True), (True, False))],
    ["torch", "flax"],
)
def test_decoding_equals_the_full_pass(name, rolling, padding, framework):
    if rolling and CONFIGS[name].mask.reach is None:
        with pytest.raises(ValueError, match="rolling"):
            twins(name)[0].init_cache(1, 1, rolling=True)
        return
    x = np.random.default_rng(1).normal(size=(BATCH, TOKENS, WIDTH))
    mask, positions = padded() if padding else (None, np.tile(np.arange(TOKENS) + 5, (BATCH, 1)))
    want = expected(name, x, mask, positions)
    module, twin = twins(name)
    outputs, start = [], 0
    with jax.enable_x64(True), torch.no_grad():
        cache = (module if framework == "torch" else twin).init_cache(BATCH, TOKENS, rolling=rolling)
        split = nnx.split(twin)
        for count in STEPS:
            new, start = slice(start, start + count), start + count
            # Padding is remembered: the last two steps leave it out.
            options = {"positions": positions[:, new]}
            if padding:
                seen = np.ones((BATCH, TOKENS), bool)
                seen[:, :start] = mask[:, :start]
                options["attention_mask"] = seen
            if framework == "torch":
                arguments = {key: torch.from_numpy(value) for key, value in options.items()}
                output, cache = module(torch.from_numpy(x[:, new]), **arguments, cache=cache)
            else:
                output, cache = flax_step(*split, x[:, new], options, cache)
            outputs.append(np.asarray(output))
    np.testing.assert_allclose(np.concatenate(outputs, 1), want, rtol=0, atol=1e-12 * np.abs(want).max())
    assert int(cache.length) == TOKENS


def test_padding_is_remembered_after_the_first_step():
    mask, positions = padded()
    x = np.random.default_rng(2).normal(size=(BATCH, TOKENS, WIDTH))
    want = expected("rotary", x, mask, positions)
    module = twins("rotary")[0]
    with torch.no_grad():
        cache = module.init_cache(BATCH, TOKENS)
        given = {"attention_mask": torch.from_numpy(mask[:, :6]), "positions": torch.from_numpy(positions[:, :6])}
        _, cache = module(torch.from_numpy(x[:, :6]), **given, cache=cache)
        last, cache = module(torch.from_numpy(x[:, 6:]), positions=torch.from_numpy(positions[:, 6:]), cache=cache)
    np.testing.assert_allclose(last.numpy(), want[:, 6:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("framework", ["torch", "flax", "jitted flax"])
def test_a_node_of_a_tree_gets_what_its_own_path_gets(framework):
    """Drafted tokens are verified in one pass over the tree: each sees the context and its ancestors alone."""
    parents = np.array([[-1, -1, 0, 2, 2], [-1, 0, 0, 1, -1], [-1, 0, 1, 2, 3]])
    module, twin = twins("rotary")
    x = np.random.default_rng(4).normal(size=(BATCH, TOKENS, WIDTH))
    context = TOKENS - parents.shape[1]
    tree, positions = masks.tree(parents, context), masks.tree_positions(parents, context)
    with torch.no_grad(), jax.enable_x64(True):
        one, cast = (module, torch.from_numpy) if framework == "torch" else (twin, jnp.asarray)
        _, cache = one(cast(x[:, :context]), cache=one.init_cache(BATCH, TOKENS))
        if framework == "jitted flax":
            graphdef, state = nnx.split(twin)
            got = jax.jit(
                lambda x, cache: nnx.merge(graphdef, state)(x, positions=positions, attention_mask=tree, cache=cache)[0]
            )(x[:, context:], cache)
        else:
            got, _ = one(cast(x[:, context:]), positions=cast(positions), attention_mask=tree, cache=cache)
    for row, node in np.ndindex(parents.shape):
        path = [node]
        while parents[row, path[0]] >= 0:
            path.insert(0, parents[row, path[0]])
        tokens = [*range(context), *(context + step for step in path)]
        want = expected("rotary", x[row : row + 1, tokens], None, np.arange(len(tokens))[None])[0, -1]
        np.testing.assert_allclose(np.asarray(got)[row, node], want, rtol=0, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_blocks_denoised_behind_a_cache_equal_a_pass_of_both_halves(framework):
    """Block diffusion: a noised block behind the clean blocks of a cache is a row of the training step's mask."""
    size, blocks = 3, TOKENS // 3
    config = dataclasses.replace(CONFIGS["rotary"], mask=masks.block_causal(size))
    clean, noised = np.random.default_rng(5).normal(size=(2, BATCH, TOKENS, WIDTH))
    module = torch_attn.GroupedQueryAttention(config, dtype=torch.float64).eval()
    module.load_state_dict(twins("rotary")[0].state_dict())
    positions = np.tile(np.arange(TOKENS), 2)[None].repeat(BATCH, 0)
    parameters = {key: value.detach().numpy() for key, value in module.state_dict().items()}
    both = dataclasses.replace(config, mask=masks.block_diffusion(size, TOKENS))
    want = reference(both, parameters, np.concatenate([noised, clean], 1), None, positions=positions)[0]
    with torch.no_grad(), jax.enable_x64(True):
        one, cast = module, torch.from_numpy
        if framework == "flax":
            one, cast = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0), param_dtype=jnp.float64), jnp.asarray
            attn_bridge.transfer(module, one)
        for block in range(blocks):
            new = slice(block * size, (block + 1) * size)
            cache = one.init_cache(BATCH, TOKENS)
            if block:
                _, cache = one(cast(clean[:, : new.start]), cache=cache)
            got, _ = one(cast(noised[:, new]), cache=cache)
            np.testing.assert_allclose(np.asarray(got), want[:, new], rtol=0, atol=1e-12 * np.abs(want).max())
    assert np.abs(want[:, :TOKENS] - want[:, TOKENS:]).max() > 0.1


def test_a_mask_of_the_new_tokens_alone_is_refused():
    """The cached attention of a known book sliced its mask by the wrong axis: here, columns are all tokens so far."""
    module, twin = twins("rotary")
    x = np.zeros((BATCH, 2, WIDTH))
    message = r"2-D attention mask \(3, 2\) must be \(B, S\) with B = 3 and S the tokens so far, cached and new \(4\)"
    cache = module.init_cache(BATCH, 9)
    module(torch.from_numpy(x), cache=cache)
    with pytest.raises(ValueError, match=message):
        module(torch.from_numpy(x), cache=cache, attention_mask=torch.ones(BATCH, 2, dtype=torch.bool))
    with jax.enable_x64(True):
        cache = twin(x, cache=twin.init_cache(BATCH, 9))[1]
        with pytest.raises(ValueError, match=message):
            twin(x, cache=cache, attention_mask=np.ones((BATCH, 2), bool))


def test_one_token_sees_every_key_of_the_cache():
    """Not key 0 alone, as ``is_causal=True`` of a fused kernel has it for a single query (google/flax #5591)."""
    module, twin = twins("rotary")
    x = np.random.default_rng(3).normal(size=(1, TOKENS, WIDTH))
    with torch.no_grad(), jax.enable_x64(True):
        for one, cast in ((module, torch.from_numpy), (twin, jnp.asarray)):
            _, cache = one(cast(x[:, :8]), cache=one.init_cache(1, TOKENS))
            _, weights, _ = one(cast(x[:, 8:]), cache=cache, return_weights=True)
            assert weights.shape == (1, 6, 1, TOKENS)
            assert (np.asarray(weights) > 0).all()


@pytest.mark.parametrize("rolling", [False, True])
def test_running_past_the_capacity_is_an_error(rolling):
    module, twin = twins("alibi, window")
    x = np.ones((1, 3, WIDTH))
    message = r"tokens in the cache \(3\) and new ones \(3\) must be at most capacity \(5\)"
    cache = module(torch.from_numpy(x), cache=module.init_cache(1, 5, rolling=rolling))[1]
    with pytest.raises(ValueError, match=message):
        module(torch.from_numpy(x), cache=cache)
    assert cache.length == 3
    with jax.enable_x64(True):
        cache = twin(x, cache=twin.init_cache(1, 5, rolling=rolling))[1]
        with pytest.raises(ValueError, match=message):
            twin(x, cache=cache)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            jax.block_until_ready(flax_step(*nnx.split(twin), x, {}, cache))


def test_beyond_the_capacity_a_compiled_step_gives_nan(monkeypatch):
    """Even where the message of the error is never asked for."""
    twin = twins("alibi, window")[1]
    monkeypatch.setattr("attn_bridge.cache_validation.check_room", lambda *sizes: None)
    with jax.enable_x64(True):
        _, cache = twin(np.ones((1, 5, WIDTH)), cache=twin.init_cache(1, 5))
        output, _ = nnx.jit(lambda module, x, cache: module(x, cache=cache))(twin, np.ones((1, 2, WIDTH)), cache)
        assert np.isnan(output).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_share_one_program_and_write_in_place(dtype):
    config = GroupedQueryAttentionConfig(64, 8, 2, 8, position=Rotary())
    twin = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
    graphdef, state = nnx.split(twin)
    cache = twin.init_cache(2, 4096)
    size = cache.key.nbytes + cache.value.nbytes
    x = jnp.ones((2, 1, 64), dtype)
    compiled = flax_step.lower(graphdef, state, x, {}, cache).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size, "the cache is given back where it was"
    assert memory.temp_size_in_bytes < 0.5 * size, "no copy of the cache"
    before = flax_step._cache_size()
    for _ in range(3):
        _, cache = flax_step(graphdef, state, x, {}, cache)
    assert flax_step._cache_size() == before + 1


def test_torch_attends_to_views_of_the_cache():
    module = twins("alibi, window")[0]
    cache = module.init_cache(BATCH, 50)
    with torch.no_grad():
        module(torch.zeros(BATCH, 20, WIDTH, dtype=torch.float64), cache=cache)
        new = torch.ones(BATCH, 1, 2, 4, dtype=torch.float64)
        same, view = cache.append(new, new, mask=masks.sliding_window(3))
    assert same is cache
    assert view.key.shape[1] == 3, "a window reads no more than its size"
    assert view.key.untyped_storage().data_ptr() == cache.key.untyped_storage().data_ptr()
    assert view.mask.visibility(range(1), range(3)), "so that no mask array is needed"


def test_trimmed_and_reordered_caches_continue_correctly():
    module, twin = twins("rotary")
    x = np.random.default_rng(4).normal(size=(BATCH, TOKENS, WIDTH))
    order = np.array([2, 0, 0])
    positions = np.broadcast_to(np.arange(TOKENS), (BATCH, TOKENS))
    rows = np.concatenate([x[order, :4], x[:, 6:]], 1)
    want = expected("rotary", rows, None, positions[:, :7])[:, 4:]
    with torch.no_grad(), jax.enable_x64(True):
        for one, cast in ((module, torch.from_numpy), (twin, jnp.asarray)):
            _, cache = one(cast(x[:, :6]), cache=one.init_cache(BATCH, TOKENS))
            cache = cache.trim(4).reorder(cast(order))
            output, cache = one(cast(x[:, 6:]), cache=cache)
            np.testing.assert_allclose(np.asarray(output), want, rtol=0, atol=1e-12)
            with pytest.raises(ValueError, match=r"length \(8\) must be at least 0 and at most"):
                cache.trim(8)
            with pytest.raises(ValueError, match=r"indices must have shape \(B,\) = \(3,\), got \(2,\)"):
                cache.reorder(cast(order[:2]))


def test_a_rolling_cache_is_as_long_as_its_window():
    module, twin = twins("alibi, window")
    for one in (module, twin):
        with jax.enable_x64(True):
            cache = one.init_cache(1, 10**6, rolling=True)
        assert cache.key.shape[1] == 3
    with torch.no_grad():
        cache = module(torch.zeros(1, 8, WIDTH, dtype=torch.float64), cache=module.init_cache(1, 99, rolling=True))[1]
    with pytest.raises(ValueError, match=r"length \(5\) must be 0 or 8: .* rolling cache keeps .* last 3 tokens"):
        cache.trim(5)


def cached(tokens: int, capacity: int = 10, rolling: int | None = None) -> jax_attn.decoding.cache.KeyValueCache:
    """Return a cache of two rows that holds so many tokens."""
    cache = jax_attn.decoding.cache.KeyValueCache.empty(2, capacity, 1, 2, rolling=rolling)
    new = np.random.default_rng(5).normal(size=(2, tokens, 1, 2)).astype(np.float32)
    return cache.append(new, new)[0] if tokens else cache


def silence(monkeypatch) -> None:
    """Let no check raise that waits for a compiled function to run, as where nobody waits for the error."""
    monkeypatch.setattr("jax_attn.decoding.running.raise_unless", lambda holds, *_: holds)


TOO_FAR = [
    (None, -3, r"length \(-3\) must be at least 0 and at most the tokens in the cache \(6\)"),
    (None, 20, r"length \(20\) must be at least 0 and at most the tokens in the cache \(6\)"),
    (4, 2, r"length \(2\) must be 0 or 6: the rolling cache keeps the last 4 tokens only"),
]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("rolling", "length", "message"), TOO_FAR)
def test_a_compiled_trim_refuses_what_a_plain_one_does(monkeypatch, rolling, length, message, known):
    cache = cached(6, rolling=rolling)
    with pytest.raises(ValueError, match=message):
        cache.trim(length)

    def run():  # traced anew each time, as a check may have been silenced
        return jax.jit(lambda cache, n: cache.trim(length if known else n))(cache, length)

    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(run())
    silence(monkeypatch)
    trimmed = run()
    assert np.isnan(trimmed.key).all()
    assert np.isnan(trimmed.value).all()


@pytest.mark.parametrize(("rolling", "tokens"), [(None, 6), (4, 6), (4, 3)])
def test_a_compiled_trim_does_what_a_plain_one_does(rolling, tokens):
    cache = cached(tokens, rolling=rolling)
    for length in {0, tokens} | (set() if tokens > (rolling or tokens) else {2}):
        trimmed = jax.jit(lambda cache, n: cache.trim(n))(cache, length)
        jax.tree.map(np.testing.assert_array_equal, trimmed, cache.trim(length))
        assert int(trimmed.length) == length


@pytest.mark.parametrize("index", [2, 5, -1])
def test_rows_that_a_cache_does_not_have_are_refused(monkeypatch, index):
    message = rf"index \({index}\) must be at least 0 and below the batch of the cache \(2\)"
    cache, order = cached(6), np.array([0, index], np.int32)
    held = torch_attn.decoding.cache.KeyValueCache.empty(2, 6, 1, 2)
    held.key[:] = 1.0
    with pytest.raises(ValueError, match=message):
        held.reorder(torch.from_numpy(order))
    with pytest.raises(ValueError, match=message):
        cache.reorder(jnp.asarray(order))

    def run():  # traced anew each time, as a check may have been silenced
        return jax.jit(lambda cache, order: cache.reorder(order))(cache, order)

    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(run())
    silence(monkeypatch)
    for array, whole in ((run().key, cache.key), (run().value, cache.value)):
        assert np.isnan(array[1]).all()
        np.testing.assert_array_equal(array[0], whole[0])
    assert run().visible.all()


def test_a_length_that_is_not_an_integer_is_refused():
    message = "length must be an integer, got float32"
    for run in (cached(6).trim, jax.jit(cached(6).trim)):
        with pytest.raises(TypeError, match=message):
            run(jnp.float32(2.5))
    with pytest.raises(TypeError, match=message):
        torch_attn.decoding.cache.KeyValueCache.empty(2, 6, 1, 2).trim(torch.tensor(0.5))


def test_a_compiled_look_into_an_empty_cache_is_an_error(monkeypatch):
    query, masks_given = np.ones((2, 3, 1, 2), np.float32), (None, np.zeros((2, 10), bool))

    def attend(cache, mask):
        _, view = cache.look(attention_mask=mask)
        return jax_attn.functional.dot_product_attention(query, view.key, view.value, mask=view.mask)

    for mask in masks_given:
        assert np.isfinite(jax.jit(attend)(cached(3), mask)).all()
        with pytest.raises(
            (ValueError, jax.errors.JaxRuntimeError), match="context must be given, or a cache that holds one"
        ):
            jax.block_until_ready(jax.jit(attend)(cached(0), mask))
    silence(monkeypatch)
    jax.clear_caches()
    for mask in masks_given:
        assert np.isnan(jax.jit(attend)(cached(0), mask)).all()


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (np.zeros((2, 4), np.int32), ValueError, r"positions must have shape (T,) or (B, T) = (2, 3), got (2, 4)"),
        (np.zeros((2, 3), np.float32), TypeError, r"positions must have an integer dtype, got float32"),
    ],
)
def test_positions_that_fit_no_token_are_refused(positions, error, message):
    module, twin = twins("rotary")
    x = np.zeros((2, 3, WIDTH))
    for call in (
        lambda: module(torch.from_numpy(x), positions=torch.from_numpy(positions)),
        lambda: twin(x, positions=positions),
    ):
        with jax.enable_x64(True), pytest.raises(error) as caught:
            call()
        assert str(caught.value) == message
