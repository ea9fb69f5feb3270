"""Attention as functions, and what JAX does differently from torch: dtypes, random numbers.

The twin is `torch_attn.functional`. Letters: b batch, t query position, s key position, h key/value head,
g query heads per key/value head, c channel of a head; in shapes H is all query heads, K the key/value heads.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float, Int

from attn_bridge import cache_validation, misuse, validation
from attn_bridge.foreign_names import names_ours
from attn_bridge.masks import Mask, as_mask, counting_tokens
from attn_bridge.masks.positions import Full
from attn_bridge.sharding.heads import check_width
from attn_bridge.sharding.linear_layers import check_bias

from . import implementations
from .linear import Linear
from .operations import few_rows
from .random import Rngs
from .signatures import typed_as
from .signatures.function import FunctionCall

if TYPE_CHECKING:
    from .parallel.sharding import Sharding

IMPLEMENTATIONS = tuple(implementations.IMPLEMENTATIONS)
"""Names that ``implementation=`` takes, fastest first; ``"reference"`` is plain einsum code and supports every call."""

_CHOSEN: contextvars.ContextVar[str | None] = contextvars.ContextVar("_CHOSEN", default=None)


@typed_as(FunctionCall)
@names_ours
def dot_product_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    mask: Mask | Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    dropout: float = 0.0,
    rng: Array | nnx.RngStream | Rngs | None = None,
    return_weights: bool = False,
    implementation: str | None = None,
    sharding: Sharding | None = None,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float[Array, "B H T S"]]:
    """Scaled dot-product attention (arXiv 1706.03762): ``softmax(scale * query key^T) value`` per head.

    Scores are scaled, then soft-capped, then biased, then masked. Softmax and its sums run in float32, in float64 for
    float64 input. A query whose keys are all masked gets zeros, with zero gradient.

    Args:
        query: ``(B, T, H, D)``.
        key: ``(B, S, K, D)``; K divides H, and query head ``i`` reads key/value head ``i // (H // K)``.
        value: ``(B, S, K, Dv)``.
        mask: an `attn_bridge.masks` description or a bool array, ``True`` = may attend: ``(B, S)``, or broadcastable to
            ``(B, H, T, S)``.
        bias: added to the scores, broadcastable to ``(B, H, T, S)``.
        scale: factor of the scores; ``D ** -0.5`` by default.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (arXiv 2408.00118).
        sinks: ``(H,)`` logits that join each softmax and carry no value (arXiv 2508.10925).
        dropout: rate at which attention weights are dropped; the rest is scaled by ``1 / (1 - dropout)``.
        rng: source of the dropout mask: a key, a stream, an `nnx.Rngs` (its ``dropout`` stream) or a `TorchRngs`.
        return_weights: also return the weights ``(B, H, T, S)``, as they are before dropout; only the reference does.
        implementation: a name in `IMPLEMENTATIONS`; None takes the fastest that supports the call.
        sharding: devices that share the call, as `parallel.parallelize` gives it to modules; the arguments are whole
            arrays, and each device computes its heads and tokens.

    Returns:
        The context ``(B, T, H, Dv)`` in the dtype of `query`, and the weights if asked for.

    Raises:
        NotImplementedError: the named implementation does not support the call; gives the reason.
        ValueError: shapes, rates or names that do not fit; dropout without `rng`.
        TypeError: dtypes or kinds of objects that do not fit.
    """
    implementation = check_implementation(implementation) or _CHOSEN.get()
    call = _checked(query, key, value, mask, bias, scale, softcap, sinks, dropout, rng, return_weights)
    if sharding is not None:
        return sharding.attend(call, implementation)
    return implementations.choose(call, implementation).attend(call)


@contextlib.contextmanager
def use_implementation(name: str | None) -> Iterator[None]:
    """Select the implementation of attention inside the context, in modules and whole models, too.

    The argument `implementation` of a call or a module has priority. A function that was compiled before keeps its
    implementation.

    Args:
        name: a name in `IMPLEMENTATIONS`; None takes the fastest again.

    Raises:
        ValueError: another name.
    """
    token = _CHOSEN.set(check_implementation(name))
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def check_implementation(name: str | None) -> str | None:
    """Return the name of an implementation unchanged; raise a ValueError if it is unknown."""
    validation.check_implementation(name, IMPLEMENTATIONS)
    return name


def explain(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    mask: Mask | Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    dropout: float = 0.0,
    rng: Array | nnx.RngStream | Rngs | None = None,
    return_weights: bool = False,
) -> dict[str, str | None]:
    """Return implementation -> why it can't serve a call of `dot_product_attention`; None if it can.

    Args are those of `dot_product_attention`. The names come fastest first: the first that has None serves the call.
    """
    return implementations.explain(
        _checked(query, key, value, mask, bias, scale, softcap, sinks, dropout, rng, return_weights)
    )


def _checked(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: object,
    bias: Array | None,
    scale: float | None,
    softcap: float | None,
    sinks: Array | None,
    dropout: float,
    rng: Array | nnx.RngStream | Rngs | None,
    return_weights: bool,
) -> implementations.KernelCall:
    operands = {"query": query, "key": key, "value": value}
    dtypes = [dtype_name(array, name) for name, array in operands.items()]
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    shape = validation.check_attention(
        query.shape, key.shape, value.shape, dtypes, dropout=dropout, scale=scale, softcap=softcap
    )
    misuse.warn_of_axes(tuple(query.shape), tuple(key.shape))
    if bias is not None:
        dtype = dtype_name(bias, "bias")
        validation.check_scores_operand("bias", jnp.shape(bias), dtype, shape)
        bias = jnp.asarray(bias)
    if sinks is not None:
        dtype = dtype_name(sinks, "sinks")
        validation.check_sinks(jnp.shape(sinks), dtype, shape[1])
        sinks = jnp.asarray(sinks)
    if mask is not None:
        mask = _placed_checked(mask, shape)
        # Kernels without a mask are faster, and some take none.
        mask = None if isinstance(mask, Full) else mask
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return implementations.KernelCall(
        query, key, value, mask, bias, scale, softcap, sinks, dropout, rng, return_weights
    )


def _placed_checked(mask: Mask | Bool[Array, "..."], shape: tuple[int, ...]) -> Mask:
    mask = as_placed(mask)
    mask.check_arrays(lambda array: _check_mask(array, shape))
    mask.check_sizes(shape[0])
    return counting_tokens(mask, may_hide).placed(*shape[2:])


def may_hide(visible: Bool[Array, "B"]) -> bool:
    """Return whether an array may have a False; True where its values are unknown."""
    return not (_has_values(visible) and bool(np.asarray(visible).all()))


def visible_keys(mask: Mask | Bool[Array, "..."], shape: tuple[int, ...], like: Array) -> Bool[Array, "..."]:
    """Return a mask as a bool array of 4 dimensions that broadcasts to scores of a shape.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: an array that is not bool.
    """
    del like  # its device is where JAX computes anyway
    queries, keys = (jnp.arange(size) for size in shape[2:])
    seen = _placed_checked(mask, shape).allowed(queries[:, None], keys[None, :])
    return jnp.array(seen, ndmin=4, copy=False)


def constant(array: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
    """Return an array without its gradient, in a dtype if given."""
    return jax.lax.stop_gradient(array).astype(dtype or array.dtype)


def _check_mask(mask: Bool[Array, "..."], scores_shape: tuple[int, ...]) -> None:
    validation.check_attention_mask(mask.shape, dtype_name(mask), scores_shape)
    if mask.ndim == 2:
        look_at_mask(mask, scores_shape)


def look_at_mask(mask: Bool[Array, "B S"], scores_shape: tuple[int, ...]) -> None:
    """Warn of a padding mask that is inverted or causal, where its values are known."""
    if _has_values(mask) and misuse.should_look():
        misuse.warn_of_mask(np.asarray(mask), scores_shape)


def as_placed(mask: Mask | Bool[Array, "..."]) -> Mask:
    """Return a mask as a description whose arrays are JAX's, those of padding in bool."""
    # First as given: while a function is traced, JAX's arrays of constants have no values.
    return as_mask(mask).with_bool_arrays(as_visible).with_arrays(jnp.asarray).with_bool_arrays(as_visible)


def as_visible(mask: Any, name: str = "attention mask") -> Any:
    """Return a padding mask ``(B, S)`` of integers 0 and 1, as tokenizers make it, in bool; any other mask as it is.

    Raises:
        ValueError: another integer, where the values are known.
    """
    if not hasattr(mask, "dtype") or not validation.is_padding_of_integers(shape_of(mask), dtype_name(mask)):
        return mask
    if (isinstance(mask, np.ndarray) or _has_values(mask)) and mask.size:
        values = np.asarray(mask)  # while a function is traced, JAX traces the reductions of its constants, too
        validation.check_zeros_and_ones(name, int(values.min()), int(values.max()))
    return mask != 0


def _has_values(array: Array) -> bool:
    """Return whether an array may be looked at: nothing is traced, and all of it is in this process."""
    return not isinstance(array, jax.core.Tracer) and array.is_fully_addressable


def as_batch(
    x: Float[Array, "... T D"],
    layer: nnx.Linear | Array | None = None,
    *,
    d_in: int | None = None,
    context_length: int | None = None,
    cache: Any = None,
    cached: str = "key",
    misplaced: tuple[object, ...] = (),
) -> Float[Array, "B T D"]:
    """Check the input of an attention module and give ``(T, d_in)`` a batch axis.

    `layer`, or the matrix itself, is what `x` goes into; JAX promotes the two to a common dtype.
    `cached` names an array that the module's kind of `cache` has. `misplaced` are further arguments by position, which
    there must not be.
    """
    misuse.check_alone(misplaced)
    dtype = dtype_name(x, "x")
    validation.check_bounded(jnp.shape(x)[-2] if jnp.ndim(x) > 1 else 0, "context_length", context_length)
    validation.check_tokens(jnp.shape(x), dtype, d_in=d_in, context_length=context_length)
    cache_validation.check_cache(cache, "jax_attn", cached)
    x = jnp.asarray(x)
    if layer is not None:
        check_dtype(x, layer)
    return x[None] if x.ndim == 2 else x


def as_context(
    context: Float[Array, "... S D"], x: Float[Array, "... T E"], layer: nnx.Linear, *, d_context: int
) -> Float[Array, "B S D"]:
    """Check the context of a cross attention against its input `x`, and give ``(S, d_context)`` a batch axis."""
    dtype = dtype_name(context, "context")
    validation.check_context(jnp.shape(context), dtype, jnp.shape(x), d_context=d_context)
    context = jnp.asarray(context)
    check_dtype(context, layer, "context")
    return context[None] if context.ndim == 2 else context


def as_features(x: Float[Array, "... D"], scale: Array, emb_dim: int) -> Float[Array, "... D"]:
    """Check the input of a norm, whose last axis is multiplied with `scale`."""
    dtype = dtype_name(x, "x")
    validation.check_features(shape_of(x), dtype, emb_dim)
    check_width("scale", scale.shape[-1], emb_dim)
    x = jnp.asarray(x)
    check_dtype(x, scale)
    return x


def check_dtype(x: Float[Array, "..."], layer: nnx.Linear | Array, name: str = "x") -> None:
    """Refuse nothing: JAX promotes input and weights to a common dtype, where torch multiplies equal ones only."""


def matrix(layer: nnx.Linear, x: Float[Array, "..."], size: int) -> Float[Array, "i o"]:
    """Return the matrix ``(in, out)`` of a linear layer without bias, in the dtype in which it would take `x`.

    Of a layer that replaced ours, or its product, it is the layer's result for the `size` unit vectors.

    Raises:
        ValueError: the layer adds something to its product, where the values are known.
    """
    if is_plain(layer):
        return layer.kernel.astype(layer.dtype or jnp.promote_types(x.dtype, layer.kernel.dtype))
    matrix: Array = layer(jnp.eye(size + 1, size, dtype=x.dtype))
    validation.check_no_offset(type(layer).__name__, _has_values(matrix) and bool(matrix[size].any()))
    return matrix[:size]


def is_plain(layer: nnx.Module) -> bool:
    """Return whether a call of a layer is JAX's product with its weights, and nothing else: no other `dot_general`."""
    return is_stock(layer) and layer.dot_general in (few_rows.dot_general, jax.lax.dot_general)


def is_stock(layer: nnx.Module) -> bool:
    """Return whether a layer is Flax's ``Linear``, sharded or not, rather than a replacement such as ``nnx.LoRA``.

    Only then do its weights determine the dtype of its results.
    """
    kind = type(layer)
    return any(
        (kind.__module__, kind.__qualname__) == (own.__module__, own.__qualname__) for own in (Linear, nnx.Linear)
    )


def widened(layer: nnx.Module, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
    """Return the output of a linear layer, its input and weights in float32, or wider ones as they are.

    A layer that replaced ours computes in its own dtype. A product that replaced JAX's gets the wide numbers.
    """
    wide = wide_dtype(x)
    if not is_stock(layer):
        return layer(x).astype(wide)
    last = (((x.ndim - 1,), (0,)), ((), ()))
    out = layer.dot_general(x.astype(wide), layer.kernel.astype(wide), last, precision=layer.precision)
    return out if layer.bias is None else out + layer.bias.astype(wide)


def cache_options(layer: nnx.Module) -> dict[str, Any]:
    """Return the dtype of a cache for the output of a layer.

    The dtype None is that of the first keys and values: the output of a replacement layer determines it.
    """
    if is_stock(layer):
        return {"dtype": layer.dtype or layer.kernel.dtype}
    return {"dtype": None}


def project_heads(x: Float[Array, "B T D"], heads: Sequence[nnx.Module]) -> list[Float[Array, "B T H C"]]:
    """Return query, key and value of all heads of `MultiHeadAttentionWrapper`, each ``(B, T, H, C)``."""
    layers = [getattr(head, name) for name in ("W_query", "W_key", "W_value") for head in heads]
    for layer in layers:
        if isinstance(layer, nnx.Linear) and layer.bias is not None:
            check_bias("a head", layer.bias.shape[0], layer.kernel.shape[-1])
    joint = jnp.concatenate([layer(x) for layer in layers], -1)
    check_width("all heads' projections", joint.shape[-1], 3 * len(heads) * heads[0].config.d_out)
    return list(rearrange(joint, "b t (n h c) -> n b t h c", n=3, h=len(heads)))


def as_pair(result: Array | tuple[Array, Array]) -> tuple[Array, Array | None]:
    """Return context and weights from the result of `dot_product_attention`; None for weights not asked for."""
    return result if isinstance(result, tuple) else (result, None)


def as_given(
    x: Float[Array, "... T D"], context: Float[Array, "B T E"], weights: Float[Array, "B ... T S"] | None
) -> Array | tuple[Array, Array]:
    """Return a module's result for `x`: without the batch axis if `x` had none, with the weights if given."""
    if jnp.ndim(x) == 2:
        context, weights = context[0], weights if weights is None else weights[0]
    return context if weights is None else (context, weights)


def root(square: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the square root of numbers of at least 0; its gradient is 0 at 0, where that of `sqrt` is infinite.

    A row of zeros, such as the embedding of a padding token, then passes no NaN back.
    """
    is_positive = square > 0.0
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, square, 1.0)), 0.0)


def wide_dtype(x: Float[Array, "..."]) -> np.dtype:
    """Return the dtype of values that 16 bits round too much, such as rotary tables: float32, float64 for float64."""
    return jnp.promote_types(x.dtype, jnp.float32)


def widen(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return an array in its `wide_dtype`."""
    return x.astype(wide_dtype(x))


def joined(arrays: list[Array]) -> Array:
    """Return arrays side by side along their last axis: channels of one token."""
    return jnp.concatenate(arrays, -1)


def with_cache(result: Any, cache: Any) -> Any:
    """Return the result of a module, or all its results, followed by its cache, if any."""
    if cache is None:
        return result
    return (*result, cache) if isinstance(result, tuple) else (result, cache)


def attention_arguments(module: nnx.Module) -> dict[str, Any]:
    """Return the arguments of `dot_product_attention` that a module has: dropout, implementation, devices."""
    dropout, sharding = getattr(module, "dropout", None), getattr(module, "sharding", None)
    arguments = {} if sharding is None else {"sharding": sharding}
    implementation = getattr(module, "implementation", None)
    if implementation is not None:
        arguments["implementation"] = implementation
    if dropout is None or dropout.deterministic:
        return arguments
    return {"dropout": dropout.rate, "rng": dropout.rngs, **arguments}


def signed(array: Int[Array, "..."]) -> Int[Array, "..."]:
    """Return integers in a dtype whose sums and differences do not wrap around, and that holds any size.

    Raises:
        ValueError: a number that JAX would cut to 32 bits, where the values are known.
    """
    is_cut = not jax.config.jax_enable_x64 and dtype_name(array) in ("int64", "uint32", "uint64")
    if is_cut and (not isinstance(array, jax.Array) or _has_values(array)) and np.size(array):
        validation.check_32_bits(int(np.min(array)), int(np.max(array)))
    array = jnp.asarray(array)
    return array if array.dtype in (jnp.int32, jnp.int64) else array.astype(int)


def shape_of(array: Array) -> tuple[int, ...]:
    """Return the shape of an array as a tuple of integers."""
    return tuple(np.shape(array))


def dtype_name(array: Array, name: str = "an array") -> str:
    """Return the name of an array's dtype, such as ``"float32"``, as it is before JAX narrows it.

    Raises:
        TypeError: an object that JAX takes for no array; the message calls it `name`.
    """
    if type(array).__module__.partition(".")[0] == "torch":
        raise TypeError(f"{name} must be a JAX or NumPy array, got a torch {type(array).__name__}")
    if hasattr(array, "dtype"):
        return np.dtype(array.dtype).name
    try:
        return jnp.asarray(array).dtype.name
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a JAX or NumPy array, got {type(array).__name__}") from None
