"""How devices share the arrays of a run, and whether the copies that should be the same are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from ....sides.shards import Cut, Shares, differing_copies


def shares_of(
    outputs: Sequence[Any], places: Sequence[str], gradients: Mapping[str, Any], shardings: Mapping[str, Any]
) -> Shares:
    """Return how devices share the results of a run.

    Args:
        outputs: the arrays that came out.
        places: where each stands in what was returned; none where there was nothing to trace.
        gradients: of the weights, by name.
        shardings: of the weights that devices share.
    """
    cuts = {name: cut_of(one, gradients[name].ndim) for name, one in shardings.items() if name in gradients}
    named = {f"output{place}": one for place, one in zip(places, outputs, strict=False)}
    named |= {f"grad {name}": one for name, one in gradients.items()}
    apart = [f"{name}: {line}" for name, one in named.items() if (line := _apart(one))]
    return Shares(
        tuple(cut_of(getattr(one, "sharding", None), np.ndim(one)) for one in outputs),
        {name: cut for name, cut in cuts.items() if cut.is_cut},
        tuple(apart),
    )


def cut_of(sharding: Any, ndim: int) -> Cut:
    """Return how an array of a sharding is cut; uncut if its axes have no names."""
    if not isinstance(sharding, NamedSharding):
        return Cut(((),) * ndim)
    sizes = dict(sharding.mesh.shape)
    spec = (*sharding.spec, *(None,) * ndim)[:ndim]
    named = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]
    return Cut(tuple(tuple((name, sizes[name]) for name in names) for names in named))


def _apart(array: Any) -> str:
    """Say which device holds another copy than the first that has the same part; "" if none."""
    if not isinstance(array, Array) or len(array.sharding.device_set) < 2:
        return ""
    held: dict[str, list[tuple[str, Any]]] = {}
    for shard in array.addressable_shards:
        held.setdefault(str(shard.index), []).append((f"device {shard.device.id}", np.asarray(shard.data)))
    lines = (differing_copies(copies) for copies in held.values() if len(copies) > 1)
    return next((line for line in lines if line), "")
