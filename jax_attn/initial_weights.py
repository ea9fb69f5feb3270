"""Layers and arrays that start alike in both frameworks from the same numbers: those of JAX, or torch's by `TorchRngs`.

The twin is `torch_attn.initial_weights`.
"""

from __future__ import annotations

from typing import Required, TypedDict

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from .layer import chosen
from .linear import Linear, chosen_draw, draw_normal, draw_uniform
from .random import Rngs, check_rngs


class ParameterOptions(TypedDict, total=False):
    """Arguments that a module hands on to the layers in it.

    Attributes:
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
    """

    rngs: Required[Rngs]
    param_dtype: DTypeLike
    dtype: DTypeLike | None


def linear(
    d_in: int,
    d_out: int,
    bias: bool = True,
    *,
    rngs: Rngs,
    param_dtype: DTypeLike = jnp.float32,
    dtype: DTypeLike | None = None,
) -> Linear:
    """Return a `Linear`, which starts from the distribution of `torch.nn.Linear`.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        bias: whether there is a bias.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
    """
    return Linear(d_in, d_out, bias, rngs=rngs, param_dtype=param_dtype, dtype=dtype)


def uniform(
    shape: tuple[int, ...], *, rngs: Rngs, param_dtype: DTypeLike = jnp.float32, dtype: DTypeLike | None = None
) -> Array:
    """Return an array of `shape` and `param_dtype` drawn from U[0, 1), from the stream ``params``.

    A matrix is a kernel, and drawn by the ``kernel_init`` that the module under construction was given.
    """
    check_rngs(rngs)
    kernel_init = chosen().kernel_init if len(shape) == 2 else None
    return chosen_draw(kernel_init, draw_uniform, rngs)(rngs.params(), shape, param_dtype)


def normal(
    shape: tuple[int, ...], *, rngs: Rngs, param_dtype: DTypeLike = jnp.float32, dtype: DTypeLike | None = None
) -> Array:
    """Return an array of `shape` and `param_dtype` drawn from N(0, 1), from the stream ``params``."""
    check_rngs(rngs)
    return draw_normal(rngs.params(), shape, param_dtype)


def parameter(array: Array) -> nnx.Param[Array]:
    """Return an array as a parameter of a module."""
    return nnx.Param(array)


def filled(
    shape: int | tuple[int, ...],
    value: float,
    *,
    rngs: Rngs,
    param_dtype: DTypeLike = jnp.float32,
    dtype: DTypeLike | None = None,
) -> nnx.Param[Array]:
    """Return a parameter of `shape` and `param_dtype` that starts with one value; it draws nothing."""
    return parameter(jnp.full(shape, value, param_dtype))
