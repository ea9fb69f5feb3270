"""The gated delta rule and linear attention as functions: chunks of any size, and numbers that chunks could spoil."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_attn.recurrent.recurrence
import torch_attn.recurrent.recurrence
from attn_parity.frameworks.jax.probes import numpy_interpreter

BATCH, KEY_HEADS, HEADS, WIDTH, VALUE_WIDTH = 2, 2, 4, 5, 3


def draw(length: int, seed: int = 0, strength: float = 1.0) -> dict[str, np.ndarray]:
    """Return arguments of the gated delta rule; the decay of a token is of any size, from almost none to all."""
    random = np.random.default_rng(seed)
    query, key = (random.normal(size=(BATCH, length, KEY_HEADS, WIDTH)) for _ in range(2))
    return {
        "query": query,
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": random.normal(size=(BATCH, length, HEADS, VALUE_WIDTH)),
        "log_decay": -np.exp(strength * random.normal(size=(BATCH, length, HEADS))),
        "beta": random.uniform(size=(BATCH, length, HEADS)),
        "state": random.normal(size=(BATCH, HEADS, WIDTH, VALUE_WIDTH)),
    }


def run(framework: str, function: str, arrays: dict[str, np.ndarray], dtype: str = "float64", **options):
    """Return context and state of a function of `recurrence`, in `dtype`."""
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    if framework == "torch":
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return [one.numpy() for one in getattr(torch_attn.recurrent.recurrence, function)(**tensors, **options)]
    with jax.enable_x64(dtype == "float64"):

        def call(arrays):
            return getattr(jax_attn.recurrent.recurrence, function)(**arrays, **options)

        if dtype == "float64":  # for its meaning, which needs no compiler
            return numpy_interpreter.evaluate(jax.make_jaxpr(call)(arrays), *jax.tree.leaves(arrays))
        return [np.asarray(one) for one in jax.jit(call)(arrays)]


def by_definition(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return context and state of the gated delta rule, one head and one token at a time, in float64."""
    value, context, states = arrays["value"], np.zeros(arrays["value"].shape), arrays["state"].copy()
    for b, t, h in np.ndindex(value.shape[:3]):
        key, query = (arrays[name][b, t, h // (HEADS // KEY_HEADS)] for name in ("key", "query"))
        state = np.exp(arrays["log_decay"][b, t, h]) * states[b, h]
        state = state + arrays["beta"][b, t, h] * np.outer(key, value[b, t, h] - key @ state)
        states[b, h], context[b, t, h] = state, query @ state
    return context, states


@pytest.mark.parametrize("framework", ["torch", "flax"])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 64), (7, 1), (7, 3), (70, 64), (64, 64)], ids=str)
def test_chunks_of_any_size_are_the_definition(framework, length, chunk_size):
    arrays = draw(length)
    expected = by_definition(arrays)
    for form in ("chunked", "recurrent"):
        got = run(framework, "gated_delta_rule", arrays, form=form, chunk_size=chunk_size)
        for one, two in zip(got, expected, strict=True):
            assert one.dtype == np.float64
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_linear_attention_in_chunks_of_any_size(framework):
    random = np.random.default_rng(0)
    query, key = (random.uniform(size=(2, 8, 3, 4)) for _ in range(2))
    arrays = {"query": query, "key": key, "value": random.normal(size=(2, 8, 3, 5))}
    arrays["state"] = random.uniform(size=(2, 3, 4, 6))
    expected = run(framework, "linear_attention", arrays, form="recurrent")
    for chunk_size in (1, 3, 64):
        got = run(framework, "linear_attention", arrays, form="chunked", chunk_size=chunk_size)
        for one, two in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-13)


def same_key(arrays):
    """Every token corrects what the last one wrote: powers of that system grow like binomials."""
    arrays["key"][:] = arrays["key"][:1, :1, :1]
    arrays["beta"][:] = 1.0
    arrays["log_decay"][:] = -1e-4


def one_strong_decay(arrays):
    """Differences of running sums would leave three digits of the decays behind the strong one."""
    arrays["log_decay"][:] = -1e-3
    arrays["log_decay"][:, 2] = -1e4


def all_strong_decays(arrays):
    """What is left underflows, and its inverse would overflow."""
    arrays["log_decay"][:] = -200.0


@pytest.mark.parametrize("framework", ["torch", "flax"])
@pytest.mark.parametrize("spoil", [same_key, one_strong_decay, all_strong_decays], ids=lambda one: one.__name__)
def test_chunks_lose_nothing_in_float32(framework, spoil):
    arrays = draw(64)
    spoil(arrays)
    rounded = {name: array.astype(np.float32).astype(np.float64) for name, array in arrays.items()}
    expected, _ = by_definition(rounded)
    got, _ = run(framework, "gated_delta_rule", rounded, "float32", form="chunked")
    assert np.abs(got - expected).max() <= 4e-6 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_state_is_never_in_16_bits(dtype):
    arrays = draw(6)
    del arrays["state"]
    tensors = {name: torch.from_numpy(array).to(getattr(torch, dtype)) for name, array in arrays.items()}
    found = torch_attn.recurrent.recurrence.gated_delta_rule(**tensors)
    assert {one.dtype for one in found} == {torch.float32}
    arrays = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    found = jax.eval_shape(lambda arrays: jax_attn.recurrent.recurrence.gated_delta_rule(**arrays), arrays)
    assert {one.dtype.name for one in found} == {"float32"}


def test_autocast_leaves_the_state_alone():
    tensors = {name: torch.from_numpy(array).float() for name, array in draw(6).items()}
    expected, _ = torch_attn.recurrent.recurrence.gated_delta_rule(**tensors)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = torch_attn.recurrent.recurrence.gated_delta_rule(**tensors)
    assert torch.equal(got, expected)


def test_decay_is_exact_where_torchs_softplus_is_not():
    alpha, bias, log = np.array([[[25.0, -40.0]]]), np.zeros(2), np.array([0.5, -0.5])
    expected = -np.exp(log) * np.logaddexp(alpha, 0.0)
    got = torch_attn.recurrent.recurrence.log_decay(*map(torch.from_numpy, (alpha, bias, log)))
    np.testing.assert_allclose(got, expected, rtol=1e-15)
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(jax_attn.recurrent.recurrence.log_decay)(alpha, bias, log)
        np.testing.assert_allclose(numpy_interpreter.evaluate(closed, alpha, bias, log)[0], expected, rtol=1e-15)


BAD = {
    "query 3-D": ("query", lambda one: one[0], "query must have shape (B, T, H, D), got (6, 2, 5)"),
    "key shorter": ("key", lambda one: one[:, 1:], "query (2, 6, 2, 5) and key (2, 5, 2, 5) must have one shape"),
    "value longer": (
        "value",
        lambda one: np.concatenate([one, one], 1),
        "key (2, 6, 2, 5) and value (2, 12, 4, 3) must agree in batch and length",
    ),
    "odd heads": ("value", lambda one: one[:, :, :3], "heads of value (3) must be a multiple of the heads of key (2)"),
    "decay transposed": (
        "log_decay",
        lambda one: one.swapaxes(1, 2),
        "log_decay (2, 4, 6) must have shape (B, T, H) = (2, 6, 4)",
    ),
    "beta per channel": (
        "beta",
        lambda one: one[..., None] * np.ones(3),
        "beta (2, 6, 4, 3) must have shape (B, T, H) = (2, 6, 4)",
    ),
    "state transposed": (
        "state",
        lambda one: one.swapaxes(2, 3),
        "state (2, 4, 3, 5) must have shape (B, H, D, Dv) = (2, 4, 5, 3)",
    ),
}


@pytest.mark.parametrize("framework", ["torch", "flax"])
@pytest.mark.parametrize("label", BAD)
def test_shapes_that_do_not_fit_are_refused_alike(framework, label):
    name, change, message = BAD[label]
    arrays = draw(6)
    arrays[name] = change(arrays[name])
    with pytest.raises(ValueError, match="must") as caught:
        run(framework, "gated_delta_rule", arrays)
    assert str(caught.value) == message


def test_a_chunk_holds_a_token():
    with pytest.raises(ValueError, match="chunk_size") as caught:
        run("torch", "gated_delta_rule", draw(3), chunk_size=0)
    assert str(caught.value) == "chunk_size (0) must be at least 1"
