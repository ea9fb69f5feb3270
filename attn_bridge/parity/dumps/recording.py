"""Writes what one module computes as a dump: weights, inputs, and the results of every sample that the judge takes.

The judge is that of `compare`: its plan is run with one module, and what it takes is written in place of judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ... import backends
from ...weights import Rule, Rules
from ..compare import pairing as pairings
from ..compare import samples as numbers
from ..compare.coverage import MOST_PROBES
from ..compare.criterion import ZERO, scale_of
from ..compare.judgement import QUICK, SLOW, Judgement
from ..compare.outputs import apart, check_outputs
from ..compare.pair import Comparison, Progress
from ..compare.pairing import Match, Pairing, Tensor
from ..compare.report import Side
from ..compare.samples import Sample
from ..compare.subject import Arguments, Array, CannotLiftError, ModuleFailedError, Run, is_array, is_float, wide
from . import folders
from . import format as dumps
from .format import FIRST, ORACLE, Dump, Id, Manifest, Recorded, Writer, key_of, stored_as

MOST_BYTES = 1 << 30
"""About how large a dump may become; of a large module fewer samples are written."""

FIRST_LOOK = 0.6
"""Share of it for what is always judged; the rest is for a second look."""

LEFT_OUT = f"judged on fewer samples, as a dump would have more than {MOST_BYTES >> 30} GiB with all of them"

PARTS = 3
"""A fused query, key and value is looked at in its parts, too."""


def dump(
    module: Any,
    inputs: Any,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    rules: Rules | Iterable[Rule] | None = None,
    transfer: bool = True,
    seeds: int = 4,
    first_seed: int = 0,
    modes: Iterable[str] = ("eager",),
    dtypes: Iterable[str] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write what a module computes into a folder: weights, inputs, outputs and all gradients of every sample.

    The torch side is dumped first. The Flax side is dumped like it, with the same weights and inputs, those that were
    drawn included; without `like` a dump holds results of the module's own weights alone.

    Args:
        module: a ``torch.nn.Module`` or a ``flax.nnx.Module``.
        inputs: as in `compare`; arrays, and plain values by keyword. None takes those of `like`.
        folder: where to; it must be empty or not there.
        like: the torch dump whose weights, inputs, seeds, precisions and modes to use, for a Flax module.
        rules: which parameter is which, with `like`; by default it is proposed.
        transfer: with `like`, use the torch side's held weights, too; False keeps the module's own beside the drawn.
        seeds: how many times numbers are drawn.
        first_seed: the first of them.
        modes: ``eager``, and ``jit``.
        dtypes: precisions; None is the module's own.
        device: ``cpu``, ``gpu`` or ``tpu``; None is where the module is.
        progress: called with what is done, how much of it, and how much there is.

    Raises:
        TypeError: the module is of neither framework.
        ValueError: it can't be run or dumped; see `compare`.
    """
    framework = backends.framework_of(module)
    if framework is None:
        raise TypeError(f"dump takes a torch.nn.Module or a flax.nnx.Module, got {type(module).__name__}")
    if like is not None and framework == "torch":
        raise ValueError("the torch side is dumped first, and Flax like it")
    other = None if like is None else dumps.of_side(like, "torch")
    if rules is not None and other is None:
        raise ValueError("rules say which parameter is which; they go with like")
    settings = backends.load(framework, "_parity.precision")
    with folders.new(folder) as target, np.errstate(all="ignore"), settings.strict():
        harness = backends.load_harness(framework).Harness(module, device)
        alone = _Recording(harness, framework, inputs, other, rules, transfer, Writer(target))
        alone.progress = progress or alone.progress
        if other is not None:
            seeds, first_seed = other.manifest.seeds, other.manifest.first_seed
            modes, dtypes = other.manifest.modes, other.manifest.dtypes
        small = framework == "torch" and alone.work() <= QUICK
        with harness.few_threads() if small else contextlib.nullcontext():
            alone.record(seeds, first_seed, tuple(modes), tuple(dtypes or (alone.dtype or "float32",)))


class _Recording(Comparison):
    """One module, beside a torch dump or in the place of both sides."""

    can_run = False

    def __init__(
        self,
        harness: Any,
        side: Side,
        inputs: Any,
        like: Dump | None,
        rules: Rules | Iterable[Rule] | None,
        transfer: bool,
        writer: Writer,
    ):
        self.side, self.like, self.writer, self.harness = side, like, writer, harness
        self.progress = lambda what, done, total: None
        self.torch, self.flax = like or harness, harness
        self.modules = (None, None)
        self.transfer, self.lacks, self.notes = transfer, {}, []
        self.held, self.held_flax = self.torch.weights(), self.flax.weights()
        own = numbers.common_dtype(self.held_flax)
        self.dtype = like.manifest.dtype if like else own or ""
        given = numbers.as_arguments(_call_of(like) if inputs is None and like else inputs)
        self.flax_arguments = numbers.in_dtype(_without_weights(harness, side, given, self.notes), own or self.dtype)
        self.arguments = like.arguments if like else self.flax_arguments
        self.dtype = self.dtype or next((one.dtype.name for one in self.arguments.leaves if is_float(one)), "float32")
        self.same_inputs = numbers.alike(self.arguments, self.flax_arguments)
        self.large = self.work() > SLOW
        self.before: dict[Side, list[Array]] = {}
        self.outputs = harness.describe_outputs(self.held_flax, self.flax_arguments)
        self.structure = [place for place, _, _ in self.outputs]
        if like is None:
            self.pairing = Pairing(tuple(_itself(name, one) for name, one in harness.parameters().items()))
        else:
            check_outputs(like.manifest.outputs, self.outputs)
            self.pairing = self._pair(rules)
        self.floors: dict[str, dict[str, float]] = {}
        self.perturbed: dict[str, dict[str, float]] = {}
        self.noise: dict[str, dict[str, float]] = {}
        self.zeros: dict[str, tuple[Match, bool]] = {}
        self.again = False
        self.limit = 0.0
        self.calls: dict[str, list[Recorded]] = {}

    def _pair(self, rules: Rules | Iterable[Rule] | None) -> Pairing:
        """Pair the parameters; what is ambiguous is settled by the other side's stored float64 results."""
        assert self.like is not None, "a single module has no pairs"
        like, ours, theirs = self.like, self.like.parameters(), self.flax.parameters()
        if rules is not None:
            return pairings.from_rules(rules, ours, theirs)
        drawn = next((one for one in like.manifest.samples if one[0] == "own"), FIRST)
        dtype = like.manifest.dtypes[0]
        sample = numbers.rounded(self.sample(*drawn), self.cast(dtype))

        def probe(candidate: Pairing) -> float:
            weights = self.held_flax | candidate.to_flax(sample.weights)
            other = self._lifted_or_not("flax", weights, sample.flax)
            return apart(like.run(drawn, dtype, like.manifest.modes[0] if like.manifest.lacks else ORACLE), other)

        return pairings.propose(ours, theirs, probe)

    def cast(self, dtype: str) -> str | None:
        """Return what a run in a precision is cast to; None where it needs no cast."""
        return None if dtype == self.dtype else dtype

    def sample(self, kind: str, group: int, copy: int, seed: int) -> Sample:
        """Return one set of numbers: drawn, or as the other side's dump holds them."""
        if self.like is None:
            return super().sample(kind, group, copy, seed)
        one = (kind, group, copy, seed)
        arguments = self.like.inputs(one)
        flax = numbers.like(self.flax_arguments, arguments, self.same_inputs)
        plain = kind.removesuffix(" stress")
        weights = self.like.sample_weights(one)
        return Sample(weights, arguments, flax, plain, group, (seed, group, copy), plain != kind)

    def judgement(self, dtype: str, modes: tuple[str, ...]) -> Judgement:
        """Return what takes and writes the samples in one precision."""
        return _Recorder(self, dtype, modes)

    def record(self, seeds: int, first_seed: int, modes: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
        """Write the dump."""
        self.writer.write(dumps.WEIGHTS, self.held_flax)
        unstable = "" if self.large else self._instability([self.side])
        for dtype in dtypes:
            share = MOST_BYTES / len(dtypes)
            self.again, self.limit = False, self.writer.size + FIRST_LOOK * share
            judged = self.judgement(dtype, modes)
            judged.run(seeds, first_seed)
            self.again, self.limit = True, self.writer.size + (1.0 - FIRST_LOOK) * share
            judged._look_again([], seeds, first_seed)
        self.writer.finish(self._manifest(seeds, first_seed, modes, dtypes, unstable))

    def _manifest(
        self, seeds: int, first_seed: int, modes: tuple[str, ...], dtypes: tuple[str, ...], unstable: str
    ) -> Manifest:
        from ..check.report import environment

        harness, side, call = self.harness, self.side, self.flax_arguments
        arrays = {name: one for name, one in call.kwargs.items() if is_array(one)}
        rows = backends.load(side, "_parity.precision").switches()
        held = {f"{row.framework} {row.name}": row.value for row in rows if row.key or row.state in ("unsafe", "note")}
        foreign = ("jax", "flax") if side == "torch" else ("torch",)
        versions = {name: version for name, version in environment().items() if name not in foreign}
        return Manifest(
            framework=side,
            name=harness.name,
            dtype=self.dtype or "float32",
            device=str(harness.device),
            dtypes=list(dtypes),
            modes=list(modes),
            seeds=seeds,
            first_seed=first_seed,
            argument_names=harness.argument_names,
            positional=len(call.args),
            keywords=list(arrays),
            constants={name: one for name, one in call.kwargs.items() if name not in arrays},
            outputs=self.outputs,
            parameters=harness.parameters(),
            modules=harness.modules(),
            settings=harness.settings(),
            unreached=harness.unreached(call),
            lacks=self.lacks.get(side, ""),
            unstable=unstable,
            notes=self.notes,
            noise=self.noise,
            floors=self.floors,
            perturbed=self.perturbed,
            reach=self._reach(),
            like=self.like.digest if self.like else "",
            transfer=self.transfer if self.like else False,
            pairing=list(self.pairing.matches) if self.like else [],
            calls=self.calls,
            environment={**versions, f"{side} device": str(harness.device), **held},
        )

    def record_calls(self, one: Id, sample: Sample, cotangents: list[Array]) -> None:
        """Write the activations of all submodules on the first given and the first drawn sample."""
        position = str(self.writer.number(one)[0])
        is_wanted = one == FIRST or (one[0] == "own" and not any(int(key) for key in self.calls))
        is_wanted = is_wanted or (one[0] == "held" and one[1] == 1)
        if position in self.calls or not is_wanted or self.side in self.lacks:
            return
        weights = sample.weights if self.like is None else self.flax_weights(sample)
        arguments = sample.flax if self.like else sample.torch
        with contextlib.suppress(CannotLiftError, ModuleFailedError):
            self.calls[position] = self.writer.write_calls(one, self.harness.record(weights, arguments, cotangents))

    def note_zeros(self, run: Run) -> None:
        """Note the parameters, and the parts of them, whose gradients were zero in every run so far."""
        side = self.side
        matches = self.pairing.matches if self.like else [*self.pairing.matches, *_parts(self.pairing.matches, side)]
        gradients = {
            key_of(tensor): (match, tensor.take(run.parameter_gradients, side))
            for match in matches
            if (tensor := match.flax).source in run.parameter_gradients
        }
        scales = {True: 0.0, False: 0.0}
        for _, array in gradients.values():
            scales[array.ndim > 1] = max(scales[array.ndim > 1], scale_of([wide(array)]))
        for key, (match, array) in gradients.items():
            # The judge's limit is that of both sides' largest value; ten times it misses none.
            is_zero = scale_of([wide(array)]) <= 10 * ZERO * scales[array.ndim > 1]
            self.zeros[key] = (match, is_zero and self.zeros.get(key, (match, True))[1])

    def _reach(self) -> dict[str, tuple[bool, bool]]:
        """Tell which of the parameters without a gradient are used, and which change the output."""
        zeros = {key: match for key, (match, is_zero) in self.zeros.items() if is_zero}
        if not zeros:
            return {}
        side = self.side
        drawn = numbers.draw_weights(self.torch.parameters(), self.held, (0, 2))
        before = {side: self.changed(side, drawn, [], 0.0)}
        if self.large:
            moves = self.reaches(side, before, drawn, list(zeros.values()), 1.0)
            return dict.fromkeys(zeros, (True, moves))
        return {
            key: (
                self.reaches(side, before, drawn, [match], math.nan),
                self.reaches(side, before, drawn, [match], 1.0),
            )
            for key, match in list(zeros.items())[: 2 * MOST_PROBES]
        }


class _Recorder(Judgement):
    """Takes the samples that the judge would take, from one side, and writes them."""

    comparison: _Recording

    def __init__(self, comparison: _Recording, dtype: str, modes: tuple[str, ...]):
        super().__init__(comparison, dtype, modes)
        self.taken: set[str] = set()

    def take(self, kind: str, group: int, copy: int, seed: int) -> None:
        """Run one sample and write it; a torch dump holds each draw of inputs with the held weights, too."""
        comparison = self.comparison
        held = (kind.replace("own", "held"), group, 0, seed)
        if comparison.again and copy:
            return
        is_needed = kind in ("held", "own") and kind not in self.taken
        if comparison.writer.size > comparison.limit and not is_needed:
            comparison.notes = list(dict.fromkeys([*comparison.notes, LEFT_OUT]))
            return
        self.taken.add(kind)
        if comparison.like is not None:
            if (kind, group, copy, seed) in comparison.like:
                self._record((kind, group, copy, seed))
        elif comparison.side == "flax":
            if not copy:
                self._record(held)
        else:
            self._record((kind, group, copy, seed))
            if kind.startswith("own") and not copy:
                self._record(held)

    def _record(self, one: Id) -> None:
        comparison = self.comparison
        side, writer = comparison.side, comparison.writer
        sample = comparison.sample(*one)
        cotangents = self._given(one, sample)
        arrays = {f"cotangents/{i}": array for i, array in enumerate(cotangents)}
        rounded = numbers.rounded(sample, self.cast)
        found = None
        if side not in comparison.lacks:
            try:
                found = comparison.run(side, rounded, cotangents, "float64")
                arrays |= dumps.run_arrays(ORACLE, found)
            except CannotLiftError as error:
                comparison.lacks[side] = str(error)
        for mode in self.modes:
            which = stored_as(mode, self.dtype, self.cast)
            if which != ORACLE or found is None:
                run = comparison.run(side, sample, cotangents, self.cast, mode)
                arrays |= dumps.run_arrays(which, run)
                found = found or run
        assert found is not None, "there is a mode"
        comparison.note_zeros(found)
        number, is_new = writer.number(one)
        if is_new:
            leaves = (sample.flax if comparison.like else sample.torch).leaves
            inputs = {f"inputs/{i}": leaf for i, leaf in enumerate(leaves)}
            is_drawn = one[2] or not one[0].startswith("held")
            weights = {f"weights/{name}": array for name, array in sample.weights.items()}
            writer.write(f"samples/{number:04}.safetensors", inputs | (weights if is_drawn and side == "torch" else {}))
        writer.write(f"{self.dtype}/{number:04}.safetensors", arrays)
        comparison.record_calls(one, rounded, cotangents)
        self.count += 1
        self.seeds += 1

    def _given(self, one: Id, sample: Sample) -> list[Array]:
        """Return the gradients of the outputs: drawn, or those of the other side's dump."""
        like = self.comparison.like
        if like is not None:
            return like.cotangents(one, self.dtype)
        return numbers.cotangents(self.comparison.outputs, sample.seed, self.cast)

    def _measure_noise(self) -> None:
        comparison, side = self.comparison, self.comparison.side
        sample = comparison.sample(*FIRST)
        cotangents = self._given(FIRST, sample)
        runs = [comparison.run(side, sample, cotangents, self.cast, self.modes[0]) for _ in range(2)]
        once, again = (comparison.named(side, run) for run in runs)
        self._note_noise(f"{side}, run to run", once, again)
        if len(self.modes) > 1:
            other = comparison.run(side, sample, cotangents, self.cast, self.modes[1])
            self._relative(f"{side}, eager or compiled", once, comparison.named(side, other))
        if side == "torch":
            self._split_batch(sample)
        comparison.noise[self.dtype] = dict(self.noise)
        comparison.floors[self.dtype] = dict(self.floors)
        if side == "torch" and side in comparison.lacks:
            notes = list(comparison.notes)
            self.floors = {}
            self._perturb(sample, cotangents)
            comparison.perturbed[self.dtype], comparison.notes = self.floors, notes


def _without_weights(harness: Any, side: Side, call: Arguments, notes: list[str]) -> Arguments:
    """Return a call that a dump can hold; torch's own attention is asked for no weights, as Flax returns none."""
    if side == "torch" and harness.name == "MultiheadAttention" and "need_weights" not in call.kwargs:
        notes.append("attention weights of torch's MultiheadAttention: not compared, Flax returns none")
        call = Arguments(call.args, {**call.kwargs, "need_weights": False})
    arrays = {name: one for name, one in call.kwargs.items() if is_array(one)}
    plain = {name: one for name, one in call.kwargs.items() if name not in arrays}
    kinds = {type(one) for one in plain.values()}
    if not all(map(is_array, call.args)) or not kinds <= {bool, int, float, str, type(None)}:
        raise ModuleFailedError("a dump takes arrays, and plain values by keyword, as inputs")
    return Arguments(call.args, arrays | plain)


def _call_of(like: Dump) -> Arguments:
    """Return the call of a torch dump, as the Flax side takes it."""
    own = {"need_weights"} if like.name == "MultiheadAttention" else set()
    call = like.arguments
    return Arguments(call.args, {name: one for name, one in call.kwargs.items() if name not in own})


def _itself(name: str, parameter: Any) -> Match:
    tensor = Tensor(name, name, parameter.shape, parameter)
    return Match(tensor, tensor, Rule("torch", "flax"), "names")


def _parts(matches: Iterable[Match], side: Side) -> list[Match]:
    """Return matches of the equal parts of tensors that may be a fused query, key and value."""
    axis = 0 if side == "torch" else -1
    found = []
    for match in matches:
        whole = match.flax
        if not whole.shape or whole.shape[axis] % PARTS or not whole.shape[axis]:
            continue
        shape = list(whole.shape)
        shape[axis] //= PARTS
        for i in range(PARTS):
            part = dataclasses.replace(whole, name=f"{whole.name}[{i}]", shape=tuple(shape), part=(i, PARTS))
            found.append(dataclasses.replace(match, torch=part, flax=part))
    return found
