"""Attention on processors by kernels that are compiled for the present one (`attn_kernels`).

To torch they are two operations (`flash_operation`), which run on as many threads as torch may use. The twin is
`jax_attn.implementations.cpu_flash`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_bridge import validation
from attn_bridge.masks import Mask, as_pieces, goes_forward
from attn_kernels import words
from attn_kernels.description import intervals

from .. import recomputation
from ..random import RngStream
from . import flash_operation, masks, sdpa
from .call import KernelCall
from .reference import draw, source_of
from .sizes import is_surely

MIN_SCORES = 128 * 128
"""Scores per head from which it is picked: fewer are computed as fast by others."""

MIN_PRODUCTS = 2**26
"""Products of numbers, in all, from which it takes the place of torch's fused kernel, whose calls begin faster."""

MIN_QUERIES = 32
"""Queries from which it is picked: it goes through the keys with 64 of them, whether they are there or not."""


MIN_BYTES = 2**20
"""Bytes of keys and values from which it is picked for up to `words.FEW` queries: other calls begin faster."""

_DTYPES = frozenset(getattr(torch, name) for name in words.KINDS)
_PLAIN = frozenset({Tensor, nn.Parameter})


def unavailable() -> str | None:
    """Return why this machine can't run it, None if it can; loads the kernels, which takes a second or two."""
    return _lacks() or _fails_to_load()


@functools.cache
def _lacks() -> str | None:
    """Return why this machine cannot load the kernels, None if no reason is known."""
    if sys.platform == "win32":
        return "its kernels share threads as POSIX has them"
    return (
        None
        if importlib.util.find_spec("llvmlite")
        else "llvmlite, which compiles it, is not installed (pip install 'attn-bridge[cpu]')"
    )


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call, None if it can."""
    reason = _here("lacks")
    if reason is not None:
        return reason
    if not call.query.is_cpu:
        return "it is for processors"
    arrays = (call.query, call.key, call.value)
    dtype = call.query.dtype
    if not dtype == call.key.dtype == call.value.dtype or dtype not in _DTYPES:
        dtypes = [str(array.dtype).removeprefix("torch.") for array in arrays]
        return f"query, key and value must all be one of {', '.join(words.KINDS)}, got {', '.join(dtypes)}"
    if not _PLAIN.issuperset(map(type, arrays)):
        return "it reads plain tensors, and these are of a class of their own"
    if call.return_weights:
        return "it never holds the attention weights (return_weights=True)"
    if 0 in call.query.shape or 0 in call.value.shape:
        return f"there is nothing in the query {tuple(call.query.shape)} or the value {tuple(call.value.shape)}"
    if call.bias is not None and (1, *call.bias.shape)[-1] < call.key.shape[1]:
        return f"the bias {tuple(call.bias.shape)} is the same for all keys"
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return "a program that is exported would need it where it runs"
    return (None if call.mask is None else _refuses(call, call.mask)) or sdpa.in_forward_mode()


def _refuses(call: KernelCall, mask: Mask) -> str | None:
    """Return why it can't serve a mask, None if it can."""
    pieces = as_pieces(mask)
    if pieces is None:
        return "the mask joins arrays or paddings by |, or has documents twice, or moves keys under a padding"
    if torch.compiler.is_compiling():
        if pieces.plain is not None and not goes_forward(pieces.plain):
            return "a compiler can't tell whether the keys that a query sees are an interval"
    elif intervals(pieces.plain, call.query.shape[1]) is None:
        return "the keys that a query sees are no interval, or the intervals go back"
    shapes = [tuple(_array_of(call, one).shape) for one in pieces.arrays]
    if len(shapes) > 1 and not validation.is_one_of(tuple(torch.broadcast_shapes(*shapes)), shapes):
        return f"the arrays {', '.join(map(str, shapes))} of the mask would make a larger one together"
    return None


def unprofitable(call: KernelCall) -> str | None:
    """Return why it isn't picked: few scores, few heads for many threads, or something of torch that is faster."""
    reason = too_small(call)
    if reason is not None:
        return reason
    queries, keys = call.scores_shape[2:]
    if is_surely(queries <= words.FEW):
        if torch.is_grad_enabled() and any(one.requires_grad for one in (call.query, call.key, call.value)):
            return "few queries whose gradient may be asked for"
        return _is_off() or _here("fails to load")
    tasks, threads = call.key.shape[0] * call.key.shape[2], _here("threads")
    if is_surely(2 * tasks < threads):
        return f"{tasks} key heads in all for {threads} threads: backward, each is one thread's"
    if sdpa.unsupported(call) is None:
        if call.query.dtype == torch.bfloat16 and torch.bfloat16 in sdpa.FAST_ON_CPU and _here("pairs") is None:
            return "the processor multiplies torch.bfloat16 itself, by instructions that torch alone may use here"
        batch, heads = call.scores_shape[:2]
        if is_surely(batch * heads * queries * keys * (call.query.shape[3] + call.value.shape[3]) < MIN_PRODUCTS):
            return f"fewer products than {MIN_PRODUCTS}"
    return _is_off() or _here("fails to load")


def too_small(call: KernelCall) -> str | None:
    """Return why the sizes of a call alone make others faster, None if they don't."""
    if torch.jit.is_tracing():  # whose sizes are tensors; `unsupported` refuses the call
        return None
    queries, keys = call.scores_shape[2:]
    if is_surely(queries <= words.FEW):  # it reads their keys and values once
        if is_surely(sum(math.prod(array.shape) for array in (call.key, call.value)) * call.key.itemsize < MIN_BYTES):
            return f"less than {MIN_BYTES} bytes of keys and values"
    elif is_surely(queries < MIN_QUERIES):
        return f"fewer than {MIN_QUERIES} queries"
    elif is_surely(queries * keys < MIN_SCORES):
        return f"fewer scores per head than {MIN_SCORES}"
    return None


def _is_off() -> str | None:
    return None if _here("fused attention") else "fused attention is switched off (torch.nn.attention.sdpa_kernel)"


def attend(call: KernelCall) -> Float[Tensor, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    return _attend(call)[0]


def attend_with_lse(call: KernelCall) -> tuple[Float[Tensor, "B T H Dv"], Float[Tensor, "B H T"]]:
    """Return the context and, per row, the logarithm of the sum of ``exp(scores)``, as `reference.attend_with_lse`.

    Raises:
        NotImplementedError: the kernels don't load; gives the reason.
    """
    context, top, total = _attend(call)
    # Of the sum alone, so that its gradient is the one of the logarithm; the top is a shift that cancels.
    seen = total != 0.0
    return context, torch.where(seen, top.detach() + torch.log(torch.where(seen, total, 1.0)), -torch.inf)


def _attend(call: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    reason = _here("fails to load")
    if reason is not None:
        raise NotImplementedError(f"implementation 'cpu_flash' does not run here: {reason}")
    seed, kept = _dropout_of(call)
    bias = call.bias
    return flash_operation.attention(
        call.query,
        call.key,
        call.value,
        bias=bias if bias is None else bias.reshape((1,) * (4 - bias.ndim) + bias.shape),
        sinks=None if call.sinks is None else call.sinks[None],
        **_described(call),
        seed=seed,
        kept=kept,
        scale=float(call.scale),
        softcap=None if call.softcap is None else float(call.softcap),
        dropout=float(call.dropout),
    )


@functools.cache
def _fails_to_load() -> str | None:
    """Return why the kernels can't be had although llvmlite is installed, None if they can."""
    try:
        importlib.import_module("attn_kernels.direct.calls").compiled("forward")
    except Exception as error:  # a processor that they do not know, an LLVM that does not take them
        return f"its kernels do not load: {error}"
    return None


def _described(call: KernelCall) -> dict[str, Tensor | None]:
    """Return the mask as intervals, one array and documents."""
    arrays: dict[str, Tensor | None] = dict.fromkeys(("bounds", "mask", "query_ids", "key_ids"))
    pieces = None if call.mask is None else as_pieces(call.mask)
    if pieces is None:
        return arrays
    if pieces.plain is not None:
        queries = call.query.shape[1]
        if torch.compiler.is_compiling():
            arrays["bounds"] = torch.stack(pieces.plain.interval(torch.arange(queries, device="cpu")))
        else:
            arrays["bounds"] = torch.from_numpy(intervals(pieces.plain, queries))
    if pieces.arrays:
        arrays["mask"] = functools.reduce(torch.logical_and, (_array_of(call, one) for one in pieces.arrays))
    if pieces.documents is not None:
        arrays["query_ids"], arrays["key_ids"] = pieces.documents.arrays()
    return arrays


def _array_of(call: KernelCall, mask: Mask) -> Tensor:
    """Return the bools of an array mask or a padding with 4 axes ``(B, H, T, S)``; an axis that it lacks has size 1."""
    keys = torch.arange(call.key.shape[1], device="cpu")[None]
    array: Tensor = mask.allowed(torch.zeros(1, 1, dtype=torch.int64, device="cpu"), keys)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _dropout_of(call: KernelCall) -> tuple[Tensor | None, Tensor | None]:
    """Return the seed of the weights that are dropped, or the mask of those that are kept; nothing without dropout."""
    if not call.dropout:
        return None, None
    rng = source_of(call.dropout, call.rng)
    transforming = masks.is_transforming()
    if rng is None and not transforming:
        # What `draw` draws, without the numbers in between.
        kept = torch.empty(call.scores_shape, dtype=torch.bool, device="cpu")
        return None, kept.bernoulli_(1.0 - call.dropout)
    if not isinstance(rng, (RngStream, torch.Generator)):
        return None, draw(call.scores_shape, call.dropout, rng, device="cpu").expand(call.scores_shape)
    if transforming:
        # It depends on whatever a vmap has several of.
        corner = sum(array.detach().flatten()[:1].float() for array in (call.query, call.key, call.value))
        return None, masks.draw_like(corner.expand(call.scores_shape), call.dropout, rng, torch.bool)
    if isinstance(rng, RngStream) and not rng.x64:
        if not torch.compiler.is_compiling():
            recomputation.check_forward()
        return rng()[None], None
    return None, draw(call.scores_shape, call.dropout, rng, torch.bool, "cpu")


def _here(question: str) -> Any:
    """Answer a question about this machine; compiled code treats the answer as a constant."""
    answers: dict[str, Any] = {
        "lacks": _lacks,
        "fails to load": _fails_to_load,
        "pairs": lambda: importlib.import_module("attn_kernels.compiler.processor").pairs(),
        "threads": torch.get_num_threads,
        "fused attention": torch.backends.cuda.flash_sdp_enabled,
    }
    return answers[question]()


_here._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `torch.compiler` does it, which loads the compiler
