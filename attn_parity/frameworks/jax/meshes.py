"""Simulated devices: parts of the processor that JAX takes for devices, a mesh of them, and the collectives of a call.

The twin is `attn_parity.frameworks.torch.meshes`.
"""

from __future__ import annotations

import collections
import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

_COLLECTIVE = re.compile(
    r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)


def simulate(sizes: Mapping[str, int], rank: int, folder: Path, *, again: bool = False) -> Mesh:
    """Have JAX take the processor for as many devices as a mesh needs, and return the mesh.

    Args:
        sizes: of its axes by name.
        rank: number of this process; there is one.
        folder: not used.
        again: not used; further meshes have as many devices at most.

    Raises:
        ValueError: JAX has fewer devices, because it was used before.
    """
    devices = math.prod(sizes.values())
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        if len(jax.devices("cpu")) < devices:
            raise ValueError(f"a mesh of {devices} devices needs a process in which JAX was not used before") from None
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
        devices=jax.devices("cpu")[:devices],
    )


def leave() -> None:
    """Do nothing: no other process takes part."""


def double_precision() -> contextlib.AbstractContextManager[None]:
    """Return the context in which there is float64."""
    return jax.enable_x64(True)


def results(module: nnx.Module, inputs: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return the output of a call, and the gradients of inputs and parameters, whole, by name.

    Args:
        module: plain or sharded, with one output.
        inputs: keyword arguments.
        seed: of the numbers that the output is multiplied with to give the loss.
    """
    graphdef, weights, rest = nnx.split(module, nnx.Param, ...)
    sources = {name: one for name, one in inputs.items() if one.dtype.kind == "f"}
    fixed = {name: one for name, one in inputs.items() if name not in sources}

    def loss(
        weights: nnx.State, sources: dict[str, jax.Array], rest: nnx.State, fixed: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        output = nnx.merge(graphdef, weights, rest)(**sources, **fixed)
        cotangent = np.random.default_rng(seed).normal(size=output.shape)
        return (output * cotangent.astype(output.dtype)).sum(), output

    differentiate = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (of_weights, of_inputs), output = differentiate(weights, sources, rest, fixed)
    arrays = {"output": np.asarray(output)}
    arrays |= {f"grad {name}": np.asarray(one) for name, one in of_inputs.items()}
    flat = nnx.to_flat_state(of_weights)
    return arrays | {f"grad {'.'.join(map(str, path))}": np.asarray(one.get_value()) for path, one in flat}


def collectives(module: nnx.Module, inputs: Mapping[str, np.ndarray], *, backward: bool) -> dict[str, int]:
    """Return how often each collective occurs in the compiled program of a call, optionally with its backward pass."""
    graphdef, weights, rest = nnx.split(module, nnx.Param, ...)

    def run(weights: nnx.State, rest: nnx.State, inputs: dict[str, jax.Array]) -> jax.Array:
        return nnx.merge(graphdef, weights, rest)(**inputs)

    def loss(weights: nnx.State, rest: nnx.State, inputs: dict[str, jax.Array]) -> jax.Array:
        return run(weights, rest, inputs).sum()

    program = jax.jit(jax.value_and_grad(loss) if backward else run)
    text = program.lower(weights, rest, dict(inputs)).compile().as_text() or ""
    return dict(sorted(collections.Counter(_COLLECTIVE.findall(text)).items()))
