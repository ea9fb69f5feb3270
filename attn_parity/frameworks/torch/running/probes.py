"""Probes of any torch module that follow its values: the effect of one float32 unit on tables, and the use of weights.

`DispatchTables` moves every value that depends on no weight and on no floating-point input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_attn.shards import whole

from ....sides.tables import STILL, Collector
from ....sides.tables import Tables as Found
from .promotion import _WRITES_NO_DATA, BACKWARD, _writes, backward_inside
from .rounding import EXACT, Uncompiled

if TYPE_CHECKING:
    from torch._ops import OpOverload

UNIT = 2.0**-23
"""One unit in the last place of float32, relative."""

LARGEST_INTEGER = 2.0**24
"""Whole numbers up to here are exact in float32, on either side."""

_SHAPES = """
empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full
new_empty_strided lift_fresh lift_fresh_copy
"""

_SHAPE_ONLY = frozenset(_SHAPES.split())
"""Operations that ask a tensor for its shape and type only, or that make one of Python's numbers."""


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
        if _writes(func) and func not in _WRITES_NO_DATA:
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
        self._known: dict[int, tuple[StorageWeakRef, bool]] = {}

    def mark(self, tensor: Tensor, constant: bool) -> None:
        """Note whether a tensor is a constant."""
        if tensor.layout == torch.strided:
            # By storage, not by tensor: views share numbers, and so what they depend on.
            storage = StorageWeakRef(_held(tensor).untyped_storage())  # as long as it is held, no other has its address
            self._known[storage.cdata] = storage, constant

    def is_foreign(self, tensor: Tensor) -> bool:
        """Return whether a floating-point tensor has come from outside, and can be moved."""
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout != torch.strided:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_meta:
            return False
        return _held(tensor).untyped_storage()._cdata not in self._known

    def _is_constant(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided:
            return False
        _, constant = self._known.get(_held(tensor).untyped_storage()._cdata, (None, not _moves(tensor)))
        return constant

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        operation = _operation(func)
        with torch._C.DisableTorchFunction():  # what is done here is not the module's
            asked = [] if operation.asks_shapes else _tensors((args, kwargs))
            constants = list(map(self._is_constant, asked))
            constant = all(constants)
            if not constant:
                for tensor in itertools.compress(asked, constants):
                    self._meet(tensor)
        result = func(*args, **kwargs)
        if operation.is_view:
            return result
        fresh = constant and operation.makes and (not asked or not operation.is_exact)
        with torch._C.DisableTorchFunction():
            if fresh and operation.lifts:
                result = result.clone()  # its memory may be an array of the user's
            for tensor in _tensors((result, [args[place] for place in operation.written if place < len(args)])):
                if fresh:
                    self.shift(tensor)
                self.mark(tensor, constant)
        return result

    def _meet(self, tensor: Tensor) -> None:
        if self._unit == 0.0 and _moves(tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            self.met.add(_held(whole(_widest(tensor.detach()))).resolve_conj().resolve_neg().cpu().numpy())

    def shift(self, tensor: Tensor) -> Tensor:
        """Move the numbers of a tensor in place."""
        if not _moves(tensor) or tensor.layout != torch.strided or tensor.is_meta or tensor._is_zerotensor():
            return tensor
        storage = _held(tensor)
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


def _held(tensor: Tensor) -> Tensor:
    """Return the tensor inside wrappers with a single content, such as this rank's shard: its memory identifies it."""
    while is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # in newer torch also that of the mesh
        inside = [one for one in (getattr(tensor, name) for name in names) if isinstance(one, Tensor)]
        if len(inside) != 1:
            break
        (tensor,) = inside
    return tensor


def _widest(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _moves(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclasses.dataclass(frozen=True)
class _Operation:
    """Properties of a torch operation that `_Dataflow` uses.

    Attributes:
        makes: whether it fills its result with numbers.
        is_exact: whether it rounds nothing, if it gets tensors.
        is_view: whether its result shares memory with an argument.
        lifts: whether it makes a tensor of an array's memory.
        asks_shapes: whether it reads only shapes.
        written: positions of the arguments that it writes to.
    """

    makes: bool
    is_exact: bool
    is_view: bool
    lifts: bool
    asks_shapes: bool
    written: tuple[int, ...]


@functools.cache
def _operation(func: OpOverload) -> _Operation:
    """Return the properties of an ATen operation that probes need, from its name and schema."""
    name = func.overloadpacket.__name__
    is_view = func.is_view and name != "lift_fresh"
    written = [place for place, one in enumerate(func._schema.arguments) if _is_written(one)]
    return _Operation(
        makes="empty" not in name,
        is_exact=name in EXACT and name != "fill_",
        is_view=is_view,
        lifts=name.startswith("lift_fresh"),
        asks_shapes=name in _SHAPE_ONLY,
        written=tuple(written),
    )


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """Return the tensors in lists, tuples and dicts of any depth."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
        elif isinstance(value, dict):
            tensors += _tensors(value.values())
    return tensors


class Uses(Uncompiled):
    """Follows weights and inputs through one forward pass: the order in which code uses its weights.

    A weight is used by the first operation of it that depends on the inputs. Only operations count, so modules and
    functions are treated alike.

    Args:
        weights: name -> weight.
        inputs: the arrays of the call.

    Attributes:
        found: name of a weight -> when it is used first.
    """

    def __init__(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]):
        super().__init__()
        self.found: dict[str, int] = {}
        self._clock = 0
        self._known: dict[int, tuple[StorageWeakRef, frozenset[str], bool]] = {}
        for tensor in inputs:
            self._mark(tensor, frozenset(), True)
        for name, tensor in weights.items():
            self._mark(tensor, frozenset([name]), False)

    def _mark(self, tensor: Tensor, weights: frozenset[str], is_data: bool) -> None:
        if tensor.layout == torch.strided:
            storage = StorageWeakRef(_held(tensor).untyped_storage())  # as long as it is held, no other has its address
            self._known[storage.cdata] = storage, weights, is_data

    def _origin(self, tensor: Tensor) -> tuple[frozenset[str], bool]:
        if tensor.layout != torch.strided:
            return frozenset(), False
        _, weights, is_data = self._known.get(_held(tensor).untyped_storage()._cdata, (None, frozenset[str](), False))
        return weights, is_data

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        operation = _operation(func)
        with torch._C.DisableTorchFunction():  # what is done here is not the module's
            asked = [] if operation.asks_shapes else [self._origin(one) for one in _tensors((args, kwargs))]
        met = frozenset[str]().union(*(weights for weights, _ in asked))
        is_data = any(data for _, data in asked)
        self._clock += 1
        if is_data:
            for name in met:
                self.found.setdefault(name, self._clock)
        result = func(*args, **kwargs)
        if not operation.is_view:
            with torch._C.DisableTorchFunction():
                written = [args[place] for place in operation.written if place < len(args)]
                for tensor in _tensors((result, written)):
                    self._mark(tensor, frozenset() if is_data else met, is_data)
        return result
