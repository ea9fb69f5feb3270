"""The order in which code uses its weights: the first operation of each that depends on the inputs.

The twin is `frameworks.jax.probes.uses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .rounding import Uncompiled
from .storages import StorageMarks, tensors_in, traits_of

if TYPE_CHECKING:
    from torch._ops import OpOverload


class Uses(Uncompiled):
    """Follows weights and inputs through one forward pass: the order in which code uses its weights.

    A weight is used by the first operation of it that depends on the inputs. Only operations count, so modules and
    functions are treated alike.

    Args:
        weights: name -> weight.
        inputs: the arrays of the call.

    Attributes:
        first_uses: name of a weight -> when it is used first.
    """

    def __init__(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]):
        super().__init__()
        self.first_uses: dict[str, int] = {}
        self._clock = 0
        self._origins = StorageMarks[tuple[frozenset[str], bool]]()
        for tensor in inputs:
            self._origins.set(tensor, (frozenset(), True))
        for name, tensor in weights.items():
            self._origins.set(tensor, (frozenset([name]), False))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        traits = traits_of(func)
        with torch._C.DisableTorchFunction():  # what is done here is not the module's
            asked = [] if traits.asks_shapes else list(map(self._origins.get, tensors_in((args, kwargs))))
        origins = [origin for origin in asked if origin is not None]
        met = frozenset[str]().union(*(weights for weights, _ in origins))
        is_data = any(data for _, data in origins)
        self._clock += 1
        if is_data:
            for name in met:
                self.first_uses.setdefault(name, self._clock)
        result = func(*args, **kwargs)
        if not traits.is_view:
            with torch._C.DisableTorchFunction():
                for tensor in traits.results(result, args):
                    self._origins.set(tensor, (frozenset() if is_data else met, is_data))
        return result
