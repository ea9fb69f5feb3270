"""Change the result of one call of torch at a time, run again, and compare the results with the other side's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....hints.changes import (
    BINARY,
    MOST_FITTING,
    MOST_TIMES,
    MOST_VALUES,
    PER_OPERATION,
    Budget,
    Hits,
    agree,
    apart,
    are_alike,
    in_run,
    limit_of,
    solutions,
)
from ....sides.subject import Array, CannotPromoteError
from ....stack import CallSite, call_site, live, located
from .call_changes import ChangedResult, TorchCall, Value, flat, numbers_of, tensor, ways_of, with_number

WORK = 2
"""How many times the work of an operation in NumPy a call of torch is."""


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
            self.elements += sum(one.numel() for one in flat(result)) + 1
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
    for group in grouped(sites, kinds, is_wide=True):
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
            names = dict.fromkeys(text for at in (group[0], group[-1]) for text, _ in ways_of(record.calls[at]))
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
    whole: dict[tuple[Hashable, ...], list[int]] = {}
    parts: dict[tuple[Hashable, ...], list[int]] = {}
    for number, (site, kind) in enumerate(zip(sites, kinds, strict=True)):
        whole.setdefault((kind, number if site is None else site.below), []).append(number)
        if site is not None:
            parts.setdefault((kind, site.below, site.instructions), []).append(number)
            if is_wide:
                parts.setdefault((kind, site.where), []).append(number)
            if is_wide and kind not in BINARY and site.lines[0].instruction is not None:
                parts.setdefault((kind, site.lines[0].instruction[0]), []).append(number)
    some = [tuple(part) for group in (*whole.values(), *parts.values()) for part in (group, group[:1])]
    # All runs of the code come first: a loop has too many for each to be tried alone.
    return list(dict.fromkeys([*sorted(map(tuple, whole.values()), reverse=True), *sorted(some, reverse=True)]))


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
    if calls[0].site is None:  # in a library's own code a number fits by chance
        return
    shared = set.intersection(*(set(numbers_of(call)) for call in calls))
    bounds = [((key, other), own) for key, own in shared for other, number in shared if 0 < own == -number]
    for keys, own in [*bounds, *(((key,), own) for key, own in sorted(shared, key=str))]:

        def rest(value: float, keys: Collection[int | str] = keys, own: float = own) -> Array | None:
            outputs = results(0, group, with_number(keys, own, value))
            return None if outputs is None else apart(outputs, wanted)

        for value in solutions(own, rest, limit):
            if value != own and fits(group, with_number(keys, own, value)):
                yield f"{value:.6g} for {own:.6g}{' of both signs' * (len(keys) > 1)}"


def _change(text: str) -> ChangedResult:
    def change(call: TorchCall) -> Value:
        with np.errstate(all="ignore"):
            value = next((value for name, value in ways_of(call) if name == text), None)
        if value is None:  # as of a sum that begins with a number
            return call.result
        return tuple(map(tensor, value)) if isinstance(value, (list, tuple)) else tensor(value)

    return change


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
