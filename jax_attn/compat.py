"""The layer of Flax that attention is replaced in: its arguments, names and call, on the attention of this package."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attn_bridge.masks import as_mask, causal, full

from . import functional
from .layer import Precision, matmul_precision


def dot_product_attention(
    query: Float[Array, "... T H D"],
    key: Float[Array, "... S K D"],
    value: Float[Array, "... S K Dv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision | tuple[Precision, Precision] | None = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = nnx.nn.dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    implementation: str | None = None,
) -> Float[Array, "... T H Dv"]:
    """Compute what `flax.nnx.dot_product_attention` does by `functional.dot_product_attention`.

    Arguments are those of Flax, and `implementation`, a name in `functional.IMPLEMENTATIONS`. A query whose keys are
    all masked gets zeros, where Flax gives the mean of the values. The softmax of float64 runs in float64, where Flax
    may take float32. The same `dropout_rng` drops the same weights.

    Raises:
        NotImplementedError: the `implementation` does not support the call, such as one that drops or sows weights.
        ValueError: shapes that do not fit, or a pair of precisions that differ.
        TypeError: a `precision` of another kind.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    batch, rate = query.shape[:-3], 0.0 if deterministic else dropout_rate
    q, k, v = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    scores_shape = (*batch, q.shape[2], q.shape[1], k.shape[1])
    allowed = causal() if is_causal else full()
    if mask is not None:
        allowed = allowed & as_mask(_as_scores(mask.astype(bool), scores_shape))
    operands: dict[str, Any] = {"mask": allowed, "implementation": implementation}
    if bias is not None:
        operands["bias"] = _as_scores(bias, scores_shape)
    with matmul_precision(precision):
        if k.shape[1] == 0:  # a sum over no keys, which the functions of this package refuse
            context = _average(jnp.zeros((q.shape[0], *scores_shape[-3:]), q.dtype), v)
            return context.reshape(*batch, *context.shape[-3:])
        if rate == 0.0 and module is None:
            context, _ = functional.as_pair(functional.dot_product_attention(q, k, v, **operands))
            return context.reshape(*batch, *context.shape[-3:])
        context, weights = functional.dot_product_attention(q, k, v, return_weights=True, **operands)
        if module is not None:
            module.sow(nnx.Intermediate, "attention_weights", weights.reshape(scores_shape))
        if rate > 0.0:
            shape = (1,) * (len(scores_shape) - 2) + scores_shape[-2:] if broadcast_dropout else scores_shape
            kept = jax.random.bernoulli(dropout_rng, 1.0 - rate, shape)
            dropped = weights.reshape(scores_shape) * kept.astype(q.dtype) / jnp.asarray(1.0 - rate, q.dtype)
            context = _average(dropped.reshape(weights.shape), v)
    return context.reshape(*batch, *context.shape[-3:])


def _as_scores(array: Array, scores_shape: tuple[int, ...]) -> Array:
    """Return an operand of the scores ``(..., H, T, S)`` with four axes."""
    if array.ndim < len(scores_shape):
        array = array.reshape((1,) * (len(scores_shape) - array.ndim) + array.shape)
    if len(scores_shape) == 4:
        return array
    array = jnp.broadcast_to(array, (*scores_shape[:-3], *array.shape[-3:]))
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _average(weights: Float[Array, "B H T S"], value: Float[Array, "B S K D"]) -> Float[Array, "B T H D"]:
    value = jnp.repeat(value, weights.shape[1] // value.shape[2], axis=2)
    return jnp.einsum("bhts,bshc->bthc", weights, value)


@functools.cache  # modules of equal settings hold the same function, so that compiled programs and scans take either
def _computed_by(implementation: str) -> Callable[..., Array]:
    return functools.partial(dot_product_attention, implementation=implementation)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` whose attention is `functional.dot_product_attention`.

    Arguments, initial weights, names, the cache of `decode` and the call are those of the stock layer, so either takes
    the other's state.

    Args:
        *sizes: `num_heads`, `in_features` and the other sizes, as in Flax.
        attention_fn: another function, as in Flax.
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest. Only
            the reference can drop or sow weights.
        **options: the other keyword arguments of Flax, such as `rngs`.

    Raises:
        ValueError: an unknown `implementation`, or one next to an `attention_fn`.
    """

    def __init__(
        self,
        *sizes: int | None,
        attention_fn: Callable[..., Array] = dot_product_attention,
        implementation: str | None = None,
        **options: object,
    ):
        if functional.check_implementation(implementation) is not None:
            if attention_fn is not dot_product_attention:
                raise ValueError("give attention_fn or implementation, not both")
            attention_fn = _computed_by(implementation)
        super().__init__(*sizes, attention_fn=attention_fn, **options)
