"""The kernels of `attn_kernels` as two operations of torch, forward and backward, with derivatives and `vmap`.

Sequences are the first axis of every array: query, key and value have an entry for each, other arrays one for a fixed
number of neighbours. A `vmap` is folded into that axis.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from attn_bridge.masks import ArrayMask
from attn_kernels import words
from attn_kernels.description import describe

from ..random import bernoulli
from . import reference
from .call import KernelCall

if TYPE_CHECKING:
    from torch._functorch.autograd_function import VmapInfo

_LIBRARY = torch.library.Library("attn_bridge", "DEF")

_OTHERS = ("bias", "sinks", "mask", "query_ids", "key_ids", "seed", "kept", "bounds")

_OPTIONS = "float scale, float? softcap, float dropout"

_LIBRARY.define(
    f"flash_forward(Tensor query, Tensor key, Tensor value, {', '.join(f'Tensor? {name}' for name in _OTHERS)}, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    f"flash_backward(Tensor query, Tensor key, Tensor value, {', '.join(f'Tensor? {name}' for name in _OTHERS)}, "
    f"Tensor top, Tensor total, Tensor d_context, Tensor d_total, {_OPTIONS}, bool asks_for_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def attention(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B S K D"],
    value: Float[Tensor, "B S K Dv"],
    *,
    bias: Tensor | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    seed: Tensor | None,
    kept: Tensor | None,
    bounds: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> tuple[Float[Tensor, "B T H Dv"], Float[Tensor, "B H T"], Float[Tensor, "B H T"]]:
    """Return the context and, per row, the largest score, without a gradient, and the sum of ``exp(scores - largest)``.

    Args:
        query: of float32, bfloat16 or float16, as `key` and `value`.
        key: K divides H.
        value: may have another width.
        bias: ``(n, H or 1, T or 1, S)``; here and below n divides B.
        sinks: ``(n, H)``.
        mask: bool ``(n, H or 1, T or 1, S or 1)``, False where a key is hidden.
        query_ids: whole numbers ``(n, 1, T, 1)`` of documents.
        key_ids: ``(n, 1, 1, S)``.
        seed: of Threefry, int32 ``(n, 2)``, for weights to drop; or
        kept: bool ``(B, H, T, S)``, those that are not dropped.
        bounds: int64 ``(2, T)``, the first key that each query sees, and the one after the last; neither goes back.
        scale: factor of the scores.
        softcap: scores are capped at this.
        dropout: rate at which weights are dropped.
    """
    others = (bias, sinks, mask, query_ids, key_ids, seed, kept, bounds)
    forward = _forward if _is_plain(query, key, value, bias, sinks) else _chosen("flash_forward")
    results: tuple[Tensor, Tensor, Tensor] = forward(query, key, value, *others, scale, softcap, dropout)
    return results


def _is_plain(*arrays: Tensor | None) -> bool:
    """Return whether no gradient or transform follows the call: going through torch would outlast a short one."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in arrays):
        return False
    return not torch._C._len_torch_dispatch_stack()


# ---- on this processor


def _forward(
    query: Tensor, key: Tensor, value: Tensor, *rest: object, decodes: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    results = _forward_results(query, key, value)
    kind = "decode" if decodes and _is_decoding(query, rest) else "forward"
    _run(kind, (query, key, value), rest[: len(_OTHERS)], rest[-3:], zip(_FORWARD, results, strict=True))
    return results


def _is_decoding(query: Tensor, others: Sequence[object]) -> bool:
    """Return whether the kernel for few queries computes a call, which drops no weights."""
    seed, kept = others[5:7]
    return query.shape[1] <= words.FEW and seed is kept is None


_FORWARD = (words.CONTEXT, words.TOP, words.TOTAL)


def _backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    others, (top, total, d_context, d_total), (*options, asks) = rest[: len(_OTHERS)], rest[-8:-4], rest[-4:]
    bias, sinks = others[:2]
    if _is_decoding(query, others):
        # That kernel rounds scores in another order, and only the rounding of the scores computed here cancels.
        _, own_top, total = _forward(query, key, value, *others, *options, decodes=False)
        top, d_total = own_top, d_total * torch.exp(own_top - top)  # a sum is relative to its largest score
    d_query, d_key, d_value = (
        torch.empty_like(one, memory_format=torch.contiguous_format) for one in (query, key, value)
    )
    slope = torch.empty_like(top, memory_format=torch.contiguous_format)
    d_bias = query.new_empty(_shape_of_gradient(query, bias) if asks else 0, dtype=torch.float32)
    written = (top, total, d_context.to(query.dtype), d_total, d_query, d_key, d_value, slope, d_bias)
    _run("backward", (query, key, value), others, options, zip(_BACKWARD, written, strict=True), asks)
    if asks:
        d_bias = d_bias.unflatten(0, (bias.shape[0], -1)).sum(1).to(bias.dtype)
        d_bias = d_bias if bias.shape[1] > 1 else d_bias.sum(1, keepdim=True)
    return d_query, d_key, d_value, d_bias, _gradient_of_sinks(sinks, top, total, slope)


_BACKWARD = (
    *(words.TOP, words.TOTAL, words.D_CONTEXT, words.D_TOTAL),
    *(words.D_QUERY, words.D_KEY, words.D_VALUE, words.SLOPE, words.D_BIAS),
)


def _run(
    kind: str,
    inputs: Sequence[Tensor],
    others: Sequence[Tensor | None],
    options: Sequence[Any],
    more: Iterable[tuple[int, Tensor]],
    asks: bool = False,
) -> None:
    """Run a kernel on arrays, and on more of them by the words of their addresses."""
    query = inputs[0]
    sequences = query.shape[0]
    present = {name: one for name, one in zip(_OTHERS, others, strict=True) if one is not None}
    bounds, seed = present.pop("bounds", None), present.get("seed")
    if "bias" in present:
        present["bias"] = present["bias"].float()
    if "sinks" in present:
        present["sinks"] = _for_each(present["sinks"].float(), sequences)
    if "query_ids" in present:
        present["query_ids"], present["key_ids"] = _in_32_bits(present["query_ids"], present["key_ids"])
    scale, softcap, dropout = options
    strides = None
    if kind == "decode":  # a cache is read where it lies
        inputs = [query, *(one if one.stride(-1) == 1 else one.contiguous() for one in inputs[1:])]
        of_keys, of_values = (tuple(one.stride()[:3]) for one in inputs[1:])
        strides = of_keys, of_values
    shapes: list[tuple[int, ...]] = [tuple(one.shape) for one in inputs]
    description = describe(
        str(query.dtype).removeprefix("torch."),
        shapes[0],
        shapes[1],
        shapes[2],
        {name: tuple(one.shape) for name, one in present.items()},
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        batch=sequences if seed is None else sequences // seed.shape[0],
        bounded=bounds is not None,
        differentiates_bias=asks,
        strides=strides,
    )
    arrays = dict(zip((words.QUERY, words.KEY, words.VALUE), inputs, strict=True))
    arrays |= {words.OPTIONAL[name][1]: one for name, one in present.items()} | dict(more)
    if bounds is not None:
        arrays[words.BOUNDS] = bounds
    placed = (words.KEY, words.VALUE) if kind == "decode" else ()
    arrays = {word: one if word in placed else one.contiguous() for word, one in arrays.items()}
    calls = importlib.import_module("attn_kernels.direct.calls")
    addresses = {word: one.data_ptr() for word, one in arrays.items()}
    calls.run(kind, description, addresses, sequences, torch.get_num_threads(), _team())


@functools.cache
def _team() -> int:
    """Return the address of ``GOMP_parallel``, which runs work on torch's own threads, 0 if there is no such library.

    Those threads spin for a while between tasks, so that other threads would compete with them for the cores.
    """
    for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        with contextlib.suppress(OSError, AttributeError):
            loaded = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_LAZY)
            return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


def _leave_team() -> None:
    """Forget torch's threads, which a child has not got."""
    global _team
    _team = functools.cache(lambda: 0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_team)


def _in_32_bits(*ids: Tensor) -> list[Tensor]:
    """Return document ids as int32; ids that do not fit are renumbered, so that equal ones stay equal."""
    if any(one.dtype.itemsize > 4 for one in ids):
        least, largest = (getattr(torch.cat([one.flatten() for one in ids]), name)() for name in ("min", "max"))
        if least < -(2**31) or largest >= 2**31:
            places = torch.unique(torch.cat([one.flatten() for one in ids]), return_inverse=True)[1]
            ids = tuple(
                part.view(one.shape) for part, one in zip(places.split([one.numel() for one in ids]), ids, strict=True)
            )
    return [one.to(torch.int32) for one in ids]


def _for_each(array: Tensor, sequences: int) -> Tensor:
    """Repeat the entries of an array that each serve several neighbouring sequences."""
    return array.repeat_interleave(sequences // array.shape[0], 0)


def _gradient_of_sinks(sinks: Tensor | None, top: Tensor, total: Tensor, slope: Tensor) -> Tensor:
    """Return the gradient of the sinks, empty without sinks; a hidden row contributes nothing.

    The slope of a row is the common factor in the gradients of its weights, over `total`.
    """
    if sinks is None:
        return top.new_empty(0)
    shifted = torch.where(total != 0.0, _for_each(sinks.to(top.dtype), top.shape[0])[:, :, None] - top, -torch.inf)
    of_heads = (torch.exp(shifted) * slope).sum(-1)
    return -of_heads.unflatten(0, (sinks.shape[0], -1)).sum(1).to(sinks.dtype)


def _shape_of_gradient(query: Tensor, bias: Tensor) -> tuple[int, ...]:
    """Return the shape of the gradient of a bias as kernels add it up: for each head, and each sequence if need be."""
    sequences, _, queries, keys = bias.shape
    return (query.shape[0] if queries == 1 else sequences, query.shape[2], queries, keys)


# ---- without numbers


def _forward_results(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty results: the context, and per row the largest score and the sum of exponentials."""
    batch, queries, heads, _ = query.shape
    top, total = (query.new_empty((batch, heads, queries), dtype=torch.float32) for _ in range(2))
    return query.new_empty((batch, queries, heads, value.shape[-1])), top, total


def _backward_results(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, ...]:
    bias, sinks = rest[:2]
    d_bias = torch.empty_like(bias) if rest[-1] else query.new_empty(0)
    d_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    copies = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (query, key, value))
    return (*copies, d_bias, d_sinks)


# ---- derivatives


def _keep(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    # Query, key and value, the eight of `_OTHERS`, and the two results per row.
    ctx.save_for_backward(*inputs[:11], *output[1:])
    ctx.options = inputs[11:]


def _differentiate(ctx: FunctionCtx, d_context: Tensor | None, _: object, d_total: Tensor | None) -> tuple[object, ...]:
    *operands, top, total = ctx.saved_tensors
    query, value = operands[0], operands[2]
    if d_context is None:
        d_context = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    if d_total is None:
        d_total = torch.zeros_like(total)
    sinks, asks = operands[4], ctx.needs_input_grad[3]
    *gradients, d_bias, d_sinks = _chosen("flash_backward")(
        *operands, top, total, d_context, d_total, *ctx.options, asks
    )
    nothing = (None,) * (len(_OTHERS) - 2 + len(ctx.options))
    return (*gradients, d_bias if asks else None, None if sinks is None else d_sinks, *nothing)


def _keep_of_backward(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    # The same eleven, both results per row, and the gradients of context and sums.
    ctx.save_for_backward(*inputs[:15])
    ctx.options = inputs[15:]


def _differentiate_twice(ctx: FunctionCtx, *seconds: Tensor | None) -> tuple[object, ...]:
    """Return the gradients of the gradients, by plain code in memory that grows with T times S, as it is rare."""
    *operands, top, _, d_context, d_total = ctx.saved_tensors
    *options, _ = ctx.options
    others = [*operands[5:8], _kept(operands, options[-1]), operands[10]]
    arguments = [*operands[:5], d_context, d_total]
    positions = [position for position, array in enumerate(arguments) if array is not None]

    def gradients(*present: Tensor) -> tuple[Tensor, ...]:
        arrays: list[Tensor | None] = [None] * len(arguments)
        for position, array in zip(positions, present, strict=True):
            arrays[position] = array
        *inputs, d_context, d_total = arrays
        present_inputs = [array for array in inputs if array is not None]

        def at_once(*present_inputs: Tensor) -> tuple[Tensor, Tensor]:
            parts = iter(present_inputs)
            return _at_once([None if array is None else next(parts) for array in inputs], others, top, *options)

        of_present = iter(torch.func.vjp(at_once, *present_inputs)[1]((d_context, d_total)))
        of_inputs = [None if array is None else next(of_present) for array in inputs]
        return tuple(array for array, second in zip(of_inputs, seconds, strict=True) if second is not None)

    asked = tuple(second for second in seconds if second is not None)
    pull_back = torch.func.vjp(gradients, *(arguments[position] for position in positions))[1]
    of_arguments = dict(zip(positions, pull_back(asked), strict=True))
    of_operands = [of_arguments.get(position) for position in range(5)]
    return (*of_operands, *(None,) * 6, None, None, of_arguments[5], of_arguments[6], *(None,) * len(ctx.options))


def _kept(operands: Sequence[Tensor], dropout: float) -> Tensor | None:
    """Return which weights are kept, None where there is no dropout."""
    query, key, seed, kept = (operands[place] for place in (0, 1, 8, 9))
    if seed is None:
        return kept
    shape = (query.shape[0] // seed.shape[0], query.shape[2], query.shape[1], key.shape[1])
    return torch.cat([bernoulli(one, 1.0 - dropout, shape) for one in seed])


def _at_once(
    inputs: Sequence[Any],
    others: Sequence[Tensor | None],
    top: Tensor,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return context and sums by the reference."""
    query, key, value, bias, sinks = inputs
    mask, query_ids, key_ids, kept, bounds = others
    sequences, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    allowed = torch.ones((1, 1, queries, keys), dtype=torch.bool, device="cpu")
    if bounds is not None:
        at, (start, end) = torch.arange(keys, device="cpu"), bounds[..., None]
        allowed = allowed & (start <= at) & (at < end)
    if mask is not None:
        allowed = allowed & _for_each(mask, sequences)
    if query_ids is not None and key_ids is not None:
        allowed = allowed & (_for_each(query_ids, sequences) == _for_each(key_ids, sequences))
    if bias is not None:
        bias = _for_each(bias, sequences)
    if sinks is not None and sinks.shape[0] != 1:
        raise NotImplementedError("second derivatives need sinks that all sequences share")
    sinks = None if sinks is None else sinks[0]
    rng = None if kept is None else reference.Drawn(kept)
    call = KernelCall(query, key, value, ArrayMask(allowed), bias, scale, softcap, sinks, dropout, rng, False)
    context, sums = reference.attend_with_lse(call)
    return context, torch.exp(sums - top)


# ---- vmap


def _folding(run: Any, arguments: Any, shared: tuple[str, ...]) -> Any:
    """Return how an operation is computed for a batch; one of the arrays `shared` may be for all of it."""
    tensors = [n for n, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
    arrays = [n for n in tensors if arguments[n].name != "bounds"]

    def batched(info: VmapInfo, dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size, folded = info.batch_size, list(args)
        for position in arrays:
            array, dim = args[position], dims[position]
            if array is None or (dim is None and arguments[position].name in shared and array.shape[0] == 1):
                continue
            array = array.expand(size, *array.shape) if dim is None else array.movedim(dim, 0)
            folded[position] = array.flatten(0, 1)
        results = tuple(_unfolded(array, size) for array in run(*folded))
        return results, (0,) * len(results)

    return batched


def _unfolded(array: Tensor, size: int) -> Tensor:
    return array.expand(size, *array.shape) if array.numel() == 0 else array.unflatten(0, (size, -1))


def _chosen(name: str) -> Callable[..., Any]:
    """Return an operation, inside `torch.func` as a function of autograd: it knows others not, which cost less."""
    is_transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    return _FUNCTIONS[name].apply if is_transformed else getattr(torch.ops.attn_bridge, name).default


def _register() -> dict[str, Any]:
    """Register the operations, and return them as functions of autograd."""
    of_mask, functions = ("mask", "query_ids", "key_ids"), {}
    for name, run, results, keep, differentiate, shared in (
        ("flash_forward", _forward, _forward_results, _keep, _differentiate, ("bias", "sinks", *of_mask)),
        ("flash_backward", _backward, _backward_results, _keep_of_backward, _differentiate_twice, of_mask),
    ):
        _LIBRARY.impl(name, run, "CPU")
        whole = f"attn_bridge::{name}"
        torch.library.register_fake(whole, results, lib=_LIBRARY)
        torch.library.register_autograd(whole, differentiate, setup_context=keep, lib=_LIBRARY)
        operation = getattr(torch.ops.attn_bridge, name).default
        parts = {"forward": operation, "setup_context": keep, "backward": differentiate}
        function: Any = type(name, (torch.autograd.Function,), {key: staticmethod(one) for key, one in parts.items()})
        function.vmap = staticmethod(_folding(function.apply, operation._schema.arguments, shared))
        functions[name] = function
    return functions


_FUNCTIONS = _register()
