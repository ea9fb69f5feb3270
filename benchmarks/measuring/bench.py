"""One framework's side of a measurement: contenders are prepared, checked, and then timed round by round."""

from __future__ import annotations

import gc
import importlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attn_bridge import backends

from ..sides import oracle
from ..sides.contender import Contender, Work
from .cells import Group
from .memory import begin_peak, free_memory, peak

MATMUL = "matmul"
"""Key of the yardstick among the contenders."""

MIN_ROUNDS = 3
"""Rounds that every contender takes part in, however slow."""


class Bench:
    """Measures the contenders of one framework, in the process that it is made in.

    Args:
        framework: ``"torch"`` or ``"jax"``.

    Raises:
        MissingBackendError: the framework is not installed.
    """

    def __init__(self, framework: str):
        backends.load("torch" if framework == "torch" else "flax")
        self.side = importlib.import_module(f"benchmarks.sides.{framework}_side")
        self._calls: dict[str, Callable[[], object]] = {}
        self._repeats: dict[str, int] = {}
        self._spent: dict[str, float] = {}
        self._rounds = 0

    def describe(self) -> dict[str, object]:
        """Return versions and device."""
        return dict(self.side.describe())

    def prepare(
        self, group: dict[str, str], modes: Sequence[str], answer: str, matmul: int, sample: float
    ) -> dict[str, Any]:
        """Build and run every contender once, and compare its results with the right answer.

        Args:
            group: the group as JSON-ready data.
            modes: those of `cells.MODES` to build.
            answer: npz file of the right answer.
            matmul: edge of the matrices of the yardstick.
            sample: least duration of a sample in seconds; short calls are repeated.

        Returns:
            ``rows``: the facts per contender so far; ``notes``: lines on omitted contenders.
        """
        wanted = Group.from_json(group)
        self._calls, self._repeats, self._spent, self._rounds = {}, {}, {}, 0
        gc.collect()
        self.side.start(wanted)
        with np.load(answer) as file:
            right = dict(file)
        contenders, notes = self.side.contenders(wanted, modes)
        rows = []
        for contender in contenders:
            row = {
                "contender": contender.name,
                "mode": contender.mode,
                "kind": contender.kind,
                "picked": contender.picked,
                "label": contender.label,
            }
            rows.append(row | self._prepare(contender, wanted, right, sample))
        self._add(MATMUL, self.side.matmul(matmul, wanted.dtype), sample)
        return {"rows": rows, "notes": notes}

    def _prepare(
        self, contender: Contender, group: Group, right: dict[str, np.ndarray], sample: float
    ) -> dict[str, Any]:
        needed = group.square_bytes()
        if contender.square and needed > free_memory():
            return {"status": "skipped", "reason": f"needs {needed / 2**30:.0f} GiB or more"}
        try:
            work = contender.make()
            begin = time.perf_counter()
            result = self.side.wait(work.call())
            first = time.perf_counter() - begin
            wrong = oracle.wrong(work.read(result), right, group.dtype)
            del result
            if wrong:
                return {"status": "wrong", "reason": wrong}
            self._add(contender.label, work.call, sample)
        except NotImplementedError as error:  # this call, or this way to run it, is not for it
            return {"status": "skipped", "reason": " ".join(str(error).split())[:300]}
        except Exception as error:  # whatever a contender's framework raises is its result
            return {"status": "failed", "reason": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        return {"status": "right", "first_call_s": first}

    def _add(self, label: str, call: Callable[[], object], sample: float) -> None:
        self.side.elapsed(call, 1)
        once = max(self.side.elapsed(call, 1), 1e-7)
        self._calls[label], self._repeats[label] = call, max(1, round(sample / once))
        self._spent[label] = 0.0

    def round(self, seed: int, budget: float) -> dict[str, float]:
        """Time every contender once, in an order drawn from `seed`; return the seconds of a call, by label.

        Those that took `budget` seconds in three or more earlier rounds are left out.
        """
        order = sorted(self._calls)
        random.Random(seed).shuffle(order)
        seconds = {}
        for label in order:
            if self._spent[label] > budget and self._rounds >= MIN_ROUNDS:
                continue
            begin = time.perf_counter()
            if self._repeats[label] > 1:
                self.side.elapsed(self._calls[label], 1)  # its own data in the caches, as when it is called repeatedly
            seconds[label] = self.side.elapsed(self._calls[label], self._repeats[label])
            self._spent[label] += time.perf_counter() - begin
        self._rounds += 1
        return seconds

    def memory(self, group: dict[str, str], modes: Sequence[str], label: str) -> dict[str, int | None]:
        """Return the peak of a contender's memory over its inputs, in bytes; to be called in a separate process."""
        wanted = Group.from_json(group)
        self.side.start(wanted)
        contenders, _ = self.side.contenders(wanted, modes)
        (contender,) = [one for one in contenders if one.label == label]
        work = contender.make()
        on_device = self.side.device_peak(work)
        return {"bytes": host_peak(work, self.side.wait) if on_device is None else on_device}

    def close(self) -> None:
        """Forget the contenders."""
        self._calls = {}


def host_peak(work: Work, wait: Callable[[object], object]) -> int | None:
    """Return how far one call raises the resident memory of this process; None where that can't be known.

    The call has run before, so that neither compiling nor the libraries' own start is counted.
    """
    wait(work.call())
    gc.collect()
    before = begin_peak()
    if before is None:
        return None
    result = wait(work.call())
    peak_bytes = peak()
    del result
    return max(peak_bytes - before, 0)
