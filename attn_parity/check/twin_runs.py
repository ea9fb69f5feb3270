"""Running the twins of a variant in a case: numbers, precisions and modes, without a verdict."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from attn_bridge import backends
from attn_bridge.specs import Variant

from ..adapters import load_adapter
from ..sides.subject import Arguments, Array
from ..verdict.probes import Moved, moved_by
from .cases import IN_FULL, IN_MODE, MODES, QUICK, Arrays, Case, Numbers, cases_of, draw, draw_cotangents

COPIES = 3
"""Samples per seed: its numbers, and copies moved by a thousandth."""


FUSED = "logsumexp"
"""The mode of a twin whose softmax is computed as fused attention kernels recompute it."""


@dataclasses.dataclass(frozen=True)
class Run:
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
class Side:
    """Results of one twin, each a list over samples.

    Attributes:
        runs: results per way of running.
        oracle: per precision, float64 results on the numbers of that precision.
        notes: what a reader has to know about how it was run.
    """

    runs: dict[Run, list[Tensors]] = dataclasses.field(default_factory=dict)
    oracle: dict[str, list[Tensors]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Subject:
    """What one task checks: a variant in one case, with weights of its own if they are given.

    `options` are the command-line options that choose those weights.
    """

    variant: Variant
    case: Case
    weights: Mapping[str, Array] | None = None
    options: tuple[str, ...] = ()

    def command(self, dtype: str, seeds: int) -> str:
        """Return the command that runs this subject again."""
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

    def numbers(self, seeds: range, copies: int) -> list[Numbers]:
        """Draw the numbers of every seed and their moved copies, `copies` samples in a row per seed, in float64."""
        found: list[Numbers] = []
        shapes: list[tuple[int, ...]] = []
        for seed in seeds:
            numbers = draw(self.case, self.variant, seed, self.weights)
            if not shapes:
                outputs = [output for output in self.reference(numbers) if output is not None]
                shapes = [output.shape for output in outputs[: 2 if self.returns_weights else 1]]
            numbers = draw_cotangents(numbers, shapes, self.case, seed)
            found += [numbers, *(numbers.moved(seed * COPIES + copy) for copy in range(1, copies))]
        return found

    def reference(self, numbers: Numbers) -> tuple[Array, Array | None]:
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
    subject: Subject,
    numbers: list[Numbers],
    dtypes: tuple[str, ...],
    everywhere: bool,
    full: bool,
    stop: threading.Event,
) -> Side:
    """Run one twin of a subject in every precision and mode; what runs `everywhere` is compiled as users compile it."""
    backend = backends.load(framework)
    chosen = subject.precisions(dtypes, everywhere)
    main, *others = MODES[framework]
    runs = [Run(framework, dtype, main) for dtype in chosen if dtype != "float64"]
    if subject.is_first and "float32" in chosen:
        modes = [mode for mode in others if full or subject.variant.name in IN_MODE[mode]]
        runs += [Run(framework, "float32", mode) for mode in modes]
    side = Side()
    with backend.few_threads():
        with backend.precision("float64"):
            runner = _twin(backend, subject, "float64", main)
            runner.check_parameters(numbers[0])
            for dtype in chosen:
                if stop.is_set():
                    return side
                side.oracle[dtype] = [runner(one.rounded(dtype).widened()) for one in numbers]
        side.runs[Run(framework, "float64", main)] = side.oracle["float64"]
        for run in runs:
            if stop.is_set():
                return side
            with backend.precision(run.dtype):
                runner = _twin(backend, subject, run.dtype, run.mode, everywhere or subject.is_in_full(run.dtype))
                side.runs[run] = [runner(one.rounded(run.dtype)) for one in numbers]
            side.notes.extend(note for note in runner.notes if note not in side.notes)
    return side


class _Twin:
    """One twin of a subject in one precision and mode; calling it gives every output and gradient in torch's layout."""

    def __init__(self, backend: Any, subject: Subject, dtype: str, mode: str):
        arguments = subject.case.arguments(subject.variant)
        module = backend.build(subject.variant, arguments, dtype)
        config = subject.case.config_of(subject.variant)
        own = getattr(module, "config", config)
        if own != config:
            raise TwinDiffersError(f"{subject.variant.name} holds the config {own}, expected {config}")
        statics = {"return_weights": True} if subject.returns_weights else {}
        self.name, self.dtype = subject.variant.name, dtype
        self.rules = config.rules()
        self.framework = backend.Runner.framework
        if mode == FUSED:
            self.runner: Any = _FusedRunner(load_adapter(self.framework).subject_of(module), statics)
        else:
            self.runner = backend.Runner(module, mode=mode, **statics)
        self.notes: list[str] = self.runner.notes

    def __call__(self, numbers: Numbers) -> Tensors:
        flax = self.framework == "flax"
        weights: Arrays = dict(numbers.weights)
        weights = self.rules.convert(weights, "torch") if flax else weights
        outputs, inputs, parameters = self.runner(weights, numbers.inputs, numbers.cotangents)
        for output in outputs:
            if output.dtype.name != self.dtype:
                raise TwinDiffersError(f"{self.name} returns {output.dtype.name} for {self.dtype} input")
        parameters = self.rules.convert(parameters, "flax") if flax else parameters
        tensors: Tensors = {
            name: (name, output) for name, output in zip(("output", "weights")[: len(outputs)], outputs, strict=True)
        }
        tensors |= {f"grad {name}": ("input gradient", gradient) for name, gradient in inputs.items()}
        for name, gradient in parameters.items():
            kind = "vector gradient" if gradient.ndim == 1 else "matrix gradient"
            tensors[f"grad {name}"] = (kind, gradient)
        return tensors

    def check_parameters(self, numbers: Numbers) -> None:
        """Poison each parameter in turn: one whose NaN changes nothing is left out of the computation.

        A gradient cannot tell: that of a key bias is zero although the bias is added. Most often NaN comes out; some
        fused kernels give zeros for a query of NaN.
        """
        for name, array in numbers.weights.items():
            poisoned = dataclasses.replace(numbers, weights=numbers.weights | {name: np.full_like(array, np.nan)})
            output = self(poisoned)["output"][1]
            if not np.isnan(output).any() and np.array_equal(output, self(numbers)["output"][1]):
                raise TwinDiffersError(f"{self.name} does not use its parameter {name}")


class _FusedRunner:
    """Runs a module with softmax computed as fused attention kernels recompute it; see `probes`."""

    def __init__(self, subject: Any, statics: Mapping[str, Any]):
        self.subject, self.statics = subject, statics
        self.notes: list[str] = []
        self.replaced = 0

    def __call__(self, weights: Arrays, inputs: Arrays, cotangents: list[Array]) -> tuple[list[Array], Arrays, Arrays]:
        call = Arguments((), {**inputs, **self.statics})
        run = self.subject.run(weights, call, cotangents, mode=FUSED)
        self.replaced = run.moved
        found = dict(zip(call.named([]), run.input_gradients, strict=True))
        return run.outputs, {name: one for name, one in found.items() if one is not None}, run.parameter_gradients


def fused_losses(
    framework: backends.Framework, subject: Subject, numbers: list[Numbers], dtype: str
) -> list[dict[str, Moved]]:
    """Return, per sample, how far each gradient moves when softmax is computed as fused kernels recompute it."""
    backend = backends.load(framework)
    plain, fused = (_twin(backend, subject, dtype, mode) for mode in (MODES[framework][0], FUSED))
    found = []
    with backend.few_threads(), backend.precision(dtype):
        for one in numbers:
            before, after = plain(one.rounded(dtype)), fused(one.rounded(dtype))
            names = [name for name, (kind, _) in before.items() if kind.endswith("gradient")]
            replaced = names if fused.runner.replaced else []
            found.append({name: moved_by(before[name][1], after[name][1]) for name in replaced})
    return found


_last = threading.local()


def _twin(backend: Any, subject: Subject, dtype: str, mode: str, in_full: bool = True) -> _Twin:
    """Return a twin; layers of one size share what was compiled (each thread keeps its last twin of a kind)."""
    mode = mode if in_full else QUICK.get(mode, mode)
    arguments = tuple(subject.case.arguments(subject.variant).items())
    key = (subject.variant.name, arguments, subject.returns_weights)
    kind = (backend.Runner.framework, dtype, mode)
    twins: dict[Any, tuple[Any, _Twin]] = _last.__dict__
    if kind not in twins or twins[kind][0] != key:
        twins[kind] = (key, _Twin(backend, subject, dtype, mode))
    return twins[kind][1]
