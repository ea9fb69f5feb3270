"""The parity matrix of our own variants: every case, precision and mode of both twins, judged by `judge`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from attn_bridge import backends
from attn_bridge.backends import usable_cores
from attn_bridge.specs import VARIANTS, find_variant

from .. import workers
from ..samples.limits import MAX_SEEDS
from ..settings.precision import environment
from ..sides.arrays import DTYPES
from ..sides.subject import load_adapter
from . import kernels
from .cases import CaseNumbers, cases_of
from .judging import Futures, judge_row
from .report import Cell, CheckReport, LeftOut
from .twin_runs import COPIES, CheckRow, fused_losses, run_side

AGAIN = 4
"""Factor on the number of seeds for judging an apparently imprecise run again, on new seeds, before reporting it."""

WORTH = 40
"""Programs that a process is worth: to start it and to import both frameworks takes as long as half of them."""

_Judged = tuple[list[Cell], list[LeftOut]]
"""The cells of a row, and the runs left out of it."""


def check(
    variants: Iterable[str] = (),
    *,
    cases: Iterable[str] = (),
    dtypes: Iterable[str] = (),
    seeds: int = 3,
    full: bool = False,
    subjects: Sequence[CheckRow] | None = None,
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
        seeds: number of draws, each with a few slightly moved copies; statistics are pooled over all.
        full: run every case in every precision, and every variant in every mode; takes minutes.
        subjects: rows to check instead of variants times cases (real weights).
        jobs: number of processes; None: limited by cores and work, at most `workers.MAX_JOBS`. With 1 everything runs
            in this process. Additional processes are fresh interpreters without the changes made in this one, such as a
            replaced function or a flag set by a call. Apart from the seconds, the report does not depend on it.
        progress: called as ``progress(row, done, total)``, in the order of the rows.

    Returns:
        The report; ``report.passed`` is True if every row passed.

    Raises:
        ValueError: a name is unknown, or fewer than one seed or process.
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
    if seeds > MAX_SEEDS:
        raise ValueError(f"seeds ({seeds}) must be at most {MAX_SEEDS}")
    chosen, kernel_cases = _choose_rows(tuple(variants), tuple(cases), subjects, everywhere)
    work = _Work(chosen, kernel_cases, wanted, everywhere, full, seeds)
    cells: list[Cell] = []
    left_out: list[LeftOut] = []
    rows = work.rows
    with contextlib.closing(_judge_in_processes(work, _count_jobs(work, jobs))) as results:
        for done, (row, (judged, refused)) in enumerate(zip(rows, results, strict=True)):
            cells.extend(judged)
            left_out.extend(refused)
            if progress:
                progress(row, done + 1, len(rows))
    return CheckReport(tuple(cells), environment(), seeds, time.perf_counter() - start, tuple(left_out))


def _choose_rows(
    variants: tuple[str, ...], cases: tuple[str, ...], subjects: Sequence[CheckRow] | None, everywhere: bool
) -> tuple[tuple[CheckRow, ...], tuple[str, ...]]:
    """Return the subjects, and the cases of the implementations of attention."""
    if subjects is not None:
        chosen = _choose("case", cases, tuple(subject.case.name for subject in subjects))
        return tuple(subject for subject in subjects if subject.case.name in chosen), ()
    names = [find_variant(name, (kernels.NAME,)).name for name in variants if name != kernels.NAME]
    names = names if variants else [variant.name for variant in VARIANTS]
    is_brief = not (variants or everywhere or cases)
    of_variants = [(one, case) for one in VARIANTS if one.name in names for case in cases_of(one, is_brief)]
    of_kernels = tuple(case.name for case in kernels.CASES)
    case_names = dict.fromkeys(case.name for variant in VARIANTS for case in cases_of(variant))
    chosen = _choose("case", cases, (*case_names, *of_kernels))
    kernel_cases: tuple[str, ...] = ()
    if not variants or kernels.NAME in variants:
        kernel_cases = tuple(name for name in chosen if name in of_kernels)
    of_subjects = tuple(CheckRow(variant, case) for variant, case in of_variants if case.name in chosen)
    if not of_subjects and not kernel_cases:
        raise ValueError(f"none of the cases ({', '.join(cases)}) is one of {', '.join(variants)}")
    return of_subjects, kernel_cases


@dataclasses.dataclass(frozen=True)
class _Work:
    """Rows of the matrix, and how they are run; see `check`."""

    subjects: tuple[CheckRow, ...]
    kernel_cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    everywhere: bool
    full: bool
    seeds: int

    @property
    def rows(self) -> list[str]:
        """Names of the rows."""
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
        """Return the work in parts for processes, in order: cases of a variant share compiled code.

        In this order the processes end together: slow parts come first, the last ones take a second or two.
        """
        grouped = itertools.groupby(
            self.subjects, lambda row: (row.variant.name, None if row.weights is None else row.case.name)
        )
        parts = [dataclasses.replace(self, subjects=tuple(group), kernel_cases=()) for _, group in grouped]
        return parts + [dataclasses.replace(self, subjects=(), kernel_cases=(case,)) for case in self.kernel_cases]


def _count_jobs(work: _Work, jobs: int | None) -> int:
    """Return the number of processes: those that are asked for, or that pay, as far as there are parts for them."""
    if jobs is None:
        jobs = min(usable_cores(), workers.MAX_JOBS, work.runs // WORTH)
    return max(1, min(jobs, len(work.parts())))


def _judge_in_processes(work: _Work, jobs: int) -> Generator[_Judged]:
    """Judge the rows in order, in this process if one is enough."""
    if jobs == 1:
        yield from _judge_rows(work)
        return
    with contextlib.closing(workers.run(_judge_part, work.parts(), jobs)) as results:
        for judged in results:
            yield from judged


def _judge_part(part: _Work) -> list[_Judged]:
    """Judge some rows in a separate process."""
    with seldom_collecting():
        return list(_judge_rows(part))


def _judge_rows(work: _Work) -> Generator[_Judged]:
    """Run both twins in threads, and judge one row after the other."""
    for framework in backends.FRAMEWORKS:
        backends.load(framework)
        load_adapter(framework)  # as two threads would import much of it at once
    importlib.import_module("attn_bridge.reference")
    seeds = work.seeds
    stop = threading.Event()
    with ThreadPoolExecutor(1) as torch_pool, ThreadPoolExecutor(2) as flax_pool:
        pools: dict[backends.Framework, ThreadPoolExecutor] = {"torch": torch_pool, "flax": flax_pool}

        def submit(row: CheckRow, numbers: list[CaseNumbers], dtypes: tuple[str, ...], everywhere: bool) -> Futures:
            arguments = (row, numbers, dtypes, everywhere, work.full, stop)
            return {name: pools[name].submit(run_side, name, *arguments) for name in backends.FRAMEWORKS}

        pending: list[tuple[CheckRow, list[CaseNumbers], Futures]] = []
        try:
            for row in work.subjects:
                numbers = row.numbers(range(seeds), row.copies(work.dtypes, work.everywhere))
                pending.append((row, numbers, submit(row, numbers, work.dtypes, work.everywhere)))
            kernels_pending = [
                kernels.check_kernels(name, dtypes=work.dtypes, everywhere=work.everywhere, seeds=seeds, pools=pools)
                for name in work.kernel_cases
            ]
            for row, numbers, futures in pending:
                judged = judge_row(row, numbers, futures, seeds)
                suspects = {cell.dtype for cell in judged if cell.verdict == "precision"}
                if suspects:
                    numbers = row.numbers(range(seeds, seeds * (1 + AGAIN)), COPIES)
                    # The last word is about the programs that users run.
                    futures = submit(row, numbers, ("float64", *suspects), True)
                    again = judge_row(row, numbers, futures, seeds)
                    imprecise = sorted({cell.dtype for cell in again if cell.verdict == "precision"})
                    if imprecise:
                        losses = {
                            (name, dtype): pools[name].submit(fused_losses, name, row, numbers, dtype)
                            for dtype in imprecise
                            for name in backends.FRAMEWORKS
                        }
                        measured_losses = {key: future.result() for key, future in losses.items()}
                        again = judge_row(row, numbers, futures, seeds, measured_losses)
                    judged = [cell for cell in judged if cell.dtype not in suspects]
                    # The new seeds decide about the suspected precisions, and whatever else they bring to light stays.
                    kept = [cell for cell in again if cell.dtype in suspects or cell.verdict != "equal"]
                    judged += [_with_note(cell, row, seeds) for cell in kept]
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


def _with_note(cell: Cell, row: CheckRow, seeds: int) -> Cell:
    """Add a note that a verdict comes from a second look."""
    where = f"{row.variant.name}, {row.case.name}, {cell.dtype}"
    before = f"{seeds} seed{'s' if seeds > 1 else ''}"
    note = f"{where}: beyond the allowance on {before}, judged again on {seeds * AGAIN} new ones"
    return dataclasses.replace(cell, notes=(*cell.notes, note))


def _choose(what: str, names: Iterable[str], choices: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(names)
    for name in names:
        if name not in choices:
            raise ValueError(f"{what} ({name}) must be one of {', '.join(choices)}")
    return tuple(name for name in choices if name in names) or choices
