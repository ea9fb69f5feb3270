"""A linear layer that starts from torch's distribution of weights, so that training from scratch starts alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


@dataclasses.dataclass(frozen=True)
class SymmetricUniform:
    """Initialiser that draws from U[-bound, bound); equal by value, so that two like modules share one jit cache."""

    bound: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **unused: Any) -> Array:
        """Draw an array of `shape` and `dtype`."""
        return jax.random.uniform(key, shape, dtype, -self.bound, self.bound)


class Linear(nnx.Linear):
    """`nnx.Linear` with the initial distribution of `torch.nn.Linear`: U(-1/sqrt(d_in), 1/sqrt(d_in)), bias included.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        bias: whether there is a bias.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = True,
        *,
        rngs: nnx.Rngs,
        param_dtype: Any = jnp.float32,
        dtype: Any = None,
    ):
        draw = SymmetricUniform(d_in**-0.5)
        super().__init__(
            d_in,
            d_out,
            use_bias=bias,
            kernel_init=draw,
            bias_init=draw,
            rngs=rngs,
            param_dtype=param_dtype,
            dtype=dtype,
        )
