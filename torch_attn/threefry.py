"""JAX's random bits in torch: Threefry by blocks, and the inverse error function that normal draws need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.types import Device

from attn_bridge import rng

Key: TypeAlias = Int32[Tensor, "... 2"]


Word: TypeAlias = int | Tensor


_CHUNK = 1 << 18
"""Elements drawn at a time on a CPU: enough to hide the cost of a call, few enough for the cache."""


_CHUNK_ON_GPU = 1 << 24
"""The same on a GPU, where each operation is a launch; an int32 temporary has 64 MiB."""


def signed(word: int) -> int:
    """Return the int32 of the same bits as a word."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def key_words(key: Key) -> tuple[Word, Word, Word]:
    """Return the key schedule: tensors while compiling, where a number would be compiled in, else numbers."""
    if torch.compiler.is_compiling():
        first, second = key.unbind()
        return first, second, first ^ second ^ rng.PARITY
    first, second = key.tolist()
    return first, second, first ^ second ^ rng.PARITY


def _plus(word: Word, number: int) -> Word:
    """Return the sum as an int32; sums of tensors wrap without help."""
    return signed(word + number) if isinstance(word, int) else word + number


def threefry(words: tuple[Word, Word, Word], x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Encrypt the counters ``(x0, x1)``, int32, in place."""
    x0 += words[0]
    x1 += words[1]
    rotated = torch.empty_like(x1)
    for i in range(5):
        for r in rng.ROTATIONS[i % 2]:
            x0 += x1
            # There is no logical shift: what the arithmetic one pulls in is masked. Then rotated + 2**r * x1.
            torch.bitwise_right_shift(x1, 32 - r, out=rotated)
            rotated &= (1 << r) - 1
            torch.add(rotated, x1, alpha=1 << r, out=x1)
            x1 ^= x0
        x0 += words[(i + 1) % 3]
        x1 += _plus(words[(i + 2) % 3], i + 1)
    return x0, x1


def fill(key: Key, out: Tensor, finish: Callable[[Tensor, Tensor, Tensor], None]) -> Tensor:
    """Fill `out`, contiguous, with what `finish` makes of the two words that each element's index is encrypted to."""
    rng.check_single("a draw", key.shape)
    words = key_words(key)
    flat = out.view(-1)
    size = flat.shape[0]
    if torch.compiler.is_compiling():
        # One loop over everything; the compiler fuses it.
        low = torch.arange(size, dtype=torch.int32, device=out.device)
        finish(*threefry(words, torch.zeros_like(low), low), flat)
        return out
    # Several chunks are a power of two long, so that all counters of one have the same upper word.
    chunk = min(max(size, 1), _CHUNK if out.device.type == "cpu" else _CHUNK_ON_GPU)
    with _unobserved():
        steps = torch.arange(chunk, dtype=torch.int32, device=out.device)
        x0, x1 = torch.empty_like(steps), torch.empty_like(steps)
        for start in range(0, size, chunk):
            part = flat[start : start + chunk]
            high, low = x0[: part.shape[0]].fill_(start >> 32), x1[: part.shape[0]]
            torch.add(steps[: part.shape[0]], signed(start), out=low)
            finish(*threefry(words, high, low), part)
    return out


def _unobserved() -> contextlib.AbstractContextManager[object]:
    """Return the context of arithmetic that has no gradient: inference mode, the faster one, where transforms allow."""
    return torch.no_grad() if torch._C._are_functorch_transforms_active() else torch.inference_mode()


def raw_bits(key: Key, shape: tuple[int, ...], width: int, device: Device) -> Tensor:
    """Return random bits as signed integers of `width`."""
    dtype = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]

    def join(y0: Tensor, y1: Tensor, out: Tensor) -> None:
        if width == 64:
            out.copy_(y0.to(torch.int64) << 32 | y1.to(torch.int64) & 0xFFFFFFFF)
        else:
            out.copy_(y0.bitwise_xor_(y1))

    return fill(key, torch.empty(shape, dtype=dtype, device=device), join)


def multiply_add(a: Float[Tensor, "..."], b: Tensor, c: Tensor) -> Float[Tensor, "..."]:
    """Return ``a * b + c`` as `attn_bridge.rng.multiply_add` does, which explains it."""
    wider = {torch.float32: torch.float64, torch.float16: torch.float32}.get(a.dtype)
    if wider is not None and (a.dtype != torch.float16 or rng.fused.COMPUTES_FLOAT16):
        product = a.to(wider) * b.to(wider)
        return _add_to_odd(product, c.to(wider).expand_as(product)).to(a.dtype)
    if a.dtype != torch.float64:
        return a * b + c

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x * 134217729.0  # 2**27 + 1
        upper = scaled - (scaled - x)
        return upper, x - upper

    product = a * b
    (a_upper, a_lower), (b_upper, b_lower) = halves(a), halves(b)
    rest = ((a_upper * b_upper - product) + a_upper * b_lower + a_lower * b_upper) + a_lower * b_lower
    high, low = _two_sum(c.expand_as(rest), rest)
    total, error = _two_sum(product, high)
    return total + _add_to_odd(low, error)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and its error."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _add_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """Add in float64 or float32, rounding inexact sums to the neighbour with an odd mantissa."""
    total, error = _two_sum(a, b)
    raw = total.view({4: torch.int32, 8: torch.int64}[total.itemsize])
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return (raw + torch.where((error != 0) & (raw & 1 == 0), step, 0).to(raw.dtype)).view(total.dtype)


# Giles, "Approximating the erfinv function", 2010: the polynomials, highest power first, that XLA evaluates in float32.
_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)


_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def erf_inv(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the inverse error function of float32 as XLA approximates it, with fused multiply-adds."""

    def polynomial(coefficients: Sequence[float], w: Tensor) -> Tensor:
        result = torch.full_like(w, coefficients[0])
        for coefficient in torch.tensor(coefficients[1:], dtype=torch.float32, device=w.device):
            result = (result.double() * w.double() + coefficient.double()).float()
        return result

    w = -torch.log1p((-x * x).double()).float()
    return torch.where(w < 5.0, polynomial(_CENTRE, w - 2.5), polynomial(_TAIL, w.sqrt() - 3.0)) * x
