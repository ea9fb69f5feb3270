"""Implementations of attention in torch modules that `mutate` draws: ours, and torch's own switches.

The twin is `fault_lab.frameworks.jax.kernels`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_parity.sides.patching import replaced
from torch_attn import implementations
from torch_attn.implementations import KernelCall, sdpa

from ...planted.kernels import OWN_FORMULA, Kernel, Order, draw_order


class Backend:
    """`implementations.sdpa` by one of torch's kernels, and by plain operations where that does not take a call.

    Args:
        backend: torch's name of the kernel.
        on_cpu: whether processors have it.
    """

    def __init__(self, backend: SDPBackend, *, on_cpu: bool):
        self.backend = backend
        self.on_cpu = on_cpu

    def unsupported(self, call: KernelCall) -> str | None:
        """Return why it can't serve a call; None if it can."""
        return sdpa.unsupported(call) if self.on_cpu or not call.query.is_cpu else "it is for GPUs"

    def attend(self, call: KernelCall) -> Tensor:
        """Return the context ``(B, T, H, Dv)``."""
        with self.switched_on():
            return sdpa.attend(call)

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """Hold the context in which torch takes it."""
        with sdpa_kernel([self.backend, SDPBackend.MATH]):
            yield


class Eager:
    """The plain formula as ports have it: scores below the mask are the smallest number of their precision."""

    @staticmethod
    def unsupported(call: KernelCall) -> str | None:
        """Return why it can't serve a call; None if it can."""
        reason = "it has no softcap" if call.softcap is not None else None
        reason = "it has no sinks" if call.sinks is not None else reason
        return "it has no dropout and returns no weights" if call.dropout or call.return_weights else reason

    @staticmethod
    def attend(call: KernelCall) -> Tensor:
        """Return the context ``(B, T, H, Dv)``."""
        query, key, value = (one.transpose(1, 2) for one in (call.query, call.key, call.value))
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * call.scale
        scores = scores if call.bias is None else scores + call.bias
        allowed = call.allowed()
        if allowed is not None:
            scores = scores + torch.where(allowed, 0.0, torch.finfo(scores.dtype).min).to(scores.dtype)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        if allowed is not None:
            weights = weights * allowed.any(-1, keepdim=True)  # a query without a key would get the mean
        return torch.matmul(weights, value).transpose(1, 2)


KERNELS: dict[str, Kernel] = {
    **implementations.IMPLEMENTATIONS,
    "sdpa_math": Backend(SDPBackend.MATH, on_cpu=True),
    "sdpa_flash": Backend(SDPBackend.FLASH_ATTENTION, on_cpu=True),
    "sdpa_efficient": Backend(SDPBackend.EFFICIENT_ATTENTION, on_cpu=False),
    "sdpa_cudnn": Backend(SDPBackend.CUDNN_ATTENTION, on_cpu=False),
    "eager": Eager(),
}
"""All of them by name; ``sdpa`` runs one of the backends that the judge's settings allow."""

_STOCK = ("MultiheadAttention", "TransformerEncoderLayer")


def draw(seed: int, module: str) -> Order:
    """Draw the order of kernels of a module that `mutants.build` knows by a name."""
    if module in _STOCK:
        on_gpu = torch.cuda.is_available()
        names = [name for name, one in KERNELS.items() if isinstance(one, Backend) and (one.on_cpu or on_gpu)]
    else:
        names = [*KERNELS, OWN_FORMULA] if module == "Block" else list(KERNELS)
    return Order({name: KERNELS.get(name) for name in draw_order(seed, "torch", names)})


def running(module: nn.Module, order: Order) -> nn.Module:
    """Have a module run attention by the first kernel that supports a call.

    Args:
        module: its class becomes one of the same name that runs `order`; torch's own modules ask torch alone.
        order: the kernels.
    """
    cls: Any = type(module)
    kernel = KERNELS.get(order.first) if cls.__name__ in _STOCK else None

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if isinstance(kernel, Backend):
            order.serves(order.first)
            with kernel.switched_on():
                return cls.forward(self, *args, **kwargs)
        with replaced(implementations, "choose", lambda choose: functools.partial(_choose, choose, order)):
            return cls.forward(self, *args, **kwargs)

    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return module


def _choose(choose: Callable[..., Any], order: Order, call: KernelCall, name: str | None = None) -> object:
    return order.choose(call) if name is None else choose(call, name)
