"""Calls of attention that the devices of a mesh share, against the plain ones: every operand, mask and method in JAX.

They run in a process of their own, which takes the processor for eight devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from attn_bridge import masks
from attn_parity import workers

B, T, H, K, D = 2, 16, 8, 2, 4

MESHES: tuple[dict[str, int], ...] = (
    {"tensor": 2, "context": 2},
    {"tensor": 4, "context": 2},
    {"fsdp": 2, "context": 4},
    {"fsdp": 2, "tensor": 2, "context": 2},
)

METHODS = ("all_gather", "ring", "ulysses")


def hidden() -> np.ndarray:
    """Return a mask per head, with rows that see nothing."""
    shown = np.random.default_rng(1).random((B, H, T, T)) > 0.4
    shown[0, 1, 3] = shown[1, :, 9] = False
    return shown


def calls() -> dict[str, tuple[dict[str, Any], dict[str, int]]]:
    """Return name -> options of the call, and sizes other than those above."""
    causal, ids = masks.causal(), np.random.default_rng(2).integers(0, 3, (B, T + 8)).cumsum(1)
    return {
        "no mask": ({}, {}),
        "causal": ({"mask": causal}, {}),
        "window": ({"mask": masks.sliding_window(3)}, {}),
        "chunked": ({"mask": masks.chunked(5)}, {}),
        "prefix": ({"mask": masks.prefix(6)}, {}),
        "padding": ({"mask": causal & masks.padding([0, 7])}, {}),
        "documents": ({"mask": causal & masks.documents(ids[:, :T])}, {}),
        "either": ({"mask": (masks.sliding_window(4) | masks.prefix(3)) & masks.padding([12, 16])}, {}),
        "from another position": ({"mask": causal.restrict(masks.padding([9, 14])).offset(4, keys=2)}, {}),
        "documents moved": ({"mask": masks.documents(ids).offset(4, keys=4)}, {}),
        "rows that see nothing": ({"mask": causal.restrict(hidden()), "sinks": True}, {}),
        "bias": ({"mask": causal, "bias": (1, H, T, T), "softcap": 2.0, "scale": 0.7}, {}),
        "bias of keys": ({"mask": causal, "bias": (1, 1, 1, T)}, {}),
        "dropout": ({"mask": causal, "dropout": 0.4}, {}),
        "weights": ({"mask": causal.restrict(hidden()), "sinks": True, "return_weights": True}, {}),
        "all at once": ({"mask": causal.restrict(hidden()), "bias": (B, H, T, T), "sinks": True, "dropout": 0.3}, {}),
        "other keys": ({}, {"S": 24}),
        "keys that do not divide": ({}, {"S": 11}),
        "tokens that do not divide": ({"mask": causal}, {"T": 11}),
        "groups cut unevenly": ({"mask": causal}, {"H": 12, "K": 3}),
        "one key head": ({"mask": causal}, {"K": 1}),
        "batch that does not divide": ({"mask": causal}, {"B": 3}),
    }


@dataclasses.dataclass(frozen=True)
class Task:
    """What a process runs: names of calls, whether as many scores are computed, in blocks and balanced, and all of it.

    Without `whole`, each call runs once on each mesh, by a method that moves on with the calls: all pairs of a call, a
    mesh and a method run, from three calls on.
    """

    names: tuple[str, ...]
    as_many: bool
    whole: bool


def deviations(names: tuple[str, ...], *, as_many: bool, whole: bool) -> dict[str, float]:
    """Return the largest difference of each call, mesh and method, as a part of the largest value or of 1."""
    (found,) = workers.run(run, [Task(names, as_many, whole)], 1)
    return found


def run(task: Task) -> dict[str, float]:
    """Run calls in a process where JAX was not used."""
    import jax

    from attn_parity.frameworks.jax import meshes
    from jax_attn.parallel.schemes import balance, part, ring
    from jax_attn.parallel.sharding import Sharding

    meshes.simulate({"all": 8}, 0, None)  # type: ignore[arg-type]  # no folder is used
    jax.config.update("jax_enable_x64", True)
    if task.as_many:
        balance.LEAST_TOKENS = part.SMALL_BLOCK = 1
        ring.PARTS, ring.LEAST_PART = 2, 1
    found = {}
    for turn, name in enumerate(task.names):
        plain = _results(name, None)
        for place, sizes in enumerate(MESHES):
            for method in METHODS if task.whole else [METHODS[(turn + place) % len(METHODS)]]:
                mesh = meshes.simulate(sizes, 0, None)  # type: ignore[arg-type]  # no folder is used
                sharding = Sharding.on(mesh, **{role: role for role in sizes}, method=method)
                shared = _results(name, sharding)
                found[f"{name}, {sizes}, {method}"] = max(
                    _difference(one, other) for one, other in zip(plain, shared, strict=True)
                )
    return found


def _results(name: str, sharding: Any) -> list[Any]:
    """Return the outputs and gradients of a call."""
    import jax
    import jax.numpy as jnp

    from jax_attn import functional

    options, sizes = calls()[name]
    options, random = dict(options), np.random.default_rng(3)
    b, t, h, k = (sizes.get(letter, size) for letter, size in (("B", B), ("T", T), ("H", H), ("K", K)))
    s = sizes.get("S", t)
    operands = {"query": (b, t, h, D), "key": (b, s, k, D), "value": (b, s, k, D + 1)}
    if "bias" in options:
        operands["bias"] = options.pop("bias")
    if options.pop("sinks", False):
        operands["sinks"] = (h,)
    if "dropout" in options:
        options["rng"] = jax.random.key(3)
    given = {one: jnp.asarray(random.normal(size=shape)) for one, shape in operands.items()}

    def loss(given: Any) -> Any:
        result = functional.dot_product_attention(**given, **options, sharding=sharding)
        outputs = result if isinstance(result, tuple) else (result,)
        weights = (np.random.default_rng(one.ndim).normal(size=one.shape) for one in outputs)
        return sum((jnp.sin(one) * weight).sum() for one, weight in zip(outputs, weights, strict=True)), outputs

    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    return [np.asarray(one) for one in (*outputs, *gradients.values())]


def _difference(one: Any, other: Any) -> float:
    return float(np.max(np.abs(one - other)) / max(1.0, np.abs(one).max()))


def memory(tokens: int, devices: int) -> dict[str, float]:
    """Return how much one device needs, over how much each of several does: forward and with gradients."""
    (found,) = workers.run(measure, [(tokens, devices)], 1)
    return found


def measure(task: tuple[int, int]) -> dict[str, float]:
    """Compile causal attention for one device, and round a ring; nothing runs."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    import jax_attn
    from attn_parity.frameworks.jax import meshes
    from jax_attn.parallel import parallelize

    tokens, devices = task
    mesh = meshes.simulate({"context": devices}, 0, None)  # type: ignore[arg-type]  # no folder is used
    alone, shared = (jax_attn.MultiHeadAttention(256, 256, tokens, num_heads=4, rngs=nnx.Rngs(0)) for _ in range(2))
    parallelize(shared, mesh, context="context", method="ring")

    def needed(module: Any, place: Any, *, backward: bool) -> int:
        graph, state = nnx.split(module)

        def loss(state: Any, x: Any) -> Any:
            output = nnx.merge(graph, state)(x)
            return (output**2).sum() if backward else output

        function = jax.grad(loss, argnums=(0, 1), allow_int=True) if backward else loss
        given = jax.ShapeDtypeStruct((1, tokens, 256), jnp.float32, sharding=place)
        found = jax.jit(function).lower(state, given).compile().memory_analysis()
        return int(found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes)

    whole, cut = SingleDeviceSharding(jax.devices()[0]), NamedSharding(mesh, PartitionSpec(None, "context"))
    return {
        name: needed(alone, whole, backward=backward) / needed(shared, cut, backward=backward)
        for name, backward in (("forward", False), ("with gradients", True))
    }
