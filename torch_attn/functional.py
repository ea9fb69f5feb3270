"""Attention as functions, and what torch does differently from JAX: dtypes, devices, random numbers.

The twin is `jax_attn.functional`. Letters: b batch, t query position, s key position, h key/value head,
g query heads per key/value head, c channel of a head; in shapes H is all query heads, K the key/value heads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from attn_bridge import cache_validation, misuse, validation
from attn_bridge.foreign_names import names_ours
from attn_bridge.masks import Mask, as_mask, counting_tokens
from attn_bridge.masks.positions import Full
from attn_bridge.sharding.heads import check_width
from attn_bridge.sharding.linear_layers import check_bias

from . import implementations
from .operations.autocast import without_autocast
from .random import JaxRngs, RandomSource, RngStream
from .shards import is_sharded, whole
from .signatures import typed_as
from .signatures.function import FunctionCall

if TYPE_CHECKING:
    from .parallel.sharding import Sharding

IMPLEMENTATIONS = tuple(implementations.IMPLEMENTATIONS)
"""Names that ``implementation=`` takes, fastest first; ``"reference"`` is plain einsum code and supports every call."""


class _Chosen(threading.local):
    """The name that `use_implementation` chose in this thread; unlike a context variable, `torch.compile` reads it."""

    name: str | None = None


_CHOSEN = _Chosen()

_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


@typed_as(FunctionCall)
@names_ours
def dot_product_attention(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B S K D"],
    value: Float[Tensor, "B S K Dv"],
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
    dropout: float = 0.0,
    rng: torch.Generator | RngStream | JaxRngs | None = None,
    return_weights: bool = False,
    implementation: str | None = None,
    sharding: Sharding | None = None,
) -> Float[Tensor, "B T H Dv"] | tuple[Float[Tensor, "B T H Dv"], Float[Tensor, "B H T S"]]:
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
        rng: source of the dropout mask: a `torch.Generator`, a stream of a `JaxRngs`, a `JaxRngs` (its ``dropout``
            stream), or None for the global generator.
        return_weights: also return the weights ``(B, H, T, S)``, as they are before dropout; only the reference does.
        implementation: a name in `IMPLEMENTATIONS`; None takes the fastest that supports the call.
        sharding: devices that share the call, as `parallel.parallelize` gives it to modules; the arguments are whole
            arrays, and each device computes its heads and tokens.

    Returns:
        The context ``(B, T, H, Dv)`` in the dtype of `query`, and the weights if asked for.

    Raises:
        NotImplementedError: the named implementation does not support the call; gives the reason.
        ValueError: shapes, rates or names that do not fit.
        TypeError: dtypes or kinds of objects that do not fit.
    """
    implementation = check_implementation(implementation) or _CHOSEN.name
    call = _checked(query, key, value, mask, bias, scale, softcap, sinks, dropout, rng, return_weights)
    with without_autocast(query):
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
    before, _CHOSEN.name = _CHOSEN.name, check_implementation(name)
    try:
        yield
    finally:
        _CHOSEN.name = before


def check_implementation(name: str | None) -> str | None:
    """Return the name of an implementation unchanged; raise a ValueError if it is unknown."""
    validation.check_implementation(name, IMPLEMENTATIONS)
    return name


def explain(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B S K D"],
    value: Float[Tensor, "B S K Dv"],
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
    dropout: float = 0.0,
    rng: torch.Generator | RngStream | JaxRngs | None = None,
    return_weights: bool = False,
) -> dict[str, str | None]:
    """Return implementation -> why it can't serve a call of `dot_product_attention`; None if it can.

    Args are those of `dot_product_attention`. The names come fastest first: the first that has None serves the call.
    """
    return implementations.explain(
        _checked(query, key, value, mask, bias, scale, softcap, sinks, dropout, rng, return_weights)
    )


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Bool[Tensor, "..."] | None,
    bias: Float[Tensor, "..."] | None,
    scale: float | None,
    softcap: float | None,
    sinks: Float[Tensor, "H"] | None,
    dropout: float,
    rng: RandomSource,
    return_weights: bool,
) -> implementations.KernelCall:
    operands = {"query": query, "key": key, "value": value}
    dtypes = [dtype_name(array, name) for name, array in operands.items()]
    for name, array in operands.items():
        validation.check_dense(name, array)
    shape = validation.check_attention(
        tuple(query.shape), tuple(key.shape), tuple(value.shape), dtypes, dropout=dropout, scale=scale, softcap=softcap
    )
    misuse.warn_of_axes(tuple(query.shape), tuple(key.shape))
    if bias is not None:
        dtype = dtype_name(bias, "bias")
        validation.check_scores_operand("bias", tuple(bias.shape), dtype, shape)
    if sinks is not None:
        dtype = dtype_name(sinks, "sinks")
        validation.check_sinks(tuple(sinks.shape), dtype, shape[1])
    if mask is not None:
        mask = _placed_checked(mask, shape, query.device)
        # Kernels without a mask are faster, and some take none.
        mask = None if isinstance(mask, Full) else mask
    scale = float(query.shape[-1]) ** -0.5 if scale is None else scale
    return implementations.KernelCall(
        query, key, value, mask, bias, scale, softcap, sinks, dropout, rng, return_weights
    )


def _placed_checked(mask: Mask | Bool[Tensor, "..."], shape: tuple[int, ...], device: Device) -> Mask:
    mask = as_placed(mask, device)
    mask.check_arrays(lambda array: _check_mask(array, shape))
    mask.check_sizes(shape[0])
    return counting_tokens(mask, may_hide).placed(*shape[2:])


def may_hide(visible: Bool[Tensor, "B"]) -> bool:
    """Return whether an array may have a False; True where its values are unknown."""
    return not (_has_values(visible) and bool(visible.all()))


def visible_keys(mask: Mask | Bool[Tensor, "..."], shape: tuple[int, ...], like: Tensor) -> Bool[Tensor, "..."]:
    """Return a mask as a bool array of 4 dimensions that broadcasts to scores of a shape, on the device of `like`.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: an array that is not bool.
    """
    queries, keys = (torch.arange(size, device=like.device) for size in shape[2:])
    seen: Tensor = _placed_checked(mask, shape, like.device).allowed(queries[:, None], keys[None, :])
    return seen[(None,) * (4 - seen.ndim)]


def constant(array: Float[Tensor, "..."], dtype: torch.dtype | None = None) -> Float[Tensor, "..."]:
    """Return an array without its gradient, in a dtype if given; all of it on each device where devices share it."""
    return whole(array).detach().to(dtype or array.dtype)


def _check_mask(mask: Bool[Tensor, "..."], scores_shape: tuple[int, ...]) -> None:
    validation.check_attention_mask(tuple(mask.shape), dtype_name(mask), scores_shape)
    if mask.ndim == 2:
        look_at_mask(mask, scores_shape)


def look_at_mask(mask: Bool[Tensor, "B S"], scores_shape: tuple[int, ...]) -> None:
    """Warn of a padding mask that is inverted or causal, where its values are known."""
    if _has_values(mask) and misuse.should_look():
        misuse.warn_of_mask(mask.numpy(force=True), scores_shape)


def as_placed(mask: Mask | Bool[Tensor, "..."], device: Device) -> Mask:
    """Return a mask as a description whose arrays are on a device, those of padding in bool."""
    return as_mask(mask).with_arrays(lambda array: torch.as_tensor(array, device=device)).with_bool_arrays(as_visible)


def as_visible(mask: Any, name: str = "attention mask") -> Any:
    """Return a padding mask ``(B, S)`` of integers 0 and 1, as tokenizers make it, in bool; any other mask as it is.

    Raises:
        ValueError: another integer, where the values are known.
    """
    if not isinstance(mask, Tensor) or not validation.is_padding_of_integers(tuple(mask.shape), dtype_name(mask)):
        return mask
    if _has_values(mask) and mask.numel():
        validation.check_zeros_and_ones(name, int(mask.min()), int(mask.max()))
    return mask != 0


def _has_values(array: Tensor) -> bool:
    """Return whether an array may be looked at: nothing is traced, transformed or recorded."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    if type(array) is not Tensor or array.is_meta or torch._C._len_torch_dispatch_stack():
        return False
    return not (array.is_cuda and torch.cuda.is_current_stream_capturing())


def as_batch(
    x: Float[Tensor, "... T D"],
    layer: nn.Linear | Tensor | None = None,
    *,
    d_in: int | None = None,
    context_length: int | None = None,
    cache: object = None,
    cached: str = "key",
    misplaced: tuple[object, ...] = (),
) -> Float[Tensor, "B T D"]:
    """Check the input of an attention module and give ``(T, d_in)`` a batch axis.

    `layer`, or the matrix itself, is what `x` goes into; torch multiplies equal dtypes only (autocast aside).
    `cached` names an array that the module's kind of `cache` has. `misplaced` are further arguments by position, which
    there must not be.
    """
    misuse.check_alone(misplaced)
    dtype = dtype_name(x, "x")
    validation.check_dense("x", x)
    validation.check_tokens(tuple(x.shape), dtype, d_in=d_in, context_length=context_length)
    cache_validation.check_cache(cache, "torch_attn", cached)
    if layer is not None:
        check_dtype(x, layer)
    return x[None] if x.ndim == 2 else x


def as_context(
    context: Float[Tensor, "... S D"], x: Float[Tensor, "... T E"], layer: nn.Linear, *, d_context: int
) -> Float[Tensor, "B S D"]:
    """Check the context of a cross attention against its input `x`, and give ``(S, d_context)`` a batch axis."""
    dtype = dtype_name(context, "context")
    validation.check_dense("context", context)
    validation.check_context(tuple(context.shape), dtype, tuple(x.shape), d_context=d_context)
    check_dtype(context, layer, "context")
    return context[None] if context.ndim == 2 else context


def as_features(x: Float[Tensor, "... D"], scale: Tensor, emb_dim: int) -> Float[Tensor, "... D"]:
    """Check the input of a norm, whose last axis is multiplied with `scale`; a nested one may be jagged."""
    dtype = dtype_name(x, "x")
    if x.layout != torch.jagged:
        validation.check_dense("x", x)
    validation.check_features(shape_of(x), dtype, emb_dim)
    check_width("scale", scale.shape[-1], emb_dim)
    check_dtype(x, scale)
    return x


def check_dtype(x: Float[Tensor, "..."], layer: nn.Linear | Tensor, name: str = "x") -> None:
    """Raise a TypeError if the input has another dtype than the weights, except under autocast, which casts both.

    It does not cast float64. A replacement of a layer of ours checks its input itself.
    """
    weight = layer if isinstance(layer, Tensor) else layer.weight if is_stock(layer) else None
    if weight is None or x.dtype == weight.dtype:
        return
    kind = x.device.type
    # The meta device has no autocast.
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if not is_cast or torch.float64 in (x.dtype, weight.dtype):
        raise TypeError(f"{name} must have the dtype of the weights ({dtype_name(weight)}), got {dtype_name(x)}")


def matrix(layer: nn.Linear, x: Float[Tensor, "..."], size: int) -> Float[Tensor, "i o"]:
    """Return the matrix ``(in, out)`` of a linear layer without bias, in the dtype in which it would take `x`.

    Of a layer that replaced ours, or has hooks, it is the layer's result for the `size` unit vectors.

    Raises:
        ValueError: the layer adds something to its product, where the values are known.
    """
    if is_plain(layer):
        return layer.weight.T
    matrix: Tensor = layer(torch.eye(size + 1, size, dtype=x.dtype, device=x.device))
    validation.check_no_offset(type(layer).__name__, _has_values(matrix) and bool(matrix[size].any()))
    return matrix[:size]


def is_plain(layer: nn.Module) -> bool:
    """Return whether a call of a layer is torch's product with its weights, and nothing else: no hooks either."""
    return is_stock(layer) and not _is_watched(layer)


def is_stock(layer: nn.Module) -> bool:
    """Return whether a layer is torch's ``Linear``, sharded or not, rather than a replacement such as a quantised one.

    Only then do its weights determine the dtype of its results. A quantised weight has another tensor class, which may
    support no operation but the layer's.
    """
    kind = type(layer)
    if (kind.__module__, kind.__qualname__) != (nn.Linear.__module__, nn.Linear.__qualname__):
        return False
    return is_sharded(layer.weight) or not hasattr(layer.weight, "__tensor_flatten__")


def widened(layer: nn.Module, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
    """Return the output of a linear layer, its input and weights in float32, or wider ones as they are.

    A layer that replaced ours, or whose `forward` was, computes in its own dtype. Hooks get the wide numbers.
    """
    wide = wide_dtype(x)
    if not is_stock(layer) or _is_patched(layer):
        return layer(x).to(wide)
    with without_autocast(x):
        if _is_watched(layer):
            arrays = [*layer.named_parameters(), *layer.named_buffers()]
            wider = {name: array.to(wide) for name, array in arrays if array.is_floating_point()}
            watched: Tensor = torch.func.functional_call(layer, wider, (x.to(wide),))
            return watched
        out = x.to(wide) @ layer.weight.to(wide).T
    return out if layer.bias is None else out + layer.bias.to(wide)


def cache_options(layer: nn.Module) -> dict[str, Any]:
    """Return device and dtype of a cache for the output of a layer.

    The dtype None is that of the first keys and values: the output of a replacement layer determines it.
    """
    if is_stock(layer):
        return {"device": layer.weight.device, "dtype": layer.weight.dtype}
    tensors = [*layer.parameters(), *layer.buffers()]
    return {"device": tensors[0].device if tensors else None, "dtype": None}


def project_heads(x: Float[Tensor, "B T D"], heads: Sequence[nn.Module]) -> list[Float[Tensor, "B T H C"]]:
    """Return query, key and value of all heads of `MultiHeadAttentionWrapper`, each ``(B, T, H, C)``.

    Plain linear layers are one product, with what their weights are when put together; layers that were replaced or
    that have hooks are called one by one.
    """
    layers = [getattr(head, name) for name in ("W_query", "W_key", "W_value") for head in heads]
    plain = all(type(layer) is nn.Linear and is_plain(layer) for layer in layers)
    if plain and all((layer.bias is None) == (layers[0].bias is None) for layer in layers):
        for layer in layers if layers[0].bias is not None else ():
            check_bias("a head", layer.bias.shape[0], layer.weight.shape[0])
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        joint = nn.functional.linear(x, torch.cat([layer.weight for layer in layers]), bias)
    else:
        joint = torch.cat([layer(x) for layer in layers], -1)
    check_width("all heads' projections", joint.shape[-1], 3 * len(heads) * heads[0].config.d_out)
    return list(rearrange(joint, "b t (n h c) -> n b t h c", n=3, h=len(heads)))


def _is_watched(layer: nn.Module) -> bool:
    """Return whether hooks, or a `forward` of the layer alone, join or replace the forward of its class.

    Older versions of pruning and of weight and spectral norms are hooks that write the weight.
    """
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(own) or torch.nn.modules.module._has_any_global_hook() or _is_patched(layer)


def _is_patched(layer: nn.Module) -> bool:
    """Return whether a layer's `forward` was replaced on the layer alone, as offloading to other devices does."""
    return "forward" in vars(layer)


def as_pair(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return context and weights from the result of `dot_product_attention`; None for weights not asked for."""
    return result if isinstance(result, tuple) else (result, None)


def as_given(
    x: Float[Tensor, "... T D"], context: Float[Tensor, "B T E"], weights: Float[Tensor, "B ... T S"] | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a module's result for `x`: without the batch axis if `x` had none, with the weights if given."""
    if x.ndim == 2:
        context, weights = context[0], weights if weights is None else weights[0]
    return context if weights is None else (context, weights)


def root(square: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the square root of numbers of at least 0; its gradient is 0 at 0, where that of `sqrt` is infinite.

    A row of zeros, such as the embedding of a padding token, then passes no NaN back.
    """
    is_positive = square > 0.0
    return torch.where(is_positive, torch.sqrt(torch.where(is_positive, square, 1.0)), 0.0)


def wide_dtype(x: Float[Tensor, "..."]) -> torch.dtype:
    """Return the dtype of values that 16 bits round too much, such as rotary tables: float32, float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def widen(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return an array in its `wide_dtype`."""
    return x.to(wide_dtype(x))


def joined(arrays: list[Tensor]) -> Tensor:
    """Return arrays side by side along their last axis: channels of one token."""
    return torch.cat(arrays, -1)


def with_cache(result: Any, cache: object) -> Any:
    """Return the result of a module, or all its results, followed by its cache, if any."""
    if cache is None:
        return result
    return (*result, cache) if isinstance(result, tuple) else (result, cache)


def attention_arguments(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of `dot_product_attention` that a module has: dropout, implementation, devices."""
    dropout, sharding = getattr(module, "dropout", None), getattr(module, "sharding", None)
    arguments = {} if sharding is None else {"sharding": sharding}
    implementation = getattr(module, "implementation", None)
    if implementation is not None:
        arguments["implementation"] = implementation
    if dropout is None or not dropout.training:
        return arguments
    return {"dropout": dropout.p, "rng": getattr(dropout, "rngs", None), **arguments}


def signed(array: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return integers in a dtype whose sums and differences do not wrap around, and that holds any size."""
    return array if array.dtype in (torch.int32, torch.int64) else array.to(torch.int64)


def shape_of(array: Tensor) -> tuple[int, ...]:
    """Return the shape of an array as a tuple of integers."""
    return tuple(array.shape)


def dtype_name(array: Tensor, name: str = "an array") -> str:
    """Return the name of an array's dtype, such as ``"float32"``.

    Raises:
        TypeError: another object than a tensor; the message calls it `name`.
    """
    if not isinstance(array, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(array).__name__}")
    return _DTYPE_NAMES[array.dtype]
