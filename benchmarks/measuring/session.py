"""A whole measurement: one worker per framework, never two at work at once, and their results as a report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge.backends import MissingBackendError

from ..reporting.report import Report, Row
from ..sides import oracle
from . import machine
from .bench import MATMUL, Bench
from .cells import Cell, Group

ROOT = Path(__file__).parents[2]

ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # both frameworks share the memory of a GPU
    "MALLOC_MMAP_THRESHOLD_": "1048576",  # memory that is freed goes back at once, so that a peak is one
    "ATTN_KERNELS_CACHE": "",  # a first call measures compilation, as below
}
UNSET = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
"""Removed from the environment of the workers: with a cache, a first call would not measure compilation."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        groups: the groups to compare.
        frameworks: ``"torch"``, ``"jax"`` or both.
        modes: of `cells.MODES`.
        rounds: number of timings per contender.
        memory: whether to measure peak memory, in a process per contender.
        matmul: edge of the matrices of the yardstick; None for 2048 on a CPU and 8192 on a GPU.
        sample: least duration of a sample in seconds.
        budget: seconds after which a contender takes no part in further rounds of a group, but in three at least.
        quick: whether the sizes are too small to show speed.
    """

    groups: tuple[Group, ...]
    frameworks: tuple[str, ...] = ("torch", "jax")
    modes: tuple[str, ...] = ("eager", "compiled")
    rounds: int = 9
    memory: bool = True
    matmul: int | None = None
    sample: float = 0.03
    budget: float = 12.0
    quick: bool = False


class WorkerError(Exception):
    """A worker ended before it answered; the message is the last line it wrote."""


class Worker:
    """`bench.Bench` in a separate process; a process that ended is started again for the next request.

    Args:
        framework: ``"torch"`` or ``"jax"``.
        folder: folder for its files while it runs.

    Raises:
        MissingBackendError: the framework is not installed.
    """

    def __init__(self, framework: str, folder: Path):
        self.framework, self.folder = framework, folder
        self._log = folder / f"{framework}-{id(self)}.log"
        self._process: subprocess.Popen[str] | None = None
        self._start()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        environment |= ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.measuring.worker", self.framework],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
            )
        hello = self._answer()
        if "missing" in hello:
            self.close()
            raise MissingBackendError(hello["missing"])

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        status = self._process.wait()
        self.close()
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
        raise WorkerError(f"the {self.framework} worker ended with status {status}: {last[:300]}")

    def _ask(self, what: str, **request: object) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps({"do": what, **request}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def describe(self) -> dict[str, object]:
        """Return versions and device."""
        return self._ask("describe")

    def prepare(self, group: object, modes: object, answer: str, matmul: int, sample: float) -> dict[str, Any]:
        """Build, run and check every contender of a group."""
        return self._ask("prepare", group=group, modes=modes, answer=answer, matmul=matmul, sample=sample)

    def round(self, seed: int, budget: float) -> dict[str, float]:
        """Time every contender of the group once."""
        return self._ask("round", seed=seed, budget=budget)

    def memory(self, group: object, modes: object, label: str) -> dict[str, Any]:
        """Return the peak memory of a contender, measured in a fresh process."""
        fresh = Worker(self.framework, self.folder)
        try:
            return fresh._ask("memory", group=group, modes=modes, label=label)
        finally:
            fresh.close()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
            process.wait()


Side = Worker | Bench
"""A framework, in a separate process or in this one."""


def measure(
    plan: Plan, progress: Callable[[str, int, int], None] | None = None, connect: Callable[[str, Path], Side] = Worker
) -> Report:
    """Run a plan.

    Frameworks that are not installed are left out, with a note.

    Raises:
        ValueError: none of them is installed.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        sides: dict[str, Side] = {}
        notes = []
        for framework in plan.frameworks:
            try:
                sides[framework] = connect(framework, folder)
            except MissingBackendError as error:
                notes.append(f"{framework} left out: {error}")
            else:
                stack.callback(sides[framework].close)
        if not sides:
            raise ValueError("; ".join(notes))
        facts = machine.describe() | {"frameworks": {name: side.describe() for name, side in sides.items()}}
        sizes = {
            name: plan.matmul or (2048 if found["device"] == "cpu" else 8192)
            for name, found in facts["frameworks"].items()
        }
        rows: list[Row] = []
        steps = _Steps(progress, len(plan.groups) * (2 + plan.rounds))
        answers = _Answers(folder)
        for group in plan.groups:
            steps(f"{group}: the right answer in float64")
            answer = answers.file(group)
            rows += _measure_group(plan, group, sides, sizes, answer, steps, notes)
        facts["load_average_after"] = machine.load()
        return Report(tuple(rows), facts, tuple(dict.fromkeys(notes)), plan.rounds, plan.quick)


class _Steps:
    def __init__(self, progress: Callable[[str, int, int], None] | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, what: str) -> None:
        if self.progress:
            self.progress(what, self.done, self.total)
        self.done += 1

    def show(self, what: str) -> None:
        if self.progress:
            self.progress(what, self.done, self.total)


class _Answers:
    """Right answers in files, of which only the last one is kept: that with gradients serves both directions."""

    def __init__(self, folder: Path):
        self.folder, self.kept = folder, None

    def file(self, group: Group) -> Path:
        path = self.folder / "answer.npz"
        with_gradients = dataclasses.replace(group, direction="forward+backward")
        if self.kept != group and (self.kept is None or self.kept != with_gradients):
            np.savez(path, **oracle.answer(group))
            self.kept = group
        if not group.backward and self.kept == with_gradients:
            output = self.folder / "output.npz"
            with np.load(path) as file:
                np.savez(output, output=file["output"])
            return output
        return path


def _measure_group(
    plan: Plan,
    group: Group,
    sides: dict[str, Side],
    sizes: dict[str, int],
    answer: Path,
    steps: _Steps,
    notes: list[str],
) -> list[Row]:
    prepared: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, dict[str, list[float]]] = {}
    steps(f"{group}: compiling and checking")
    for framework, side in sides.items():
        try:
            reply = side.prepare(group.to_json(), list(plan.modes), str(answer), sizes[framework], plan.sample)
        except WorkerError as error:
            notes.append(f"{group}: {error}")
            continue
        prepared[framework], seconds[framework] = reply["rows"], {}
        notes += reply["notes"]
    for number in range(plan.rounds):
        steps(f"{group}: round {number + 1}")
        order = list(prepared)
        random.Random(number).shuffle(order)
        for framework in order:
            try:
                samples = sides[framework].round(number, plan.budget)
            except WorkerError as error:
                notes.append(f"{group}: {error}")
                del prepared[framework]
                continue
            for label, value in samples.items():
                seconds[framework].setdefault(label, []).append(value)
    rows = []
    for framework, contenders in prepared.items():
        matmul = 2 * sizes[framework] ** 3 / float(np.median(seconds[framework][MATMUL]))
        for contender in contenders:
            right = contender["status"] == "right"
            memory = None
            if right and plan.memory:
                steps.show(f"{group}: memory of {framework} {contender['label']}")
                memory = _memory(sides[framework], plan, group, contender["label"], framework, notes)
            rows.append(
                Row(
                    **group.to_json(),
                    framework=framework,
                    contender=contender["contender"],
                    kind=contender["kind"],
                    mode=contender["mode"],
                    picked=contender["picked"],
                    status=contender["status"],
                    reason=contender.get("reason"),
                    seconds=tuple(seconds[framework].get(contender["label"], ())) if right else (),
                    first_call_s=contender.get("first_call_s"),
                    matmul_flops=matmul,
                    memory_bytes=memory,
                )
            )
    return rows


def _memory(side: Side, plan: Plan, group: Group, label: str, framework: str, notes: list[str]) -> int | None:
    try:
        num_bytes = side.memory(group.to_json(), list(plan.modes), label)["bytes"]
    except WorkerError as error:
        notes.append(f"{group}: memory of {framework} {label}: {error}")
        return None
    return None if num_bytes is None else int(num_bytes)


def groups(
    subjects: Sequence[str], cells: Sequence[Cell], dtypes: Sequence[str], directions: Sequence[str]
) -> Iterator[Group]:
    """Yield every combination, such that the right answer of one serves the next."""
    for subject in subjects:
        for cell in cells:
            for dtype in dtypes:
                for direction in sorted(directions, reverse=True):  # what has gradients comes first
                    yield Group(subject, cell, dtype, direction)
