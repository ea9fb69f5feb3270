"""Compare a Keras model, on its JAX backend, with its torch port: `stateless_call` is the function of its variables."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import jax
import numpy as np
import torch

from attn_bridge import parity

WIDTH, HIDDEN = 8, 16
EPSILON = 1e-3
"""What Keras takes where nothing is said; torch takes 1e-5."""


class TorchMLP(torch.nn.Module):
    """The port: widen, ReLU, norm, narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = torch.nn.Linear(WIDTH, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN, eps=EPSILON)
        self.narrow = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(B, WIDTH)``."""
        return self.narrow(self.norm(torch.relu(self.widen(x))))


def keras_side() -> Any:
    """Return the Keras model as a side of a comparison."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    layers = [
        keras.layers.Dense(HIDDEN, activation="relu", name="widen"),
        keras.layers.LayerNormalization(name="norm"),
        keras.layers.Dense(WIDTH, name="narrow"),
    ]
    model = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
    trained = model.trainable_variables
    weights = {variable.path: variable.value for variable in trained}
    state = [variable.value for variable in model.non_trainable_variables]

    def mlp(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        ordered = [weights[variable.path] for variable in trained]  # JAX hands dicts on in the order of their keys
        outputs, _ = model.stateless_call(ordered, state, x)
        return outputs

    return parity.function(mlp, weights)


def main() -> None:
    """Compare the two and print the report; exit with 1 unless they are equal."""
    if importlib.util.find_spec("keras") is None:
        print("keras is not installed; pip install keras")
        sys.exit(0)
    x = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
    report = parity.compare(TorchMLP(), keras_side(), x)
    print(report)
    sys.exit(not report.passed)


if __name__ == "__main__":
    main()
