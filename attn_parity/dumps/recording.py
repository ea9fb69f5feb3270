"""Write the computations of one side as a dump: weights, inputs, and the results of every sample that the judge takes.

The samples are those of `compare`; the measurements, probes included, are written instead of judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge import backends
from attn_bridge import whole_folders as folders

from ..compare import prepare
from ..interrupts import orderly_interrupts
from ..matching.outputs import Trials
from ..pair import Pair, Progress, few_threads
from ..pairing import Match
from ..results.findings import Side
from ..samples import calls, sampling
from ..samples.sampling import FIRST, Planned, Sample
from ..settings import precision
from ..sides.arrays import wide
from ..sides.libraries import as_side
from ..sides.subject import (
    Array,
    Arrays,
    CannotPromoteError,
    ModuleFailedError,
    Returned,
    Run,
    SideWeight,
    Subject,
    is_array,
    load_adapter,
)
from ..sides.tables import STILL, Tables
from ..verdict.measures import ZERO, scale_of
from ..verdict.notes import MAX_PROBES
from ..verdict.probes import EXACT, KINDS, Kind
from ..verdict.runner import Live, measured_noise, perturbed
from . import format as dumps
from .format import FLASH, ORACLE, Dump, DumpWriter, key_of, stored_as
from .manifest import DumpManifest, Recorded
from .pairs import alone, beside, match_weights, parted

MAX_BYTES = 1 << 30
"""About how large a dump may become; of a large module fewer samples are written."""

FIRST_LOOK = 0.6
"""Share of it for the measurements that are always judged; the rest is for a second look."""

LEFT_OUT = f"judged on fewer samples, as a dump would have more than {MAX_BYTES >> 30} GiB with all of them"

PARTS = 3
"""A fused query, key and value is looked at in its parts, too."""


def dump(
    module: object,
    inputs: object,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    rules: object = None,
    transfer: bool = True,
    seeds: int = 4,
    first_seed: int = 0,
    modes: Iterable[str] = ("eager",),
    dtypes: Iterable[str] | None = None,
    device: str | None = None,
    fixed: Iterable[int | str] = (),
    vary: Iterable[int | str] = (),
    output: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the results of a module to a folder: weights, inputs, outputs and all gradients of every sample.

    The torch side is dumped first. The Flax side is dumped like it, with the same weights and inputs, drawn ones
    included; without `like` a Flax dump has results of the module's own weights alone.

    Args:
        module: one side, as `compare` takes it.
        inputs: as in `compare`; arrays, and plain values by keyword. None takes those of `like`.
        folder: the target; it must be empty or missing.
        like: the torch dump whose weights, inputs, seeds, precisions and modes to use, for a Flax module.
        rules: pairing of the parameters, with `like`; by default proposed.
        transfer: with `like`, use the torch side's own weights, too; False keeps this module's next to the drawn ones.
        seeds: number of draws.
        first_seed: the first of them.
        modes: ``eager``, and ``jit``.
        dtypes: precisions; None is the module's own.
        device: ``cpu``, ``gpu`` or ``tpu``; None is the module's device.
        fixed: arguments that every sample takes as given; see `compare`.
        vary: arguments of integers that samples shuffle; see `compare`.
        output: the entry of the return value to dump; see `compare`.
        progress: callback with the current stage, the work done and the total.

    Raises:
        TypeError: the module belongs to neither framework.
        ValueError: it can't be run or dumped; see `compare`.
    """
    module = as_side(module)
    framework = backends.framework_of(module)
    if like is not None and framework == "torch":
        raise ValueError("the torch side is dumped first, and Flax like it")
    other = None if like is None else dumps.of_side(like, "torch")
    if rules is not None and other is None:
        raise ValueError("rules say which parameter is which; they go with like")
    subject = prepare.subject_of(module, device)
    subject.returned = Returned(output)
    settings = load_adapter(subject.framework, "precision")
    with orderly_interrupts(), folders.new(folder) as target, np.errstate(all="ignore"), precision.hold_safe(settings):
        recorder = DumpRecorder(
            subject, inputs, other, DumpWriter(target), rules=rules, transfer=transfer, progress=progress
        )
        if other is None:
            call, names = recorder.pair.arguments["first"], subject.argument_names
            recorder.pair.fixed = frozenset(calls.named_leaves("fixed", fixed, call, names))
            recorder.pair.vary = frozenset(calls.named_leaves("vary", vary, call, names))
        if other is not None:
            seeds, first_seed = other.manifest.seeds, other.manifest.first_seed
            modes, dtypes = other.manifest.modes, other.manifest.dtypes
        with few_threads(recorder.pair):
            recorder.record(seeds, first_seed, tuple(modes), tuple(dtypes or (recorder.pair.dtype,)))


class _AsDumped(Live):
    """Runs a module on the samples of another side's dump."""

    def __init__(self, pair: Pair, like: Dump):
        super().__init__(pair)
        self.like = like

    def sample(self, planned: Planned) -> Sample:
        """Return the sample as the dump holds it."""
        first = self.like.inputs(planned)
        second = calls.like(self.pair.arguments["second"], first, self.pair.same_inputs)
        return Sample(self.like.sample_weights(planned), {"first": first, "second": second}, planned)

    def cotangents(self, sample: Sample, cast: str | None) -> list[Array]:
        """Return the gradients that were given to the outputs."""
        return self.like.cotangents(sample.planned, cast or self.like.manifest.dtype)


class DumpRecorder:
    """Runs one side on the planned samples and writes the results.

    Args:
        subject: the side.
        inputs: its call; None takes that of `like`.
        like: the dump of the other side, if any.
        writer: the writer of the dump.
        rules: rules for pairing the parameters, with `like`.
        transfer: see `dump`.
        progress: see `dump`.
    """

    def __init__(
        self,
        subject: Subject,
        inputs: Any,
        like: Dump | None,
        writer: DumpWriter,
        *,
        rules: Any = None,
        transfer: bool = True,
        progress: Progress | None = None,
    ):
        self.subject, self.like, self.writer = subject, like, writer
        self.side: Side = "second" if like else "first"
        self.pair = alone(subject, inputs) if like is None else beside(subject, inputs, like)
        self.pair.transfer = transfer
        self.pair.progress = progress or self.pair.progress
        self.runner = Live(self.pair) if like is None else _AsDumped(self.pair, like)
        if like is not None:
            match_weights(self.pair, like, self.runner, rules)
        self.weights, self.state = parted(self.pair, self.side)
        self.found = _Found()
        self.limit = 0.0
        self.taken: set[str] = set()
        self.fuses = True

    def record(self, seeds: int, first_seed: int, modes: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
        """Write the dump."""
        effort = self.pair.effort
        self.writer.write(dumps.WEIGHTS, self.weights)
        if self.state:
            self.writer.write(dumps.STATE, self.state)
        unstable = "" if effort.large else self.runner.unstable([self.side])
        for dtype in dtypes:
            share = MAX_BYTES / len(dtypes)
            if not effort.large:
                self._measure_noise(dtype, modes)
            self.limit = self.writer.size + FIRST_LOOK * share
            plan = effort.first_look(seeds, first_seed, transfer=True)
            self._take_all(plan, dtype, modes, f"recording in {dtype}")
            self.limit = self.writer.size + (1.0 - FIRST_LOOK) * share
            again = [one for one in effort.second_look(seeds, first_seed, transfer=True) if not one.copy]
            self._take_all(again, dtype, modes, "recording for a second look")
        self.writer.finish(self._manifest(seeds, first_seed, modes, dtypes, unstable))

    def _take_all(self, plan: list[Planned], dtype: str, modes: tuple[str, ...], what: str) -> None:
        self.taken = set()  # each look holds one sample of held and one of drawn weights, however large a dump gets
        for done, planned in enumerate(plan):
            self.pair.progress(what, done, len(plan))
            self._take(planned, dtype, modes)

    def _take(self, planned: Planned, dtype: str, modes: tuple[str, ...]) -> None:
        """Write a planned sample; a torch dump holds each draw of inputs with the held weights, too."""
        with_held_weights = planned._replace(kind=planned.kind.replace("own", "held"), copy=0)
        is_needed = planned.kind in ("held", "own") and planned.kind not in self.taken
        if self.writer.size > self.limit and not is_needed:
            self.pair.notes[:] = list(dict.fromkeys([*self.pair.notes, LEFT_OUT]))
            return
        self.taken.add(planned.kind)
        if self.like is not None:
            if planned in self.like:
                self._write(planned, dtype, modes)
        elif self.subject.framework == "flax":
            if not planned.copy:
                self._write(with_held_weights, dtype, modes)
        else:
            self._write(planned, dtype, modes)
            if planned.kind.startswith("own") and not planned.copy:
                self._write(with_held_weights, dtype, modes)

    def _write(self, planned: Planned, dtype: str, modes: tuple[str, ...]) -> None:
        pair, side, runner = self.pair, self.side, self.runner
        sample = runner.sample(planned)
        cast = None if dtype == pair.dtype else dtype
        gradients = runner.cotangents(sample, cast)
        arrays = {f"cotangents/{i}": array for i, array in enumerate(gradients)}
        exact = self._exact(sample, dtype)
        if exact is not None:
            arrays |= dumps.run_arrays(ORACLE, exact)
        for mode in modes:
            which = stored_as(mode, dtype, cast)
            if which != ORACLE or exact is None:
                run = runner.run(side, sample, dtype, mode)
                arrays |= dumps.run_arrays(which, run)
                exact = exact or run
        assert exact is not None, "there is a mode"
        unfused = self._unfused(sample, dtype)
        if unfused is not None:
            arrays |= dumps.run_arrays(FLASH, unfused)
        self._note_zeros(exact)
        number, is_new = self.writer.number(planned)
        if is_new:
            inputs = {f"inputs/{i}": leaf for i, leaf in enumerate(sample.arguments[side].leaves)}
            is_drawn = planned.copy or not planned.kind.startswith("held")
            weights = {f"weights/{name}": array for name, array in sample.weights.items()}
            stored = weights if is_drawn and self.subject.framework == "torch" else {}
            self.writer.write(f"samples/{number:04}.safetensors", inputs | stored)
        self.writer.write(f"{dtype}/{number:04}.safetensors", arrays)
        self._note_probes(number, sample, dtype)
        self._record_calls(planned, sampling.rounded(sample, cast), gradients)

    def _exact(self, sample: Sample, dtype: str) -> Run | None:
        if self.side in self.pair.lacks:
            return None
        try:
            return self.runner.exact(self.side, sample, dtype)
        except CannotPromoteError as error:
            self.pair.lacks[self.side] = str(error)
            return None

    def _unfused(self, sample: Sample, dtype: str) -> Run | None:
        """Return the float64 results with softmax instead of fused attention; None if no fused attention runs."""
        if self.pair.effort.large or self.side in self.pair.lacks or not self.fuses:
            return None
        run: Run = self.runner.exact(self.side, sample, dtype, FLASH, STILL)
        self.fuses = run.moved > 0
        return run if self.fuses else None

    def _note_probes(self, number: int, sample: Sample, dtype: str) -> None:
        """Record the effect of other roundings, which replay cannot measure; nothing for a large module."""
        if self.pair.effort.large:
            return
        effects: dict[str, dict[str, tuple[float, float]]] = {}
        for kind in KINDS:
            if self._is_asked(kind):
                moved = self.runner.probe(kind, self.side, sample, dtype, number)
                effects[kind] = {name: (one.rms, one.largest) for name, one in moved.items() if one.largest}
        self.found.probes.setdefault(dtype, {})[str(number)] = {kind: some for kind, some in effects.items() if some}
        if dtype not in self.found.tables and effects.get("tables"):
            tables = self.runner.tables(self.side, sample, dtype)
            if tables is not None:
                self.found.tables[dtype] = tables

    def _is_asked(self, kind: Kind) -> bool:
        if kind == FLASH and not self.fuses:
            return False
        return kind not in (FLASH, *EXACT) or self.side not in self.pair.lacks

    def _record_calls(self, planned: Planned, sample: Sample, gradients: list[Array]) -> None:
        """Write the activations of all submodules on the first given and the first drawn sample."""
        calls_so_far = self.found.calls
        position = str(self.writer.number(planned)[0])
        is_wanted = planned == FIRST or (planned.kind == "own" and not any(int(key) for key in calls_so_far))
        is_wanted = is_wanted or (planned.kind == "held" and planned.group == 1)
        if position in calls_so_far or not is_wanted or self.side in self.pair.lacks:
            return
        with contextlib.suppress(CannotPromoteError, ModuleFailedError):
            call = self.pair.weights(sample, self.side), sample.arguments[self.side], gradients
            calls_so_far[position] = self.writer.write_calls(planned, self.subject.substituted(*call, {})[1])

    def _measure_noise(self, dtype: str, modes: tuple[str, ...]) -> None:
        measured = measured_noise(self.runner, dtype, modes, [self.side], perturb=False)
        self.found.noise[dtype], self.found.floors[dtype] = measured.differences, measured.floors
        if self.side == "first":
            self._exact(self.runner.sample(FIRST), dtype)
            if self.side in self.pair.lacks:
                self.found.perturbed[dtype] = perturbed(self.runner, dtype)

    def _note_zeros(self, run: Run) -> None:
        """Note the parameters, and the parts of them, whose gradients were zero in every run so far."""
        matches = list(self.pair.pairing.matches)
        if self.like is None:
            matches += _parts(matches, self.subject.framework)
        gradients = {
            key_of(tensor): (match, tensor.take(run.parameter_gradients, self.side))
            for match in matches
            if (tensor := match.second).source in run.parameter_gradients
        }
        scales = {True: 0.0, False: 0.0}
        for _, array in gradients.values():
            scales[array.ndim > 1] = max(scales[array.ndim > 1], scale_of([wide(array)]))
        for key, (match, array) in gradients.items():
            # The judge's limit is that of both sides' largest value; ten times it misses none.
            is_zero = scale_of([wide(array)]) <= 10 * ZERO * scales[array.ndim > 1]
            self.found.zeros[key] = (match, is_zero and self.found.zeros.get(key, (match, True))[1])

    def _reach(self) -> dict[str, tuple[bool, bool]]:
        """Return parameter without a gradient -> whether it is used, and whether it changes the output."""
        zeros = {key: match for key, (match, is_zero) in self.found.zeros.items() if is_zero}
        if not zeros:
            return {}
        side, runner = self.side, self.runner
        before = {side: runner.changed(side, [], 0.0)}
        if self.pair.effort.large:
            moves = runner.reaches(side, before, list(zeros.values()), 1.0)
            return dict.fromkeys(zeros, (True, moves))
        return {
            key: (runner.reaches(side, before, [match], math.nan), runner.reaches(side, before, [match], 1.0))
            for key, match in list(zeros.items())[: 2 * MAX_PROBES]
        }

    def _manifest(
        self, seeds: int, first_seed: int, modes: tuple[str, ...], dtypes: tuple[str, ...], unstable: str
    ) -> DumpManifest:
        subject, pair, framework = self.subject, self.pair, self.subject.framework
        call = pair.arguments[self.side]
        arrays = {name: one for name, one in call.kwargs.items() if is_array(one)}
        return DumpManifest(
            framework=framework,
            kind=subject.kind,
            name=subject.name,
            dtype=pair.dtype or "float32",
            device=str(subject.device),
            dtypes=list(dtypes),
            modes=list(modes),
            seeds=seeds,
            first_seed=first_seed,
            argument_names=subject.argument_names,
            positional=len(call.args),
            keywords=list(arrays),
            constants={name: one for name, one in call.kwargs.items() if name not in arrays},
            outputs=pair.outputs,
            parameters=_as_held(subject.parameters(), self.weights),
            state=_as_held(subject.state(), self.state),
            modules=subject.modules(),
            settings=_numbers(subject.settings()),
            unreached=subject.unreached(call),
            lacks=pair.lacks.get(self.side, ""),
            unstable=unstable,
            notes=pair.notes,
            noise=self.found.noise,
            floors=self.found.floors,
            perturbed=self.found.perturbed,
            probes=self.found.probes,
            tables=self.found.tables,
            reach=self._reach(),
            like=self.like.digest if self.like else "",
            transfer=pair.transfer if self.like else False,
            pairing=list(pair.pairing.matches) if self.like else [],
            dropped=list(pair.pairing.dropped) if self.like else [],
            uses={} if self.like or pair.effort.large else Trials(pair).uses("first"),
            calls=self.found.calls,
            environment=_environment(subject),
        )


@dataclasses.dataclass
class _Found:
    """Findings that a recorder gathers while it writes: fields of `DumpManifest`; `zeros` leads to its `reach`."""

    noise: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    floors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    perturbed: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    probes: dict[str, dict[str, dict[str, dict[str, tuple[float, float]]]]] = dataclasses.field(default_factory=dict)
    tables: dict[str, Tables] = dataclasses.field(default_factory=dict)
    calls: dict[str, list[Recorded]] = dataclasses.field(default_factory=dict)
    zeros: dict[str, tuple[Match, bool]] = dataclasses.field(default_factory=dict)


def _as_held(parameters: Mapping[str, SideWeight], weights: Arrays) -> dict[str, SideWeight]:
    """Return the parameters in the dtypes of the weights that are written, which may be wider than the module's."""
    return {
        name: dataclasses.replace(one, dtype=weights[name].dtype.name)
        for name, one in parameters.items()
        if name in weights
    }


def _numbers(settings: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, float]]:
    """Return those settings that are numbers."""
    return {
        path: {key: one for key, one in known.items() if isinstance(one, (int, float)) and not isinstance(one, bool)}
        for path, known in settings.items()
    }


def _environment(subject: Subject) -> dict[str, str]:
    framework = subject.framework
    rows = precision.rows_of(precision.LABELS[framework], load_adapter(framework, "precision"))
    settings = {f"{row.framework} {row.name}": row.value for row in rows if row.key or row.state in ("unsafe", "note")}
    foreign = ("jax", "flax") if framework == "torch" else ("torch",)
    versions = {name: version for name, version in precision.environment().items() if name not in foreign}
    return {**versions, f"{framework} device": str(subject.device), **settings}


def _parts(matches: Iterable[Match], framework: str) -> list[Match]:
    """Return matches of the equal parts of tensors that may be a fused query, key and value."""
    axis = 0 if framework == "torch" else -1
    parts = []
    for match in matches:
        tensor = match.second
        if not tensor.shape or tensor.shape[axis] % PARTS or not tensor.shape[axis]:
            continue
        size = tensor.shape[axis] // PARTS
        for i in range(PARTS):
            part = tensor.slice(axis % len(tensor.shape), i * size, (i + 1) * size, f"{tensor.name}[{i}]")
            parts.append(dataclasses.replace(match, first=part, second=part))
    return parts
