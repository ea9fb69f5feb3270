"""The probe ``literals``: move literals of float32 accuracy, and exchange branches that float32 cannot distinguish.

`attn_parity/sides/tables.py` derives both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....sides.tables import EXACT_THRESHOLD, SOFTPLUS_THRESHOLD, STILL, Collector, Tables, close, moved, slack


class DispatchLiterals(TorchFunctionMode):
    """While it is entered, the calls of torch get other literals, and `where` takes the other of two close branches.

    Args:
        seed: of the moves; `STILL` moves nothing.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._seed = seed
        self._literals = Collector()
        self.moved = 0

    @property
    def met(self) -> Tables | None:
        """The literals that were met."""
        return self._literals.found()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        args, kwargs = self._other(tuple(args)), self._other(dict(kwargs or {}))
        if func is functional.softplus:
            return func(*_exact_softplus(args, kwargs, self), **kwargs)
        if func in EXACT:
            self.moved += 1
            func = func if self._seed == STILL else EXACT[func]
        if func in (torch.where, Tensor.where) and len(args) == 3:
            return func(*self._exchanged(func, args), **kwargs)
        return func(*args, **kwargs)

    def _other(self, value: Any) -> Any:
        """Return arguments with their literals moved."""
        if type(value) is float and slack(value):
            self._literals.add(np.asarray([value]))
            self.moved += 1
            return value if self._seed == STILL else moved(value, self._seed)
        if type(value) in (list, tuple):
            return type(value)(self._other(one) for one in value)
        if type(value) is dict:
            return {key: self._other(one) for key, one in value.items()}
        return value

    def _exchanged(self, func: Callable[..., object], args: tuple[Any, ...]) -> tuple[object, ...]:
        """Return the arguments of `where` with its condition turned over where both branches are close."""
        if func is Tensor.where:  # x.where(condition, other), while torch.where(condition, x, other)
            mine, condition, other = args
        else:
            condition, mine, other = args
        branches = [one for one in (mine, other) if isinstance(one, Tensor)]
        if len(branches) < 2 or not all(one.is_floating_point() and not one.is_meta for one in branches):
            return args
        with torch._C.DisableTorchFunction(), torch.no_grad():
            first, second = (branch.detach().cpu().double().numpy() for branch in torch.broadcast_tensors(*branches))
            near = torch.from_numpy(np.asarray(close(first, second))).to(condition.device)
            if not near.any():
                return args
            self.moved += int(near.sum())
            turned = condition if self._seed == STILL else condition ^ near
        return (mine, turned, other) if func is Tensor.where else (turned, mine, other)


def _exact_hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return functional.relu6(input + 3.0) / 6.0


def _exact_celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, alpha * torch.expm1(input.clamp(max=0.0) / alpha))


EXACT: dict[object, Callable[..., Tensor]] = {
    functional.hardsigmoid: _exact_hardsigmoid,
    functional.celu: _exact_celu,
    torch.celu: _exact_celu,
}
"""Function of torch whose kernel keeps a constant of its gradient (1/6, 1/alpha) in float32 -> its formula."""


def _exact_softplus(args: tuple[Any, ...], kwargs: dict[str, Any], probe: DispatchLiterals) -> tuple[object, ...]:
    """Return the arguments of softplus, with an exact threshold if float32 does not show the present one."""
    threshold = args[2] if len(args) > 2 else kwargs.get("threshold", 20.0)
    if SOFTPLUS_THRESHOLD <= threshold < EXACT_THRESHOLD:
        probe.moved += 1
        if probe._seed != STILL:
            kwargs.pop("threshold", None)
            beta = args[1] if len(args) > 1 else kwargs.pop("beta", 1.0)
            first = args[0] if args else kwargs.pop("input")
            return (first, beta, EXACT_THRESHOLD)
    return args
