"""Running the twins of a variant in a case: numbers, precisions and modes, without a verdict."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from attn_bridge import backends
from attn_bridge.specs import Variant

from ..sides.subject import Arguments, Array, Arrays, Run, Subject, load_adapter
from ..verdict.probes import Moved, moved_by
from .cases import IN_FULL, IN_MODE, MODES, CaseNumbers, TwinCase, cases_of, draw, draw_cotangents, mode_of

COPIES = 3
"""Samples per seed: its numbers, and copies moved by a thousandth."""


FUSED = "logsumexp"
"""The mode of a twin whose softmax is computed as fused attention kernels recompute it."""


@dataclasses.dataclass(frozen=True)
class TwinMode:
    """One way of running one twin: a framework, a precision, and one of its `MODES`."""

    framework: backends.Framework
    dtype: str
    mode: str

    def __str__(self) -> str:
        return f"{self.framework} {self.mode}"


class TwinDiffersError(ValueError):
    """A twin differs before any number does: another config, another dtype, a parameter that does nothing."""


Tensors = dict[str, tuple[str, Array]]
"""Tensor name -> (kind, array), in torch's layout."""


@dataclasses.dataclass
class Results:
    """Results of one twin, each a list over samples.

    Attributes:
        low: results per way of running.
        exact: per precision, float64 results on the numbers of that precision.
        notes: remarks for the reader on how it was run.
    """

    low: dict[TwinMode, list[Tensors]] = dataclasses.field(default_factory=dict)
    exact: dict[str, list[Tensors]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """A row of the check: a variant in one case, with drawn or given weights.

    `options` are the command-line options that choose given weights.
    """

    variant: Variant
    case: TwinCase
    weights: Mapping[str, Array] | None = None
    options: tuple[str, ...] = ()

    def command(self, dtype: str, seeds: int) -> str:
        """Return the command that runs this row again."""
        chosen = self.options or (self.variant.name,)
        arguments = ("--case", self.case.name, "--dtype", dtype, "--seeds", str(seeds))
        return shlex.join(["attn-bridge", "check", *chosen, *arguments])

    def copies(self, dtypes: tuple[str, ...], everywhere: bool) -> int:
        """Return the samples per seed: one where only the meaning is judged, which no luck decides."""
        return 1 if self.precisions(dtypes, everywhere) == ("float64",) else COPIES

    def precisions(self, dtypes: tuple[str, ...], everywhere: bool) -> tuple[str, ...]:
        """Return those of `dtypes` that the case runs in, by default or because they were asked for."""
        return tuple(dtype for dtype in dtypes if everywhere or dtype in self.case.dtypes)

    def runs(self, dtypes: tuple[str, ...], everywhere: bool) -> int:
        """Return how many programs it takes, roughly: one per side and precision."""
        return 2 * len(self.precisions(dtypes, everywhere))

    @property
    def is_first(self) -> bool:
        """Whether it is the first case of its variant, the one that is run in every way."""
        return self.case.name == cases_of(self.variant)[0].name

    def is_in_full(self, dtype: str) -> bool:
        """Whether it is compiled as users compile it by default; with weights from a user it always is."""
        variants = IN_FULL.get(dtype, ())
        return self.weights is not None or (self.is_first and (variants is None or self.variant.name in variants))

    def numbers(self, seeds: range, copies: int) -> list[CaseNumbers]:
        """Draw the numbers of every seed and their moved copies, `copies` samples in a row per seed, in float64."""
        samples: list[CaseNumbers] = []
        shapes: list[tuple[int, ...]] = []
        for seed in seeds:
            numbers = draw(self.case, self.variant, seed, self.weights)
            if not shapes:
                outputs = [output for output in self.reference(numbers) if output is not None]
                shapes = [output.shape for output in outputs[: 2 if self.returns_weights else 1]]
            numbers = draw_cotangents(numbers, shapes, self.case, seed)
            samples += [numbers, *(numbers.moved(seed * COPIES + copy) for copy in range(1, copies))]
        return samples

    def reference(self, numbers: CaseNumbers) -> tuple[Array, Array | None]:
        """Evaluate the NumPy float64 reference."""
        module = importlib.import_module("attn_bridge.reference")
        config = self.case.config_of(self.variant)
        others = dict(numbers.inputs)
        arguments = (others.pop("x"), others.pop("attention_mask", None))
        function = module.find(self.variant)
        result: tuple[Array, Array | None] = function(config, numbers.weights, *arguments, **others)
        return result

    @property
    def returns_weights(self) -> bool:
        """Whether the attention weights are an output."""
        return self.case.return_weights and self.variant.returns_weights


def run_side(
    framework: backends.Framework,
    row: CheckRow,
    numbers: list[CaseNumbers],
    dtypes: tuple[str, ...],
    everywhere: bool,
    full: bool,
    stop: threading.Event,
) -> Results:
    """Run one twin of a row, on all samples, in every precision and mode.

    Args:
        framework: the twin's.
        row: the variant and the case.
        numbers: the samples, in float64.
        dtypes: precisions to run in, as far as the case has them.
        everywhere: run in all of `dtypes`, and compile every run as users do; else most are compiled quickly.
        full: run the first case of every variant in all modes, not only where a mode was chosen for the variant.
        stop: once set, the remaining runs are left out.
    """
    backend = backends.load(framework)
    chosen = row.precisions(dtypes, everywhere)
    main, *others = MODES[framework]
    ways = [TwinMode(framework, dtype, main) for dtype in chosen if dtype != "float64"]
    if row.is_first and "float32" in chosen:
        modes = [mode for mode in others if full or row.variant.name in IN_MODE[mode]]
        ways += [TwinMode(framework, "float32", mode) for mode in modes]
    results = Results()
    with backend.few_threads():
        with backend.precision("float64"):
            twin, mode = _twin(framework, row, "float64"), mode_of(framework, main, "float64", in_full=True)
            twin.check_parameters(numbers[0], mode)
            for dtype in chosen:
                if stop.is_set():
                    return results
                results.exact[dtype] = [twin.run(one.rounded(dtype).widened(), mode) for one in numbers]
        results.low[TwinMode(framework, "float64", main)] = results.exact["float64"]
        for way in ways:
            if stop.is_set():
                return results
            mode = mode_of(framework, way.mode, way.dtype, in_full=everywhere or row.is_in_full(way.dtype))
            with backend.precision(way.dtype):
                twin = _twin(framework, row, way.dtype)
                results.low[way] = [twin.run(one.rounded(way.dtype), mode) for one in numbers]
            if mode == "inductor" and not load_adapter(framework).can_build_extensions():
                results.notes.append("inductor ran as aot: no C++ compiler or no Python headers on this machine")
    return results


class _Twin:
    """One twin of a row in one precision, run as the judge runs any module, with results in torch's layout."""

    def __init__(self, framework: backends.Framework, row: CheckRow, dtype: str):
        config = row.case.config_of(row.variant)
        module = backends.load(framework).build(row.variant, row.case.arguments(row.variant), dtype)
        own = getattr(module, "config", config)
        if own != config:
            raise TwinDiffersError(f"{row.variant.name} holds the config {own}, expected {config}")
        self.name, self.dtype, self.framework = row.variant.name, dtype, framework
        self.rules = config.rules()
        self.subject: Subject = load_adapter(framework).subject_of(module)
        self.statics = {"return_weights": True} if row.returns_weights else {}
        names = {getattr(parameter.rule, framework) for parameter in config.parameters}
        if self.subject.parameters().keys() != names:
            names_of_twin = ", ".join(self.subject.parameters())
            raise TwinDiffersError(
                f"{self.name} has the parameters {names_of_twin}, expected {', '.join(sorted(names))}"
            )

    def run(self, numbers: CaseNumbers, mode: str) -> Tensors:
        """Return every output and gradient."""
        return self._named(self._run(numbers, mode), numbers.inputs)

    def moved(self, numbers: CaseNumbers, mode: str) -> dict[str, Moved]:
        """Return how far each gradient moves when softmax is computed as fused kernels recompute it."""
        run = self._run(numbers, FUSED)
        if not run.moved:
            return {}
        before, after = self.run(numbers, mode), self._named(run, numbers.inputs)
        names = [name for name, (kind, _) in before.items() if kind.endswith("gradient")]
        return {name: moved_by(before[name][1], after[name][1]) for name in names}

    def _run(self, numbers: CaseNumbers, mode: str) -> Run:
        weights: Arrays = dict(numbers.weights)
        weights = self.rules.convert(weights, "torch") if self.framework == "flax" else weights
        call = Arguments((), {**numbers.inputs, **self.statics})
        run: Run = self.subject.run(weights, call, numbers.cotangents, mode=mode)
        return run

    def _named(self, run: Run, inputs: Iterable[str]) -> Tensors:
        for output in run.outputs:
            if output.dtype.name != self.dtype:
                raise TwinDiffersError(f"{self.name} returns {output.dtype.name} for {self.dtype} input")
        parameters = run.parameter_gradients
        parameters = self.rules.convert(parameters, "flax") if self.framework == "flax" else parameters
        names = ("output", "weights")[: len(run.outputs)]
        tensors: Tensors = {name: (name, output) for name, output in zip(names, run.outputs, strict=True)}
        gradients = zip(inputs, run.input_gradients, strict=True)
        tensors |= {f"grad {name}": ("input gradient", one) for name, one in gradients if one is not None}
        for name, gradient in parameters.items():
            kind = "vector gradient" if gradient.ndim == 1 else "matrix gradient"
            tensors[f"grad {name}"] = (kind, gradient)
        return tensors

    def check_parameters(self, numbers: CaseNumbers, mode: str) -> None:
        """Poison each parameter in turn; raise for one whose NaN changes nothing, as the computation leaves it out.

        A gradient cannot show that: a key bias has a zero gradient although it is added. Usually NaN appears in the
        output; some fused kernels return zeros for a query of NaN.

        Raises:
            TwinDiffersError: a parameter is not used.
        """
        for name, array in numbers.weights.items():
            poisoned = dataclasses.replace(numbers, weights=numbers.weights | {name: np.full_like(array, np.nan)})
            output = self._run(poisoned, mode).outputs[0]
            if not np.isnan(output).any() and np.array_equal(output, self._run(numbers, mode).outputs[0]):
                raise TwinDiffersError(f"{self.name} does not use its parameter {name}")


def fused_losses(
    framework: backends.Framework, row: CheckRow, numbers: list[CaseNumbers], dtype: str
) -> list[dict[str, Moved]]:
    """Return, per sample, how far each gradient moves when softmax is computed as fused kernels recompute it."""
    backend = backends.load(framework)
    twin, mode = _twin(framework, row, dtype), MODES[framework][0]
    with backend.few_threads(), backend.precision(dtype):
        return [twin.moved(one.rounded(dtype), mode) for one in numbers]


_last = threading.local()


def _twin(framework: backends.Framework, row: CheckRow, dtype: str) -> _Twin:
    """Return a twin; layers of one size share compiled code (each thread keeps its last twin of a precision)."""
    arguments = tuple(row.case.arguments(row.variant).items())
    key = (row.variant.name, arguments, row.returns_weights)
    twins: dict[Any, tuple[object, _Twin]] = _last.__dict__
    if twins.get(f"{framework} {dtype}", ((),))[0] != key:
        twins[f"{framework} {dtype}"] = (key, _Twin(framework, row, dtype))
    return twins[f"{framework} {dtype}"][1]
