"""Compare an Equinox model with its torch port: the model's arrays are the weights, the rest of it is the function."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import jax
import numpy as np
import torch

from attn_bridge import parity

WIDTH, HIDDEN = 8, 16


class TorchMLP(torch.nn.Module):
    """The port: norm, widen, GELU, narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.widen = torch.nn.Linear(WIDTH, HIDDEN)
        self.narrow = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x ``(B, WIDTH)`` and what the layers make of it."""
        hidden = torch.nn.functional.gelu(self.widen(self.norm(x)), approximate="tanh")
        return x + self.narrow(hidden)


def equinox_side() -> Any:
    """Return the Equinox model as a side of a comparison."""
    import equinox as eqx

    class MLP(eqx.Module):
        norm: eqx.nn.LayerNorm
        widen: eqx.nn.Linear
        narrow: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            first, second = jax.random.split(key)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.widen = eqx.nn.Linear(WIDTH, HIDDEN, key=first)
            self.narrow = eqx.nn.Linear(HIDDEN, WIDTH, key=second)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.narrow(jax.nn.gelu(self.widen(self.norm(x))))

    arrays, rest = eqx.partition(MLP(jax.random.key(0)), eqx.is_array)

    def mlp(weights: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(weights, rest))(x)  # an Equinox layer takes one vector

    return parity.function(mlp, arrays)


def main() -> None:
    """Compare the two and print the report; exit with 1 unless they are equal."""
    if importlib.util.find_spec("equinox") is None:
        print("equinox is not installed; pip install equinox")
        sys.exit(0)
    x = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
    report = parity.compare(TorchMLP(), equinox_side(), x)
    print(report)
    sys.exit(not report.passed)


if __name__ == "__main__":
    main()
