"""Run any torch code with other roundings: move every result of an operation by up to one unit in the last place.

This resamples a module's rounding error (Monte Carlo arithmetic: Parker, 1997).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

_EXACT = """
_local_scalar_dense _to_copy _unsafe_view abs amax amin arange argmax argmin bernoulli bernoulli_ cat ceil clamp
clamp_max clamp_min clone constant_pad_nd copy copy_ detach embedding empty empty_like empty_strided
exponential_ eye fill fill_ flip floor floor_divide full full_like gather histc index index_select lift_fresh
masked_fill masked_fill_ max maximum min minimum neg new_empty new_full new_ones new_zeros normal_ ones
ones_like rand rand_like randn randn_like relu relu_ repeat roll round scalar_tensor scatter select_backward
sign slice_backward sort stack threshold_backward topk tril triu trunc unfold_backward uniform_ where zero_
zeros zeros_like
"""

EXACT = frozenset(_EXACT.split())
"""Operations that add no rounding: they move, choose, count, fill or draw."""

MANY = 1 << 20
"""Numbers of a tensor above which they are drawn in float32, which takes a third of the time."""


class Uncompiled(TorchDispatchMode):
    """A mode in which nothing is compiled: else torch imports its compiler, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Rounding(Uncompiled):
    """While it is entered, operations, those of the backward pass included, round at random.

    Args:
        seed: of the random numbers.
        low: the module is of a lower precision than float64, so that its float64 results move by a float32 unit, too.
    """

    def __init__(self, seed: int, low: bool):
        super().__init__()
        self._jitter = DispatchJitter(seed, torch.finfo(torch.float32 if low else torch.float64).eps)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # what is done here is not the module's
            return result if func.is_view else self._jitter.moved(func.overloadpacket.__name__, result)


class DispatchJitter:
    """Moves what operations return.

    Args:
        seed: of the random numbers.
        wide: relative unit of float64 results.
    """

    def __init__(self, seed: int, wide: float = torch.finfo(torch.float64).eps):
        self._generator = torch.Generator().manual_seed(seed)
        self._wide = wide

    def moved(self, name: str, results: object) -> object:
        """Return the results of the operation `name`, moved unless it rounds nothing."""
        if name in EXACT:
            return results
        if isinstance(results, (tuple, list)):
            return type(results)([self._moved(one) for one in results])
        return self._moved(results)

    def _moved(self, value: object) -> object:
        """Move the numbers of a tensor in place: it is new, or it was just written to."""
        if not isinstance(value, Tensor) or value.layout != torch.strided or value._is_zerotensor():
            return value
        if value.is_complex():
            self._moved(torch.view_as_real(value.resolve_conj()))
        elif value.is_floating_point():
            own = torch.float32 if value.numel() > MANY and value.dtype != torch.float64 else torch.float64
            noise = torch.rand(value.shape, generator=self._generator, dtype=own)
            unit = self._wide if value.dtype == torch.float64 else torch.finfo(value.dtype).eps
            noise = noise.mul_(2.0).sub_(1.0).mul_(unit).to(value.device)
            wide = value.to(own)
            moved = torch.addcmul(wide, wide, noise, out=noise)
            value.copy_(torch.where(wide.isinf(), wide, moved))  # a hidden score stays hidden
        return value


def uniform(values: np.ndarray, seed: int) -> np.ndarray:
    """Return a number in [-1, 1) for each of some numbers that follows from it and the seed (splitmix64)."""
    start = np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64).reshape(np.shape(values)) ^ start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    # 53 bits, all that float64 holds, times 2**-52: [0, 2).
    mixed: np.ndarray = (bits >> np.uint64(11)) * 2.0**-52 - 1.0
    return mixed


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor holds numbers that round."""
    return tensor.is_floating_point() or tensor.is_complex()
