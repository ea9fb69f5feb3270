"""Change the result of one call of torch at a time, run again, and compare the results with the other side's."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....hints.changes import (
    BINARY,
    COMPARISONS,
    EXCHANGED,
    MOST_FITTING,
    MOST_PARTS,
    MOST_TIMES,
    MOST_VALUES,
    PER_OPERATION,
    ROUNDINGS,
    Budget,
    Hits,
    agree,
    apart,
    are_alike,
    binaries,
    comparisons,
    functions,
    in_run,
    limit_of,
    logsumexps,
    orders,
    reductions,
    scaled_transforms,
    shifts,
    softmaxes,
    solutions,
)
from ....sides.subject import Array, CannotPromoteError
from ....stack import CallSite, call_site, live, located

Value = typing.Any
"""A tensor or a number, or a sequence of them: an argument of a function of torch, or its result."""

Ways = Iterator[tuple[str, Value]]

ChangedResult = Callable[["TorchCall"], Value]

WORK = 2
"""How many times the work of an operation in NumPy a call of torch is."""

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

UNTRIED = frozenset({"training", "inplace", "p", "bias", "running_mean", "running_var"})
"""Options that belong to the mode or the weights of a layer, and those that other hints name."""

ALONG = frozenset(("cumsum", "cumprod", "logcumsumexp", "flip"))
"""Functions of torch whose second argument is an axis."""

REDUCED = re.compile("(log_)?softmax|logsumexp|sum|mean|var|std|a(rg)?(min|max)")
"""Functions of torch whose other axes are tried with other changes."""

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


class ChangedCalls(TorchFunctionMode):
    """While it is entered, records calls of torch, or changes the results of some.

    Args:
        at: numbers of the calls that are changed; none records.
        change: makes its result from a call.
        most: calls after which a changed run is given up: with a change, a loop may never end.
    """

    def __init__(self, at: Collection[int] = (), change: ChangedResult | None = None, most: int = 0):
        super().__init__()
        self._at, self._change, self._most, self._number = at, change, most, 0
        self.calls: list[TorchCall] = []
        self.elements = 0
        self.moved = 0

    def __torch_function__(self, func: Value, types: Value, args: Value = (), kwargs: Value = None) -> Value:
        name, kwargs = call_name(func), dict(kwargs or {})
        if not name:
            return func(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        if not self._at:
            before = [_copied(one) for one in args]
            result = func(*args, **kwargs)
            site = call_site(live(sys._getframe(1)))
            self.calls.append(TorchCall(name, tuple(before), kwargs, _copied(result), site, func))
            self.elements += sum(one.numel() for one in _flat(result)) + 1
            if self.elements > MOST_VALUES:
                raise CannotPromoteError("its values are too many to keep")
            return result
        if number > self._most:
            raise CannotPromoteError("it does not end with this change")
        if number not in self._at or self._change is None:
            return func(*args, **kwargs)
        operands = tuple(map(_copied, args))  # a call in place, such as `x += y`, writes its first operand
        return self._change(TorchCall(name, operands, kwargs, func(*args, **kwargs), func=func))


def found(
    run: Callable[[int, ChangedCalls], Sequence[Array]],
    wanted: Sequence[Sequence[Array]],
    *,
    numbers: bool = False,
    has_literals: bool = True,
) -> list[tuple[str, str]]:
    """Return the changes of one call with which the results are those wanted: what changes, and ``file:line``.

    Args:
        run: number of the sample and mode -> the outputs of the side.
        wanted: the results wanted of each sample.
        numbers: whether numbers in code are solved for, instead of trying other operations.
        has_literals: see `limit_of`.
    """
    record, budget = ChangedCalls(), Budget()
    plain = run(0, record)
    cost = WORK * (PER_OPERATION * len(record.calls) + record.elements)
    if not are_alike(plain, wanted[0]):
        return []
    plains = [plain, *(run(at, ChangedCalls()) for at in range(1, len(wanted)))]
    limits = [limit_of(made, each, has_literals=has_literals) for made, each in zip(plains, wanted, strict=True)]

    def results(sample: int, at: Collection[int], change: ChangedResult) -> Sequence[Array] | None:
        if not budget.spend(cost):
            return None
        try:
            return run(sample, ChangedCalls(at, change, MOST_TIMES * len(record.calls)))
        except Exception:  # a change may make any call fail
            return None

    def fits(at: Collection[int], change: ChangedResult) -> bool:
        made = (results(sample, at, change) for sample in range(len(wanted)))
        return all(
            one is not None and agree(one, two, limit) for one, two, limit in zip(made, wanted, limits, strict=True)
        )

    sites, kinds = [call.site for call in record.calls], [call.name for call in record.calls]
    solved: dict[tuple[str, str], None] = {}
    hits = Hits()
    for group in sorted(grouped(sites, kinds, is_wide=True), reverse=True):
        call, which = record.calls[group[0]], run_of(group, sites, kinds)
        if hits.are_enough or len(solved) >= MOST_FITTING or budget.left < 0:
            break
        if numbers:
            for text in _fitting_numbers(
                [record.calls[at] for at in group], group, results, fits, wanted[0], limits[0]
            ):
                solved[text + which, written_at(group, sites, kinds)] = None
            continue
        with np.errstate(all="ignore"):
            names = [text for text, value in ways_of(call)]
        line = "" if call.site is None else call.site.where
        for text in names:
            if not hits.have(line, text, group) and fits(group, _change(text)):
                hits.add(line, text, group, (text + which, written_at(group, sites, kinds)))
    return [*solved, *hits.messages()]


def grouped(
    sites: Sequence[CallSite | None], kinds: Sequence[Hashable], *, is_wide: bool = False
) -> list[tuple[int, ...]]:
    """Return the numbers of calls that are changed together: those of one code, of one call of it, and the first alone.

    Args:
        sites: the site of each call.
        kinds: its kind: calls of several are not changed together.
        is_wide: add those of one line, and those of one function but for arithmetic, which is everywhere.
    """
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for number, (site, kind) in enumerate(zip(sites, kinds, strict=True)):
        groups.setdefault((kind, number if site is None else site.below), []).append(number)
        if site is not None:
            groups.setdefault((kind, site.below, site.instructions), []).append(number)
            if is_wide:
                groups.setdefault((kind, site.where), []).append(number)
            if is_wide and kind not in BINARY and site.lines[0].instruction is not None:
                groups.setdefault((kind, site.lines[0].instruction[0]), []).append(number)
    return list(dict.fromkeys(part for group in map(tuple, groups.values()) for part in (group, group[:1])))


def written_at(group: Sequence[int], sites: Sequence[CallSite | None], kinds: Sequence[Hashable]) -> str:
    """Return ``file:line`` of calls that are changed together; see `grouped`, and `located`."""
    mine = [site for at in group if (site := sites[at]) is not None]
    alike = [site for site, kind in zip(sites, kinds, strict=True) if kind == kinds[group[0]] and site is not None]
    by_line = [[site for site in mine if site.where == where] for where in dict.fromkeys(site.where for site in mine)]
    return " and ".join(located(sites, alike) for sites in by_line)


def run_of(group: Sequence[int], sites: Sequence[CallSite | None], kinds: Sequence[Hashable]) -> str:
    """Describe in which run of its code a call is that is changed alone; "" for all runs, or if it runs once."""
    at, site = group[0], sites[group[0]]
    if len(group) > 1 or site is None:
        return ""
    code = kinds[at], site.below, site.instructions
    runs = [
        number
        for number, (other, kind) in enumerate(zip(sites, kinds, strict=True))
        if other is not None and (kind, other.below, other.instructions) == code
    ]
    return in_run(runs.index(at), len(runs))


def _fitting_numbers(
    calls: Sequence[TorchCall],
    group: Collection[int],
    results: Callable[[int, Collection[int], ChangedResult], Sequence[Array] | None],
    fits: Callable[[Collection[int], ChangedResult], bool],
    wanted: Sequence[Array],
    limit: float,
) -> Iterator[str]:
    """Yield the numbers that calls share with each of which the results are those wanted, by solving for them."""
    shared = set.intersection(*(set(_numbers(call)) for call in calls))
    for index, own in sorted(shared, key=str) if calls[0].site else ():  # in a library's own code one fits by chance

        def rest(value: float, index: int | str = index) -> Array | None:
            outputs = results(0, group, _with_number(index, value))
            return None if outputs is None else apart(outputs, wanted)

        for value in solutions(own, rest, limit):
            if value != own and fits(group, _with_number(index, value)):
                yield f"{value:.6g} for {own:.6g}"


def _change(text: str) -> ChangedResult:
    def change(call: TorchCall) -> Value:
        with np.errstate(all="ignore"):
            value = next(value for name, value in ways_of(call) if name == text)
        return tuple(map(_tensor, value)) if isinstance(value, (list, tuple)) else _tensor(value)

    return change


def _numbers(call: TorchCall) -> Iterator[tuple[int | str, float]]:
    """Yield the position or keyword, and the value, of the numbers that code gives a call; sizes are no numbers."""
    if not isinstance(call.result, Tensor) or not call.result.dtype.is_floating_point:
        return
    for key, number in (*enumerate(call.args), *call.kwargs.items()):
        is_number = type(number) is float or (type(number) is int and call.name in ARITHMETIC)
        if is_number and key not in UNTRIED and np.isfinite(number):
            yield key, float(number)


def _with_number(key: int | str, value: float) -> ChangedResult:
    """Return a change that calls the function with another number."""

    def change(call: TorchCall) -> Value:
        args = [value if at == key else one for at, one in enumerate(call.args)]
        return call.func(*args, **{name: value if name == key else one for name, one in call.kwargs.items()})

    return change


def ways_of(call: TorchCall) -> Ways:
    """Yield the results that likely mistakes in a call would give, such as other axes, each with a description."""
    result, name = call.result, call.name
    tensors = [one for one in call.args if isinstance(one, Tensor)]
    if not tensors and name == "arange" and isinstance(result, Tensor):
        yield "positions 1 higher", _array(result) + 1
        yield "positions 1 lower", _array(result) - 1
    if not tensors:
        return
    if isinstance(result, (tuple, list)):
        if 1 < len(result) <= 2 * MOST_PARTS and len({tuple(one.shape) for one in _flat(result)}) == 1:
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
    """Yield the results of a function along other axes; reductions have changes of their own."""
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
        for index, operand in enumerate(call.args[:2]):
            if isinstance(operand, Tensor) and operand.ndim > 1 and operand.shape[-1] == operand.shape[-2]:
                args = [one.mT if at == index else one for at, one in enumerate(call.args)]
                with torch.no_grad():
                    yield f"operand {index} of a product transposed", _array(call.func(*args, **call.kwargs))
        return
    equation = call.args[0].replace(" ", "") if isinstance(call.args[0], str) else ""
    terms = re.split(r"(,|->)", equation)
    for at, term in enumerate(terms):
        for one, two in itertools.combinations(dict.fromkeys(filter(str.isalpha, term)), 2):
            turned = term.translate({ord(one): two, ord(two): one})
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


def _tensor(array: Value) -> Tensor:
    return torch.from_numpy(np.array(array, order="C"))  # np.ascontiguousarray would give a number an axis


def call_name(func: Value) -> str:
    """Return the plain name of a function of torch; "" for attributes."""
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__", "__setitem__") or name.endswith("_like"):
        return ""
    name = name.strip("_").removeprefix("i")
    others = {"truediv": "div", "true_divide": "div", "divide": "div", "subtract": "sub", "multiply": "mul"}
    return others.get(name, name)


def _copied(value: Value) -> Value:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copied, value)) if type(value) in (tuple, list) else value


def _flat(value: Value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in _flat(part)] if isinstance(value, (tuple, list)) else []
