"""Probe of any torch module that follows its values: the effect of one float32 unit on tables.

`DispatchTables` moves every value that depends on no weight and on no floating-point input.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_attn.shards import whole

from ....sides.tables import STILL, Collector
from ....sides.tables import Tables as Found
from ..probes.rounding import Uncompiled, is_inexact, uniform
from ..probes.storages import StorageMarks, innermost, tensors_in, traits_of
from .promotion import BACKWARD, backward_inside, writes

if TYPE_CHECKING:
    from torch._ops import OpOverload

UNIT = 2.0**-23
"""One unit in the last place of float32, relative."""

LARGEST_INTEGER = 2.0**24
"""Whole numbers up to here are exact in float32, on either side."""


class DispatchTables(TorchFunctionMode):
    """Mode that moves results computed only from constants and integers by up to one float32 unit, while `following`.

    The move of a number follows from the number and the seed: repeated computations, such as a checkpoint's, move
    alike, as they would by rounding.

    Args:
        seed: of the moves; `STILL` moves nothing.
        dependent: weights and floating-point inputs; results that depend on them do not move.
    """

    def __init__(self, seed: int, dependent: Iterable[Tensor]):
        super().__init__()
        self._below = _Dataflow(seed)
        for tensor in dependent:
            self._below.mark(tensor, constant=False)

    @property
    def moved(self) -> int:
        """How many values have moved."""
        return self._below.moved

    @property
    def met(self) -> Found | None:
        """The tables that met weights and inputs so far."""
        return self._below.met.found()

    def table(self, tensor: Tensor) -> Tensor:
        """Return an input table, moved; results computed from it alone move, too."""
        moved = self._below.shift(tensor.clone())
        self._below.mark(moved, constant=True)
        return moved

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Hold the context in which it works."""
        with self._below, self:
            yield

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in BACKWARD:
            return backward_inside(self, func, args, kwargs)
        if writes(func):
            return func(args[0], *self._entered(args[1:]), **self._entered(kwargs))
        if getattr(func, "__name__", "") in ("__get__", "__set__") or func in _ASK_NOTHING:
            return func(*args, **kwargs)
        return func(*self._entered(args), **self._entered(kwargs))

    def _entered(self, value: Any, depth: int = 0) -> Any:
        """Return arguments with moved copies of the constants that come from outside: attributes, buffers, globals."""
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():
                return self.table(_widest(value.detach())) if self._below.is_foreign(value) else value
        if type(value) in (list, tuple) and depth < 4:
            return type(value)([self._entered(one, depth + 1) for one in value])
        if type(value) is dict:
            return {key: self._entered(one, depth + 1) for key, one in value.items()}
        return value


_ASK_NOTHING = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.requires_grad_, Tensor.is_floating_point}


class _Dataflow(Uncompiled):
    """Tracks values that depend on weights and inputs, and moves the rest."""

    def __init__(self, seed: int):
        super().__init__()
        self.moved = 0
        self.met = Collector()
        self._seed = seed
        self._unit = 0.0 if seed == STILL else UNIT
        self._constants = StorageMarks[bool]()

    def mark(self, tensor: Tensor, constant: bool) -> None:
        """Note whether a tensor is a constant."""
        self._constants.set(tensor, constant)

    def is_foreign(self, tensor: Tensor) -> bool:
        """Return whether a floating-point tensor has come from outside, and can be moved."""
        if not is_inexact(tensor) or tensor.layout != torch.strided:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_meta:
            return False
        return self._constants.get(tensor) is None

    def _is_constant(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided:
            return False
        constant = self._constants.get(tensor)
        return not is_inexact(tensor) if constant is None else constant

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        traits = traits_of(func)
        with torch._C.DisableTorchFunction():  # what is done here is not the module's
            asked = [] if traits.asks_shapes else tensors_in((args, kwargs))
            constants = list(map(self._is_constant, asked))
            constant = all(constants)
            if not constant:
                for tensor in itertools.compress(asked, constants):
                    self._meet(tensor)
        result = func(*args, **kwargs)
        if traits.is_view:
            return result
        fresh = constant and traits.makes and (not asked or not traits.is_exact)
        with torch._C.DisableTorchFunction():
            if fresh and traits.lifts:
                result = result.clone()  # its memory may be an array of the user's
            for tensor in traits.results(result, args):
                if fresh:
                    self.shift(tensor)
                self.mark(tensor, constant)
        return result

    def _meet(self, tensor: Tensor) -> None:
        if self._unit == 0.0 and is_inexact(tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            self.met.add(innermost(whole(_widest(tensor.detach()))).resolve_conj().resolve_neg().cpu().numpy())

    def shift(self, tensor: Tensor) -> Tensor:
        """Move the numbers of a tensor in place."""
        if not is_inexact(tensor) or tensor.layout != torch.strided or tensor.is_meta or tensor._is_zerotensor():
            return tensor
        storage = innermost(tensor)
        if storage is not tensor:
            self.shift(storage)
            return tensor
        plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
        values = plain.cpu().double().numpy()
        # Small whole numbers are exact on either side (positions, counts, 0 and 1), and keep their value.
        moves = np.isfinite(values) & ((values != np.rint(values)) | (np.abs(values) > LARGEST_INTEGER))
        if moves.any():
            with np.errstate(over="ignore"):
                moved = values * (1.0 + self._unit * uniform(values, max(self._seed, 0)))
            moves &= np.isfinite(moved)
            self.moved += int(moves.sum())
            moved = torch.from_numpy(np.where(moves, moved, values)).to(plain.device, plain.dtype)
            with torch.no_grad():
                tensor.copy_(torch.view_as_complex(moved) if tensor.is_complex() else moved)
        return tensor


def _widest(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
