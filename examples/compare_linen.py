"""Compare a Linen module, given with its variables, with its torch port, and see a fault found inside it."""

from __future__ import annotations

import sys

import flax.linen as nn
import jax
import numpy as np
import torch

from attn_bridge import parity

WIDTH, HIDDEN = 8, 16


class LinenBlock(nn.Module):
    """Norm, widen, GELU, narrow, and the residual."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ``(B, T, WIDTH)``."""
        hidden = nn.LayerNorm(epsilon=self.epsilon, name="norm")(x)
        hidden = nn.gelu(nn.Dense(HIDDEN, name="widen")(hidden))
        return x + nn.Dense(WIDTH, name="narrow")(hidden)


class TorchBlock(torch.nn.Module):
    """The same in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.widen = torch.nn.Linear(WIDTH, HIDDEN)
        self.narrow = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(B, T, WIDTH)``."""
        hidden = torch.nn.functional.gelu(self.widen(self.norm(x)), approximate="tanh")
        return x + self.narrow(hidden)


def main() -> None:
    """Compare the two, then a Linen module with its own default eps; exit with 1 unless both verdicts are right."""
    x = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
    verdicts = []
    for block in (LinenBlock(), LinenBlock(epsilon=1e-6)):
        report = parity.compare(TorchBlock(), (block, block.init(jax.random.key(0), x)), x)
        print(report)
        verdicts.append(report.verdict)
    sys.exit(verdicts != ["equal", "different"])


if __name__ == "__main__":
    main()
