"""Check the gallery without the judge: right pairs agree to 1e-5 in float32, nearly exactly in float64; faults show.

Runs both sides with the weights they hold, forward and backward from one drawn gradient. Gradients of weights are
compared as one sorted list, whatever their names and layouts. Float32 tables limit what float64 shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .gallery import Case

FLOAT32, FLOAT64 = 1e-5, 3e-7


def differences(case: Case, dtype: str) -> tuple[float, float]:
    """Return the largest difference of outputs and of gradients, relative to the largest value of either."""
    call = case.options.get("second_inputs", case.inputs)
    outputs, gradients = _run(case.first, case.inputs, dtype)
    others, other_gradients = _run(case.second, call, dtype)
    assert [one.shape for one in outputs] == [one.shape for one in others]
    forward = max(_apart(one, two) for one, two in zip(outputs, others, strict=True))
    return forward, _apart(np.sort(gradients), np.sort(other_gradients))


def _apart(one: np.ndarray, two: np.ndarray) -> float:
    if one.shape != two.shape:
        return float("inf")
    difference = np.abs(one - two).max(initial=0.0)
    return float(difference / max(np.abs(one).max(initial=0.0), 1e-30)) if difference else 0.0


def _run(side: Any, inputs: Any, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    if hasattr(side, "named_parameters") or _is_torch_function(side):
        return _torch(side, inputs, dtype)
    with _float64() if dtype == "float64" else contextlib.nullcontext():
        return _jax(side, inputs, dtype)


def _is_torch_function(side: Any) -> bool:
    if not hasattr(side, "weights"):
        return False
    leaves = list(_leaves(side.weights))
    return type(leaves[0]).__module__.startswith("torch")


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for one in tree.values():
            yield from _leaves(one)
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _leaves(one)
    else:
        yield tree


def _map(function: Any, tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(function, one) for key, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(function, one) for one in tree)
    return function(tree)


def _arguments(inputs: Any, cast: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), _map(cast, inputs)
    return _map(cast, inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _cotangent(index: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(100 + index).normal(size=shape)


def _torch(side: Any, inputs: Any, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    import copy

    import torch

    wanted = getattr(torch, dtype)

    def cast(leaf: Any) -> Any:
        tensor = torch.as_tensor(leaf).detach()
        return tensor.to(wanted).clone().requires_grad_() if tensor.is_floating_point() else tensor

    args, keywords = _arguments(inputs, cast)
    if hasattr(side, "named_parameters"):
        call = copy.deepcopy(side).to(wanted)
        weights = [one for one in call.parameters() if one.requires_grad]
        result = call(*args, **keywords)
    else:
        tree = _map(cast, side.weights)
        weights = list(_leaves(tree))
        result = side.call(tree, *args, **keywords)
    outputs = list(_leaves(result))
    loss = sum((one * torch.as_tensor(_cotangent(i, one.shape)).to(one.dtype)).sum() for i, one in enumerate(outputs))
    loss.backward()
    gradients = [(one.grad if one.grad is not None else torch.zeros_like(one)).double().numpy() for one in weights]
    return [one.detach().double().numpy() for one in outputs], np.concatenate([one.ravel() for one in gradients])


def _float64() -> Any:
    import jax

    return jax.enable_x64(True)


def _jax(side: Any, inputs: Any, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def cast(leaf: Any) -> Any:
        array = jnp.asarray(leaf)
        return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array

    args, keywords = _arguments(inputs, cast)
    if hasattr(side, "weights"):
        weights, run = _map(cast, side.weights), side.call
    elif isinstance(side, tuple):
        module, variables = side
        rest = {name: _map(cast, one) for name, one in variables.items() if name != "params"}
        weights = _map(cast, variables["params"])

        def run(weights: Any, *args: Any, **keywords: Any) -> Any:
            return module.apply({"params": weights, **rest}, *args, **keywords)
    else:
        side = nnx.clone(side)
        for _, node in nnx.iter_graph(side):
            if isinstance(node, nnx.Embed):
                node.dtype = jnp.dtype(dtype)  # nnx.Embed freezes the dtype of its table
        graph, weights, others = nnx.split(side, nnx.Param, ...)
        weights = jax.tree.map(cast, weights)
        others = jax.tree.map(lambda one: one if jnp.issubdtype(one.dtype, jax.dtypes.prng_key) else cast(one), others)

        def run(weights: Any, *args: Any, **keywords: Any) -> Any:
            return nnx.merge(graph, weights, others, copy=True)(*args, **keywords)

    def loss(weights: Any) -> Any:
        outputs = list(_leaves(run(weights, *args, **keywords)))
        return sum((one * _cotangent(i, one.shape)).sum() for i, one in enumerate(outputs)), outputs

    (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    flat = [np.asarray(one, np.float64).ravel() for one in jax.tree.leaves(gradients)]
    return [np.asarray(one, np.float64) for one in outputs], np.concatenate(flat)


def main(names: list[str]) -> None:
    """Print what differs by how much, of some entries or of all."""
    from .gallery import entries, outside

    known = {**entries(), **(outside() if any(name.startswith("outside") for name in names) else {})}
    doubtful = 0
    for name, entry in known.items():
        if names and not any(name.startswith(one) for one in names):
            continue
        for fault in (None, *entry.faults):
            try:
                case = entry.build(fault)
                single = differences(case, "float32")
                double = (
                    (0.0 if fault is None else 1.0,) * 2
                    if "float32 only" in entry.tags
                    else differences(case, "float64")
                )
            except Exception as error:  # the table goes on
                doubtful += 1
                print(f"DOUBTFUL {name:28} {fault or '-':32} {type(error).__name__}: {error}"[:400], flush=True)
                continue
            precise = fault is not None and entry.faults[fault].effect == "precision"
            if fault is None:
                good = max(single) < 10 * FLOAT32 and single[0] < FLOAT32 and max(double) < FLOAT64
            else:
                good = max(single) > 1e-4 if precise else max(double) > 4e-7
                if entry.faults[fault].direction == "backward":
                    good = good and double[0] < FLOAT64
            doubtful += not good
            row = " ".join(f"{one:8.1e}" for one in (*single, *double))
            print(f"{'' if good else 'DOUBTFUL ':9}{name:28} {fault or '-':32} {row}", flush=True)
    print(f"{doubtful} doubtful")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
