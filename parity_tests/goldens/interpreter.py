"""Reads the recipe of a golden entry and computes it with one backend; imports no framework.

What differs between backends is in `twin`, an object with ``package`` (`torch_attn` or `jax_attn`), ``backend``,
``array(values)``, ``build(recipe)``, a module with the weights that the recipe says, and ``drop(weights, dropout)``. A
result is reached by up to two routes, and both must hold: the public functions of ``steps``, and a call of the module
itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_bridge import masks

from . import check_known, load

ENTRIES = {entry["id"]: entry for entry in load()["entries"]}
ARRAYS = load()["arrays"]
PARAMETERS = load()["parameters"]


def routes(twin: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Return route -> what the entry's recipe gives on that route."""
    check_known(entry)
    recipe = entry["recipe"]
    steps = twin.package.steps
    variant, quantity = recipe["variant"], recipe["returns"]["quantity"]
    x = None if entry["inputs"] is None else twin.array(ARRAYS[entry["inputs"]])
    if variant == "sum_of_printed_row":
        return {"printed": {"scalar": sum(ENTRIES[recipe["entry"]]["value"][recipe["row"]])}[quantity]}
    if variant == "array_shape":
        return {"array": {"batch": x}[quantity]}
    if variant == "lower_triangular_ones":
        return {"steps": {"mask": steps.causal_mask(recipe["constructor"]["size"])}[quantity]}
    if variant == "dropout_of_ones":
        ones = twin.array(np.ones(recipe["constructor"]["shape"]))
        return {"steps": {"dropped": twin.drop(ones, recipe["dropout"])}[quantity]}
    if variant == "per_head_self_product":
        one = x if recipe["head"] is None else x[0, recipe["head"]]
        return {"steps": {"scores": steps.attention_scores(one, one)}[quantity]}
    module = None if variant == "plain_dot_product" else twin.build(recipe)
    found = {"steps": by_steps(twin, recipe, module, x), "module": by_module(twin, recipe, module, x)}
    return {route: results[quantity] for route, results in found.items() if quantity in results}


def by_steps(twin: Any, recipe: dict[str, Any], module: Any, x: Any) -> dict[str, Any]:
    """Compute one head's quantities from the public functions of ``steps``; heads are the module's own affair."""
    if "heads" in recipe:
        return {}
    steps, wanted, dropout = twin.package.steps, recipe["steps"], recipe["dropout"]
    if module is None:
        query = key = value = x
    elif PARAMETERS[recipe["parameters"]]["layout"] == "in_out":
        query, key, value = x @ module.W_query, x @ module.W_key, x @ module.W_value
    else:
        query, key, value = module.W_query(x), module.W_key(x), module.W_value(x)
    mask = steps.causal_mask(x.shape[-2])
    scores = steps.attention_scores(query, key)
    if wanted["mask"] == "minus_inf_above_diagonal":
        scores = steps.mask_scores(scores, mask)
    found = {"queries": query, "keys": key, "values": value, "scores": scores}
    if wanted["normalise"] is None:
        return found
    normalise = {
        "divide_by_sum": steps.sum_normalize,
        "softmax_unshifted": steps.naive_softmax,
        "softmax": steps.softmax,
    }[wanted["normalise"]]
    weights = normalise(scores if wanted["scale"] is None else scores / key.shape[-1] ** 0.5)
    if wanted["mask"] == "zero_above_diagonal":
        weights = steps.mask_weights(weights, mask, renormalize=wanted["renormalise_rows"])
    if dropout and dropout["rate"] > 0:
        weights = twin.drop(weights, dropout)
    return found | {"weights": weights, "context": steps.context_vectors(weights, value)}


def by_module(twin: Any, recipe: dict[str, Any], module: Any, x: Any) -> dict[str, Any]:
    """Call the module, or `simple_self_attention`, where it does what the recipe says."""
    wanted, dropout, variant = recipe["steps"], recipe["dropout"], recipe["variant"]
    dropped = dropout and dropout["rate"] > 0
    if variant == "manual_projection" or wanted["normalise"] != "softmax" or dropped:
        return {}
    if wanted["mask"] == "zero_above_diagonal" and not wanted["renormalise_rows"]:
        return {}
    call = twin.package.simple_self_attention if module is None else module
    causal_itself = "context_length" in (recipe["constructor"] or {})
    mask = masks.causal() if wanted["mask"] and not causal_itself else None
    context, weights = call(x, attention_mask=mask, return_weights=True)
    return {"context": context, "weights": weights}


def finish(result: Any, returns: dict[str, Any]) -> Any:
    """Take the row and column asked for, and reduce."""
    for index in (returns["row"], returns["col"]):
        result = result if index is None else result[index]
    reduce = {
        None: lambda: result,
        "sum": lambda: result.sum(),
        "sum_last_axis": lambda: result.sum(-1),
        "shape": lambda: result.shape,
    }
    return reduce[returns["then"]]()


def as_numpy(twin: Any, result: Any) -> Any:
    """Return a result as an array; a number stays one."""
    return result if isinstance(result, float) else twin.backend.to_numpy(result)
