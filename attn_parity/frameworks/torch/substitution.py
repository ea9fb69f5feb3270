"""Replace the outputs of some submodule calls, and the gradients that they propagate to their inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torch_attn.backend import from_numpy
from torch_attn.shards import cut_as

from ...sides.subject import Array, ModuleFailedError, Substitute
from ...sides.trees import flatten, replace
from .recording import hooked
from .weights import is_tensor

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class Substitution:
    """Replaces the calls of submodules while `holding` is held.

    Args:
        modules: all submodules by path.
        substitutes: path -> one for each of its calls.
    """

    def __init__(self, modules: Mapping[str, nn.Module], substitutes: Mapping[str, Sequence[Substitute]]):
        self._modules, self._substitutes = modules, substitutes
        self._next: dict[str, int] = {}
        self._running: dict[str, Substitute] = {}

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the hooks."""
        self._next.clear()
        with hooked((self._modules[path], self._before(path), self._after(path)) for path in self._substitutes):
            yield

    def _before(self, path: str) -> Callable[..., object]:
        def hook(child: nn.Module, args: object, kwargs: object) -> object:
            number = self._next.get(path, 0)
            self._next[path] = number + 1
            if number >= len(self._substitutes[path]):
                raise ModuleFailedError(f"{path} is called more often than it was before")
            substitute = self._running[path] = self._substitutes[path][number]
            leaves = [leaf for _, leaf in flatten((args, kwargs), is_tensor)]
            if len(leaves) != len(substitute.added):
                raise ModuleFailedError(f"{path} is called with other arrays than before")
            pairs = zip(leaves, substitute.added, strict=True)
            return replace((args, kwargs), is_tensor, [_with_gradient(leaf, added) for leaf, added in pairs])

        return hook

    def _after(self, path: str) -> Callable[..., object]:
        def hook(child: nn.Module, args: object, kwargs: object, result: object) -> object:
            substitute = self._running.pop(path)
            leaves = [leaf for _, leaf in flatten(result, is_tensor)]
            if [None if array is None else array.shape for array in substitute.outputs] != [
                None if array is None else tuple(leaf.shape)
                for leaf, array in zip(leaves, substitute.outputs, strict=False)
            ]:
                raise ModuleFailedError(f"{path} returns other arrays than before")
            pairs = zip(leaves, substitute.outputs, strict=True)
            return replace(result, is_tensor, [_with_value(leaf, array) for leaf, array in pairs])

        return hook


class _Added(torch.autograd.Function):
    """Hands an array on, and adds something to the gradient that comes back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, added: Tensor) -> Tensor:
        ctx.save_for_backward(added)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (added,) = ctx.saved_tensors
        return gradient + added, None


def _with_gradient(leaf: Tensor, added: Array | None) -> Tensor:
    if added is None or not leaf.requires_grad:
        return leaf
    tensor: Tensor = _Added.apply(leaf, cut_as(from_numpy(added).to(leaf.device, leaf.dtype), leaf))
    return tensor


def _with_value(leaf: Tensor, array: Array | None) -> Tensor:
    if array is None:
        return leaf
    value = cut_as(from_numpy(array).to(leaf.device, leaf.dtype), leaf)
    return value + (leaf - leaf.detach()) if leaf.requires_grad else value
