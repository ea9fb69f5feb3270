"""A side that is a pure function with its weights: any library of torch or JAX whose modules are not nn.Module or NNX.

`function` makes one; ``_parity/subject.py`` of the backend that its arrays belong to runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ....backends import _ARRAY_HOMES, Framework
from .subject import flatten


@dataclasses.dataclass(frozen=True)
class Function:
    """A pure function ``call(weights, *inputs)`` and the tree of arrays that it takes as its weights."""

    call: Callable[..., Any]
    weights: Any

    @property
    def framework(self) -> Framework:
        """The framework of the arrays.

        Raises:
            TypeError: there are none, or they are of both frameworks.
        """
        found = {home for _, leaf in flatten(self.weights, _is_array) if (home := _home(leaf)) is not None}
        if not found:
            raise TypeError(
                f"weights must hold tensors of torch or arrays of JAX, got {type(self.weights).__name__} without any"
            )
        if len(found) > 1:
            raise TypeError("weights must be arrays of one framework, got tensors of torch and arrays of JAX")
        return found.pop()


def function(call: Callable[..., Any], weights: Any) -> Function:
    """Return a side of a comparison: a pure function and its weights.

    Args:
        call: ``call(weights, *inputs)`` returns an array, or a tuple, list, mapping or dataclass of arrays.
        weights: dicts, lists, tuples and dataclasses of torch tensors or of JAX arrays, at any depth.

    Raises:
        TypeError: `call` can't be called, or `weights` are not arrays of one framework.
    """
    if not callable(call):
        raise TypeError(f"call must be a function of the weights and the inputs, got {type(call).__name__}")
    made = Function(call, weights)
    made.framework  # noqa: B018 - so that the error comes here, and not where the function is run
    return made


def _home(value: Any) -> Framework | None:
    homes = (base.__module__.partition(".")[0] for base in type(value).__mro__)
    return next((_ARRAY_HOMES[home] for home in homes if home in _ARRAY_HOMES), None)


def _is_array(value: Any) -> bool:
    return _home(value) is not None and hasattr(value, "dtype") and hasattr(value, "shape")
