"""Kinds of torch's functions that modes treat apart: calls of the backward pass, and writes to tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WRITES = re.compile(r"__setitem__|__i(?!nvert|nt|ndex)[a-z]+__|[a-z].*[a-z0-9]_")
_WRITES_NO_DATA = {Tensor.requires_grad_, Tensor.detach_}

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


def writes(func: object) -> bool:
    """Return whether a function of torch writes to a tensor's numbers, judged by its name."""
    return func not in _WRITES_NO_DATA and _is_name_of_write(getattr(func, "__name__", ""))


@functools.cache
def _is_name_of_write(name: str) -> bool:
    return bool(_WRITES.fullmatch(name))
