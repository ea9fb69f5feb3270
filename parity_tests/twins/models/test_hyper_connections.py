"""Hyper-connections: both twins and DeepSeek V4's of `transformers` give the same outputs and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from attn_bridge import backends, transfer
from attn_bridge.specs import HyperConnectionConfig
from attn_parity.frameworks.torch.running.promotion import promoted

WIDTH, STREAMS = 10, 3
CONFIG = HyperConnectionConfig(WIDTH, STREAMS, iterations=4, eps=1e-3, norm_eps=1e-2)
NAMES = {"projection.weight": ("fn", "hc_fn"), "scale": ("scale", "hc_scale"), "bias": ("base", "hc_base")}


def published(*, writes: bool):
    config = transformers.AutoConfig.for_model(
        "deepseek_v4", hidden_size=WIDTH, hc_mult=STREAMS, hc_sinkhorn_iters=4, hc_eps=1e-3, rms_norm_eps=1e-2
    )
    layer = (DeepseekV4HyperConnection if writes else DeepseekV4HyperHead)(config).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=draw) + 0.2)
    return layer


def twins(layer, *, writes: bool):
    config = CONFIG.replace(writes=writes)
    ours, theirs = (backends.load(name).build_blank("HyperConnection", config, "float64") for name in ("torch", "flax"))
    state = layer.state_dict()
    ours.load_state_dict({name: state[names[not writes]] for name, names in NAMES.items()})
    transfer(ours, theirs)
    return ours, theirs


def behind(layer, output):
    """Return the loss of a whole connection around a layer, with what each library has for it."""
    return (
        (torch.sin(layer) * torch.cos(output)).sum()
        if isinstance(layer, torch.Tensor)
        else (jnp.sin(layer) * jnp.cos(output)).sum()
    )


@pytest.mark.usefixtures("x64")
def test_outputs_and_gradients_are_those_of_transformers():
    layer = published(writes=True)
    ours, theirs = twins(layer, writes=True)
    streams = np.random.default_rng(1).normal(size=(2, 5, STREAMS, WIDTH))

    with promoted():
        given = torch.from_numpy(streams).requires_grad_()
        post, comb, x = layer(given)
        expected = post.unsqueeze(-1) * torch.tanh(x).unsqueeze(-2) + comb.transpose(-1, -2) @ given
        behind(x, expected.sum(-2)).backward()
    right = {names[0]: dict(layer.named_parameters())[names[0]].grad.numpy() for names in NAMES.values()}

    own = torch.from_numpy(streams).requires_grad_()
    read = ours.read(own)
    written = ours.write(own, torch.tanh(read[0]), *read[1:])
    behind(read[0], written.sum(-2)).backward()
    np.testing.assert_allclose(written.detach(), expected.detach(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(own.grad, given.grad, rtol=0, atol=1e-12)

    def loss(module, streams):
        read = module.read(streams)
        written = module.write(streams, jnp.tanh(read[0]), *read[1:])
        return behind(read[0], written.sum(-2)), written

    (_, from_flax), (gradients, of_streams) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        theirs, jnp.asarray(streams)
    )
    np.testing.assert_allclose(from_flax, expected.detach(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(of_streams, given.grad, rtol=0, atol=1e-12)
    for name, (theirs_name, _) in NAMES.items():
        got = dict(ours.named_parameters())[name].grad
        np.testing.assert_allclose(got, right[theirs_name], rtol=0, atol=1e-11)
    np.testing.assert_allclose(gradients["projection"]["kernel"][...].T, right["fn"], rtol=0, atol=1e-11)
    for name in ("scale", "base"):
        np.testing.assert_allclose(gradients["bias" if name == "base" else name][...], right[name], rtol=0, atol=1e-11)


@pytest.mark.usefixtures("x64")
def test_the_last_connection_is_that_of_transformers():
    layer = published(writes=False)
    streams = np.random.default_rng(1).normal(size=(2, 5, STREAMS, WIDTH))
    with promoted(), torch.no_grad():
        expected = layer(torch.from_numpy(streams)).numpy()
    ours, theirs = twins(layer, writes=False)
    with torch.no_grad():
        np.testing.assert_allclose(ours.read(torch.from_numpy(streams))[0], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(theirs.read(jax.numpy.asarray(streams))[0], expected, rtol=0, atol=1e-12)
