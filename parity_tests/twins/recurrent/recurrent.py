"""What the tests of recurrent attention share: inputs, calls of either twin, and the masks that both refuse."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from attn_parity.frameworks.torch.running.promotion import promoted

from ...support.calls.interpreted import by_numpy


def tokens(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def left_and_right(length: int) -> np.ndarray:
    """Return a mask ``(3, length)``: whole, padded on the left, padded on the right."""
    at = np.arange(length)
    return np.stack([at >= 0, at >= 3, at < length - 4])


def call(module, x, **arguments):
    """Call either twin with NumPy arrays; JAX is interpreted by NumPy, which compiles nothing."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in arguments.items() if name not in arrays}
    if isinstance(module, torch.nn.Module):
        with torch.no_grad():
            return module(
                torch.from_numpy(x), **{name: torch.from_numpy(array) for name, array in arrays.items()}, **rest
            )
    cache = rest.pop("cache", None)

    def run(x, arrays, cache):
        return module(x, **arrays, **rest, **({} if cache is None else {"cache": cache}))

    return by_numpy(run, x, arrays, cache)


def decode(module, x, steps, mask=None):
    """Return the outputs of several calls with a cache, one after the other; one call has none."""
    cache = module.init_cache(x.shape[0], sum(steps)) if len(steps) > 1 else None
    outputs, stop = [], 0
    for count in steps:
        begin, stop = stop, stop + count
        out = call(module, x[:, begin:stop], attention_mask=None if mask is None else mask[:, :stop], cache=cache)
        out, cache = (out, None) if cache is None else out
        outputs.append(np.asarray(out))
    return np.concatenate(outputs, 1)


def check_masks_over_other_tokens(monkeypatch, ours, theirs):
    """Have masks refused that are not over all tokens so far, in torch, in JAX, and in a compiled step."""
    x = tokens(2, 6, 10)
    cache, twin = ours.init_cache(2, 9), theirs.init_cache(2, 9)
    ours(torch.from_numpy(x[:, :5]), cache=cache)
    _, twin = call(theirs, x[:, :5], cache=twin)
    graph, state = nnx.split(theirs)

    def run(mask):
        return jax.jit(lambda cache: nnx.merge(graph, state)(x[:, 5:], attention_mask=mask, cache=cache))(twin)

    expected = call(theirs, x[:, 5:], cache=twin)[0]
    wrong = [np.ones(shape, bool) for shape in ((2, 1), (2, 3), (1, 7), (2, 1, 1, 5))]
    for mask in wrong:
        message = (
            rf"2-D attention mask \({len(mask)}, {mask.shape[-1]}\) must be \(B, S\) with B = 2 "
            r"and S the tokens so far, cached and new \(6\), or capacity \(9\)"
        )
        with pytest.raises(ValueError, match=message):
            ours(torch.from_numpy(x[:, 5:]), attention_mask=torch.from_numpy(mask), cache=cache)
        assert cache.length == 5
        with pytest.raises(ValueError, match=message):
            theirs(x[:, 5:], attention_mask=mask, cache=twin)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            jax.block_until_ready(run(mask))
    monkeypatch.setattr("jax_attn.decoding.running.raise_unless", lambda holds, *_: holds)
    for mask in wrong:
        assert np.isnan(run(mask)[0]).all()
    for columns in (6, 9):
        np.testing.assert_allclose(run(np.ones((2, columns), bool))[0], expected, rtol=0, atol=1e-13)


def gradients_of_torch(module, x, form):
    """Return the gradients of a weighted sum of the outputs, by the names of the input and the parameters."""
    x = torch.from_numpy(x).requires_grad_()
    out = module(x, form=form)
    weight = torch.from_numpy(tokens(*out.shape, seed=3)).to(out.dtype)
    wanted = [x, *module.parameters()]
    arrays = [gradient.numpy() for gradient in torch.autograd.grad((out * weight).sum(), wanted)]
    return dict(zip(["x", *(name for name, _ in module.named_parameters())], arrays, strict=True))


def run_hugging_face(layer, config, x, mask, steps):
    """Return the output of a layer of `transformers` in float64, in as many calls with a cache as there are `steps`.

    Single tokens are never padding there.
    """
    cache = transformers.DynamicCache(config=config) if len(steps) > 1 else None
    outputs, stop = [], 0
    with promoted(), torch.no_grad():
        for count in steps:
            begin, stop = stop, stop + count
            shown = None if mask is None or count == 1 else torch.from_numpy(mask[:, begin:stop])
            chunk = torch.from_numpy(x[:, begin:stop])
            outputs.append(layer(chunk, cache_params=cache, attention_mask=shown).numpy())
    return np.concatenate(outputs, 1)
