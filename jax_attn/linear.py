"""A linear layer that starts from torch's distribution of weights, so that training from scratch starts alike."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from .layer import Initializer, chosen
from .operations import few_rows
from .random import Rngs, TorchRngs, check_rngs


@dataclasses.dataclass(frozen=True)
class SymmetricUniform:
    """Initialiser that draws from U[-bound, bound); equal by value, so that two like modules share one jit cache.

    torch computes its bound on another way, which may end at a neighbouring number: `torch_bound`.
    """

    bound: float
    torch_bound: float

    def __call__(
        self, key: Array | TorchRngs, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, **unused: object
    ) -> Array:
        """Draw an array of `shape` and `dtype`; torch's matrices are the other way round."""
        if isinstance(key, TorchRngs):
            return draw_uniform(key, shape[::-1], dtype, -self.torch_bound, self.torch_bound).T
        return draw_uniform(key, shape, dtype, -self.bound, self.bound)


_is_undrawn = contextvars.ContextVar("_is_undrawn", default=False)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Draw no initial weights: modules made meanwhile hold zeros without memory, and get theirs from elsewhere.

    Torch's counterpart is in `torch_attn.checkpoints.undrawn`. `nnx.eval_shape` would trace every draw, which takes ten
    times as long.
    """
    token = _is_undrawn.set(True)
    try:
        yield
    finally:
        _is_undrawn.reset(token)


def draw_uniform(
    key: Array | TorchRngs, shape: tuple[int, ...], dtype: DTypeLike, minval: float = 0.0, maxval: float = 1.0
) -> Array:
    """Draw from U[minval, maxval) with a key of JAX or with torch's generator."""
    if _is_undrawn.get():
        return _nothing(shape, dtype)
    if isinstance(key, TorchRngs):
        return key.uniform(shape, minval, maxval, dtype)
    return jax.random.uniform(key, shape, dtype, minval, maxval)


def draw_normal(key: Array | TorchRngs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Draw from N(0, 1) with a key of JAX or with torch's generator."""
    if _is_undrawn.get():
        return _nothing(shape, dtype)
    return key.normal(shape, dtype) if isinstance(key, TorchRngs) else jax.random.normal(key, shape, dtype)


def chosen_draw(initializer: Initializer | None, default: Initializer, rngs: Rngs) -> Initializer:
    """Return the initialiser that the caller gave to the module under construction, or the default.

    Raises:
        TypeError: an initialiser next to a source that has no keys.
    """
    if initializer is None or _is_undrawn.get():
        return default
    if isinstance(rngs, TorchRngs):
        raise TypeError("kernel_init and bias_init draw from a key of JAX, which a TorchRngs has not; give nnx.Rngs")
    return initializer


def _nothing(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    return np.broadcast_to(np.zeros((), dtype), shape)


class Linear(nnx.Linear):
    """`nnx.Linear` with the initial distribution of `torch.nn.Linear`: U(-1/sqrt(d_in), 1/sqrt(d_in)), bias included.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        bias: whether there is a bias.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.

    The module that it is a part of may have been given another distribution, or a precision: `LayerOptions`.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = True,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        check_rngs(rngs)
        # As `torch.nn.init.kaiming_uniform_` has it for the weights, and `torch.nn.Linear` for the bias.
        draw = SymmetricUniform(d_in**-0.5, math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / math.sqrt(d_in)))
        draw_bias = SymmetricUniform(d_in**-0.5, 1.0 / math.sqrt(d_in))
        layers = chosen()
        super().__init__(
            d_in,
            d_out,
            use_bias=bias,
            kernel_init=chosen_draw(layers.kernel_init, draw, rngs),
            bias_init=chosen_draw(layers.bias_init, draw_bias, rngs),
            precision=layers.precision,
            rngs=rngs,
            param_dtype=param_dtype,
            dtype=dtype,
            dot_general=few_rows.dot_general,
        )
