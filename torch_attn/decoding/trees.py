"""Caches as trees of tensors, which `torch.export`, `torch.func`, `copy` and `pickle` take apart and put together."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor
from torch.utils import _pytree as pytree  # its functions have no other name for classes that are no dataclasses


def register(cache: type[object], leaves: Sequence[str], fixed: Sequence[str]) -> None:
    """Have torch take caches of a class for trees, and copies and pickles hold their numbers alone.

    torch copies no tensor that has a graph of gradients.

    Args:
        cache: the class.
        leaves: attributes that are tensors, None, or numbers that a program takes (the length).
        fixed: attributes that a program is made for.
    """

    def fixed_of(tree: object) -> tuple[object, ...]:
        return tuple(getattr(tree, name) for name in fixed)

    def flatten(tree: object) -> tuple[list[object], tuple[object, ...]]:
        return [getattr(tree, name) for name in leaves], fixed_of(tree)

    def flatten_by_name(tree: object) -> tuple[list[tuple[object, object]], tuple[object, ...]]:
        return [(pytree.GetAttrKey(name), getattr(tree, name)) for name in leaves], fixed_of(tree)

    def unflatten(values: Iterable[object], kept: Iterable[object]) -> object:
        restored = object.__new__(cache)
        for name, value in (*zip(leaves, values, strict=True), *zip(fixed, kept, strict=True)):
            setattr(restored, name, value)
        return restored

    copyreg.pickle(cache, _reduced)
    pytree.register_pytree_node(
        cache,
        flatten,
        unflatten,
        serialized_type_name=f"{cache.__module__}.{cache.__qualname__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=flatten_by_name,
    )


def _reduced(cache: object) -> tuple[Callable[..., object], tuple[type[object], dict[str, object]]]:
    fields = {name: field.detach() if isinstance(field, Tensor) else field for name, field in vars(cache).items()}
    return _restored, (type(cache), fields)


def _restored(kind: type[object], fields: Mapping[str, object]) -> object:
    restored = object.__new__(kind)
    vars(restored).update(fields)
    return restored
