"""The form of a model of DeepMind's package `gemma` in Linen, which selects its rows in `tables/gemma-linen.toml`."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from ...weights.placements import Shape
from ..layout import Settings
from ..layout.chosen import Form


def form_of_theirs(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form of a model of `gemma`; square feed-forward matrices alone don't determine the gate's axes."""
    votes = collections.Counter({settings["transposed"]: 0})
    for name, shape in shapes.items():
        stem, separator, rest = name.partition("gating_einsum")
        other = shapes.get(f"{stem}linear{rest}", ())
        if separator and len(shape) == 3 and len(other) == 2 and other[0] != other[1]:
            votes[int(tuple(shape[1:]) == tuple(other))] += 1
    transposed = votes.most_common(1)[0][0]  # of most layers: one that is wrong must not turn all others
    flat = int(any(name.startswith("transformer/") for name in shapes))  # published files join modules by slashes
    return {"flat": flat, "transposed": transposed, "fused": any("qkv_einsum" in name for name in shapes)}


def form_of_ours(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form that `gemma` gives a model: one projection if keys have as many heads as queries."""
    pairs = [
        (shape, shapes.get(name.replace("W_query", "W_key")))
        for name, shape in shapes.items()
        if name.endswith("att.W_query.weight")
    ]
    fused = bool(pairs) and all(key is not None and tuple(query) == tuple(key) for query, key in pairs)
    return {"flat": settings["flat"], "transposed": settings["transposed"], "fused": fused}
