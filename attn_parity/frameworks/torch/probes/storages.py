"""Marks on the memory of tensors, for probes that follow values through a run: views share it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .rounding import EXACT

if TYPE_CHECKING:
    from torch._ops import OpOverload

_SHAPES = """
empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full
new_empty_strided lift_fresh lift_fresh_copy
"""

_SHAPE_ONLY = frozenset(_SHAPES.split())
"""Operations that ask a tensor for its shape and type only, or that make one of Python's numbers."""

Mark = TypeVar("Mark")


class StorageMarks(Generic[Mark]):
    """Marks on the memory of dense tensors; other layouts get none."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[StorageWeakRef, Mark]] = {}

    def set(self, tensor: Tensor, mark: Mark) -> None:
        """Mark the memory of a tensor."""
        if tensor.layout == torch.strided:
            storage = StorageWeakRef(innermost(tensor).untyped_storage())  # while this lives, its address is not reused
            self._marks[storage.cdata] = storage, mark

    def get(self, tensor: Tensor) -> Mark | None:
        """Return the mark on the memory of a dense tensor; None without one."""
        if tensor.layout != torch.strided:
            return None
        _, mark = self._marks.get(innermost(tensor).untyped_storage()._cdata, (None, None))
        return mark


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor inside wrappers with a single content, such as this rank's shard: its memory identifies it."""
    while is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # in newer torch also that of the mesh
        inside = [value for value in (getattr(tensor, name) for name in names) if isinstance(value, Tensor)]
        if len(inside) != 1:
            break
        (tensor,) = inside
    return tensor


@dataclasses.dataclass(frozen=True)
class OperationTraits:
    """Properties of a torch operation that probes use.

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

    def results(self, result: object, args: tuple[object, ...]) -> list[Tensor]:
        """Return the tensors that a call returned or wrote to."""
        return tensors_in((result, [args[position] for position in self.written if position < len(args)]))


@functools.cache
def traits_of(func: OpOverload) -> OperationTraits:
    """Return the properties of an ATen operation that probes need, from its name and schema."""
    name = func.overloadpacket.__name__
    is_view = func.is_view and name != "lift_fresh"
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return OperationTraits(
        makes="empty" not in name,
        is_exact=name in EXACT and name != "fill_",
        is_view=is_view,
        lifts=name.startswith("lift_fresh"),
        asks_shapes=name in _SHAPE_ONLY,
        written=tuple(at for at, alias in enumerate(aliases) if alias is not None and alias.is_write),
    )


def tensors_in(values: Iterable[object]) -> list[Tensor]:
    """Return the tensors in lists, tuples and dicts of any depth."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
        elif isinstance(value, dict):
            tensors += tensors_in(value.values())
    return tensors
