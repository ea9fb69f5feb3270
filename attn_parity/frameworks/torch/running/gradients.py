"""Gradients that code stops, or lets through: the change of one call of torch with which the backward pass agrees.

The twin is `frameworks.jax.changes.gradients`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....hints.changes import MOST_FITTING, PER_OPERATION, Budget, stopped
from ....sides.subject import GradientSample, Run
from ....stack import CallSite, call_site, live
from .call_changes import Value
from .operations import WORK, call_name, grouped, run_of, written_at


@dataclasses.dataclass(frozen=True)
class _Stop:
    """A change: the numbers of calls, and the index of the operand that each detaches; None calls no `detach`."""

    text: str
    at: tuple[int, ...]
    index: int | None
    site: CallSite | None


class StoppedCalls(TorchFunctionMode):
    """While it is entered, records calls of torch whose operands have gradients, or detaches one operand of one.

    Args:
        change: the change; None records.
    """

    moved = 0

    def __init__(self, change: _Stop | None = None):
        super().__init__()
        self._change, self._number = change, 0
        self.stops: list[_Stop] = []
        self.elements = 0

    def __torch_function__(self, func: Value, types: Value, args: Value = (), kwargs: Value = None) -> Value:
        name, kwargs = call_name(func), dict(kwargs or {})
        if not name:
            return func(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        if self._change is None:
            places = [at for at, one in enumerate(args) if isinstance(one, Tensor) and one.requires_grad]
            site = call_site(live(sys._getframe(1))) if places else None
            places = places if site is not None else []  # the rest is no code of the side's
            if name == "detach":
                self.stops += [_Stop("a gradient not stopped", (number,), None, site) for _ in places]
            else:
                self.stops += [_Stop(stopped(name, at, len(args)), (number,), at, site) for at in places]
            self.elements += sum(args[at].numel() for at in places)
        elif number in self._change.at:
            if self._change.index is None:
                return args[0]
            index = self._change.index
            args = tuple(one.detach() if at == index else one for at, one in enumerate(args))
        return func(*args, **kwargs)


def found(run: Callable[[int, StoppedCalls], Run], samples: Sequence[GradientSample]) -> list[tuple[str, str]]:
    """Return the changes with which every sample agrees: what changes, and ``file:line``.

    Args:
        run: number of the sample and mode -> the run of the side.
        samples: the calls.
    """
    record, budget = StoppedCalls(), Budget()
    run(0, record)
    cost = 2 * WORK * (PER_OPERATION * len(record.stops) + record.elements)
    hits: dict[object, tuple[str, str]] = {}
    sites, kinds = [stop.site for stop in record.stops], [stop.text for stop in record.stops]
    groups = [*grouped(sites, kinds), *((number,) for number in range(len(sites)))]
    groups = sorted(dict.fromkeys(groups), key=lambda group: -len(group))  # a line that runs several times first
    for group in sorted(groups, key=lambda group: record.stops[group[0]].index is not None):
        stop = record.stops[group[0]]
        if stop.site is None or stop.site.where in hits or not budget.spend(cost):
            continue
        change = dataclasses.replace(stop, at=tuple(record.stops[number].at[0] for number in group))
        with contextlib.suppress(Exception):  # a change may make any call fail
            if all(sample.agrees(run(at, StoppedCalls(change))) for at, sample in enumerate(samples)):
                text = stop.text + run_of(group, sites, kinds)
                hits[stop.site.where] = text, written_at(group, sites, kinds)
        if len(hits) == MOST_FITTING:
            break
    return list(hits.values())
