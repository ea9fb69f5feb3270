"""Calls of JAX functions without compiling them, which takes most of the time of a call made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from attn_parity.frameworks.jax.probes.numpy_interpreter import evaluate


def by_numpy(function: Callable[..., Any], *inputs: Any) -> Any:
    """Trace a function of JAX and evaluate it by NumPy; return its result with NumPy arrays.

    Args:
        function: takes and returns trees of arrays; what XLA does with it is not tested.
        inputs: its arguments.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*inputs)
    return jax.tree.unflatten(jax.tree.structure(shape), evaluate(closed, *map(np.asarray, jax.tree.leaves(inputs))))


def run_by_numpy(function: Callable[..., Any], model: nnx.Module, *inputs: Any, **options: Any) -> Any:
    """Return the result of `function(model, *inputs, **options)`, evaluated by NumPy.

    Args:
        function: takes a model and trees of arrays; `operator.call` calls the model itself.
        model: its parameters are inputs of the program; everything else of it is constant.
        inputs: positional arguments after the model.
        options: keyword arguments.
    """
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def run(parameters, inputs, options):
        return function(nnx.merge(graph, parameters, rest), *inputs, **options)

    return by_numpy(run, parameters, inputs, options)
