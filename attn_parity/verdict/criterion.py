"""The criterion: decides from samples whether two sides compute the same; docs/parity.md explains it.

Meaning: in float64 the two agree to `MEANING_LIMIT` of the largest value of their kind.

Precision: the error of a side, its distance from its own float64 result, may be a few times that of the other one:

    rms(error) <= 3 rms(error of the other) + floor    and    max|error| <= 5 max|error of the other| + floor

The floor is half a unit in the last place of the tensor's largest value. A tensor that is zero in exact arithmetic is
measured by the largest value of its kind (output, gradients of inputs, of matrices, of vectors). Entries that a mask
sets to a large constant count as parts of themselves in both, and give no scale (`measures.FarEntries`).

Samples come in groups, one draw and copies of it moved by a thousandth. Precision is pooled with equal weight per
group: within one group a single ill-conditioned row can carry all of the error of a tensor, and whether its roundings
cancel is luck that the copies redraw.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..results.findings import Side, TensorVerdict, Verdict, shown
from ..sides.arrays import unit_of
from ..sides.subject import Array
from .measures import (
    CHUNK,
    FLOOR_ULPS,
    GROUP_FACTOR,
    MAX_LIMIT,
    RMS_LIMIT,
    FarEntries,
    Measure,
    MeasureKey,
    chunk,
    meaning_limit,
    scale_of,
)

LABELS: Mapping[Side, str] = {"first": "torch", "second": "flax"}
"""Default names of the sides."""


def decide(
    name: str,
    second_name: str,
    kind: str,
    shape: tuple[int, ...],
    dtype: str,
    measures: Sequence[Measure],
    *,
    mode: str = "eager",
    noise: float = 0.0,
    sides: Sequence[Side] = ("first", "second"),
    labels: Mapping[Side, str] = LABELS,
) -> TensorVerdict:
    """Return the verdict on a tensor from all its samples.

    Args:
        name: the first side's name.
        second_name: the second side's name.
        kind: kind of tensor.
        shape: the first side's shape.
        dtype: precision of the runs.
        measures: one per sample.
        mode: mode of the runs.
        noise: how much the sides differ from themselves, in units of the last place; added to the allowance.
        sides: the sides whose precision is judged; another side is the reference.
        labels: names of the sides in messages.
    """
    allowed = [allowed_meaning(one, dtype) for one in measures]
    shares = [(one.meaning or 0.0) / limit for one, limit in zip(measures, allowed, strict=True)]
    # Inputs drawn to be hard lose digits in right code, too: they count for the meaning, which is compared in float64,
    # alone.
    plain = [one for one in measures if not one.stress]
    first_used, second_used = precision_used(plain, noise)
    judged = [used for side, used in (("first", first_used), ("second", second_used)) if side in sides]
    meaning_used = max(shares, default=0.0)
    by_meaning = int(np.argmax(shares)) if shares else 0
    furthest = max(plain, key=lambda worst: max(worst.first_max, worst.second_max), default=None)
    if furthest is not None:
        furthest = dataclasses.replace(furthest, worst=furthest.rounded or furthest.worst)
    distances = [one.meaning for one in measures if one.meaning is not None]
    base = TensorVerdict(
        name=name,
        second_name=second_name,
        kind=kind,
        shape=shape,
        dtype=dtype,
        verdict="equal",
        mode=mode,
        relative=max(distances) if distances else None,
        meaning_used=meaning_used if distances else None,
        first_used=first_used,
        second_used=second_used,
        first_ulps=_rms([one.first_square for one in plain]),
        second_ulps=_rms([one.second_square for one in plain]),
        count=sum(one.count for one in measures),
    )
    # From here on the order decides which cause a message names. Elements that are not finite on one side come first:
    # distances leave them out, so that no later step would see them.
    bad = [one for one in measures if one.mismatched]
    if bad:
        count = sum(one.mismatched for one in bad)
        message = f"{count} elements are finite on one side only{_at(bad[0], labels)}"
        return _with(base, "different", bad[0], message, bad=count)
    if not any(one.finite for one in measures) and base.count:
        return _with(base, "inconclusive", measures[0], "no element is finite on both sides, so nothing was compared")
    # Before precision: a side that computes something else is also far from the other in low precision.
    if meaning_used > 1.0:
        worst = measures[by_meaning]
        message = (
            f"float64 results differ by {worst.meaning:.2g} of the largest value, allowed {allowed[by_meaning]:.1g}"
            f"{_at(worst, labels)}"
        )
        return _with(base, "different", worst, message, bad=sum(one.beyond for one in measures))
    if max(judged, default=0.0) > 1.0 and furthest is not None:
        worst = furthest
        side: Side = "first" if first_used > second_used or "second" not in sides else "second"
        mine, other = (base.first_ulps, base.second_ulps) if side == "first" else (base.second_ulps, base.first_ulps)
        verdict: Verdict = "precision"
        side_or_none: str | None = None
        message = (
            f"{shown(labels[side])} loses more than its share: its rounding error is {mine:.3g} ulps, "
            f"the other side's {other:.3g}{_at(worst, labels)}"
        )
        # Without float64 results rounding and meaning look alike; 100 times the allowance is not rounding.
        if not distances and max(judged) > 100.0:
            verdict = "different"
            message = f"the results differ by far more than rounding{_at(worst, labels)}"
        else:
            side_or_none = labels[side]
        return dataclasses.replace(_with(base, verdict, worst, message), side=side_or_none)
    if furthest is None:
        return base
    return dataclasses.replace(base, worst=furthest.worst, sample=furthest.title)


def agree(
    first: Array,
    second: Array,
    dtype: str,
    kind_scale: float,
    earlier: Sequence[Measure],
    far: FarEntries | None = None,
) -> bool:
    """Return whether two results are about as close as their rounding errors in other samples predict.

    Non-finite differences count as disagreement.
    """
    own_scale = scale_of([first]) if far is None else far.scale
    # A tensor that is zero in exact arithmetic holds rounding errors alone, which are no scale; see `measures.measure`.
    scale = own_scale if own_scale > 1e-6 * kind_scale else kind_scale
    allowed = GROUP_FACTOR * max(one.first_max + one.second_max for one in earlier) + FLOOR_ULPS
    limit = allowed * unit_of(dtype) * scale
    first, second = first.reshape(-1), second.reshape(-1)
    for start in range(0, first.size, CHUNK):
        apart = chunk(first, start) - chunk(second, start)
        if not float(np.abs(apart if far is None else far.scaled(apart, start)).max(initial=0.0)) <= limit:
            return False  # so it is where one of them is not finite
    return True


def precision_used(measures: Sequence[Measure], noise: float = 0.0) -> tuple[float, float]:
    """Return the shares of the precision allowance that the first and the second side took."""
    groups = collections.defaultdict(list)
    for measure in measures:
        groups[measure.group, measure.weights].append(measure)
    floor = FLOOR_ULPS + noise
    shares = []
    for mine, other in (("first", "second"), ("second", "first")):
        normal, largest, other_normal, other_largest, single, floors = [], [], [], [], 0.0, []
        for group in groups.values():
            square = float(np.mean([getattr(one, f"{mine}_square") for one in group]))
            other_square = float(np.mean([getattr(one, f"{other}_square") for one in group]))
            top = max(getattr(one, f"{mine}_max") for one in group)
            other_top = max(getattr(one, f"{other}_max") for one in group)
            # Each group is divided by its own size, so that all count alike: undivided, one ill-conditioned group would
            # be the whole sum. 1.0: both sides are exact, and only the floor is left.
            size = math.sqrt(square + other_square) or 1.0
            top_size = max(top, other_top) or 1.0
            normal.append(square / size**2)
            other_normal.append(other_square / size**2)
            largest.append(top / top_size)
            other_largest.append(other_top / top_size)
            floors.append((floor / size, floor / top_size))
            # Pooled over many good groups, one bad group could hide; alone it may be `GROUP_FACTOR` times further off.
            allowed = GROUP_FACTOR * (RMS_LIMIT * math.sqrt(other_square) + floor)
            single = max(single, math.sqrt(square) / allowed)
        pooled_floor, top_floor = (float(np.mean(column)) for column in zip(*floors, strict=True)) if floors else (1, 1)
        rms = _share(_rms(normal), RMS_LIMIT * _rms(other_normal) + pooled_floor)
        top = _share(_rms([x * x for x in largest]), MAX_LIMIT * _rms([x * x for x in other_largest]) + top_floor)
        shares.append(max(rms, top, single))
    return shares[0], shares[1]


def allowed_meaning(measure: Measure, dtype: str) -> float:
    """Return the float64 difference that a measure is allowed, as a part of the scale of its kind."""
    return (
        meaning_limit((measure.first_max, measure.second_max), measure.scale, measure.meaning_scale, dtype)
        + measure.allowance
    )


def beyond(last: Mapping[MeasureKey, Measure], dtype: str) -> dict[MeasureKey, float]:
    """Return by how much the float64 results of a sample differ by more than they may, where they do."""
    excess = {key: (one.meaning or 0.0) - allowed_meaning(one, dtype) for key, one in last.items()}
    return {key: more for key, more in excess.items() if more > 0.0}


def _with(base: TensorVerdict, verdict: Verdict, measure: Measure, message: str, bad: int = 0) -> TensorVerdict:
    return dataclasses.replace(
        base,
        verdict=verdict,
        message=message,
        bad=bad,
        weights=measure.weights,
        worst=measure.worst,
        sample=measure.title,
    )


def _at(measure: Measure, labels: Mapping[Side, str]) -> str:
    worst = measure.worst
    index = "" if not worst.index else f" at {worst.index}"
    values = f"{shown(labels['first'])} {worst.first:.9g}, {shown(labels['second'])} {worst.second:.9g}"
    return f"; worst{index}: {values} ({measure.title or f'{measure.weights} weights'})"


def _rms(squares: Sequence[float]) -> float:
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _share(value: float, allowed: float) -> float:
    return 0.0 if value == 0.0 else value / allowed if allowed else math.inf
