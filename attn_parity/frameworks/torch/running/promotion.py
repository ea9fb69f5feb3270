"""Float64 for any torch code, as it is: while it runs, every request for a lower precision asks for float64."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_attn.functional import dtype_name

from ....sides.subject import CannotPromoteError
from ....sides.tables import Branches
from ..probes.branches import CHOICES, note

_LOW = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
_NAMED = {
    **dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), Tensor.double),
    **dict.fromkeys((Tensor.cfloat, Tensor.chalf), Tensor.cdouble),
}


def _grouped_mm(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: object = None
) -> Tensor:
    """Stand for `torch._grouped_mm`, the products of mixtures of experts, which torch does not have in float64."""
    if offs is None:
        product = mat_a @ mat_b
    else:
        ends = [int(end) for end in offs]
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if mat_a.ndim == 2 and mat_b.ndim == 2:
            product = torch.stack([mat_a[:, part] @ mat_b[part] for part in parts])
        elif mat_a.ndim == 2:
            parts.append(slice(ends[-1], None))  # rows of no group: whatever torch leaves there
            experts = [*mat_b, torch.zeros_like(mat_b[0])]
            product = torch.cat([mat_a[part] @ one for part, one in zip(parts, experts, strict=True)])
        else:
            product = torch.cat([one @ mat_b[:, part] for part, one in zip(parts, mat_a, strict=True)], -1)
    return product if bias is None else product + bias


_IN_FLOAT64 = {getattr(torch, "_grouped_mm", None): _grouped_mm}
"""Function that torch lacks in float64 -> a replacement built from other functions."""

_LEGACY = re.compile(r"torch\.(cuda\.)?(Float|Half|BFloat16)Tensor")
_INTO_NUMPY = {Tensor.numpy, Tensor.__array__}
_WRITES = re.compile(r"__setitem__|__i(?!nvert|nt|ndex)[a-z]+__|[a-z].*[a-z0-9]_")
_WRITES_NO_DATA = {Tensor.requires_grad_, Tensor.detach_}
_GRAD = Tensor.grad.__get__
# Levels of lists that are looked into: also the end of one that contains itself.
_MAX_DEPTH = 4


@contextlib.contextmanager
def promoted(branches: Branches | None = None) -> Iterator[None]:
    """Enter a context in which operations that request a lower precision run in float64.

    It covers cases that a module's dtype does not: a softmax fixed to float32, a tensor in a plain attribute.

    Args:
        branches: receives the branches that code takes.
    """
    default = torch.get_default_dtype()
    # For functions that make a tensor without being given a dtype.
    torch.set_default_dtype(torch.float64)
    try:
        with _Promotion(branches):
            yield
    finally:
        torch.set_default_dtype(default)


BACKWARD = {torch.autograd.backward, torch.autograd.grad, Tensor.backward}
"""Calls that run the user's code again where it is checkpointed."""


def backward_inside(
    mode: TorchFunctionMode, func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """Run one of `BACKWARD` for a mode that was left to handle it, and have the mode entered meanwhile.

    Given tensors, torch asks the modes again; given the edges of the graph, it does not.
    """
    edge = torch.autograd.graph.get_gradient_edge
    args = tuple(args)
    if func is Tensor.backward:
        func, kwargs = torch.autograd.backward, dict(kwargs)
        names: tuple[str, ...] = ("grad_tensors", "retain_graph", "create_graph", "inputs")
        kwargs.update(zip(names, args[1:], strict=False))
        if "gradient" in kwargs:
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        args = args[:1]
    names = ("outputs", "inputs") if func is torch.autograd.grad else ("tensors",)
    arguments = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
    if kwargs.get("is_grads_batched") or kwargs.get("materialize_grads") or len(args) > len(names) + 1:
        return func(*args, **kwargs)
    if not all(_has_edge(root) for tree in arguments.values() for root in _several(tree)):
        return func(*args, **kwargs)
    edges = {
        name: [edge(root) if isinstance(root, Tensor) else root for root in _several(arguments[name])]
        for name in arguments
    }
    rest = {name: value for name, value in kwargs.items() if name not in names and value is not None}
    if len(args) > len(names):
        rest["grad_outputs" if func is torch.autograd.grad else "grad_tensors"] = args[len(names)]
    if func is torch.autograd.backward and "inputs" in rest:
        rest["inputs"] = [edge(root) if isinstance(root, Tensor) else root for root in _several(rest["inputs"])]
    with mode:
        return func(*[edges[name] for name in names], **rest)


def _has_edge(value: object) -> bool:
    """Return whether a root or leaf of the graph is an edge, or a tensor that has one; inside torch.func it has not."""
    if not isinstance(value, Tensor):
        return True
    return value.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _several(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) and not hasattr(value, "node") else (value,)


class _Promotion(TorchFunctionMode):
    def __init__(self, branches: Branches | None) -> None:
        super().__init__()
        self.been_to_numpy = False
        self._branches = branches

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in BACKWARD:
            return backward_inside(self, func, args, kwargs or {})
        if func is _GRAD or (func is Tensor.view and isinstance(args[1], torch.dtype)):
            return func(*args, **(kwargs or {}))  # the bits of integers read as floats: no precision is asked for
        if func in _INTO_NUMPY:
            # NumPy computes where no mode of torch sees it: a tensor in low precision may come from there from now on.
            self.been_to_numpy = True
        elif self.been_to_numpy and any(isinstance(arg, Tensor) and arg.dtype in _LOW for arg in args):
            raise CannotPromoteError("a part of it is computed by NumPy, in lower precision")
        # The write would go to a promoted copy, and the tensor itself would keep its former numbers.
        if args and isinstance(args[0], Tensor) and args[0].dtype in _LOW and writes(func):
            raise CannotPromoteError(f"a tensor of dtype {dtype_name(args[0])} that is no buffer is written to")
        func = _IN_FLOAT64.get(func, _NAMED.get(func, func))
        args = tuple([_promoted(value) for value in args])
        if func is Tensor.type and len(args) > 1:
            args = (args[0], _promoted_name(args[1]), *args[2:])
        if self._branches is not None and func in CHOICES:
            note(self._branches, func, args, kwargs)
        return func(*args, **{name: _promoted(value) for name, value in kwargs.items()} if kwargs else {})


def writes(func: object) -> bool:
    """Return whether a function of torch writes to a tensor's numbers, judged by its name."""
    return func not in _WRITES_NO_DATA and _is_name_of_write(getattr(func, "__name__", ""))


@functools.cache
def _is_name_of_write(name: str) -> bool:
    return bool(_WRITES.fullmatch(name))


def _promoted_name(wanted: object) -> object:
    name = wanted if isinstance(wanted, str) else f"torch.{getattr(wanted, '__name__', '')}"
    return torch.float64 if _LEGACY.fullmatch(name) else wanted


def _promoted(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return value.to(_LOW[value.dtype]) if value.dtype in _LOW else value
    if isinstance(value, torch.dtype):
        return _LOW.get(value, value)
    if type(value) in (list, tuple) and depth < _MAX_DEPTH:
        return type(value)([_promoted(one, depth + 1) for one in value])
    return value
