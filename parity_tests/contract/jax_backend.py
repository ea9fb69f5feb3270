"""The adapter of JAX: builds and calls what `jax_attn` offers, with NumPy arrays in and out.

Calls are compiled whole where they can be: operation by operation, compiling takes several times as long.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_attn
from attn_bridge import flax_to_torch, torch_to_flax
from attn_bridge.masks import Mask
from jax_attn import functional, implementations
from jax_attn.backend import build_blank, get_weights, precision, set_weights
from jax_attn.decoding import generation
from jax_attn.implementations import reference
from parity_tests.support.calls.interpreted import run_by_numpy

__all__ = ["build_blank", "precision", "reference"]

package = jax_attn
OTHERS = {"torch"}
"""Packages without which this backend must work."""

PROGRAM = """
import jax, jax_attn, jax_attn.backend
from flax import nnx
module = jax_attn.MultiHeadAttention(4, 4, 6, num_heads=2, rngs=nnx.Rngs(0))
jax.eval_shape(module, jax.ShapeDtypeStruct((5, 4), "float32"))
"""
"""Imports the backend and calls a module."""

SOURCES = "a key, a stream, an nnx.Rngs or a TorchRngs"
"""What `functional` takes for a random source, in the words of its message."""


def build(name: str, seed: int = 0, **arguments: Any) -> nnx.Module:
    """Return a new module whose weights, and then masks of dropout, are drawn from a seed."""
    return getattr(jax_attn, name)(**arguments, rngs=nnx.Rngs(seed))


def load(module: nnx.Module, weights: dict[str, np.ndarray]) -> None:
    """Give a module its weights by their torch names."""
    set_weights(module, torch_to_flax(weights, module.config.rules()))


def halve(layer: nnx.Linear, half: int, side: str) -> None:
    """Keep the first or the second half of the ``outputs`` or ``inputs`` of a linear layer."""
    for name in ("kernel", "bias"):
        array = getattr(layer, name)
        if array is not None and (name == "kernel" or side == "outputs"):
            axis = 0 if side == "inputs" else -1
            setattr(layer, name, nnx.Param(jnp.split(array[...], 2, axis)[half]))


def stock_linear(inputs: int, outputs: int, bias: int) -> nnx.Linear:
    """Return Flax's linear layer with a bias of a width."""
    layer = nnx.Linear(inputs, outputs, rngs=nnx.Rngs(0))
    layer.bias = nnx.Param(jnp.ones(bias))
    return layer


def keep_first(layer: nnx.Linear) -> None:
    """Keep the first output of a linear layer alone."""
    for name in ("kernel", "bias"):
        array = getattr(layer, name)
        if array is not None:
            setattr(layer, name, nnx.Param(array[...][..., :1]))


def keep_first_number(owner: nnx.Module, name: str, axis: int = -1) -> None:
    """Keep the first number of a parameter along an axis alone."""
    setattr(owner, name, nnx.Param(jax.lax.slice_in_dim(getattr(owner, name)[...], 0, 1, axis=axis)))


def parameter(module: nnx.Module, name: str) -> np.ndarray:
    """Return a parameter by its torch name."""
    return flax_to_torch(get_weights(module), module.config.rules())[name]


def as_argument(value: Any) -> Any:
    """Return what a user gives for a NumPy array; anything else as it is."""
    return value


def output(module: Any, *inputs: np.ndarray) -> np.ndarray:
    """Return what a plain call gives."""
    return np.asarray(_plain(*_as_arguments(module), *map(jnp.asarray, inputs)))


def call_once(module: nnx.Module, *inputs: Any, **options: Any) -> Any:
    """Return what a call gives, traced and evaluated by NumPy: compiling takes most of the time of a call made once."""
    return run_by_numpy(operator.call, module, *inputs, **options)


def pick(logits: np.ndarray, numbers: np.ndarray, options: Any) -> np.ndarray:
    """Return the tokens that numbers from [0, 1) pick."""
    return np.asarray(generation.pick(jnp.asarray(logits), jnp.asarray(numbers), options.checked(logits.shape[-1])))


def output_eagerly(module: nnx.Module, *inputs: np.ndarray) -> np.ndarray:
    """Return what a plain call gives, compiled operation by operation."""
    return np.asarray(module(*inputs))


def run(module: Any, x: np.ndarray, mask: np.ndarray | Mask | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the context and the weights."""
    described = isinstance(mask, Mask)
    context, weights = _with_weights(
        *_as_arguments(module), x, None if described else mask, mask if described else None
    )
    return np.asarray(context), np.asarray(weights)


def run_eagerly(module: nnx.Module, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the context and the weights, compiled operation by operation."""
    return tuple(map(np.asarray, module(x, return_weights=True)))


def gradients(module: Any, x: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the input and of every parameter, for a cotangent without symmetry."""
    function, module = _as_arguments(module)
    graphdef, parameters, rest = nnx.split(module, nnx.Param, ...)
    found = _module_gradients(x, parameters, rest, mask, function, graphdef)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def random_state(module: nnx.Module) -> Any:
    """Return the state of everything that a module may draw from: the counts of all streams inside it."""
    return [int(count) for count in jax.tree.leaves(nnx.state(module, nnx.RngCount))]


def attend(*inputs: np.ndarray, **options: Any) -> Any:
    """Call `functional.dot_product_attention` on NumPy arrays."""
    call = _attention if options.get("rng") is None else functional.dot_product_attention
    result = call(*inputs, **options)
    return tuple(map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)


def attend_gradients(*inputs: np.ndarray, **options: Any) -> list[np.ndarray]:
    """Return the gradients of query, key, value and, if there are any, of the sinks."""
    found = _attention_gradients(inputs, options.pop("sinks", None), options)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def unavailable(*inputs: np.ndarray) -> dict[str, str | None]:
    """Return why each implementation can't serve a call, None if it can."""
    call = functional._checked(*map(jnp.asarray, inputs), *[None] * 5, 0.0, None, False)
    return {name: one.unsupported(call) for name, one in implementations.IMPLEMENTATIONS.items()}


def source(seed: int) -> nnx.RngStream:
    """Return a random source of `functional`."""
    return nnx.Rngs(dropout=seed).dropout


def source_state(rng: nnx.RngStream) -> Any:
    """Return the state of a random source."""
    return int(rng.count[...])


def _as_arguments(module: Any) -> tuple[Any, nnx.Module | None]:
    """Return the function and the module, one of them, as `_with_weights` takes them."""
    return (None, module) if isinstance(module, nnx.Module) else (module, None)


@functools.partial(nnx.jit, static_argnums=0)
def _plain(function: Any, module: nnx.Module | None, *inputs: jax.Array) -> jax.Array:
    return (function or module)(*inputs)


@functools.partial(nnx.jit, static_argnums=(0, 4))
def _with_weights(function: Any, module: nnx.Module | None, x: Any, mask: Any, described: Mask | None) -> Any:
    mask = mask if described is None else described
    return (function or module)(x, attention_mask=mask, return_weights=True)


_attention = jax.jit(
    functional.dot_product_attention, static_argnames=("scale", "softcap", "return_weights", "implementation")
)


@functools.partial(jax.jit, static_argnums=(4, 5))
@functools.partial(jax.grad, argnums=(0, 1))
def _module_gradients(x: Any, parameters: Any, rest: Any, mask: Any, function: Any, graphdef: Any) -> Any:
    called = function or nnx.merge(graphdef, parameters, rest, copy=True)
    return _loss(called(x, attention_mask=mask, return_weights=True))


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1))
def _attention_gradients(inputs: Any, sinks: Any, options: dict[str, Any]) -> Any:
    return _loss([functional.dot_product_attention(*inputs, **options, sinks=sinks)])


def _loss(outputs: Any) -> jax.Array:
    return sum((part * jnp.cos(jnp.arange(part.size)).reshape(part.shape)).sum() for part in outputs)
