"""Verdicts on the rows of the parity matrix: each twin judged by the other one, and both by the NumPy reference."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from attn_bridge import backends

from ..results.findings import Side, TensorVerdict, shown, worst
from ..sides.subject import Array, ModuleFailedError
from ..verdict.criterion import decide
from ..verdict.measures import measure, sum_floor, with_error
from ..verdict.probes import Moved
from .cases import MODES, CaseNumbers
from .report import Cell
from .twin_runs import CheckRow, Results, Tensors, TwinDiffersError, TwinMode

MAX_REFERENCES = 3
"""Samples that are compared with the NumPy reference, which is written for reading, not for speed."""

REFERENCE = "NumPy reference"

SIDE_OF: dict[backends.Framework, Side] = {"torch": "first", "flax": "second"}
OTHER: dict[backends.Framework, backends.Framework] = {"torch": "flax", "flax": "torch"}

Futures = dict[backends.Framework, "Future[Results]"]
Losses = Mapping[tuple[backends.Framework, str], list[dict[str, Moved]]]
"""Framework and precision -> per sample, how far each gradient moves under the formula of fused kernels."""


def cause_of(error: BaseException) -> BaseException:
    """Return the exception of the framework behind an error that a subject of the judge reports."""
    return error.__cause__ if isinstance(error, ModuleFailedError) and error.__cause__ is not None else error


def message_of(error: BaseException) -> str:
    """Return the message of a framework's exception in one line."""
    cause = cause_of(error)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def judge_row(
    row: CheckRow, numbers: list[CaseNumbers], futures: Futures, seeds: int, losses: Losses | None = None
) -> list[Cell]:
    """Judge all runs of a row: against the reference, against each other in float64, then each precision.

    `losses`: the error that the formula of fused attention kernels costs either framework; both are allowed it.
    """
    variant, case = row.variant.name, row.case.name
    results: dict[backends.Framework, Results] = {}
    for framework, future in futures.items():
        try:
            results[framework] = future.result()
        except Exception as error:  # whatever a framework raises, the other cells still deserve their verdict
            message = message_of(error)
            verdict = "different" if isinstance(error, TwinDiffersError) else "inconclusive"
            command = row.command("float64", seeds)
            return [Cell(variant, case, "float64", f"{framework} run", verdict, (), command, message)]
    cells = _against_reference(row, numbers, results)
    for framework, other in OTHER.items():
        for way, runs in results[framework].low.items():
            if way == TwinMode("torch", "float64", MODES["torch"][0]):
                continue  # the Flax run of that precision says the same
            trusted = results[other].low[TwinMode(other, way.dtype, MODES[other][0])]
            exact = {one: results[one].exact[way.dtype] for one in OTHER}
            copies = row.copies((way.dtype,), True)
            judged = judge_tensors(
                {framework: runs, other: trusted}, exact, way, copies=copies, rows=row.case.rows, losses=losses
            )
            cells.append(_cell(row, way, judged, f"{way} vs {other} float64"))
    notes = tuple(note for one in results.values() for note in one.notes)
    cells = _with_odd_one_out(cells)
    return [dataclasses.replace(cell, notes=notes, command=row.command(cell.dtype, seeds)) for cell in cells]


def _with_odd_one_out(cells: list[Cell]) -> list[Cell]:
    """Name the party that differs from the two others, which agree: torch, Flax or the NumPy reference."""
    parties = {"torch", "flax", REFERENCE}
    meant = [cell for cell in cells if cell.dtype == "float64"]
    pairs = {cell.what: frozenset(name for name in parties if name in cell.what) for cell in meant}
    apart = {pairs[cell.what] for cell in meant if cell.verdict == "different"}
    agreeing = {pair for pair in pairs.values() if pair not in apart and len(pair) == 2}
    if not apart or len(agreeing) != 1:
        return cells
    (agreed,) = agreeing
    (odd,) = parties - agreed
    first, second = (shown(name) for name in ("torch", "flax", REFERENCE) if name in agreed)
    message = f"{first} and {second} agree: {shown(odd)} is the odd one out"
    return [
        dataclasses.replace(cell, message=cell.message or message * (cell.verdict == "different")) for cell in cells
    ]


def _cell(row: CheckRow, way: TwinMode, tensors: tuple[TensorVerdict, ...], what: str) -> Cell:
    verdict = worst([tensor.verdict for tensor in tensors])
    return Cell(row.variant.name, row.case.name, way.dtype, what, verdict, tensors)


def judge_tensors(
    low: Mapping[backends.Framework, list[Tensors]],
    exact: Mapping[backends.Framework, list[Tensors]],
    way: TwinMode,
    *,
    copies: int = 1,
    rows: int = 0,
    losses: Losses | None = None,
) -> tuple[TensorVerdict, ...]:
    """Judge every tensor of a framework against the other one's, over all samples.

    Args:
        low: framework -> results of each sample in the precision of `way`.
        exact: the same in float64, from the same numbers.
        way: how the framework that is judged ran.
        copies: samples of one group, in a row.
        rows: vectors that the gradient of a parameter sums over.
        losses: error that the formula of fused attention kernels costs either framework; both are allowed it.
    """
    side, other = SIDE_OF[way.framework], SIDE_OF[OTHER[way.framework]]
    scales = [_scales(one, two) for one, two in zip(exact["torch"], exact["flax"], strict=True)]
    allowed = [moves for (_, dtype), moves in (losses or {}).items() if dtype == way.dtype]
    judged = []
    for name, (kind, array) in low[way.framework][0].items():
        measures = []
        for number, scale in enumerate(scales):
            arrays = [results[one][number][name][1] for results in (low, exact) for one in SIDE_OF]
            error = measure(
                *arrays, kind_scale=scale[kind], dtype=way.dtype, group=number // copies, weights="own", sample=number
            )
            for moved in [moves[number] for moves in allowed if name in moves[number]]:
                error = with_error(error, other, moved[name].rms, moved[name].largest, way.dtype)
            measures.append(error)
        noise = sum_floor(way.dtype, rows) if rows and kind in ("vector gradient", "matrix gradient") else 0.0
        verdict = decide(name, name, kind, array.shape, way.dtype, measures, mode=way.mode, noise=noise, sides=(side,))
        judged.append(verdict)
    return tuple(judged)


def _against_reference(
    row: CheckRow, numbers: list[CaseNumbers], results: Mapping[backends.Framework, Results]
) -> list[Cell]:
    """Judge the twins' float64 results against the NumPy reference: outputs, and gradients along random directions."""
    numbers = numbers[:MAX_REFERENCES]
    references = [row.reference(one) for one in numbers]
    exact = {framework: one.exact["float64"][:MAX_REFERENCES] for framework, one in results.items()}
    slopes = _slopes(row, numbers[0], exact["torch"][0])
    cells = []
    for framework, samples in exact.items():
        judged = []
        for position, name in enumerate(("output", "weights")):
            if name in samples[0]:
                expected = [np.asarray(reference[position]) for reference in references]
                judged.append(_meaning(name, name, [tensors[name][1] for tensors in samples], expected))
        scales = _scales(samples[0])
        for name, (direction, slope) in slopes.items():
            kind, gradient = samples[0][name]
            scale = scales[kind] * float(np.abs(direction).sum())
            got, wanted = np.array(np.sum(gradient * direction)), np.array(slope)
            judged.append(_meaning(f"{name} along a direction", kind, [got], [wanted], scale))
        way = TwinMode(framework, "float64", MODES[framework][0])
        cells.append(_cell(row, way, tuple(judged), f"{way} vs {REFERENCE}"))
    return cells


def _meaning(
    name: str, kind: str, got: list[Array], expected: list[Array], scale: float | None = None
) -> TensorVerdict:
    measures = [
        measure(
            *(one, two) * 2,
            kind_scale=float(np.abs(two).max(initial=0.0)) if scale is None else scale,
            dtype="float64",
            group=number,
            weights="own",
            sample=number,
        )
        for number, (one, two) in enumerate(zip(got, expected, strict=True))
    ]
    return decide(name, name, kind, got[0].shape, "float64", measures)


def _slopes(row: CheckRow, numbers: CaseNumbers, tensors: Tensors) -> dict[str, tuple[Array, float]]:
    """Return for every gradient a random direction, and the reference's derivative along it by the complex step."""
    module = importlib.import_module("attn_bridge.reference")
    function = module.find(row.variant)
    config = row.case.config_of(row.variant)
    random = np.random.default_rng(0)
    cotangents = [*numbers.cotangents, None][:2]
    slopes: dict[str, tuple[Array, float]] = {}
    for name, (_, gradient) in tensors.items():
        if not name.startswith("grad "):
            continue
        direction: Array = np.asarray(random.normal(size=gradient.shape))
        others = dict(numbers.inputs)
        inputs = (numbers.weights, others.pop("x"), others.pop("attention_mask", None))
        source = name.removeprefix("grad ")
        slope = module.directional_derivative(function, config, *inputs, source, direction, cotangents, **others)
        slopes[name] = direction, slope
    return slopes


def _scales(*results: Tensors) -> dict[str, float]:
    """Largest absolute value per kind of tensor."""
    scales: dict[str, float] = {}
    for tensors in results:
        for kind, array in tensors.values():
            values = np.abs(array.astype(np.float64))
            largest = float(values[np.isfinite(values)].max(initial=0.0))
            scales[kind] = max(scales.get(kind, 0.0), largest)
    return scales
