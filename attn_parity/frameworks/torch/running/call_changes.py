"""Results that likely mistakes in a call of torch would give: other axes, functions, options and numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ....hints.changes import (
    BINARY,
    COMPARISONS,
    EXCHANGED,
    MOST_PARTS,
    ROUNDINGS,
    binaries,
    comparisons,
    functions,
    logsumexps,
    orders,
    reductions,
    scaled_transforms,
    shifts,
    softmaxes,
    transposed_operand,
)
from ....hints.rearranged import reshapes
from ....sides.subject import Array
from ....stack import CallSite

Value = typing.Any
"""A tensor or a number, or a sequence of them: an argument of a function of torch, or its result."""

Ways = Iterator[tuple[str, Value]]

ChangedResult = Callable[["TorchCall"], Value]

_UNARY = """
relu relu6 gelu silu elu selu celu mish softplus leaky_relu hardsigmoid hardswish hardtanh tanh sigmoid exp log sin cos
sqrt rsqrt square neg abs pow log10 log2 log1p expm1 erf reciprocal normalize layer_norm rms_norm
group_norm instance_norm
"""

UNARY = frozenset((*_UNARY.split(), *ROUNDINGS))
"""Functions of torch that others are tried for."""


LIMITING = frozenset(("clamp", "clamp_min", "clamp_max", "clip", "masked_fill", "tril", "triu", "remainder", "fmod"))
"""Functions of torch that leave a part of their operand as it is, so that ports may lack them."""

ARITHMETIC = frozenset((*BINARY, *LIMITING, "pow")) - {"tril", "triu"}
"""Functions of torch whose whole numbers are numbers like others, not sizes or axes."""

UNTRIED = frozenset({"dim", "training", "inplace", "p", "bias", "running_mean", "running_var"})
"""Options that belong to the mode or the weights of a layer, and those that other changes and hints name."""

ALONG = frozenset(("cumsum", "cumprod", "logcumsumexp", "flip"))
"""Functions of torch whose second argument is an axis."""

REDUCED = re.compile("(log_)?softmax|logsumexp|sum|mean|var|std|a(rg)?(min|max)")
"""Functions of torch whose other axes are tried with other changes."""

RESHAPES = frozenset(("reshape", "view", "flatten", "unflatten"))

PRODUCTS = frozenset(("matmul", "mm", "bmm", "linear", "einsum"))


@dataclasses.dataclass
class TorchCall:
    """One call of torch by a side's code.

    Attributes:
        name: of the function, without underscores.
        args: its arguments, by position.
        kwargs: its arguments by keyword.
        result: its result.
        site: the place in the user's code that calls it; None if library code alone does.
        func: the function.
    """

    name: str
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    result: Value
    site: CallSite | None = None
    func: Value = None


def numbers_of(call: TorchCall) -> Iterator[tuple[int | str, float]]:
    """Yield the position or keyword, and the value, of the numbers that code gives a call, sizes left out."""
    if not isinstance(call.result, Tensor) or not call.result.dtype.is_floating_point:
        return
    keys: list[int | str] = [*range(len(call.args)), *call.kwargs]
    for key, number in zip(keys, (*call.args, *call.kwargs.values()), strict=True):
        is_number = type(number) is float or (type(number) is int and call.name in ARITHMETIC)
        if is_number and key not in UNTRIED and np.isfinite(number):
            yield key, float(number)


def with_number(keys: Collection[int | str], own: float, value: float) -> ChangedResult:
    """Return a change that calls the function with another number; those of the other sign keep it."""

    def change(call: TorchCall) -> Value:
        def other(key: int | str, number: Value) -> Value:
            return number if key not in keys else value if number == own else -value

        args = itertools.starmap(other, enumerate(call.args))
        return call.func(*args, **{key: other(key, number) for key, number in call.kwargs.items()})

    return change


def ways_of(call: TorchCall) -> Ways:
    """Yield the results that likely mistakes in a call would give, such as other axes, each with a description."""
    result, name = call.result, call.name
    tensors = [one for one in call.args if isinstance(one, Tensor)]
    if not tensors and name == "arange" and isinstance(result, Tensor):
        yield "numbers of arange 1 higher", _array(result) + 1
        yield "numbers of arange 1 lower", _array(result) - 1
    if not tensors:
        return
    if isinstance(result, (tuple, list)):
        if 1 < len(result) <= 2 * MOST_PARTS and len({tuple(one.shape) for one in flat(result)}) == 1:
            for text, order in orders(range(len(result)), len(result)):
                yield text, [_array(result[part]) for part in order]
        return
    if not isinstance(result, Tensor):
        return
    plain, operand = _array(result), _array(tensors[0])
    yield from _defaults(call)
    yield from _other_axes(call)
    if name in COMPARISONS and len(call.args) == 2:
        left, right = (np.asarray(_array(one) if isinstance(one, Tensor) else one) for one in call.args)
        yield from comparisons(name, left, right)
    if name in ("argmin", "argmax") and len(_axes(call, operand)) == 1:
        other = {"argmin": "argmax", "argmax": "argmin"}[name]
        value = getattr(np, other)(operand, axis=_axes(call, operand)[0])
        yield f"{other} for {name}", value.reshape(plain.shape).astype(plain.dtype)
    if name.startswith("fft_") and plain.dtype.kind in "fc":
        axes = call.kwargs.get("dim", -1 if not name.endswith("2") else (-2, -1))
        sizes = operand.shape if operand.size > plain.size else plain.shape
        if isinstance(axes, (int, tuple, list)):
            yield from scaled_transforms(plain, int(np.prod([sizes[axis] for axis in np.atleast_1d(axes)])))
    if name == "sub" and plain.dtype.kind in "iu" and len(tensors) == 2:
        yield EXCHANGED, _array(tensors[1]) - operand
    if name in RESHAPES:
        yield from reshapes(operand, plain.shape)
    if name in ("tril", "triu"):
        diagonal = int([*call.args[1:2], *call.kwargs.values(), 0][0])
        for word, step in (("higher", 1), ("lower", -1)):
            yield f"a diagonal 1 {word} in {name}", getattr(np, name)(operand, diagonal + step)
    if plain.dtype.kind != "f" or operand.dtype.kind != "f":
        return
    if name in BINARY and len(call.args) == 2 and not call.kwargs:
        left, right = (np.asarray(_array(one) if isinstance(one, Tensor) else one) for one in call.args)
        yield from binaries(name, left, right, plain, has_number=not all(isinstance(one, Tensor) for one in call.args))
    elif name in ("softmax", "log_softmax"):
        axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else -1)
        if isinstance(axis, int):
            yield from softmaxes(operand, (axis % operand.ndim,), is_log=name == "log_softmax")
    elif name == "logsumexp" and plain.ndim < operand.ndim:
        yield from logsumexps(operand, _axes(call, operand))
    elif name == "roll":
        arguments = {**dict(zip(("input", "shifts", "dims"), call.args, strict=False)), **call.kwargs}
        moved, axes = arguments.get("shifts"), arguments.get("dims")
        if isinstance(moved, int) and isinstance(axes, int):
            yield from shifts(operand, axes, moved)
        elif isinstance(moved, (tuple, list)) and isinstance(axes, (tuple, list)):
            yield "the shift the other way", np.roll(operand, tuple(-one for one in moved), tuple(axes))
            yield "no shift", operand
    elif name in ("sum", "mean") and plain.size:
        count = operand.size / plain.size
        yield ("a mean for the sum", plain / count) if name == "sum" else ("a sum for the mean", plain * count)
        largest = operand.max(_axes(call, operand), keepdims=plain.ndim == operand.ndim)
        if largest.shape == plain.shape:
            yield f"a maximum for the {name}", largest
        for text, others in reductions(operand, _axes(call, operand)):
            value = getattr(operand, name)(axis=others, keepdims=plain.ndim == operand.ndim)
            if value.shape == plain.shape or plain.ndim == operand.ndim:
                yield text, value
    elif name in ("var", "std"):
        axes = _axes(call, operand)
        by_count, count = operand.var(axes, keepdims=plain.ndim == operand.ndim), operand.size / max(plain.size, 1)
        for divisor, variance in (("n", by_count), ("n - 1", by_count * (count / max(count - 1, 1)))):
            value = np.sqrt(variance) if name == "std" else variance
            if value.shape == plain.shape and not np.allclose(value, plain, rtol=1e-9, atol=0):
                yield f"a {name} by {divisor}", value
    elif name in ("amax", "amin"):
        for text, function in (("mean", np.mean), ("sum", np.sum), ("maximum", np.max), ("minimum", np.min)):
            value = function(operand, axis=_axes(call, operand), keepdims=plain.ndim == operand.ndim)
            if value.shape == plain.shape and not np.array_equal(value, plain):
                yield f"a {text} for the {'maximum' if name == 'amax' else 'minimum'}", value
    elif name in PRODUCTS:
        yield from _products(call)
    elif name in ("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d"):
        yield from _pools(call, name)
    elif name in LIMITING and operand.shape == plain.shape:
        yield f"no {name}", operand
        if name == "masked_fill" and len(call.args) == 3 and isinstance(call.args[1], Tensor):
            for filled in (0.0, -np.inf):
                yield f"masked_fill by {filled:g}", np.where(_array(call.args[1]), filled, operand)
    elif name in UNARY and operand.shape == plain.shape:
        yield from functions(name, operand, plain)
        if name == "exp":
            yield "exp of the negated operand", np.exp(-operand)


def _defaults(call: TorchCall) -> Ways:
    """Yield the results of a function of `torch.nn.functional` without an option that code gives it."""
    if getattr(functional, call.name, None) is not call.func or not inspect.isfunction(call.func):
        return
    parameters = inspect.signature(call.func).parameters
    for key, value in call.kwargs.items():
        default = parameters[key].default if key in parameters else inspect.Parameter.empty
        is_default = default is inspect.Parameter.empty or (not isinstance(value, Tensor) and value == default)
        if is_default or key in UNTRIED:
            continue
        options = {other: option for other, option in call.kwargs.items() if other != key}
        with torch.no_grad(), contextlib.suppress(Exception):  # an option may need another
            plain = call.func(*call.args, **options)
            if isinstance(plain, Tensor) and plain.shape == call.result.shape and plain.dtype == call.result.dtype:
                yield f"no `{key}` in {call.name}", _array(plain)


def _other_axes(call: TorchCall) -> Ways:
    """Yield the results of a function along other axes; those of reductions are tried elsewhere."""
    operand = call.args[0] if call.args else None
    options = dict(call.kwargs)
    if inspect.isfunction(call.func):  # as those of `torch.nn.functional`, whose axis may be the default
        with contextlib.suppress(TypeError):
            bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
            bound.apply_defaults()
            options = {key: value for key, value in bound.arguments.items() if value is not operand}
    axis = options.get("dim", call.args[1] if call.name in ALONG and len(call.args) == 2 else None)
    if REDUCED.fullmatch(call.name) or type(axis) is not int or not isinstance(operand, Tensor):
        return
    for other in range(operand.ndim):
        if other != axis % operand.ndim:
            with torch.no_grad(), contextlib.suppress(Exception):  # sizes of axes may differ
                value = call.func(operand, **{**options, "dim": other})
                if isinstance(value, Tensor) and value.ndim == call.result.ndim:
                    yield (
                        f"{call.name} over axis {other} of {operand.ndim} for axis {axis % operand.ndim}",
                        _array(value),
                    )


def _products(call: TorchCall) -> Ways:
    """Yield products with a square operand transposed, and sums of products with two letters of a term exchanged."""
    if call.name != "einsum":
        shapes = [tuple(getattr(operand, "shape", ())) for operand in call.args[:2]]
        for index, operand in enumerate(call.args[:2]):
            if isinstance(operand, Tensor) and operand.ndim > 1 and operand.shape[-1] == operand.shape[-2]:
                args = [one.mT if at == index else one for at, one in enumerate(call.args)]
                with torch.no_grad():
                    yield transposed_operand(index, shapes), _array(call.func(*args, **call.kwargs))
        return
    equation = call.args[0].replace(" ", "") if isinstance(call.args[0], str) else ""
    terms = re.split(r"(,|->)", equation)
    for at, term in enumerate(terms):
        for left, right in itertools.combinations(dict.fromkeys(filter(str.isalpha, term)), 2):
            turned = term.translate({ord(left): right, ord(right): left})
            other = "".join([*terms[:at], turned, *terms[at + 1 :]])
            with torch.no_grad(), contextlib.suppress(Exception):  # sizes of axes may differ
                value = torch.einsum(other, *call.args[1:])
                if value.shape == call.result.shape:
                    yield f"einsum of {other} for {equation}", _array(value)


def _axes(call: TorchCall, operand: Array) -> tuple[int, ...]:
    """Return the axes that a call reduces, all without one."""
    axes = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    axes = (axes,) if type(axes) is int else axes
    is_list = isinstance(axes, (tuple, list)) and all(type(axis) is int for axis in axes)
    return tuple(axis % operand.ndim for axis in axes) if is_list and axes else tuple(range(operand.ndim))


def _pools(call: TorchCall, name: str) -> Ways:
    """Yield the mean of each window for its maximum, or the other way round."""
    names = ("input", "kernel_size", "stride", "padding")
    arguments = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    kept = {key: arguments[key] for key in names if arguments.get(key) is not None}
    other = name.replace("max", "avg") if name.startswith("max") else name.replace("avg", "max")
    words = {"max": "maximum", "avg": "mean"}
    with torch.no_grad():
        value = getattr(torch.nn.functional, other)(**kept)
    if value.shape == call.result.shape:
        yield f"the {words[other[:3]]} of each window for its {words[name[:3]]}", _array(value)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()


def tensor(array: Value) -> Tensor:
    """Return a tensor of an array."""
    return torch.from_numpy(np.array(array, order="C"))  # np.ascontiguousarray would give a number an axis


def flat(value: Value) -> list[Tensor]:
    """Return the tensors in a value."""
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in flat(part)] if isinstance(value, (tuple, list)) else []
