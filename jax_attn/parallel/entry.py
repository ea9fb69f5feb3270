"""The entry of a sharded module: it moves inputs onto its devices, and outputs are sharded over the mesh.

`parallelize` changes the class of a module to a subclass of the same name (as torch's ``fully_shard`` does): so it
stays an instance of its class, `nnx.split` and `nnx.merge` keep it sharded, as they store the class, and it is called
as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from attn_bridge.masks import Mask

from ..decoding.cache import KeyValueCache
from ..decoding.recurrent_cache import RecurrentCache
from ..random import is_tracing
from . import explicit
from .classes import same_name
from .sharding import Sharding

Tree = TypeVar("Tree")

SEQUENCES = ("x", "tokens", "ids", "source", "context")
"""Names of arguments that are sequences; those of a context need not divide."""


@functools.cache
def sharded_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return the subclass of a module's class whose calls put inputs and outputs on the devices of `sharding`."""
    parameters = list(inspect.signature(kind.__call__).parameters.values())[1:]
    order = [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]

    def call(self: nnx.Module, *arguments: object, **options: object) -> object:
        sharding: Sharding = self.sharding
        named = dict(zip(order, arguments, strict=False)) | options
        if len(named) < len(arguments) + len(options):
            return kind.__call__(self, *arguments, **options)  # which says what is wrong
        entered = enter(sharding, named)
        if sharding.is_explicit:
            return explicit.call(kind, self, entered, lambda result: leave(sharding, result))
        return leave(sharding, kind.__call__(self, **entered))

    members: dict[str, object] = {"__call__": functools.wraps(kind.__call__)(call)}
    if hasattr(kind, "init_cache"):

        def init_cache(self: nnx.Module, *arguments: object, **options: object) -> object:
            return place_caches(self.sharding, kind.init_cache(self, *arguments, **options), outside=True)

        members["init_cache"] = functools.wraps(kind.init_cache)(init_cache)
    for name in ("generate", "generate_greedy"):
        if hasattr(kind, name):
            members[name] = explicit.generating(getattr(kind, name))
    return same_name(kind, members)


def enter(sharding: Sharding, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a call on the devices: sequences cut by tokens, all else whole.

    Raises:
        ValueError: tokens that do not divide.
    """
    is_cached = arguments.get("cache") is not None
    return {
        name: _sequence(sharding, one, must_divide=not is_cached and name != "context")
        if name in SEQUENCES
        else _whole(sharding, one)
        for name, one in arguments.items()
    }


def leave(sharding: Sharding, result: object) -> object:
    """Return the result of a call, its caches as `init_cache` places them."""
    if not isinstance(result, tuple):
        return _cut_tokens(sharding, result)
    first, *rest = result
    return (_cut_tokens(sharding, first), *(place_caches(sharding, one) for one in rest))


def place_caches(sharding: Sharding, caches: Tree, *, outside: bool = False) -> Tree:
    """Return caches, or whatever else there is, with each device's heads of keys, values and states on it."""
    put = _put if outside else _constrain
    kinds = (KeyValueCache, RecurrentCache)
    plan = sharding.plan

    def by_head(array: Array, axis: int) -> Array:
        size = plan.size("tensor")
        cuts: list[str | None] = [None] * array.ndim
        if size > 1 and array.shape[axis] % size == 0:
            cuts[axis] = plan.tensor
        cuts[0] = sharding.divided("fsdp", array.shape[0])
        return put(sharding, array, *cuts)

    def placed(cache: object) -> object:
        if not isinstance(cache, kinds):
            return cache
        head_axis = 2 if isinstance(cache, KeyValueCache) else 1
        return jax.tree.map(lambda leaf: by_head(leaf, head_axis) if leaf.ndim == 4 else put(sharding, leaf), cache)

    return jax.tree.map(placed, caches, is_leaf=lambda leaf: isinstance(leaf, kinds))


def _sequence(sharding: Sharding, array: object, *, must_divide: bool) -> object:
    """Return a sequence ``(..., T, D)``, or ids ``(B, T)``, cut by tokens and by sequences of the batch."""
    if not _is_array(array) or not 2 <= array.ndim <= 3:
        return array
    tokens = array.ndim - 2 if jnp.issubdtype(array.dtype, jnp.inexact) else array.ndim - 1
    if must_divide:
        sharding.plan.check_tokens(array.shape[tokens])
    cuts: list[str | None] = [None] * array.ndim
    cuts[tokens] = sharding.divided("context", array.shape[tokens])
    if tokens:
        cuts[0] = sharding.divided("fsdp", array.shape[0])
    return _put(sharding, array, *cuts)


def _cut_tokens(sharding: Sharding, array: object) -> object:
    """Return an output ``(..., T, D)`` cut by tokens."""
    if not isinstance(array, Array) or array.ndim < 2:
        return array
    cuts: list[Any] = [jax.sharding.PartitionSpec.UNCONSTRAINED] * array.ndim
    cuts[-2] = sharding.divided("context", array.shape[-2])
    if not isinstance(array, jax.core.Tracer):
        return array
    return jax.lax.with_sharding_constraint(array, sharding.of(*cuts))


def _whole(sharding: Sharding, value: object) -> object:
    if isinstance(value, Mask):
        return value.with_arrays(lambda array: _whole(sharding, array))
    return _put(sharding, value) if isinstance(value, Array) else value


def _is_array(array: object) -> TypeGuard[Array]:
    """Whether it is an array that JAX holds as it is."""
    return isinstance(array, Array) or (
        isinstance(array, np.ndarray) and jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
    )


def _put(sharding: Sharding, array: Array, *cuts: str | None) -> Array:
    """Return an array on the mesh as it was given."""
    target = sharding.outside(sharding.of(*cuts), array.ndim)
    if sharding.is_explicit and is_tracing():
        return jax.sharding.reshard(array, target)
    if isinstance(array, jax.core.Tracer) and not sharding.is_explicit and not is_tracing():
        # jax.vmap has device_put count the axes of the whole batch, and with_sharding_constraint its own.
        return jax.lax.with_sharding_constraint(jax.device_put(array, sharding.of()), target)
    return jax.device_put(array, target)


def _constrain(sharding: Sharding, array: Array, *cuts: str | None) -> Array:
    """Return an array with its axes cut by these axes of the mesh: a constraint when traced, else a transfer."""
    target = sharding.of(*cuts)
    if isinstance(array, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(array, target)
    return jax.device_put(array, target)
