"""JAX's random numbers in torch: the keys of `nnx.Rngs`, and what `jax.random` draws from them, bit for bit.

A key is an int32 tensor of two words, ``(..., 2)``, on the CPU: the bits of `jax.random.key_data`. Drawing is
arithmetic on integers, so that CPU, GPU and `torch.compile` give the same numbers. JAX's default generator is meant:
threefry2x32, partitionable (`attn_bridge.rng` has it in NumPy). The counterpart for Flax is `jax_attn.random`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from torch.types import Device

from attn_bridge import rng, validation

from . import recomputation
from .threefry import Key, erf_inv, fill, key_words, multiply_add, raw_bits, signed, threefry

__all__ = ["JaxRngs", "RngStream", "bernoulli", "bits", "fold_in", "key", "normal", "split", "uniform"]

Shape: TypeAlias = int | Sequence[int]

recomputation.watch()

_UNSIGNED = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_FLOATS = {
    torch.float16: (torch.int16, 16, 10),
    torch.bfloat16: (torch.int16, 8, 7),
    torch.float32: (torch.int32, 32, 23),
    torch.float64: (torch.int64, 64, 52),
}
"""Type -> the integers of its width, the width of the draw behind it, and how many bits of that become the mantissa."""


# ---- keys


def check_rngs(rngs: object) -> None:
    """Check the ``rngs`` argument of a module: a `JaxRngs` or None.

    Raises:
        TypeError: it is something else, such as an `nnx.Rngs` or a seed.
    """
    validation.check_source("rngs", rngs, (JaxRngs,), "a torch_attn.random.JaxRngs or None")


def key(seed: int, *, x64: bool = False) -> Key:
    """Return `jax.random.key(seed)`; `x64` as under ``jax_enable_x64``, where a seed has 64 bits instead of 32."""
    return torch.from_numpy(rng.key(seed, x64=x64).view(np.int32))


def fold_in(key: Key, data: int | Tensor) -> Key:
    """Return ``jax.random.fold_in(key, data)``, a key that depends on both."""
    rng.check_single("fold_in", key.shape)
    if torch.compiler.is_compiling():
        low = torch.as_tensor(data, device="cpu").to(torch.int32).reshape(1)
        return torch.cat(threefry(key_words(key), torch.zeros_like(low), low))
    rng.check_fold_in(int(data))
    first, second = (word & 0xFFFFFFFF for word in key.tolist())
    words = [signed(word) for word in rng.threefry_words(first, second, 0, int(data))]
    # By way of NumPy: neither transforms nor dispatch modes take it for a step of the computation.
    return torch.from_numpy(np.array(words, dtype=np.int32))


def split(key: Key, num: Shape = 2) -> Key:
    """Return ``jax.random.split(key, num)``, keys ``(*num, 2)``; key ``i`` is also ``fold_in(key, i)``."""
    rng.check_single("split", key.shape)
    shape = rng.as_shape(num)
    low = torch.arange(math.prod(shape), dtype=torch.int32, device="cpu")
    return torch.stack(threefry(key_words(key), torch.zeros_like(low), low), -1).reshape(*shape, 2)


# ---- draws


def bits(key: Key, shape: Shape = (), dtype: torch.dtype = torch.uint32, *, device: Device = None) -> Tensor:
    """Return ``jax.random.bits(key, shape, dtype)``.

    Args:
        key: one key.
        shape: of the result.
        dtype: ``uint8``, ``uint16``, ``uint32`` or ``uint64``; the last as JAX draws it under ``jax_enable_x64``.
        device: of the result; the CPU by default.
    """
    if dtype not in _UNSIGNED:
        raise ValueError(f"dtype of bits must be uint8, uint16, uint32 or uint64, got {dtype}")
    return raw_bits(key, rng.as_shape(shape), _UNSIGNED[dtype], device).view(dtype)


def uniform(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
    *,
    x64: bool = False,
    device: Device = None,
) -> Tensor:
    """Draw from U[minval, maxval), as ``jax.random.uniform(key, shape, dtype, minval, maxval)`` does.

    Args:
        key: one key.
        shape: of the result.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``, the last as JAX draws it under ``jax_enable_x64``.
        minval: lower bound.
        maxval: upper bound.
        x64: whether as under ``jax_enable_x64``, where JAX takes the bounds in float64 before rounding them to `dtype`.
        device: of the result; the CPU by default.
    """
    if dtype not in _FLOATS:
        raise ValueError(f"dtype of uniform must be float16, bfloat16, float32 or float64, got {dtype}")
    integer, width, mantissa = _FLOATS[dtype]
    draw = raw_bits(key, rng.as_shape(shape), width, device).to(integer)
    # One in the exponent and random bits in the mantissa are uniform over [1, 2).
    bits_of_one = {torch.float16: 0x3C00, torch.bfloat16: 0x3F80, torch.float32: 0x3F800000, torch.float64: 1023 << 52}[
        dtype
    ]
    draw = draw >> (width - mantissa) & ((1 << mantissa) - 1) | bits_of_one
    unit = draw.view(dtype) - 1.0
    if (minval, maxval) == (0.0, 1.0):
        return unit
    wide = torch.float64 if x64 or dtype == torch.float64 else torch.float32
    low, high = (torch.tensor(bound, dtype=wide, device=device).to(dtype) for bound in (minval, maxval))
    return torch.maximum(multiply_add(unit, high - low, low), low)


def bernoulli(
    key: Key, p: float | Tensor = 0.5, shape: Shape | None = None, *, x64: bool = False, device: Device = None
) -> Bool[Tensor, "..."]:
    """Draw True with probability `p`, as ``jax.random.bernoulli(key, p, shape)`` does.

    Args:
        key: one key.
        p: a float, or a floating-point tensor, which draws in its own type.
        shape: of the result; that of `p` by default.
        x64: whether as under ``jax_enable_x64``, where a Python float draws in float64: another mask.
        device: of the result; that of `p`, or the CPU, by default.
    """
    if isinstance(p, Tensor):
        if p.dtype not in _FLOATS:
            raise TypeError(f"p of bernoulli must be floating point, got {p.dtype}")
        device = p.device if device is None else device
        return uniform(key, p.shape if shape is None else shape, p.dtype, device=device) < p.to(device)
    if not isinstance(p, float):
        raise TypeError(f"p of bernoulli must be floating point, got {type(p).__name__}")
    # What the comparison of two floats says, the integers behind them say, too.
    mantissa = 52 if x64 else 23
    limit = p if x64 else float(np.float32(p))
    threshold = 0 if math.isnan(limit) else math.ceil(min(max(limit, 0.0), 1.0) * 2**mantissa)
    sizes = () if shape is None else rng.as_shape(shape)
    if threshold in (0, 1 << mantissa):
        return torch.full(sizes, threshold > 0, device=device)
    if x64:
        # The first 52 of 64 bits are the mantissa: a whole word, and 20 bits of the next.
        high, low = _as_ordered(threshold >> 20), _as_ordered(threshold << 12)

        def below(y0: Tensor, y1: Tensor, out: Tensor) -> None:
            y0.bitwise_xor_(-(1 << 31))
            y1.bitwise_xor_(-(1 << 31))
            out.copy_((y0 < high) | (y0 == high) & (y1 < low))
    else:
        limit_of_word = _as_ordered(threshold << 9)

        def below(y0: Tensor, y1: Tensor, out: Tensor) -> None:
            y1.bitwise_xor_(y0).bitwise_xor_(-(1 << 31))
            torch.lt(y1, limit_of_word, out=out)

    return fill(key, torch.empty(sizes, dtype=torch.bool, device=device), below)


def normal(key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32, *, x64: bool = False) -> Tensor:
    """Draw from the normal distribution as ``jax.random.normal(key, shape, dtype)`` does, but for rounding.

    The uniform draws behind it are JAX's; the inverse error function differs by a few units in the last place.

    Args:
        key: one key.
        shape: of the result, on the CPU.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``.
        x64: whether as under ``jax_enable_x64``.
    """
    below_one = -1.0 + 2.0 ** -(_FLOATS[dtype][2] + 1)
    draw = uniform(key, shape, dtype, below_one, 1.0, x64=x64)
    wide = torch.erfinv(draw) if dtype == torch.float64 else erf_inv(draw.float())
    return wide.to(dtype) * torch.tensor(math.sqrt(2.0), dtype=dtype)


# ---- streams


class RngStream:
    """A key and a count, as `nnx.RngStream`: each call gives ``fold_in(key, count)`` and counts on.

    `bits`, `uniform`, `bernoulli` and `normal` draw from the next key.

    Args:
        key: a seed, a key, or keys ``(..., 2)``; several are for taking apart, not for drawing.
        tag: name of the stream.
        x64: whether as under ``jax_enable_x64``: seeds have 64 bits, and types that are not named are 64-bit ones.
    """

    def __init__(self, key: int | Key | RngStream, *, tag: str, x64: bool = False):
        self.tag = tag
        self.x64 = x64
        self.drawn = 0
        with _lasting():
            self.key = _as_key(key, x64)
            self.count = torch.zeros(self.key.shape[:-1], dtype=torch.int64, device="cpu")

    def __new__(cls, *args: object, **kwargs: object) -> RngStream:
        """Register every stream, copies too."""
        stream = super().__new__(cls)
        if not torch.compiler.is_compiling():
            recomputation.register(stream)
        return stream

    def __call__(self) -> Key:
        """Return the next key; in a recomputation by `torch.utils.checkpoint`, the key of the forward pass."""
        if not torch.compiler.is_compiling():
            return fold_in(self.key, recomputation.next_count(self))
        if torch.compiler.is_exporting():
            recomputation.refuse_capture(self.tag, "an exported program")
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"the stream {self.tag!r} can't draw inside torch.func inside torch.compile; compile less"
            )
        key = fold_in(self.key, self.count)
        # Not in place: a backward pass that computes the key again reads the count that the forward pass read.
        self.count = self.count + 1
        return key

    def __repr__(self) -> str:
        words = " ".join(f"{word & 0xFFFFFFFF:08x}" for word in self.key.flatten().tolist())
        return f"RngStream(tag={self.tag!r}, key={words}, count={self.count.tolist()})"

    def fork(self) -> RngStream:
        """Return a separate stream, whose key is the next one of this stream."""
        return RngStream(self(), tag=self.tag, x64=self.x64)

    def split(self, k: Shape) -> RngStream:
        """Return the next key, split into `k` keys, as a stream."""
        return RngStream(split(self(), k), tag=self.tag, x64=self.x64)

    def fold_in(self, data: int) -> Key:
        """Return the next key with `data` folded in."""
        return fold_in(self(), data)

    def bits(self, shape: Shape = (), dtype: torch.dtype | None = None, *, device: Device = None) -> Tensor:
        """Draw `bits` from the next key; ``uint32``, with `x64` ``uint64``, by default."""
        return bits(self(), shape, dtype or (torch.uint64 if self.x64 else torch.uint32), device=device)

    def uniform(
        self, shape: Shape = (), minval: Any = None, maxval: Any = None, dtype: Any = None, *, device: Device = None
    ) -> Tensor:
        """Draw `uniform` numbers from the next key, by default from [0, 1) in ``float32``, with `x64` in ``float64``.

        The order of `jax.random`, ``(shape, dtype, minval, maxval)``, is understood, too.
        """
        if isinstance(minval, torch.dtype):
            minval, maxval, dtype = maxval, dtype, minval
        dtype = dtype or (torch.float64 if self.x64 else torch.float32)
        low, high = 0.0 if minval is None else minval, 1.0 if maxval is None else maxval
        return uniform(self(), shape, dtype, low, high, x64=self.x64, device=device)

    def bernoulli(
        self, p: float | Tensor = 0.5, shape: Shape | None = None, *, device: Device = None
    ) -> Bool[Tensor, "..."]:
        """Draw a mask, True with probability `p`, from the next key."""
        return bernoulli(self(), p, shape, x64=self.x64, device=device)

    def normal(self, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
        """Draw from the normal distribution from the next key, to a few units in the last place."""
        return normal(self(), shape, dtype or (torch.float64 if self.x64 else torch.float32), x64=self.x64)


class JaxRngs:
    """`nnx.Rngs` in torch: named streams of keys that equal its keys, bit for bit, call after call.

    A stream that was not given is the stream ``default``. Keys stay on the CPU, and neither keys nor counts are part of
    a module's ``state_dict``; copying a module copies them.

    Args:
        default: seed or key of the stream ``default``, or a mapping of streams.
        x64: whether to draw as under ``jax_enable_x64``: seeds have 64 bits instead of 32, a mask drawn with a Python
            float is drawn in float64, which is another mask, and unspecified dtypes are 64-bit ones.
        **rngs: seed, key or stream by name of the stream.

    Raises:
        ValueError: a value of another kind.
    """

    def __init__(
        self,
        default: int | Key | RngStream | Mapping[str, int | Key | RngStream] | None = None,
        *,
        x64: bool = False,
        **rngs: int | Key | RngStream,
    ):
        if isinstance(default, Mapping):
            rngs = {**default, **rngs}
        elif default is not None:
            rngs["default"] = default
        self._x64 = x64
        for tag, value in rngs.items():
            setattr(self, tag, RngStream(value, tag=tag, x64=x64))

    def __getitem__(self, name: str) -> RngStream:
        return self._get_stream(name, KeyError)

    def __getattr__(self, name: str) -> RngStream:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._get_stream(name, AttributeError)

    def __call__(self) -> Key:
        """Return the next key of the stream ``default``."""
        return self.default()

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items())

    def __len__(self) -> int:
        return len(list(self.items()))

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __repr__(self) -> str:
        return f"JaxRngs({', '.join(f'{name}={stream!r}' for name, stream in self.items())})"

    def items(self) -> Iterator[tuple[str, RngStream]]:
        """Give names and streams."""
        return ((name, stream) for name, stream in vars(self).items() if isinstance(stream, RngStream))

    def fork(self) -> JaxRngs:
        """Return separate streams, whose keys are the next ones of these streams."""
        return self._with({name: stream.fork() for name, stream in self.items()})

    def split(self, k: Shape | Mapping[str | EllipsisType, Shape | None]) -> JaxRngs:
        """Return streams of `k` keys each; a mapping gives the number by name, ``...`` for others, None for unsplit."""
        sizes: Mapping[str | EllipsisType, Shape | None] = k if isinstance(k, Mapping) else {...: k}
        by_name: dict[str, Shape | None] = {name: sizes.get(name, sizes.get(...)) for name, _ in self.items()}
        return self._with(
            {name: stream if (size := by_name[name]) is None else stream.split(size) for name, stream in self.items()}
        )

    def fold_in(self, data: int) -> Key:
        """Return the next key of ``default`` with `data` folded in."""
        return self.default.fold_in(data)

    def bits(self, shape: Shape = (), dtype: torch.dtype | None = None, *, device: Device = None) -> Tensor:
        """Draw from the stream ``default``; see `RngStream.bits`."""
        return self.default.bits(shape, dtype, device=device)

    def uniform(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw from the stream ``default``; see `RngStream.uniform`."""
        return self.default.uniform(*args, **kwargs)

    def bernoulli(
        self, p: float | Tensor = 0.5, shape: Shape | None = None, *, device: Device = None
    ) -> Bool[Tensor, "..."]:
        """Draw from the stream ``default``; see `RngStream.bernoulli`."""
        return self.default.bernoulli(p, shape, device=device)

    def normal(self, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
        """Draw from the stream ``default``; see `RngStream.normal`."""
        return self.default.normal(shape, dtype)

    def _get_stream(self, name: str, error: type[Exception]) -> RngStream:
        streams = vars(self)
        if name not in streams and "default" not in streams:
            raise error(f"No RngStream named '{name}' found in Rngs.")
        stream: RngStream = streams[name if name in streams else "default"]
        return stream

    def _with(self, streams: Mapping[str, RngStream]) -> JaxRngs:
        return JaxRngs(streams, x64=self._x64)


# ---- inside


def _as_key(value: object, x64: bool) -> Key:
    if isinstance(value, RngStream):
        value = value.key
    if isinstance(value, (int, np.integer)):
        return key(int(value), x64=x64)
    if isinstance(value, np.ndarray) and value.dtype == np.uint32:
        value = torch.from_numpy(value.view(np.int32).copy())
    if isinstance(value, Tensor) and value.dtype == torch.uint32:
        value = value.view(torch.int32)
    if not isinstance(value, Tensor) or value.dtype != torch.int32 or value.shape[-1:] != (2,):
        raise ValueError(f"Invalid rng value: {value}, expected a seed, a stream, or keys of two 32-bit words each")
    return value.detach().cpu().clone()


def _lasting() -> contextlib.AbstractContextManager[object]:
    """Hold the context in which tensors are made that may be written to later, also when inference mode has ended."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _as_ordered(word: int) -> int:
    """Return the int32 that compares with words whose highest bit is flipped as the word does with them as they are."""
    return signed(word ^ 1 << 31)


RandomSource: TypeAlias = torch.Generator | RngStream | JaxRngs | None
"""A source of random numbers for `generate`; None takes torch's global generator."""
