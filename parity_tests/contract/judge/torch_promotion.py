"""The adapter of torch's promotion to float64: ways to ask for less inside a module, and what they compute exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_parity.frameworks.torch.running.promotion import promoted
from attn_parity.frameworks.torch.subject import subject_of
from attn_parity.sides.subject import Arguments, Subject

from .promotion import THIRD, Exact, X, cotangent_like, third

__all__ = ["promoted"]

PLAIN = torch.tensor([1.1, 0.7, 0.3])
TURNS = torch.tensor([1 + 2j, 0.5j, 3.0])
IDS = torch.tensor([2, 0, 1])


class Thirds(torch.autograd.Function):
    """A third of the exponential, with float32 on the way there and bfloat16 on the way back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.float().exp() * THIRD).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient.bfloat16() * x.half().exp() * THIRD).to(gradient.dtype)


class Module(nn.Module):
    """A module of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def wide(tensor):
    return tensor.double()


def filled(x):
    empty = torch.empty(3, dtype=torch.float16)
    empty[:] = x
    return empty * THIRD


def summed(x):
    total = torch.zeros(3, dtype=torch.bfloat16)
    total += x * THIRD
    return total


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.outer(x, x) @ torch.eye(3)


def casts_inside(x):
    return torch.func.grad(lambda h: (h.half() ** 3).sum())(x)


WAYS = {
    "to": (lambda x: x.to(torch.float32) * THIRD, third),
    "to(dtype=)": (lambda x: x.to(dtype=torch.bfloat16) * THIRD, third),
    "to(device, dtype)": (lambda x: x.to("cpu", torch.float16) * THIRD, third),
    "to(other)": (lambda x: x.to(PLAIN) * THIRD, third),
    "float": (lambda x: x.float() * THIRD, third),
    "half": (lambda x: x.half() * THIRD, third),
    "bfloat16": (lambda x: x.bfloat16() * THIRD, third),
    "type": (lambda x: x.type(torch.float32) * THIRD, third),
    "type by name": (lambda x: x.type("torch.FloatTensor") * THIRD, third),
    "type by class": (lambda x: x.type(torch.HalfTensor) * THIRD, third),
    "type_as": (lambda x: x.type_as(PLAIN) * THIRD, third),
    "zeros": (lambda x: torch.zeros(3, dtype=torch.float16).add_(x * THIRD), third),
    "tensor": (lambda x: x * torch.tensor([THIRD] * 3, dtype=torch.float32), third),
    "tensor by default": (lambda x: x * torch.tensor(THIRD), third),
    "Tensor": (lambda x: x.detach() * torch.Tensor([THIRD] * 3) + x, lambda x: x.detach() * THIRD + x),
    "as_tensor": (lambda x: x * torch.as_tensor([THIRD] * 3, dtype=torch.float16), third),
    "full": (lambda x: torch.full((3,), THIRD, dtype=torch.bfloat16) * x, third),
    "full_like": (lambda x: torch.full_like(x, THIRD, dtype=torch.float32) * x, third),
    "new_full": (lambda x: PLAIN.new_full((3,), THIRD) * x, third),
    "new_tensor": (lambda x: x.new_tensor([THIRD] * 3, dtype=torch.float32) * x, third),
    "linspace": (
        lambda x: torch.linspace(0, THIRD, 3, dtype=torch.float32) * x,
        lambda x: x * torch.tensor([0, 0.5, 1]) / 3,
    ),
    "arange": (
        lambda x: (torch.arange(3, dtype=torch.float32) / 7).exp() * x,
        lambda x: (torch.arange(3.0).double() / 7).exp() * x,
    ),
    "softmax(dtype=)": (lambda x: torch.softmax(x, -1, dtype=torch.float32), lambda x: x.softmax(-1)),
    "Tensor.softmax(dtype=)": (lambda x: x.softmax(-1, dtype=torch.float32), lambda x: x.softmax(-1)),
    "F.softmax(dtype=)": (lambda x: F.softmax(x, dim=-1, dtype=torch.bfloat16), lambda x: x.softmax(-1)),
    "F.log_softmax(dtype=)": (lambda x: F.log_softmax(x, -1, dtype=torch.float32), lambda x: x.log_softmax(-1)),
    "sum(dtype=)": (lambda x: x.sum(dtype=torch.float32) * THIRD, lambda x: x.sum() * THIRD),
    "cumsum(dtype=)": (lambda x: x.cumsum(0, dtype=torch.float32), lambda x: x.cumsum(0)),
    "copy_ into an empty one": (lambda x: torch.empty(3, dtype=torch.float16).copy_(x) * THIRD, third),
    "assignment to an empty one": (filled, third),
    "+= on zeros": (summed, third),
    "index_put": (
        lambda x: torch.zeros(3, dtype=torch.bfloat16).index_put((IDS,), x * THIRD),
        lambda x: third(x)[[1, 2, 0]],
    ),
    "attribute": (lambda x: PLAIN * x * THIRD, lambda x: wide(PLAIN) * x * THIRD),
    "attribute in a list": (lambda x: torch.stack([PLAIN, x * THIRD]), lambda x: torch.stack([wide(PLAIN), third(x)])),
    "attribute in a tuple": (lambda x: torch.cat((x * THIRD, PLAIN)), lambda x: torch.cat((third(x), wide(PLAIN)))),
    "attribute in einsum": (lambda x: torch.einsum("i,j->ij", x, PLAIN), lambda x: torch.outer(x, wide(PLAIN))),
    "attribute by keyword": (
        lambda x: torch.where(x > 0, other=PLAIN, input=x),
        lambda x: torch.where(x > 0, x, wide(PLAIN)),
    ),
    "attribute of complex numbers": (
        lambda x: torch.view_as_real(TURNS * x),
        lambda x: torch.view_as_real(TURNS.to(torch.complex128) * x),
    ),
    "complex": (lambda x: torch.view_as_real(x.to(torch.complex64) * THIRD)[..., 0], third),
    "cfloat": (lambda x: x.cfloat().real * THIRD, third),
    "polar": (
        lambda x: torch.view_as_real(torch.polar(torch.ones(3, dtype=torch.float32), x)),
        lambda x: torch.stack([x.cos(), x.sin()], -1),
    ),
    "F.layer_norm with float32 weights": (
        lambda x: F.layer_norm(x.float(), (3,), PLAIN, PLAIN),
        lambda x: F.layer_norm(x, (3,), wide(PLAIN), wide(PLAIN)),
    ),
    "scaled_dot_product_attention": (
        lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 1).half()] * 3),
        lambda x: (torch.outer(x, x).softmax(-1) @ x).view(1, 1, 3, 1),
    ),
    "autocast": (autocast, lambda x: torch.outer(x, x)),
    "autograd.Function": (Thirds.apply, lambda x: x.exp() * THIRD),
    "checkpoint": (
        lambda x: checkpoint(lambda h: h.float().exp() * THIRD, x, use_reentrant=False),
        lambda x: x.exp() * THIRD,
    ),
    "vmap": (lambda x: torch.func.vmap(lambda h: h.half() * THIRD)(x), third),
    "torch.func.grad": (casts_inside, lambda x: 3 * x**2),
    "item": (lambda x: x * (x.float() * THIRD).sum().item(), lambda x: x * (x.detach() * THIRD).sum()),
    "through NumPy in float64": (
        lambda x: x + torch.from_numpy(np.exp(x.detach().numpy())),
        lambda x: x + x.detach().exp(),
    ),
    "NumPy constants": (
        lambda x: x.float() * torch.from_numpy(np.float32([3.0, 0.5, 0.25])) * THIRD,
        lambda x: third(x) * torch.tensor([3, 0.5, 0.25]),
    ),
}
"""Way -> a function that asks for less, and the same function without that."""

NO_LOSS = {
    "linspace",
    "attribute in a list",
    "attribute in a tuple",
    "attribute of complex numbers",
    "attribute in einsum",
    "through NumPy in float64",
    "NumPy constants",
    "item",
    "arange",
    "attribute",
    "attribute by keyword",
}
LOSING = set(WAYS) - NO_LOSS
"""Ways that lose digits by themselves; others need weights, or inputs, that are rounded."""

STATE = torch.zeros(3)


def writes(x):
    STATE[:] = x.detach() * THIRD
    return STATE * x


def adds(x):
    STATE.add_(x.detach())
    return STATE * x


REFUSED = {
    "through NumPy in float32": (
        lambda x: x + torch.from_numpy(x.detach().numpy().astype(np.float32)) * THIRD,
        "a part of it is computed by NumPy, in lower precision",
    ),
    "through an array": (
        lambda x: x + torch.from_numpy(np.sin(np.asarray(x.detach()), dtype=np.float32)),
        "a part of it is computed by NumPy, in lower precision",
    ),
    "assignment to an attribute": (writes, "a tensor of dtype float32 that is no buffer is written to"),
    "in place on an attribute": (adds, "a tensor of dtype float32 that is no buffer is written to"),
    "an error": (lambda x: x.nonsense, "torch module Module raised AttributeError: .*nonsense"),
}
"""Way -> a function whose promotion is refused, and the reason."""


def subject(function: Any) -> Subject:
    """Return a side of the judge whose module is a function."""
    return subject_of(Module(function))


def compute_exactly(way: str) -> Exact:
    """Return the outputs of the exact function in float64, and their gradients."""
    side, given = subject(WAYS[way][1]), Arguments((X,))
    found = side.run({}, given, [cotangent_like(one) for one in side.run({}, given).outputs])
    return found.outputs, found.input_gradients


def compute_unpromoted(way: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the outputs of both functions for the same float32 numbers; None where torch refuses to mix dtypes."""
    low, exact = WAYS[way]
    with torch.no_grad():
        x = torch.from_numpy(X.astype(np.float32))
        try:
            return low(x).double().numpy(), exact(x.double()).numpy()
        except RuntimeError:
            return None


def make_narrow() -> torch.Tensor:
    """Return an array of bfloat16."""
    return torch.ones(2, dtype=torch.bfloat16)


def state() -> Any:
    """Return what promotion changes while it lasts."""
    return (
        torch.get_default_dtype(),
        torch.ones(2).dtype,
        torch.ones(2, dtype=torch.float64).float().dtype,
        torch.overrides._get_current_function_mode_stack(),
        STATE.tolist(),
    )
