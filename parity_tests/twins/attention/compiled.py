"""Modules compiled as users compile them, but for options that make XLA quick about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array

from attn_parity.frameworks.jax.running.execution import quick_options


def in_jit(module: nnx.Module, x: Array, arguments: Mapping[str, Any]) -> Any:
    """Call a module as one compiled program per config, dtype and shapes."""
    return _jitted()(module, x, arguments)


@functools.cache
def _jitted() -> Callable[..., Any]:
    return jax.jit(lambda module, x, arguments: module(x, **arguments), compiler_options=quick_options())
