"""Layers of torch that may start from JAX's random numbers: those that the Flax twin has by the same seed.

Without `rngs` they start as torch has it, from its global generator.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.types import Device

from .random import JaxRngs, check_rngs


class ParameterOptions(TypedDict, total=False):
    """Arguments that a module hands on to the layers in it.

    Attributes:
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    rngs: JaxRngs | None
    device: Device
    dtype: torch.dtype | None


def linear(
    d_in: int,
    d_out: int,
    bias: bool = True,
    *,
    rngs: JaxRngs | None = None,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear:
    """Return an `nn.Linear`; with `rngs`, its weights are those of `jax_attn.linear.Linear`, bit for bit.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        bias: whether there is a bias.
        rngs: source of the initial weights (stream ``params``); None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """
    check_rngs(rngs)
    if rngs is None:
        return nn.Linear(d_in, d_out, bias=bias, device=device, dtype=dtype)
    # On the meta device, torch's own draws cost nothing and leave its generator alone.
    layer = nn.Linear(d_in, d_out, bias=bias, device="meta", dtype=dtype)
    layer = layer.to_empty(device=torch.get_default_device() if device is None else device)
    bound = d_in**-0.5
    with torch.no_grad():
        layer.weight.copy_(rngs.params.uniform((d_in, d_out), -bound, bound, layer.weight.dtype).T)
        if bias:
            layer.bias.copy_(rngs.params.uniform((d_out,), -bound, bound, layer.bias.dtype))
    return layer


def uniform(
    shape: tuple[int, ...], *, rngs: JaxRngs | None = None, device: Device = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor of `shape` drawn from U[0, 1); with `rngs`, JAX's numbers, from the stream ``params``."""
    check_rngs(rngs)
    if rngs is None:
        return torch.rand(shape, device=device, dtype=dtype)
    drawn = rngs.params.uniform(shape, dtype=dtype or torch.get_default_dtype())
    return drawn.to(torch.get_default_device() if device is None else device)


def normal(
    shape: tuple[int, ...], *, rngs: JaxRngs | None = None, device: Device = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor of `shape` drawn from N(0, 1); with `rngs`, JAX's numbers, from the stream ``params``."""
    check_rngs(rngs)
    if rngs is None:
        return torch.randn(shape, device=device, dtype=dtype)
    drawn = rngs.params.normal(shape, dtype or torch.get_default_dtype())
    return drawn.to(torch.get_default_device() if device is None else device)


def parameter(array: Tensor) -> nn.Parameter:
    """Return an array as a parameter of a module."""
    return nn.Parameter(array)


def filled(
    shape: int | tuple[int, ...],
    value: float,
    *,
    rngs: JaxRngs | None = None,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Return a parameter of `shape` that starts with one value; it draws nothing."""
    return parameter(torch.full((shape,) if isinstance(shape, int) else shape, value, device=device, dtype=dtype))
