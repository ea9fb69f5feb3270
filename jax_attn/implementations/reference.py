"""Attention as plain einsum code: every call, the weights included, in memory that grows with T times S.

The twin is `torch_attn.implementations.reference`. Letters: b batch, t query position, s key position, h key/value
head, g query heads per key/value head, c channel of a head.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from einops import einsum, rearrange
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from ..random import Rngs, TorchRngs
from .call import KernelCall


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """A dropout mask that is drawn already, ``True`` = kept: a device's part of a larger one, instead of an rng."""

    mask: Bool[Array, "..."]


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call; None, as it serves every one."""
    return None


def attend(call: KernelCall) -> Array | tuple[Array, Array]:
    """Return the context ``(B, T, H, Dv)``, and the weights ``(B, H, T, S)`` if the call asks for them."""
    weights = masked_softmax(_scores(call), call.allowed(), call.sinks)
    context = _average(drop(weights, call.dropout, call.rng), call.value.astype(weights.dtype)).astype(call.query.dtype)
    return (context, weights.astype(call.query.dtype)) if call.return_weights else context


def attend_with_lse(call: KernelCall) -> tuple[Array, Array]:
    """Return the context and, per row, the logarithm of the sum of ``exp(scores)``, as `blocked.attend_with_lse`."""
    scores = _scores(call)
    allowed = call.allowed()
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    has_key = (scores != -jnp.inf).any(-1, keepdims=True)
    scores = jnp.where(has_key, scores, 0.0)
    # The shift cancels in the quotient, so no gradient flows through it.
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    if call.sinks is not None:
        sinks = rearrange(call.sinks.astype(scores.dtype), "h -> h 1 1")
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if call.sinks is not None:
        # A sink is one more term of the divisor, and has no value to add.
        total = total + jnp.exp(sinks - top)
    weights = jnp.where(has_key, weights / total, 0.0)
    context = _average(drop(weights, call.dropout, call.rng), call.value.astype(weights.dtype))
    sums = jnp.where(has_key, top + jnp.log(total), -jnp.inf)[..., 0]
    return context.astype(call.query.dtype), sums


def _scores(call: KernelCall) -> Float[Array, "B H T S"]:
    """Return the scores with their cap and bias, not masked yet."""
    query, key = call.query, call.key
    # Float32 at least: a bfloat16 score s would be off by up to 2**-9 of itself, and the weight exp(s) by s times that.
    compute_dtype = jnp.promote_types(query.dtype, jnp.float32)
    query_heads, key_heads = query.shape[2], key.shape[2]
    # Query head i reads key head i // g: the query heads that share a key head are neighbours (arXiv 2305.13245).
    q = rearrange(query.astype(compute_dtype), "b t (h g) c -> b t h g c", h=key_heads, g=query_heads // key_heads)
    k = key.astype(compute_dtype)
    scores = rearrange(einsum(q, k, "b t h g c, b s h c -> b h g t s"), "b h g t s -> b (h g) t s") * call.scale
    # Before the bias and the mask: a capped score is finite, so a hidden key would become visible.
    if call.softcap is not None:
        scores = call.softcap * jnp.tanh(scores / call.softcap)
    return scores if call.bias is None else scores + call.bias.astype(compute_dtype)


def _average(weights: Float[Array, "B H T S"], value: Float[Array, "B S K Dv"]) -> Float[Array, "B T H Dv"]:
    """Return the sums of the values by these weights."""
    heads = value.shape[2]
    dropped = rearrange(weights, "b (h g) t s -> b h g t s", h=heads)
    context = einsum(dropped, value, "b h g t s, b s h c -> b t h g c")
    return rearrange(context, "b t h g c -> b t (h g) c")


def masked_softmax(
    scores: Float[Array, "B H T S"],
    allowed: Bool[Array, "..."] | None = None,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B H T S"]:
    """Softmax over the allowed keys; a row without any is all zeros, with zero gradient.

    Args:
        scores: ``(B, H, T, S)``; minus infinity hides a key, too.
        allowed: bool, broadcastable to `scores`; None allows all.
        sinks: ``(H,)`` extra logits that take part in the sum only.
    """
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    has_key = (scores != -jnp.inf).any(-1, keepdims=True)
    # A row of minus infinities would be NaN.
    scores = jnp.where(has_key, scores, 0.0)
    if sinks is None:
        weights = softmax(scores)
    else:
        # On a mesh of explicit axes both parts of a row must be sharded alike: `has_key` is as the scores are.
        column = jnp.zeros_like(has_key, scores.dtype) + rearrange(sinks.astype(scores.dtype), "h -> h 1 1")
        weights = softmax(jnp.concatenate([scores, column], -1))[..., :-1]
    return jnp.where(has_key, weights, 0.0)


@jax.custom_jvp
def softmax(scores: Float[Array, "... s"]) -> Float[Array, "... s"]:
    """Softmax over the last axis, whose gradient is ``weights * (g - sum(weights * g))``.

    That is torch's formula; what `jax.nn.softmax` is transposed to, ``weights * g - weights * sum(weights * g)``,
    rounds twice more before it cancels.
    """
    return jax.nn.softmax(scores, -1)


@softmax.defjvp
def _softmax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    weights = jax.nn.softmax(*primals, -1)
    product = weights * tangents[0]
    return weights, product - weights * product.sum(-1, keepdims=True)


def drop(
    weights: Float[Array, "..."], rate: float, rng: Array | nnx.RngStream | Rngs | Drawn | None = None
) -> Float[Array, "..."]:
    """Zero each weight with probability `rate` and scale the rest by ``1 / (1 - rate)``; 0 and 1 draw nothing."""
    if rate == 0.0:
        return weights
    if rate == 1.0:  # the scale is infinite, and the gradient would be 0 times that
        return weights * 0.0
    if isinstance(rng, TorchRngs):
        keep = rng.bernoulli(1.0 - rate, weights.shape, like=weights)
    else:
        keep = draw(weights.shape, rate, rng)
    return jnp.where(keep, weights / (1.0 - rate), 0.0)


def draw(shape: tuple[int, ...], rate: float, rng: Array | nnx.RngStream | Rngs | Drawn | None) -> Bool[Array, "..."]:
    """Return a dropout mask, ``True`` = kept, with probability ``1 - rate``."""
    rng = source_of(rate, rng)
    if isinstance(rng, Drawn):
        return rng.mask
    if isinstance(rng, TorchRngs):
        return rng.bernoulli(1.0 - rate, shape)
    return jax.random.bernoulli(rng, 1.0 - rate, shape)


def source_of(rate: float, rng: Array | nnx.RngStream | Rngs | Drawn | None) -> Array | TorchRngs | Drawn:
    """Return the source of a dropout mask; of a stream, its next key.

    Raises:
        ValueError: no `rng`.
        TypeError: `rng` is something else.
    """
    if rng is None:
        raise ValueError(f"dropout ({rate}) needs rng: a key, a stream, an nnx.Rngs or a TorchRngs")
    if isinstance(rng, nnx.Rngs):
        rng = rng.dropout
    if isinstance(rng, nnx.RngStream):
        rng = rng()
    if not isinstance(rng, (Array, TorchRngs, Drawn)):
        raise TypeError(f"rng must be a key, a stream, an nnx.Rngs or a TorchRngs, got {type(rng).__name__}")
    return rng
