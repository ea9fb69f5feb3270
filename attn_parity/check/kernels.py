"""Rows of the parity matrix for the implementations of attention: a fast wrong answer can't win.

Each implementation that this machine can run is judged by the plain reference of the other framework, in every case
that it supports: the context and the gradients of all operands. A kernel for another device is interpreted, where its
framework can do that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import numpy as np

from attn_bridge import backends, masks

from ..results.findings import worst
from ..sides.function import function
from ..sides.subject import Arguments, ModuleFailedError, load_adapter
from .cases import MODES, CaseNumbers, mode_of
from .judging import OTHER, cause_of, judge_tensors, message_of
from .report import Cell, LeftOut
from .twin_runs import Tensors, TwinMode

NAME = "dot_product_attention"
"""Name in the command line and the rows."""

REFERENCE = "reference"

RUNS = 16
"""Programs that a case takes, roughly: four or five implementations, each in two precisions, in both frameworks."""


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One call: longer than the blocks of the block-wise implementations, and no multiple of them.

    Attributes:
        name: word for it in reports and on the command line.
        mask: who attends to whom.
        options: further constant arguments of `functional.dot_product_attention`.
        operands: those among ``bias``, ``sinks`` and ``attention_mask`` (padding) that are drawn and given.
        value_width: width of a value head; a key's is 8.
        dtypes: precisions it runs in by default.
        in_full: whether it is compiled as users compile it by default; one case that every implementation serves is.
    """

    name: str
    mask: masks.Mask
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    operands: tuple[str, ...] = ()
    value_width: int = 8
    dtypes: tuple[str, ...] = ("float64", "float32")
    in_full: bool = False

    def draw(self, seed: int) -> CaseNumbers:
        """Return operands ``(2, 150, 4, 8)`` with two key/value heads, and a cotangent, in float64."""
        random = np.random.default_rng([seed, *self.name.encode()])
        batch, tokens, heads, key_heads, width = 2, 150, 4, 2, 8
        shapes: dict[str, tuple[int, ...]] = {
            "query": (batch, tokens, heads, width),
            "key": (batch, tokens, key_heads, width),
            "value": (batch, tokens, key_heads, self.value_width),
        }
        shapes |= {"bias": (heads, tokens, tokens), "sinks": (heads,)}
        inputs = {
            name: random.normal(size=shape) * random.choice([0.3, 1.0, 2.0], size=(*shape[:-1], 1))
            for name, shape in shapes.items()
            if name not in ("bias", "sinks") or name in self.operands
        }
        if "padding" in self.operands:
            positions = np.arange(tokens)
            inputs["padding"] = np.stack([positions < tokens - 31, positions >= 17])
        return CaseNumbers({}, inputs, [random.normal(size=(batch, tokens, heads, self.value_width))])


CASES = (
    KernelCase("grouped", masks.causal(), value_width=12),
    KernelCase("windowed", masks.sliding_window(40), in_full=True),
    KernelCase("packed", masks.causal() & masks.documents(np.repeat([[0, 1, 2], [0, 1, 1]], 50, axis=1))),
    KernelCase("sinks", masks.causal(), {}, ("sinks",)),
    KernelCase("padded", masks.causal(), {}, ("padding",)),
    KernelCase("capped", masks.causal(), {"softcap": 3.0, "scale": 0.5}, ("bias", "sinks", "padding")),
)


def check_kernels(
    case: str, *, dtypes: tuple[str, ...], everywhere: bool, seeds: int, pools: Mapping[backends.Framework, Executor]
) -> Callable[[], tuple[list[Cell], list[LeftOut]]]:
    """Begin to run every implementation of both frameworks in one of `CASES`.

    Args:
        case: its name.
        dtypes: precisions to run.
        everywhere: run them also where the case does not name them.
        seeds: number of draws.
        pools: the executor of each framework.

    Returns:
        A function that waits for the runs, and returns the judged cells and the implementations left out.
    """
    (chosen,) = (one for one in CASES if one.name == case)
    dtypes = tuple(one for one in dtypes if everywhere or one in chosen.dtypes)
    numbers = [chosen.draw(seed) for seed in range(seeds)]
    futures = {
        framework: pools[framework].submit(_run_all, framework, chosen, numbers, dtypes, everywhere or chosen.in_full)
        for framework in OTHER
    }

    def judge() -> tuple[list[Cell], list[LeftOut]]:
        results = {framework: one.result() for framework, one in futures.items()}
        runs = {framework: served for framework, (served, _) in results.items()}
        away = {framework: _elsewhere(framework) for framework in results}
        left_out = [
            LeftOut(f"{NAME}: {name}", case, reason)
            for _, refused in results.values()
            for name, reason in refused.items()
        ]
        return _judge_all(chosen, runs, away, dtypes, seeds), left_out

    return judge


def _elsewhere(framework: backends.Framework) -> list[str]:
    """Return the implementations that only another device runs, and that the framework can interpret."""
    module = backends.load(framework, "implementations")
    missing = module.unavailable()
    return [name for name, one in module.IMPLEMENTATIONS.items() if missing[name] and hasattr(one, "interpreted")]


Runs = dict[tuple[str, str], list[Tensors]]
"""(precision of the numbers, precision it was computed in: that or float64) -> tensors by name, per seed."""


def _judge_all(
    case: KernelCase,
    runs: Mapping[backends.Framework, dict[str, Runs | str]],
    away: Mapping[backends.Framework, list[str]],
    dtypes: tuple[str, ...],
    seeds: int,
) -> list[Cell]:
    cells = []
    for framework, other in OTHER.items():
        for name, outcome in runs[framework].items():
            for dtype in dtypes:
                if not isinstance(outcome, str) and (dtype, dtype) not in outcome:  # not a precision that it has
                    continue
                how = " interpreted" if name in away[framework] else ""
                what = f"{framework} {name}{how} vs {other} {REFERENCE}"
                command = ("attn-bridge", "check", NAME, "--case", case.name, "--dtype", dtype, "--seeds", str(seeds))
                cell = Cell(f"{NAME}: {name}", case.name, dtype, what, "inconclusive", (), shlex.join(command))
                trusted = runs[other].get(REFERENCE)
                if isinstance(outcome, str) or trusted is None or isinstance(trusted, str):
                    message = outcome if isinstance(outcome, str) else f"{other} {REFERENCE}: {trusted}"
                    cells.append(dataclasses.replace(cell, message=message))
                    break
                plain = runs[framework].get(REFERENCE)
                # One without float64 means what the reference beside it computes there.
                exact = outcome if (dtype, "float64") in outcome or not isinstance(plain, dict) else plain
                pair = {framework: outcome[dtype, dtype], other: trusted[dtype, dtype]}
                truths = {framework: exact[dtype, "float64"], other: trusted[dtype, "float64"]}
                tensors = judge_tensors(pair, truths, TwinMode(framework, dtype, "eager"))
                cells.append(
                    dataclasses.replace(cell, verdict=worst([one.verdict for one in tensors]), tensors=tensors)
                )
    return cells


def _run_all(
    framework: backends.Framework, case: KernelCase, numbers: list[CaseNumbers], dtypes: tuple[str, ...], in_full: bool
) -> tuple[dict[str, Runs | str], dict[str, str]]:
    """Return the results of every implementation that supports the case, or why it broke; and why others don't."""
    implementations = backends.load(framework, "implementations")
    away = _elsewhere(framework)
    outcomes: dict[str, Runs | str] = {}
    refused: dict[str, str] = {}
    for name, missing in implementations.unavailable().items():
        if missing is not None and name not in away:
            refused[name] = missing
            continue
        try:
            with implementations.IMPLEMENTATIONS[name].interpreted() if name in away else contextlib.nullcontext():
                outcomes[name] = _run(framework, name, case, numbers, dtypes, in_full)
        except Exception as error:  # whatever a framework raises, the other rows still deserve their verdict
            if isinstance(cause_of(error), NotImplementedError):  # this call is not for it
                unsupported = f"implementation {name!r} does not support this call: "
                refused[name] = str(cause_of(error)).removeprefix(unsupported)
            else:
                outcomes[name] = message_of(error)
    return outcomes, refused


def _run(
    framework: backends.Framework,
    name: str,
    case: KernelCase,
    numbers: list[CaseNumbers],
    dtypes: tuple[str, ...],
    in_full: bool,
) -> Runs:
    """Return the results in every precision that the implementation has.

    Raises:
        ModuleFailedError: it has none of them, or does not serve the case.
    """
    runs: Runs = {}
    refusals = []
    for computed in dtypes:
        try:
            stored = dtypes if computed == "float64" else (computed,)
            runs |= _run_in(framework, name, case, numbers, stored, computed, in_full)
        except ModuleFailedError as refusal:
            if not isinstance(refusal.__cause__, NotImplementedError):
                raise
            refusals.append(refusal)
    if not any(dtype == computed for dtype, computed in runs):
        raise refusals[0]
    return runs


def _run_in(
    framework: backends.Framework,
    name: str,
    case: KernelCase,
    numbers: list[CaseNumbers],
    dtypes: tuple[str, ...],
    computed: str,
    in_full: bool,
) -> Runs:
    backend, functional = backends.load(framework), backends.load(framework, "functional")

    def attend(
        _: object, query: object, key: object, value: object, padding: object = None, **operands: object
    ) -> object:
        mask = case.mask.restrict(padding)
        options = {**operands, **case.options}
        return functional.dot_product_attention(query, key, value, mask=mask, implementation=name, **options)

    mode = mode_of(framework, MODES[framework][0], computed, in_full=in_full)
    runs: Runs = {}
    with backend.few_threads(), backend.precision(computed):
        subject = load_adapter(framework).subject_of(function(attend, {}, framework=framework))
        for dtype in dtypes:
            results: list[Tensors] = []
            for sample in numbers:
                rounded = sample.rounded(dtype).widened() if computed == "float64" else sample.rounded(dtype)
                run = subject.run({}, Arguments((), rounded.inputs), rounded.cotangents, mode=mode)
                gradients = zip(rounded.inputs, run.input_gradients, strict=True)
                tensors: Tensors = {"output": ("output", run.outputs[0])}
                tensors |= {f"grad {key}": ("input gradient", array) for key, array in gradients if array is not None}
                results.append(tensors)
            runs[dtype, computed] = results
    return runs
