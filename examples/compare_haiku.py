"""Compare a Haiku model with its torch port: `hk.transform` gives a pure function and its parameters."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import jax
import numpy as np
import torch

from attn_bridge import parity

CHANNELS, FEATURES = 3, 8


class TorchNet(torch.nn.Module):
    """The port: a convolution over ``(B, C, H, W)``, ReLU, the mean over pixels, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(CHANNELS, FEATURES, kernel_size=3, padding=1)
        self.linear = torch.nn.Linear(FEATURES, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(B, 4)``."""
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


def haiku_side(x: np.ndarray) -> Any:
    """Return the Haiku model as a side of a comparison; x is ``(B, H, W, C)``."""
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(hk.Conv2D(FEATURES, kernel_shape=3, padding="SAME")(x))
        return hk.Linear(4)(hidden.mean((1, 2)))

    net = hk.without_apply_rng(hk.transform(forward))
    return parity.function(net.apply, net.init(jax.random.key(0), x))


def main() -> None:
    """Compare the two and print the report; exit with 1 unless they are equal."""
    if importlib.util.find_spec("haiku") is None:
        print("haiku is not installed; pip install dm-haiku")
        sys.exit(0)
    x = np.random.default_rng(0).normal(size=(2, CHANNELS, 6, 5)).astype(np.float32)
    channels_last = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    report = parity.compare(TorchNet(), haiku_side(channels_last), x, channels_last)
    print(report)
    sys.exit(not report.passed)


if __name__ == "__main__":
    main()
