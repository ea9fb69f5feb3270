"""The order in which code uses its weights: the first operation of each that depends on the inputs.

Only the operations of one forward pass count, so modules and functions are treated alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .probes import _held, _operation, _tensors
from .rounding import Uncompiled

if TYPE_CHECKING:
    from torch._ops import OpOverload


class Uses(Uncompiled):
    """Follows weights and inputs through one forward pass.

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
