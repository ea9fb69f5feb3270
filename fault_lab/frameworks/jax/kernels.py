"""Implementations of attention in NNX modules that `mutate` draws: ours, and those of JAX and Flax.

The twin is `fault_lab.frameworks.torch.kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from attn_parity.sides.patching import replaced
from jax_attn import functional, implementations
from jax_attn.implementations import KernelCall

from ...planted.kernels import OWN_FORMULA, Kernel, Order, draw_order


class Library:
    """Attention of a library, which gives a query that sees no key some mean: here it gets zeros.

    Args:
        own_weights: have Flax compute the weights itself; else it is `jax.nn.dot_product_attention`.
    """

    def __init__(self, *, own_weights: bool):
        self.own_weights = own_weights

    def unsupported(self, call: KernelCall) -> str | None:
        """Return why it can't serve a call; None if it can."""
        if call.softcap is not None or call.sinks is not None:
            return "it has no softcap and no sinks"
        if call.dropout or call.return_weights:
            return "it has no dropout and returns no weights"
        if call.key.shape[-1] != call.value.shape[-1]:
            return "keys and values must have one width"
        if self.own_weights and call.scale != call.query.shape[-1] ** -0.5:
            return "it has a scale of its own"
        return None

    def attend(self, call: KernelCall) -> Array:
        """Return the context ``(B, T, H, Dv)``."""
        query, key, value, allowed = call.query, call.key, call.value, call.allowed()
        sees = None
        if allowed is not None:
            allowed = jnp.array(allowed, ndmin=4, copy=False)
            sees = allowed.any(-1, keepdims=True)
            allowed = jnp.broadcast_to(jnp.where(sees, allowed, True), (*allowed.shape[:2], *call.scores_shape[2:]))
            sees = jnp.swapaxes(sees, 1, 2)  # as the context has them: queries, then heads
        if self.own_weights:
            key, value = (jnp.repeat(one, query.shape[2] // key.shape[2], axis=2) for one in (key, value))
            # With a rate of dropout Flax leaves it to nobody else; no mask is drawn.
            off: dict[str, object] = {"dropout_rate": 0.5, "deterministic": True}
            context = nnx.dot_product_attention(query, key, value, call.bias, allowed, **off)
        else:
            context = jax.nn.dot_product_attention(query, key, value, call.bias, allowed, scale=call.scale)
        return context if sees is None else jnp.where(sees, context, jnp.zeros((), context.dtype))


KERNELS: dict[str, Kernel] = {
    **implementations.IMPLEMENTATIONS,
    "jax.nn": Library(own_weights=False),
    "nnx": Library(own_weights=True),
}
"""All of them by name."""


def draw(seed: int, module: str) -> Order:
    """Draw the order of kernels of a module that `mutants.build` knows by a name."""
    names = [*KERNELS, OWN_FORMULA] if module == "Block" else list(KERNELS)
    return Order({name: KERNELS.get(name) for name in draw_order(seed, "flax", names)})


def running(module: nnx.Module, order: Order) -> nnx.Module:
    """Have a module run attention by the first kernel that supports a call.

    Args:
        module: its class becomes one of the same name that runs `order`.
        order: the kernels.
    """
    cls: Any = type(module)
    for _, submodule in nnx.iter_modules(module):
        if isinstance(submodule, nnx.MultiHeadAttention):
            submodule.attention_fn = _attend

    @functools.wraps(cls.__call__)
    def call(self: nnx.Module, *args: object, **kwargs: object) -> object:
        with replaced(implementations, "choose", lambda choose: functools.partial(_choose, choose, order)):
            return cls.__call__(self, *args, **kwargs)

    module.__class__ = type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    return module


def _attend(query: Array, key: Array, value: Array, *, mask: Array | None = None, **others: Any) -> Array:
    """Attend as `nnx.MultiHeadAttention` asks for it, in eval mode."""
    del others
    context: Array = functional.dot_product_attention(query, key, value, mask=mask)
    return context


def _choose(choose: Callable[..., Any], order: Order, call: KernelCall, name: str | None = None) -> object:
    return order.choose(call) if name is None else choose(call, name)
