"""Large weights of a float64 run: each stays in its own precision, and every operation that reads it promotes it again.

Copies that an operation saves for its backward pass are dropped too, and promoted again there. The gradient moves to
the store of large gradients as soon as it is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_attn.backend import to_numpy

from ....sides.arrays import Array, release, spilled

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

_TURNS = {"t", "transpose", "permute", "swapaxes"}
"""Operations that only change the layout; below, properties that do."""

_TURNED = {"T", "mT"}

_ASKED = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous"}
    | {"requires_grad_", "element_size", "get_device", "__len__", "__hash__", "__repr__", "storage_offset"}
    | {"untyped_storage", "is_signed", "register_hook"}
)
"""Methods that read no number."""


class Loan:
    """A large weight, and the gradient that has come for it.

    Args:
        array: the weight in its own precision.
    """

    def __init__(self, array: Array):
        self.array = array
        self.anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.gradient: Array | None = None

    def promoted(self) -> Tensor:
        """Return the weight in float64."""
        return torch.from_numpy(self.array.astype("float64", order="C"))

    def add(self, gradient: Array) -> None:
        """Add a gradient of the weight."""
        if self.gradient is not None:
            gradient = gradient + self.gradient
            release(self.gradient)
        self.gradient = spilled(gradient)


class LentTensor(Tensor):
    """Proxy for a large weight in float64: it has the shape but no memory, and operations that read it get the numbers.

    Attributes:
        loan: the weight.
        turn: the layout operations between the weight and this view.
    """

    loan: Loan
    turn: Callable[[Tensor], Tensor] | None

    @staticmethod
    def of(loan: Loan, blank: Tensor | None = None, turn: Callable[[Tensor], Tensor] | None = None) -> LentTensor:
        """Return a proxy for a weight, optionally with a changed layout."""
        if blank is None:
            blank = torch.zeros((), dtype=torch.float64).expand(loan.array.shape)
        made: LentTensor = Tensor._make_subclass(LentTensor, blank.detach(), turn is None)
        made.loan, made.turn = loan, turn
        return made

    def read(self) -> Tensor:
        """Return the numbers, as part of the graph."""
        base: Tensor = _Promotion.apply(self.loan.anchor, self.loan)
        return base if self.turn is None else self.turn(base)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _ASKED or (name == "__get__" and getattr(func.__self__, "__name__", "") not in _PARTS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        turned = name in _TURNS or (name == "__get__" and func.__self__.__name__ in _TURNED)
        if turned and isinstance(first, LentTensor) and not kwargs:
            before = first.turn
            with torch._C.DisableTorchFunctionSubclass():
                blank = func(*args)
            return LentTensor.of(
                first.loan, blank, lambda base: func(base if before is None else before(base), *args[1:])
            )
        loans: dict[int, tuple[Loan, Tensor]] = {}
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = _read(args, loans), _read(kwargs, loans)
            with _lending(loans):
                return func(*args, **kwargs)


_PARTS = {*_TURNED, "data", "H", "mH", "real", "imag"}
"""Properties that read numbers."""

_HELD: dict[int, tuple[Loan, Tensor]] = {}
"""Storage address of each weight that the running operation reads -> the weight. Only one run is active at a time."""


@contextlib.contextmanager
def _lending(loans: dict[int, tuple[Loan, Tensor]]) -> Iterator[None]:
    _HELD.update(loans)
    try:
        yield
    finally:
        for address in loans:
            _HELD.pop(address, None)


@contextlib.contextmanager
def returned() -> Iterator[None]:
    """Hold the context in which nothing that is read from lent weights is kept for the backward pass."""

    def pack(tensor: Tensor) -> object:
        loan_and_tensor = _HELD.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
        if loan_and_tensor is None:
            return tensor
        return loan_and_tensor[0], tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept: Tensor | tuple[Any, ...]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        loan, *lies = kept
        tensor: Tensor = loan.promoted().as_strided(*lies)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Promotion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, loan: Loan) -> Tensor:
        ctx.loan = loan
        return loan.promoted()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, None]:
        ctx.loan.add(to_numpy(gradients[0]))
        return torch.zeros((), dtype=torch.float64), None


def _read(value: Any, loans: dict[int, tuple[Loan, Tensor]], depth: int = 0) -> Any:
    """Return arguments with each proxy replaced by its numbers."""
    if isinstance(value, LentTensor):
        tensor = value.read()
        loans[tensor.untyped_storage().data_ptr()] = value.loan, tensor
        return tensor
    if type(value) in (list, tuple) and depth < 4:
        return type(value)([_read(one, loans, depth + 1) for one in value])
    if type(value) is dict:
        return {name: _read(one, loans, depth + 1) for name, one in value.items()}
    return value
