"""Calls of a module on a mesh with explicit axes: the module's code runs where XLA shards arrays automatically.

With explicit axes shardings are part of types, and each operation must declare the sharding of its results. So a call
enters `jax.sharding.auto_axes` with the parameters and all other arrays, and leaves it with the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_bridge.masks import Mask
from attn_bridge.masks.description import ArrayPlaceholder

from ..decoding.cache import KeyValueCache
from ..decoding.recurrent_cache import RecurrentCache
from .sharding import Sharding

Values = dict[tuple[str, ...], Array]
"""Path of a variable of a module -> its value."""


def call(
    kind: type[nnx.Module], module: nnx.Module, arguments: Mapping[str, object], leave: Callable[[object], object]
) -> object:
    """Return the result of the class's own ``__call__``, sharded over the mesh as given.

    Args:
        kind: the class.
        module: the module; its counts of random numbers advance.
        arguments: by name.
        leave: called with the result.
    """
    sharding: Sharding = module.sharding
    graph, state = nnx.split(module)
    values = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
    masks = {name: one.separate() for name, one in arguments.items() if isinstance(one, Mask)}
    plain = {name: one for name, one in arguments.items() if name not in masks}
    leaves, structure = jax.tree.flatten(plain)
    arrays = {number: leaf for number, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}
    arrays_of_masks = {name: arrays_of for name, (_, arrays_of) in masks.items()}

    def body(
        values: Values, arrays: dict[int, Array], arrays_of_masks: dict[str, tuple[Array, ...]]
    ) -> tuple[object, Values]:
        inside = nnx.merge(graph, nnx.from_flat_state(values))
        keywords = jax.tree.unflatten(structure, [arrays.get(number, leaf) for number, leaf in enumerate(leaves)])
        for name, (mask, _) in masks.items():
            keywords[name] = mask.with_arrays(functools.partial(_in_place, arrays_of_masks[name]))
        result = leave(kind.__call__(inside, **keywords))
        counts = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(inside, nnx.RngState))}
        return result, counts

    anywhere = sharding.outside(sharding.of())
    shapes = jax.eval_shape(jax.sharding.auto_axes(body, out_sharding=anywhere), values, arrays, arrays_of_masks)
    result, counts = jax.sharding.auto_axes(body, out_sharding=_shardings(sharding, shapes))(
        values, arrays, arrays_of_masks
    )
    if counts:
        nnx.update(module, nnx.from_flat_state(counts))
    return result


def _in_place(arrays: tuple[Array, ...], slot: ArrayPlaceholder) -> Array:
    return arrays[slot.number]


def generating(method: Callable[..., object]) -> Callable[..., object]:
    """Return a method that compiles its own programs, and so runs as a whole where XLA shards arrays automatically."""

    @functools.wraps(method)
    def run(self: nnx.Module, *arguments: object, **options: object) -> object:
        sharding: Sharding = self.sharding
        if not sharding.is_explicit:
            return method(self, *arguments, **options)
        graph, state = nnx.split(self)
        inside = nnx.merge(graph, jax.tree.map(lambda leaf: _moved(leaf, sharding.mesh), state))
        for _, child in nnx.iter_modules(inside):
            if hasattr(child, "sharding"):
                child.sharding = Sharding(sharding.mesh, sharding.plan)
        with jax.set_mesh(sharding.mesh):
            positional = [_moved(leaf, sharding.mesh) for leaf in arguments]
            named = {name: _moved(leaf, sharding.mesh) for name, leaf in options.items()}
            result = method(inside, *positional, **named)
        counts = nnx.state(inside, nnx.RngState)
        nnx.update(self, jax.tree.map(lambda leaf: _moved(leaf, sharding.outside_mesh), counts))
        return jax.device_put(result, sharding.outside(sharding.of()))

    return run


def _moved(array: object, mesh: Mesh) -> object:
    """Return an array that devices share as one of the same devices, on axes of another type; all else as it is."""
    if not isinstance(array, Array) or not isinstance(array.sharding, NamedSharding):
        return array
    return jax.device_put(array, NamedSharding(mesh, array.sharding.spec))


def _shardings(sharding: Sharding, shapes: tuple[object, object]) -> tuple[object, object]:
    """Return the shardings of results outside of a call."""
    result, counts = shapes

    def of(*cuts: object) -> NamedSharding:
        return NamedSharding(sharding.outside_mesh, P(*cuts))

    def tokens(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if leaf.ndim < 2:
            return of()
        batch = sharding.divided("fsdp", leaf.shape[0]) if leaf.ndim > 2 else None
        return of(*(batch,) * (leaf.ndim > 2), *(None,) * (leaf.ndim - 3), sharding.divided("context", leaf.shape[-2]))

    def cache(output: object) -> object:
        if not isinstance(output, (KeyValueCache, RecurrentCache)):
            return jax.tree.map(lambda _: of(), output)
        axis = 2 if isinstance(output, KeyValueCache) else 1

        def by_head(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            if leaf.ndim != 4:
                return of()
            heads = sharding.divided("tensor", leaf.shape[axis])
            return of(sharding.divided("fsdp", leaf.shape[0]), *(None,) * (axis - 1), heads)

        return jax.tree.map(by_head, output)

    first, *rest = result if isinstance(result, tuple) else (result,)
    kinds = (KeyValueCache, RecurrentCache)
    others = [jax.tree.map(cache, output, is_leaf=lambda leaf: isinstance(leaf, kinds)) for output in rest]
    results = (jax.tree.map(tokens, first), *others)
    return results if isinstance(result, tuple) else results[0], jax.tree.map(lambda _: of(), counts)
