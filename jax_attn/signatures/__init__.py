"""How the public classes and functions are called, by overloads: the type of a result follows from the arguments.

They are protocols, a file per kind of callable. ``@typed_as(AttentionCall)`` gives a method the type of a protocol for
type checkers; when the program runs, the method is unchanged, and so are its docstring and its signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from jax.typing import DTypeLike

Signature = TypeVar("Signature")

DType: TypeAlias = DTypeLike
"""The dtypes that a constructor takes."""


def typed_as(signature: Callable[..., Signature]) -> Callable[[Callable[..., object]], Signature]:
    """Return a decorator that gives a function the type of the protocol `signature`, and returns it as it is."""

    def unchanged(function: object) -> Any:
        return function

    return unchanged
