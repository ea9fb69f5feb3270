"""torch's fused kernels through `scaled_dot_product_attention`, in memory that grows with T plus S.

The causal mask alone costs nothing and halves the work; any other mask becomes an array, broadcast where it can be.
Softmax and sums run in float32. Second derivatives take the reference (`second_derivatives`).
"""

from __future__ import annotations

import contextlib
import functools

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from attn_bridge.masks import as_band

from . import second_derivatives
from .call import KernelCall
from .sizes import is_surely, is_true

FAST_ON_CPU = (torch.float32, torch.float64, *([torch.bfloat16] if torch.cpu._is_amx_tile_supported() else []))
"""Dtypes in which the CPU kernel is fast. Without AMX, forward and backward in 16 bits take 6 to 9 times as long as in
float32, casts included (2 cores with AVX2, 12 heads of 64, (B, T) = (8, 256) and (2, 1024))."""

MIN_KEYS = 16
"""Numbers in the widest vector of a CPU. Where no mask is given, torch's kernel there compares fewer scores one by one,
passes over NaN, and takes a row of nothing else for a hidden one (pytorch/pytorch#141128, in torch 2.13 still)."""

FIRST_CUDNN = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Order of torch's kernels on Hopper (H100, H200) for heads of at least `MIN_WIDTH`: cuDNN's takes 0.8 of the time of
the one that torch takes first, 0.67 with gradients. With heads of 64 it takes twice as long (causal, bf16, H200)."""

MIN_WIDTH = 128
"""Channels of a head from which on cuDNN's comes first."""

FIRST_FLASH = (*FIRST_CUDNN[1:], FIRST_CUDNN[0])
"""Order for few queries on a GPU. cuDNN plans each new shape, which takes 40 ms of CPU time with an H100; torch prefers
cuDNN there, and while tokens are generated each step has another number of keys."""

MIN_QUERIES = 256
"""Queries from which on cuDNN's comes first."""


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call; None if it can."""
    if call.return_weights:
        return "it does not return the weights"
    if call.softcap is not None:
        return "it has no softcap"
    if call.sinks is not None:
        return "it has no sinks"
    if not call.query.dtype == call.key.dtype == call.value.dtype:
        dtypes = {str(array.dtype) for array in (call.query, call.key, call.value)}
        return f"query, key and value must have one dtype, got {', '.join(sorted(dtypes))}"
    if call.bias is not None and _mask_dtype(call.query, call.bias) == torch.float64 != call.query.dtype:
        return f"it would round a float64 bias for a {call.query.dtype} query"
    if call.dropout and call.rng is not None:
        return "its dropout draws from the global generator only"
    if call.bias is not None and not call.query.is_cpu and _mask_dtype(call.query, call.bias) != call.query.dtype:
        return "on this device it would round the bias to the dtype of query"
    return in_higher_modes(call)


def in_forward_mode() -> str | None:
    """Return why no fused kernel can serve a call while forward-mode derivatives are taken; None otherwise."""
    return "it has no forward-mode derivatives" if forward_ad._current_level >= 0 else None


def in_higher_modes(call: KernelCall) -> str | None:
    """Return why torch's kernels can't serve a call inside the transforms that are active; None otherwise."""
    nested = second_derivatives.nested_gradients(call.query, call.key, call.value, call.bias)
    return in_forward_mode() or nested or second_derivatives.hidden_gradient(call.bias)


@second_derivatives.twice
def attend(call: KernelCall) -> Float[Tensor, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    allowed, is_causal = _split_mask(call)
    key, value = (array.transpose(1, 2) for array in (call.key, call.value))
    batch, queries, heads, width = call.query.shape
    if is_true(queries == 1) and not is_causal and call.bias is None and _is_for_all_heads(allowed):
        # One query per head: those that share keys go together, so that the keys are read once and not once per head.
        query = call.query.reshape(batch, key.shape[1], heads // key.shape[1], width)
        context = fused(query, key, value, allowed, scale=call.scale, dropout=call.dropout)
        return context.reshape(batch, 1, heads, value.shape[-1])
    query = call.query.transpose(1, 2)
    context = fused(query, key, value, allowed, call.bias, is_causal=is_causal, scale=call.scale, dropout=call.dropout)
    return context.transpose(1, 2)


def fused(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S Dv"],
    allowed: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    *,
    scale: float,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T Dv"]:
    """Call the kernel in the form in which it is fast; a query without any key gets zeros.

    Args:
        query: heads before positions, as torch has them; so are `key` and `value`.
        key: K divides H.
        value: may have another width.
        allowed: bool, broadcastable to the scores.
        bias: added to the scores, broadcastable to them.
        scale: factor of the scores.
        is_causal: query ``i`` sees keys ``0..i``; without `allowed` and `bias`.
        dropout: rate at which weights are dropped.
    """
    dtype, width = query.dtype, value.shape[-1]
    if query.is_cpu:
        # Of another width, or with gaps between the channels, torch would compute a T x S array.
        widest = max(query.shape[-1], width)
        query, key, value = (_for_cpu(array, widest) for array in (query, key, value))
    mask = _join(query, allowed, bias)
    has_key = None
    if mask is not None and not query.is_cpu:
        # Not every kernel of a GPU is known to give zeros where all is hidden.
        has_key = (mask if mask.dtype == torch.bool else mask != -torch.inf).any(-1, keepdim=True)
        mask = torch.where(has_key, mask, torch.ones_like(mask))
    with _kernels(query, mask, dropout):
        context = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            **({} if query.shape[1] == key.shape[1] else {"enable_gqa": True}),  # the kernel takes no symbolic bool
        )
    if has_key is not None:
        context = torch.where(has_key, context, 0.0)
    if query.is_cpu and mask is None and _may_be_few(key.shape[-2]):
        context = torch.where(_is_unknown(query, key), torch.nan, context)
    context = context if context.shape[-1] == width else context[..., :width]
    return context if context.dtype == dtype else context.to(dtype)


def _kernels(query: Tensor, mask: Tensor | None, dropout: float) -> contextlib.AbstractContextManager[None]:
    """Return the context in which torch tries its kernels in the order that suits a GPU."""
    if not query.is_cuda or torch.compiler.is_compiling():  # the compiler takes torch's order
        return contextlib.nullcontext()
    plain = mask is None and not dropout and query.dtype in (torch.bfloat16, torch.float16)
    plain = plain and query.shape[-1] >= MIN_WIDTH
    capability, are_few = _capability(query.device.index or 0), query.shape[-2] < MIN_QUERIES
    if _is_restricted() or capability < (9, 0) or not (are_few or (plain and capability == (9, 0))):
        return contextlib.nullcontext()
    return sdpa_kernel(list(FIRST_FLASH if are_few else FIRST_CUDNN), set_priority=True)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _is_restricted() -> bool:
    """Return whether the user, or the judge, has chosen among torch's kernels: that stays."""
    backends = torch.backends.cuda
    enabled = (backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled)
    return not all(one() for one in (*enabled, backends.cudnn_sdp_enabled))


def _may_be_few(keys: int) -> bool:
    """Return whether there may be fewer keys than `MIN_KEYS`; a graph for any number of them stays one."""
    return not is_surely(keys >= MIN_KEYS)


def _is_unknown(query: Float[Tensor, "B H T D"], key: Float[Tensor, "B K S D"]) -> Bool[Tensor, "B H T 1"]:
    """Return which queries have a score of NaN with the first key, which all see; so has a row of nothing else."""
    first = key.detach().select(-2, 0)[:, :, None, :, None]
    return (query.detach().unflatten(1, (key.shape[1], -1)) @ first).isnan().flatten(1, 2)


def _split_mask(call: KernelCall) -> tuple[Tensor | None, bool]:
    """Return a mask as an array, None if it hides nothing; and whether it is the causal one, which needs no array."""
    if call.mask is None:
        return None, False
    _, _, queries, keys = call.scores_shape
    band = as_band(call.mask)
    # The kernel hides keys before it scales the scores: a scale of 0 or below, or one that it rounds to 0, would bring
    # them back.
    least = torch.finfo(torch.promote_types(call.query.dtype, torch.float32)).tiny
    if band is not None and not band[1] and call.bias is None and call.scale >= least:
        offset, size = band[0].offset, band[0].size
        if offset == 0 and (size is None or is_true(size >= queries)):
            return None, True
        if is_true(offset >= keys - 1) and (size is None or is_true(size >= queries + offset)):
            return None, False
    return call.allowed(), False


def _is_for_all_heads(allowed: Tensor | None) -> bool:
    return allowed is None or allowed.ndim < 3 or allowed.shape[-3] == 1


def _for_cpu(array: Float[Tensor, "B H T D"], width: int) -> Float[Tensor, "B H T W"]:
    if array.dtype not in FAST_ON_CPU:
        array = array.to(torch.float32)
    if array.shape[-1] != width:
        array = pad(array, (0, width - array.shape[-1]))
    return array if array.stride(-1) == 1 else array.contiguous()


def _join(query: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return hidden keys and the bias of the scores as one array of 4 axes; None without both."""
    if bias is not None:
        bias = bias.to(_mask_dtype(query, bias))
        allowed = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
    return None if allowed is None else allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)


def _mask_dtype(query: Tensor, bias: Tensor) -> torch.dtype:
    """Return the dtype of a bias for the kernel: float32 at least on a CPU, which takes that for any query."""
    dtype = torch.promote_types(query.dtype, bias.dtype)
    return torch.promote_types(dtype, torch.float32) if query.is_cpu else dtype
