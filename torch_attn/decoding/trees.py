"""Caches as trees of tensors, which `torch.export` and `torch.func` take apart and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree  # its functions have no other name for classes that are no dataclasses


def register(cache: type[Any], leaves: Sequence[str], fixed: Sequence[str]) -> None:
    """Have torch take caches of a class for trees.

    Args:
        cache: the class.
        leaves: attributes that are tensors, None, or numbers that a program takes (the length).
        fixed: attributes that a program is made for.
    """

    def keep(one: Any) -> tuple[Any, ...]:
        return tuple(getattr(one, name) for name in fixed)

    def flatten(one: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(one, name) for name in leaves], keep(one)

    def flatten_by_name(one: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return [(pytree.GetAttrKey(name), getattr(one, name)) for name in leaves], keep(one)

    def unflatten(values: Any, kept: Any) -> Any:
        restored = object.__new__(cache)
        for name, value in (*zip(leaves, values, strict=True), *zip(fixed, kept, strict=True)):
            setattr(restored, name, value)
        return restored

    pytree.register_pytree_node(
        cache,
        flatten,
        unflatten,
        serialized_type_name=f"{cache.__module__}.{cache.__qualname__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=flatten_by_name,
    )
