"""Second derivatives of torch's fused kernels, which have none: by plain code, where they are asked for.

A gradient that is to be differentiated again (``create_graph=True``) is computed by the reference, in memory that grows
with T times S. Any other is the kernel's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd.function import FunctionCtx

from . import reference
from .call import KernelCall

Attend = Callable[[KernelCall], Tensor]


def twice(attend: Attend) -> Attend:
    """Decorate the ``attend`` of an implementation, which then has derivatives of all orders in eager mode."""

    @functools.wraps(attend)
    def attend_twice(call: KernelCall) -> Tensor:
        context = attend(call)
        if not context.requires_grad or _is_transformed(call.query):
            return context
        mask, arrays = (None, ()) if call.mask is None else call.mask.separate()
        options = (mask, call.scale, call.dropout)
        result: Tensor = _Twice.apply(context, options, call.query, call.key, call.value, call.bias, *arrays)
        return result

    return attend_twice


def nested_gradients(*operands: Tensor | None) -> str | None:
    """Return why no fused kernel can serve a call whose gradient by ``torch.func.grad`` has a gradient, too; else None.

    So has one inside another ``torch.func.grad``, and one of operands that require gradients outside of it.
    """
    if not torch._C._are_functorch_transforms_active():
        return None
    levels = sum(level.key() == TransformType.Grad for level in retrieve_all_functorch_interpreters())
    if levels > 1 or (levels == 1 and any(_requires_grad_outside(operand) for operand in operands)):
        return "it has no second derivatives"
    return None


def hidden_gradient(bias: Tensor | None) -> str | None:
    """Return why no fused kernel can serve a call inside ``torch.vmap`` whose bias needs a gradient; else None.

    torch picks among its kernels by whether the bias requires a gradient, which a tensor batched by ``vmap`` conceals.
    """
    if bias is None or not torch.is_grad_enabled() or not in_vmap():
        return None
    while is_functorch_wrapped_tensor(bias) and not bias.requires_grad:
        bias = get_unwrapped(bias)
    return "inside vmap its bias has no gradient" if bias.requires_grad else None


def in_vmap() -> bool:
    """Return whether a call is inside ``torch.vmap``, under which no number of a tensor can be read."""
    if not torch._C._are_functorch_transforms_active():
        return False
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())


def _requires_grad_outside(operand: Tensor | None) -> bool:
    """Return whether autograd follows a tensor outside the transforms that wrap it."""
    if operand is None:
        return False
    while is_functorch_wrapped_tensor(operand):
        operand = get_unwrapped(operand)
    return operand.requires_grad


def _is_transformed(query: Tensor) -> bool:
    """Return whether something else than autograd follows the call: compilers, transforms and modes take it plain."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return True
    return type(query) is not Tensor or bool(torch._C._len_torch_dispatch_stack())


class _Twice(torch.autograd.Function):
    """Passes a context on; passes its gradient to the kernel, or around it where it is differentiated again."""

    @staticmethod
    def forward(ctx: FunctionCtx, context: Tensor, options: tuple[object, ...], *operands: Tensor | None) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(*operands)
        return context.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, d_context: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return d_context, *(None for _ in ctx.needs_input_grad[1:])
        mask, scale, dropout = ctx.options
        if dropout:
            raise NotImplementedError(
                "second derivatives with dropout of the global generator need implementation='reference'"
            )
        # Of query, key, value and bias, which come behind the context and the options.
        is_asked = ctx.needs_input_grad[2:6]
        # Saved with the operands: autograd sees whether the arrays of a mask were written to since.
        saved, arrays = ctx.saved_tensors[:4], iter(ctx.saved_tensors[4:])
        mask = None if mask is None else mask.with_arrays(lambda _: next(arrays))
        # Views: operands may be one tensor, or computed from each other, and each gets its own part of the gradient.
        operands = [None if array is None else array.view_as(array) for array in saved]
        query, key, value, bias = operands
        call = KernelCall(query, key, value, mask, bias, scale, None, None, 0.0, None, False)
        asked = [array for array, is_needed in zip(operands, is_asked, strict=True) if is_needed]
        gradients = iter(torch.autograd.grad(reference.attend(call), asked, d_context, create_graph=True))
        of_operands = (next(gradients) if is_needed else None for is_needed in is_asked)
        return None, None, *of_operands, *(None for _ in ctx.needs_input_grad[6:])
