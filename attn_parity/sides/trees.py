"""Trees of values: tuples, lists, mappings and dataclasses whose leaves calls take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def flatten(tree: object, is_leaf: Callable[[object], bool], path: str = "") -> list[tuple[str, Any]]:
    """Return ``(path, leaf)`` of every leaf in tuples, lists, mappings and dataclasses; None holds nothing.

    Mappings are walked in the order of their sorted keys, as JAX does, so that two that hold the same are walked alike.
    """
    if is_leaf(tree):
        return [(path, tree)]
    return [leaf for key, child in _children(tree) for leaf in flatten(child, is_leaf, path + key)]


def plain_values(tree: object) -> dict[str, object]:
    """Return path -> value of the Python numbers, bools and strings that a call returned."""
    return dict(flatten(tree, lambda value: isinstance(value, (bool, int, float, complex, str))))


def replace(tree: object, is_leaf: Callable[[object], bool], leaves: Sequence[object]) -> Any:
    """Return the tree with its leaves replaced, in order, and everything else as it is."""
    rest = list(leaves)

    def walk(node: object) -> Any:
        if is_leaf(node):
            return rest.pop(0)
        if isinstance(node, Mapping):
            walked = {key: walk(node[key]) for key in _sorted(node)}
            changed = {key: walked[key] for key in node}
            return changed if type(node) is dict else _like_mapping(node, changed)
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return type(node)(*map(walk, node))
        if isinstance(node, (tuple, list)):
            return type(node)(map(walk, node))
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            return dataclasses.replace(
                node, **{field.name: walk(getattr(node, field.name)) for field in dataclasses.fields(node)}
            )
        return node

    return walk(tree)


def _like_mapping(node: Any, changed: dict[object, object]) -> object:
    try:
        return type(node)(changed)
    except TypeError:
        return changed


def _sorted(keys: Iterable[object]) -> list[Any]:
    listed = list(keys)
    try:
        return sorted(listed)
    except TypeError:  # of several types
        return sorted(listed, key=lambda key: (type(key).__name__, repr(key)))


def _children(node: object) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", node[key]) for key in _sorted(node)]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{key}", child) for key, child in zip(node._fields, node, strict=True)]
    if isinstance(node, (tuple, list)):
        return [(f"[{position}]", child) for position, child in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    return []
