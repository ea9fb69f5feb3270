"""The parity matrix of our own variants: every case, precision and mode of both twins, judged by `judge`."""

from __future__ import annotations

import dataclasses
import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ... import backends
from ...specs import VARIANTS, find_variant
from ..compare.results.findings import Side as SideName
from ..compare.results.findings import TensorVerdict, worst
from ..compare.sides.dtypes import DTYPES
from ..compare.sides.subject import Array
from ..compare.verdict.criterion import decide
from ..compare.verdict.limits import sum_floor
from ..compare.verdict.measures import measure, with_error
from ..compare.verdict.probes import Moved
from ..settings.environment import environment
from . import kernels
from .cases import MODES, Numbers, cases_of
from .report import Cell, CheckReport
from .twin_runs import COPIES, Run, Side, Subject, Tensors, TwinDiffersError, fused_losses, run_side

AGAIN = 4
"""A run that looks imprecise is judged again, on this many times as many new seeds, before that is said of it."""

MAX_REFERENCES = 3
"""Samples that are compared with the NumPy reference, which is written for reading, not for speed."""

FRAMEWORKS: tuple[backends.Framework, ...] = ("torch", "flax")

_Futures = dict[backends.Framework, "Future[Side]"]
Losses = Mapping[tuple[backends.Framework, str], list[dict[str, Moved]]]
"""Framework and precision -> per sample, how far each gradient moves under the formula of fused kernels."""


def check(
    variants: Iterable[str] = (),
    *,
    cases: Iterable[str] = (),
    dtypes: Iterable[str] = (),
    seeds: int = 3,
    full: bool = False,
    subjects: Sequence[Subject] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CheckReport:
    """Run the parity matrix on this machine.

    Args:
        variants: class names (or aliases) to check, and ``dot_product_attention`` for its implementations; empty = all,
            each modern one on its first example, though not in float16, and on the others for their meaning only.
        cases: names of cases; empty = all.
        dtypes: names of precisions to run in every case, compiled as users compile them; empty = those that each case
            names. float64 always runs, as the proof of the meaning.
        seeds: how many times numbers are drawn, each with a few slightly moved copies; statistics are pooled over all.
        full: run every case in every precision, and every variant in every mode; takes minutes.
        subjects: what to check instead of variants times cases (real weights).
        progress: called as ``progress(what was done, done, total)``.

    Returns:
        The report; ``report.passed`` says whether everything held.

    Raises:
        ValueError: a name that is not known, or fewer than one seed.
        MissingBackendError: a framework is not installed.
    """
    start = time.perf_counter()
    dtypes = tuple(dtypes)
    everywhere = full or bool(dtypes)
    wanted = _choose("dtype", dtypes, DTYPES)
    wanted = tuple(dtype for dtype in DTYPES if dtype == "float64" or dtype in wanted)
    if seeds < 1:
        raise ValueError(f"seeds ({seeds}) must be at least 1")
    variants, cases = tuple(variants), tuple(cases)
    kernel_cases: tuple[str, ...] = ()
    if subjects is not None:
        chosen = _choose("case", cases, tuple(subject.case.name for subject in subjects))
        subjects = [subject for subject in subjects if subject.case.name in chosen]
    else:
        names = [find_variant(name, (kernels.NAME,)).name for name in variants if name != kernels.NAME]
        names = names if variants else [variant.name for variant in VARIANTS]
        is_brief = not (variants or everywhere or cases)
        of_variants = [(one, case) for one in VARIANTS if one.name in names for case in cases_of(one, is_brief)]
        of_kernels = tuple(case.name for case in kernels.CASES)
        known = dict.fromkeys(case.name for variant in VARIANTS for case in cases_of(variant))
        chosen = _choose("case", cases, (*known, *of_kernels))
        if not variants or kernels.NAME in variants:
            kernel_cases = tuple(name for name in chosen if name in of_kernels)
        subjects = [Subject(variant, case) for variant, case in of_variants if case.name in chosen]
        if not subjects and not kernel_cases:
            raise ValueError(f"none of the cases ({', '.join(cases)}) is one of {', '.join(variants)}")
    for framework in FRAMEWORKS:
        backends.load(framework)
    importlib.import_module("attn_bridge.reference")
    cells: list[Cell] = []
    done = 0
    total = len(subjects) + len(kernel_cases)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as torch_pool, ThreadPoolExecutor(2) as flax_pool:
        pools: dict[backends.Framework, ThreadPoolExecutor] = {"torch": torch_pool, "flax": flax_pool}

        def submit(subject: Subject, numbers: list[Numbers], dtypes: tuple[str, ...], everywhere: bool) -> _Futures:
            arguments = (subject, numbers, dtypes, everywhere, full, stop)
            return {name: pools[name].submit(run_side, name, *arguments) for name in FRAMEWORKS}

        pending: list[tuple[Subject, list[Numbers], _Futures]] = []
        try:
            for subject in subjects:
                numbers = subject.numbers(range(seeds), subject.copies(wanted, everywhere))
                pending.append((subject, numbers, submit(subject, numbers, wanted, everywhere)))
            kernels_pending = [
                (name, kernels.check_kernels(name, dtypes=wanted, everywhere=everywhere, seeds=seeds, pools=pools))
                for name in kernel_cases
            ]
            for subject, numbers, futures in pending:
                judged = _judge_subject(subject, numbers, futures, seeds)
                suspects = {cell.dtype for cell in judged if cell.verdict == "precision"}
                if suspects:
                    numbers = subject.numbers(range(seeds, seeds * (1 + AGAIN)), COPIES)
                    # The last word is about the programs that users run.
                    futures = submit(subject, numbers, ("float64", *suspects), True)
                    again = _judge_subject(subject, numbers, futures, seeds)
                    imprecise = sorted({cell.dtype for cell in again if cell.verdict == "precision"})
                    if imprecise:
                        for name in FRAMEWORKS:
                            backends.load_subjects(name)  # here, as two threads would import much of it at once
                        losses = {
                            (name, dtype): pools[name].submit(fused_losses, name, subject, numbers, dtype)
                            for dtype in imprecise
                            for name in FRAMEWORKS
                        }
                        found = {key: future.result() for key, future in losses.items()}
                        again = _judge_subject(subject, numbers, futures, seeds, found)
                    judged = [cell for cell in judged if cell.dtype not in suspects]
                    # The new seeds decide about the suspected precisions, and whatever else they bring to light stays.
                    kept = [cell for cell in again if cell.dtype in suspects or cell.verdict != "equal"]
                    judged += [_with_note(cell, subject, seeds) for cell in kept]
                cells.extend(judged)
                done += 1
                if progress:
                    progress(f"{subject.variant.name} {subject.case.name}", done, total)
            for kernel_case, judged_kernels in kernels_pending:
                cells.extend(judged_kernels())
                done += 1
                if progress:
                    progress(f"{kernels.NAME} {kernel_case}", done, total)
        finally:
            stop.set()
            for pool in pools.values():
                pool.shutdown(wait=False, cancel_futures=True)
    return CheckReport(tuple(cells), environment(), seeds, time.perf_counter() - start)


def _with_note(cell: Cell, subject: Subject, seeds: int) -> Cell:
    """Say that a verdict is that of a second look."""
    where = f"{subject.variant.name}, {subject.case.name}, {cell.dtype}"
    before = f"{seeds} seed{'s' if seeds > 1 else ''}"
    note = f"{where}: beyond the allowance on {before}, judged again on {seeds * AGAIN} new ones"
    return dataclasses.replace(cell, notes=(*cell.notes, note))


def _judge_subject(
    subject: Subject, numbers: list[Numbers], futures: _Futures, seeds: int, losses: Losses | None = None
) -> list[Cell]:
    """Judge all runs of a subject: against the reference, against each other in float64, then each precision.

    `losses` are what the formula of fused attention kernels costs either framework, which is allowed to both.
    """
    variant, case = subject.variant.name, subject.case.name
    sides: dict[backends.Framework, Side] = {}
    for framework, future in futures.items():
        try:
            sides[framework] = future.result()
        except Exception as error:  # whatever a framework raises, the other cells still deserve their verdict
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            verdict = "different" if isinstance(error, TwinDiffersError) else "inconclusive"
            command = subject.command("float64", seeds)
            return [Cell(variant, case, "float64", f"{framework} run", verdict, (), command, message)]
    cells = _against_reference(subject, numbers, sides)
    pairs: tuple[tuple[backends.Framework, backends.Framework], ...] = (("torch", "flax"), ("flax", "torch"))
    for framework, other in pairs:
        for run, results in sides[framework].runs.items():
            if run == Run("torch", "float64", MODES["torch"][0]):
                continue  # the Flax run of that precision says the same
            trusted = sides[other].runs[Run(other, run.dtype, MODES[other][0])]
            mine = results if run.dtype == "float64" else sides[framework].oracle[run.dtype]
            oracles = {framework: mine, other: sides[other].oracle[run.dtype]}
            judged = _judge_tensors({framework: results, other: trusted}, oracles, run, subject, losses or {})
            cells.append(_cell(subject, run, judged, f"{run} vs {other} float64"))
    notes = tuple(note for side in sides.values() for note in side.notes)
    return [dataclasses.replace(cell, notes=notes, command=subject.command(cell.dtype, seeds)) for cell in cells]


def _cell(subject: Subject, run: Run, tensors: tuple[TensorVerdict, ...], what: str) -> Cell:
    verdict = worst([tensor.verdict for tensor in tensors])
    return Cell(subject.variant.name, subject.case.name, run.dtype, what, verdict, tensors)


def _judge_tensors(
    low: Mapping[backends.Framework, list[Tensors]],
    oracles: Mapping[backends.Framework, list[Tensors]],
    run: Run,
    subject: Subject,
    losses: Losses,
) -> tuple[TensorVerdict, ...]:
    """Judge every tensor of a run by the other twin, over all samples."""
    allowed = [one for (_, dtype), one in losses.items() if dtype == run.dtype]
    other: SideName = "second" if run.framework == "torch" else "first"
    scales = [_scales(one, two) for one, two in zip(oracles["torch"], oracles["flax"], strict=True)]
    copies = subject.copies((run.dtype,), True)
    judged = []
    for name, (kind, array) in low["torch"][0].items():
        measures = [
            measure(
                *(side[name][1] for side in sample),
                kind_scale=scale[kind],
                dtype=run.dtype,
                group=number // copies,
                weights="own",
                sample=number,
            )
            for number, (scale, *sample) in enumerate(
                zip(scales, low["torch"], low["flax"], oracles["torch"], oracles["flax"], strict=True)
            )
        ]
        for moves in allowed:
            measures = [
                with_error(one, other, moved[name].rms, moved[name].largest, run.dtype) if name in moved else one
                for one, moved in zip(measures, moves, strict=True)
            ]
        noise = sum_floor(run.dtype, subject.case.rows) if kind in ("vector gradient", "matrix gradient") else 0.0
        sides: tuple[SideName] = ("first" if run.framework == "torch" else "second",)
        judged.append(
            decide(name, name, kind, array.shape, run.dtype, measures, mode=run.mode, noise=noise, sides=sides)
        )
    return tuple(judged)


def _against_reference(
    subject: Subject, numbers: list[Numbers], sides: Mapping[backends.Framework, Side]
) -> list[Cell]:
    """Judge the twins' float64 results against the NumPy reference: outputs, and gradients along random directions."""
    numbers = numbers[:MAX_REFERENCES]
    references = [subject.reference(one) for one in numbers]
    results = {framework: side.oracle["float64"][:MAX_REFERENCES] for framework, side in sides.items()}
    slopes = _slopes(subject, numbers[0], results["torch"][0])
    cells = []
    for framework, found in results.items():
        judged = []
        for position, name in enumerate(("output", "weights")):
            if name in found[0]:
                expected = [np.asarray(reference[position]) for reference in references]
                judged.append(_meaning(name, name, [tensors[name][1] for tensors in found], expected))
        scales = _scales(found[0])
        for name, (direction, slope) in slopes.items():
            kind, gradient = found[0][name]
            scale = scales[kind] * float(np.abs(direction).sum())
            got, wanted = np.array(np.sum(gradient * direction)), np.array(slope)
            judged.append(_meaning(f"{name} along a direction", kind, [got], [wanted], scale))
        run = Run(framework, "float64", MODES[framework][0])
        cells.append(_cell(subject, run, tuple(judged), f"{run} vs NumPy reference"))
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


def _slopes(subject: Subject, numbers: Numbers, tensors: Tensors) -> dict[str, tuple[Array, float]]:
    """Return for every gradient a random direction, and the reference's derivative along it by the complex step."""
    module = importlib.import_module("attn_bridge.reference")
    function = module.find(subject.variant)
    config = subject.case.config_of(subject.variant)
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


def _choose(what: str, names: Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(names)
    for name in names:
        if name not in known:
            raise ValueError(f"{what} ({name}) must be one of {', '.join(known)}")
    return tuple(name for name in known if name in names) or known
