"""The parity matrix of our own variants: every case, precision and mode of both twins, judged by `judge`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from attn_bridge import backends
from attn_bridge.specs import VARIANTS, find_variant

from .. import workers
from ..adapters import load_adapter
from ..results.findings import Side as SideName
from ..results.findings import TensorVerdict, shown, worst
from ..settings.environment import environment
from ..sides.dtypes import DTYPES
from ..sides.subject import Array
from ..verdict.criterion import decide
from ..verdict.limits import sum_floor
from ..verdict.measures import measure, with_error
from ..verdict.probes import Moved
from . import kernels
from .cases import MODES, Numbers, cases_of
from .report import Cell, CheckReport, LeftOut
from .twin_runs import COPIES, Run, Side, Subject, Tensors, TwinDiffersError, fused_losses, run_side

AGAIN = 4
"""A run that looks imprecise is judged again, on this many times as many new seeds, before that is said of it."""

WORTH = 40
"""Programs that a process is worth: to start it and to import both frameworks takes as long as half of them."""

MAX_REFERENCES = 3
"""Samples that are compared with the NumPy reference, which is written for reading, not for speed."""

FRAMEWORKS: tuple[backends.Framework, ...] = ("torch", "flax")

REFERENCE = "NumPy reference"

_Judged = tuple[list[Cell], list[LeftOut]]
"""A row: its cells, and what was left out of it."""

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
    jobs: int | None = 1,
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
        jobs: number of processes; None: as many as there are cores and work for, at most `workers.MAX_JOBS`. With 1
            everything runs in this process. More of them are fresh interpreters that know nothing of what was changed
            in this one: a function replaced here, a flag set by a call. The report is the same but for the seconds.
        progress: called as ``progress(what was done, done, total)``, in the order of the rows.

    Returns:
        The report; ``report.passed`` says whether everything held.

    Raises:
        ValueError: a name that is not known, or fewer than one seed or process.
        MissingBackendError: a framework is not installed.
        WorkerDiedError: a process was killed.
    """
    start = time.perf_counter()
    dtypes = tuple(dtypes)
    everywhere = full or bool(dtypes)
    wanted = _choose("dtype", dtypes, DTYPES)
    wanted = tuple(dtype for dtype in DTYPES if dtype == "float64" or dtype in wanted)
    for name, value in (("seeds", seeds), ("jobs", 1 if jobs is None else jobs)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    chosen, kernel_cases = _choose_rows(tuple(variants), tuple(cases), subjects, everywhere)
    work = _Work(chosen, kernel_cases, wanted, everywhere, full, seeds)
    cells: list[Cell] = []
    left_out: list[LeftOut] = []
    rows = work.rows
    with contextlib.closing(_judge_in_processes(work, _count_jobs(work, jobs))) as found:
        for done, (row, (judged, refused)) in enumerate(zip(rows, found, strict=True)):
            cells.extend(judged)
            left_out.extend(refused)
            if progress:
                progress(row, done + 1, len(rows))
    return CheckReport(tuple(cells), environment(), seeds, time.perf_counter() - start, tuple(left_out))


def _choose_rows(
    variants: tuple[str, ...], cases: tuple[str, ...], subjects: Sequence[Subject] | None, everywhere: bool
) -> tuple[tuple[Subject, ...], tuple[str, ...]]:
    """Return the subjects, and the cases of the implementations of attention."""
    if subjects is not None:
        chosen = _choose("case", cases, tuple(subject.case.name for subject in subjects))
        return tuple(subject for subject in subjects if subject.case.name in chosen), ()
    names = [find_variant(name, (kernels.NAME,)).name for name in variants if name != kernels.NAME]
    names = names if variants else [variant.name for variant in VARIANTS]
    is_brief = not (variants or everywhere or cases)
    of_variants = [(one, case) for one in VARIANTS if one.name in names for case in cases_of(one, is_brief)]
    of_kernels = tuple(case.name for case in kernels.CASES)
    known = dict.fromkeys(case.name for variant in VARIANTS for case in cases_of(variant))
    chosen = _choose("case", cases, (*known, *of_kernels))
    kernel_cases: tuple[str, ...] = ()
    if not variants or kernels.NAME in variants:
        kernel_cases = tuple(name for name in chosen if name in of_kernels)
    found = tuple(Subject(variant, case) for variant, case in of_variants if case.name in chosen)
    if not found and not kernel_cases:
        raise ValueError(f"none of the cases ({', '.join(cases)}) is one of {', '.join(variants)}")
    return found, kernel_cases


@dataclasses.dataclass(frozen=True)
class _Work:
    """Rows of the matrix, and how they are run; see `check`."""

    subjects: tuple[Subject, ...]
    kernel_cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    everywhere: bool
    full: bool
    seeds: int

    @property
    def rows(self) -> list[str]:
        """What the rows are called."""
        names = [f"{subject.variant.name} {subject.case.name}" for subject in self.subjects]
        return names + [f"{kernels.NAME} {case}" for case in self.kernel_cases]

    @property
    def runs(self) -> int:
        """How many programs the rows take, roughly."""
        of_subjects = sum(subject.runs(self.dtypes, self.everywhere) for subject in self.subjects)
        return of_subjects + kernels.RUNS * len(self.kernel_cases)

    def __str__(self) -> str:
        return self.rows[0] if len(self.rows) == 1 else self.rows[0].split()[0]

    def parts(self) -> list[_Work]:
        """Return the work in parts for processes, in order: cases of a variant share what is compiled.

        Handed out in this order they end together: what takes long is in front, the last ones take a second or two.
        """
        grouped = itertools.groupby(
            self.subjects, lambda one: (one.variant.name, None if one.weights is None else one.case.name)
        )
        parts = [dataclasses.replace(self, subjects=tuple(group), kernel_cases=()) for _, group in grouped]
        return parts + [dataclasses.replace(self, subjects=(), kernel_cases=(case,)) for case in self.kernel_cases]


def _count_jobs(work: _Work, jobs: int | None) -> int:
    """Return the number of processes: those that are asked for, or that pay, as far as there are parts for them."""
    if jobs is None:
        jobs = min(workers.usable_cores(), workers.MAX_JOBS, work.runs // WORTH)
    return max(1, min(jobs, len(work.parts())))


def _judge_in_processes(work: _Work, jobs: int) -> Generator[_Judged]:
    """Judge the rows in order, in this process if one is enough."""
    if jobs == 1:
        yield from _judge_rows(work)
        return
    with contextlib.closing(workers.run(_judge_part, work.parts(), jobs)) as found:
        for judged in found:
            yield from judged


def _judge_part(part: _Work) -> list[_Judged]:
    """Judge some rows in a process of their own."""
    with seldom_collecting():
        return list(_judge_rows(part))


def _judge_rows(work: _Work) -> Generator[_Judged]:
    """Run both twins in threads, and judge one row after the other."""
    for framework in FRAMEWORKS:
        backends.load(framework)
    importlib.import_module("attn_bridge.reference")
    seeds = work.seeds
    stop = threading.Event()
    with ThreadPoolExecutor(1) as torch_pool, ThreadPoolExecutor(2) as flax_pool:
        pools: dict[backends.Framework, ThreadPoolExecutor] = {"torch": torch_pool, "flax": flax_pool}

        def submit(subject: Subject, numbers: list[Numbers], dtypes: tuple[str, ...], everywhere: bool) -> _Futures:
            arguments = (subject, numbers, dtypes, everywhere, work.full, stop)
            return {name: pools[name].submit(run_side, name, *arguments) for name in FRAMEWORKS}

        pending: list[tuple[Subject, list[Numbers], _Futures]] = []
        try:
            for subject in work.subjects:
                numbers = subject.numbers(range(seeds), subject.copies(work.dtypes, work.everywhere))
                pending.append((subject, numbers, submit(subject, numbers, work.dtypes, work.everywhere)))
            kernels_pending = [
                kernels.check_kernels(name, dtypes=work.dtypes, everywhere=work.everywhere, seeds=seeds, pools=pools)
                for name in work.kernel_cases
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
                            load_adapter(name)  # here, as two threads would import much of it at once
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
                yield judged, []
            for judge_kernels in kernels_pending:
                yield judge_kernels()
        finally:
            stop.set()
            for pool in pools.values():
                pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Hold the context in which Python seldom looks for cycles: tracing makes small objects by the million."""
    former = gc.get_threshold()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*former)


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
    cells = _with_odd_one_out(cells)
    return [dataclasses.replace(cell, notes=notes, command=subject.command(cell.dtype, seeds)) for cell in cells]


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
    one, two = (shown(name) for name in ("torch", "flax", REFERENCE) if name in agreed)
    message = f"{one} and {two} agree: {shown(odd)} is the odd one out"
    return [
        dataclasses.replace(cell, message=cell.message or message * (cell.verdict == "different")) for cell in cells
    ]


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
        cells.append(_cell(subject, run, tuple(judged), f"{run} vs {REFERENCE}"))
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
