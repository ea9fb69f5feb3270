"""Eval mode: a call draws nothing, changes no statistics, and gives the same again."""

from __future__ import annotations

from typing import Any

from ..sides.subject import load_adapter
from .layout import Axes
from .side import REFUSALS, Gap, LawResult, OneSide


def determinism(side: OneSide, layout: Axes) -> LawResult:
    """Compare two calls with other random numbers, and two calls of one module that follow each other."""
    del layout
    gap, change = side.drawn_apart, "in a second call, with other random numbers"
    why = "two calls, with other random numbers and one after the other"
    if gap.size > side.limit:
        return LawResult(gap, "a call in eval mode draws random numbers", change)
    try:
        again, statistics = _again(side)
    except REFUSALS:
        return LawResult(gap, "two calls, with other random numbers")
    if statistics.size > 0:
        return LawResult(statistics, "a call in eval mode changes running statistics", "after it", is_broken=True)
    if again.size > side.limit:
        return LawResult(again, "a call in eval mode changes the next one", "in a second call")
    return LawResult(max(gap, again, key=lambda gap: gap.size), why)


def _again(side: OneSide) -> tuple[Gap, Gap]:
    """Return how far a second call is from the first, and how far the first one moves running statistics."""
    adapter = load_adapter(side.subject.framework, "programs")

    def program(target: Any, *args: Any, **kwargs: Any) -> object:
        before = adapter.statistics(target)
        first = target(*args, **kwargs)
        after = adapter.statistics(target)
        return {"first": first, "second": target(*args, **kwargs), "s": [before, after]}

    subject = side.programmed(program)
    run = subject.run(side.weights_of(subject), side.call, dtype=side.dtype)
    named = list(zip(run.structure, run.outputs, strict=True))

    def below(prefix: str) -> tuple[list[Any], list[str]]:
        some = [(place, one) for place, one in named if place.startswith(prefix)]
        return [one for _, one in some], [f"output{place.removeprefix(prefix)}" for place, _ in some]

    first, names = below("['first']")
    before, places = below("['s'][0]")
    words = [place.removeprefix("output['").removesuffix("']") for place in places]
    return side.gap(first, below("['second']")[0], names), side.gap(before, below("['s'][1]")[0], words)
