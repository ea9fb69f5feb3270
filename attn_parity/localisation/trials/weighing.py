"""The effect of rounding and tables on one pair of submodules: its share of precision, and the float64 allowance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...pair import SIDES
from ...results.findings import Side
from ...sides.arrays import is_float, unit_of
from ...sides.subject import Array, Call, Run
from ...sides.tables import STILL
from ...verdict.criterion import precision_used
from ...verdict.measures import ROUNDING_FACTOR, TABLE_FACTOR, Measure, measure, scale_of
from ..leaves import distance, fed, fed_cotangents, match_inputs, match_outputs
from ..sides import Sides, SubmoduleRunner
from .forcing import Paths, shapes_apart

TABLE_SEEDS = 2
"""How many times the tables in a submodule are moved."""

COPIES = 6
"""How many slightly moved inputs a submodule's precision is judged on."""


def rounding(runner: SubmoduleRunner, sides: Sides, paths: Paths, calls: dict[Side, Call]) -> float:
    """Return the relative difference in float64 that the errors of a pair in its own precision predict.

    Rounding errors in low precision show how ill-conditioned a submodule is; in float64 they shrink with the unit.
    """
    groups = match_inputs(calls)
    outputs = match_outputs(calls)
    arguments = fed(calls, groups, "first", dtype=sides.dtype)
    cotangents = fed_cotangents(calls, outputs, "first", sides.dtype)
    largest = 0.0
    for side in SIDES:
        low, high = (
            runner.run(side, paths[side], arguments[side], cotangents[side], low=is_low) for is_low in (True, False)
        )
        largest = max(largest, _error(low.outputs, high.outputs), _gradient_error(low, high))
    # In units of the low precision, times the unit of float64.
    return ROUNDING_FACTOR * largest / unit_of(sides.dtype) * float(np.finfo(np.float64).eps)


def explained(runner: SubmoduleRunner, sides: Sides, paths: Paths, calls: dict[Side, Call]) -> dict[str, float]:
    """Return the relative differences, forward and backward, that tables and literals of a pair may cause.

    Tables are values that depend on neither weights nor floating-point inputs; literals are those of float32 accuracy.
    If both sides have the same ones, or none, the pair has to agree exactly.
    """
    groups = match_inputs(calls)
    outputs = match_outputs(calls)
    arguments, cotangents = fed(calls, groups, "first"), fed_cotangents(calls, outputs, "first")
    allowed = {"forward": 0.0, "backward": 0.0}
    for kind, factor in (("tables", TABLE_FACTOR), ("literals", 1.0)):
        still = {
            side: runner.run_moved(side, paths[side], arguments[side], cotangents[side], STILL, kind) for side in SIDES
        }
        first, second = (still[side].tables for side in SIDES)
        has_same = first is not None and second is not None and first.count > 0 and first.equals(second)
        for side in SIDES:
            if has_same or (kind == "literals" and not still[side].moved):
                continue
            largest = dict.fromkeys(allowed, 0.0)
            for seed in range(TABLE_SEEDS):
                run = runner.run_moved(side, paths[side], arguments[side], cotangents[side], seed, kind)
                if not run.moved:
                    break
                largest["forward"] = max(largest["forward"], _error(run.outputs, still[side].outputs))
                largest["backward"] = max(largest["backward"], _gradient_error(run, still[side]))
            # Both sides' tables may be off, in opposite directions: their effects add up.
            allowed = {key: allowed[key] + factor * largest[key] for key in allowed}
    return allowed


def _error(low: Sequence[Array | None], high: Sequence[Array | None]) -> float:
    """Return the largest error of some arrays, relative to the largest value of all."""
    pairs = [(one, two) for one, two in zip(low, high, strict=True) if one is not None and two is not None]
    scale = scale_of([two for _, two in pairs]) or 1.0
    return max((distance(one, two) / scale for one, two in pairs if is_float(one)), default=0.0)


def _gradient_error(low: Run, high: Run) -> float:
    """Return the largest error of the gradients that both runs have, relative to the largest value of all."""
    names = sorted(low.parameter_gradients.keys() & high.parameter_gradients.keys())
    return _error(*([*run.input_gradients, *(run.parameter_gradients[name] for name in names)] for run in (low, high)))


def weigh(
    runner: SubmoduleRunner, sides: Sides, paths: Paths, calls: dict[Side, Call]
) -> tuple[dict[str, float], dict[str, Side], str]:
    """Judge the precision of a pair alone, on the first side's inputs.

    Returns the share of the allowance that the worse side took, forward and backward, which side that is, and a
    problem.
    """
    groups = match_inputs(calls)
    outputs = match_outputs(calls)
    if not outputs:
        return {}, {}, shapes_apart(calls)
    measures: dict[str, list[Measure]] = {"forward": [], "backward": []}
    for copy in range(COPIES):
        arguments = fed(calls, groups, "first", copy=copy, dtype=sides.dtype)
        cotangents = fed_cotangents(calls, outputs, "first", sides.dtype)
        low, high = (
            {
                side: runner.run(side, paths[side], arguments[side], cotangents[side], low=is_low)
                if is_low or side not in sides.lacks
                else None
                for side in SIDES
            }
            for is_low in (True, False)
        )
        sided = [(found[side], side) for found in (low, high) for side in SIDES]
        for position, group in enumerate(outputs):
            tensors = [None if run is None else group.value(side, run.outputs) for run, side in sided]
            measures["forward"] += measured(tensors, sides.dtype, position, copy)
        for position, group in enumerate(groups):
            totals = [None if run is None else group.total(side, run.input_gradients) for run, side in sided]
            measures["backward"] += measured(totals, sides.dtype, position, copy)
    used: dict[str, float] = {}
    worse: dict[str, Side] = {}
    for direction, measures_of_side in measures.items():
        shares = dict(zip(SIDES, precision_used(measures_of_side) if measures_of_side else (0.0, 0.0), strict=True))
        worse[direction] = max(reversed(sides.judged), key=lambda side: shares[side])
        used[direction] = shares[worse[direction]]
    return used, worse, ""


def measured(tensors: Sequence[Array | None], dtype: str, group: int, sample: int) -> list[Measure]:
    """Return the measure of one tensor by both results and their float64 results, none if a side has none."""
    first, second, *oracles = tensors
    if first is None or second is None or not is_float(first) or not is_float(second):
        return []
    scale = scale_of([array for array in oracles if array is not None] or [first])
    first_oracle, second_oracle = oracles
    return [
        measure(
            first,
            second,
            first_oracle,
            second_oracle,
            kind_scale=scale,
            dtype=dtype,
            group=group,
            weights="own",
            sample=sample,
        )
    ]
