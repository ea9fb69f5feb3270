"""Gradients that code stops, or lets through: the change of one call of torch with which the backward pass agrees.

The twin is `frameworks.jax.probes.changes.gradients`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....hints.changes import PER_OPERATION, Budget, stopped
from ....sides.subject import GradientSample, Run
from ....stack import live, user_line, written_at
from .operations import WORK, Value, call_name


@dataclasses.dataclass(frozen=True)
class _Stop:
    """A change: the numbers of calls, and the index of the operand that each detaches; None calls no `detach`."""

    text: str
    where: str
    at: tuple[int, ...]
    index: int | None
    site: tuple[object, ...] = ()


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
            lines = live(sys._getframe(1)) if places else []
            where, line = written_at(lines), user_line(lines, {})
            site = (number,) if line is None or line.frame is None else (line.frame.f_code, line.frame.f_lasti)
            places = places if where else []  # the rest is no code of the side's
            if name == "detach":
                self.stops += [_Stop("a gradient not stopped", where, (number,), None, site) for _ in places]
            else:
                self.stops += [_Stop(stopped(name, at, len(args)), where, (number,), at, site) for at in places]
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
    hits: dict[str, str] = {}
    sites: dict[tuple[object, ...], list[_Stop]] = {}
    for stop in record.stops:
        sites.setdefault((stop.site, stop.text, stop.index), []).append(stop)
    together = [dataclasses.replace(some[0], at=tuple(one.at[0] for one in some)) for some in sites.values()]
    together = [change for change in together if len(change.at) > 1]  # a line that runs several times
    for change in sorted([*together, *record.stops], key=lambda change: change.index is not None):
        if change.where in hits or not budget.spend(cost):
            continue
        with contextlib.suppress(Exception):  # a change may make any call fail
            if all(sample.agrees(run(at, StoppedCalls(change))) for at, sample in enumerate(samples)):
                hits[change.where] = change.text
        if len(hits) > 1:
            break
    return [(text, where) for where, text in hits.items()]
