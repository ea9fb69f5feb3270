"""Calls of attention in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_attn import functional

Options = dict[str, Any]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(batch=2, queries=9, keys=9, heads=4, key_heads=2, width=8, value_width=8, seed=0) -> list[Tensor]:
    """Return query, key and value in float64; token vectors differ in size."""
    shapes = ((queries, heads, width), (keys, key_heads, width), (keys, key_heads, value_width))
    return [draw(batch, *shape, seed=10 * seed + n) * (1.0 + n) for n, shape in enumerate(shapes)]


def some(*shape: int, seed: int, share: float = 0.7) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(shape) < share)


def to(dtype: torch.dtype, inputs: list[Tensor], options: Options) -> tuple[list[Tensor], Options]:
    """Return the call in a dtype, every float array a leaf that takes gradients."""

    def leaf(array: Tensor) -> Tensor:
        return array.detach().to(dtype).requires_grad_()

    floats = ("bias", "sinks")
    return [leaf(one) for one in inputs], {k: leaf(v) if k in floats else v for k, v in options.items()}


def supported(inputs: list[Tensor], options: Options) -> list[str]:
    reasons = functional.explain(*inputs, **options)
    return [name for name, reason in reasons.items() if reason is None]


def all_options(options: Options) -> Options:
    """Return the options of a call with the defaults of those left out."""
    defaults = dict.fromkeys(("mask", "bias", "scale", "softcap", "sinks", "rng"))
    return {**defaults, "dropout": 0.0, "return_weights": False, **options}
