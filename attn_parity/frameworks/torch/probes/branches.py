"""The branches that code takes in a run: its calls of ``where``, ``clamp`` and their like, and its ``if`` on tensors.

The twin is `frameworks.jax.probes.branches`.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ....sides.subject import Array
from ....sides.tables import Branches
from ....stack import call_site, live

_CHOICES = (
    *("where", "clamp", "clamp_", "clamp_min", "clamp_max", "clip", "masked_fill", "masked_fill_", "maximum"),
    *("minimum", "fmax", "fmin", "max", "min", "__bool__"),
)

CHOICES: dict[object, str] = {
    getattr(owner, name): name.strip("_") for name in _CHOICES for owner in (torch, Tensor) if hasattr(owner, name)
}
"""Function of torch that chooses between numbers -> its name."""

COMPARED: dict[object, str] = {
    getattr(owner, name): sign
    for sign, names in {
        "<": ("lt", "less", "__lt__"),
        "<=": ("le", "less_equal", "__le__"),
        ">": ("gt", "greater", "__gt__"),
        ">=": ("ge", "greater_equal", "__ge__"),
    }.items()
    for name in names
    for owner in (torch, Tensor)
    if hasattr(owner, name)
}
"""Comparison of torch -> its sign in code."""

BOUNDED = {functional.relu6: (0.0, 6.0), functional.hardtanh: (-1.0, 1.0)}
"""Activation, which a layer of torch may call for the user -> the bounds that it has by default."""

CHOICES.update({function: function.__name__ for function in BOUNDED})
CHOICES.update(COMPARED)


def note(
    branches: Branches, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object] | None
) -> None:
    """Note the branches that a call of one of `CHOICES` takes, if the user's code calls it, and no library's."""
    site = call_site(live(sys._getframe(2)))
    if site is None or (len(site.below) > 1 and func not in BOUNDED):
        return
    name, where, kwargs = CHOICES[func], site.where, kwargs or {}
    with torch._C.DisableTorchFunction(), torch.no_grad():
        numbers = [_array(one) for one in args]
        if func in COMPARED:
            operands = [number for number in numbers if number is not None]
            if len(operands) == 2:
                signs = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}
                branches.compare(name, where, operands, signs[name](*operands))
        elif name == "bool" and numbers[0] is not None:
            branches.choose("if", where, np.asarray(bool(numbers[0])), None, None)
        elif name == "where" and len(numbers) == 3:
            condition, first, second = numbers if func is torch.where else (numbers[1], numbers[0], numbers[2])
            if condition is not None:
                branches.choose(name, where, condition, first, second)
        elif name == "masked_fill" and len(numbers) == 3 and numbers[1] is not None:
            branches.choose(name, where, numbers[1], numbers[2], numbers[0])
        elif func in BOUNDED and numbers[0] is not None:
            values = [*args[1:3], *(kwargs[key] for key in ("min_val", "max_val") if key in kwargs)]
            ends = values if name == "hardtanh" and len(values) == 2 else BOUNDED[func]
            for bound, upper in zip(ends, (False, True), strict=True):
                branches.limit(name, where, numbers[0], np.asarray(bound), upper=upper)
        elif name.startswith("cl") and numbers[0] is not None:
            names = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(name, ("min", "max"))
            bounds = {**{key: _array(kwargs[key]) for key in kwargs}, **dict(zip(names, numbers[1:], strict=False))}
            for key in names:
                if (bound := bounds.get(key)) is not None:
                    branches.limit(name, where, numbers[0], bound, upper=key == "max")
        elif len(numbers) == 2 and all(isinstance(one, Tensor) for one in args):
            first, second = numbers
            if first is not None and second is not None:
                branches.extreme(name, where, first, second, larger="max" in name)


def _array(value: typing.Any) -> Array | None:
    """Return the numbers of an argument; None where it has none."""
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and not value.is_meta
        is_plain = is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        return value.detach().cpu().numpy() if is_plain and value.dtype != torch.bfloat16 and value.numel() else None
    return np.asarray(value) if isinstance(value, (bool, int, float)) else None
