"""Judges two dumps as `compare` judges two sides; neither framework is needed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import matching
from .. import pairing as pairings
from ..compare.driver import judged, peak_memory
from ..localisation import find_in_calls
from ..localisation.sides import sides_of
from ..matching.outputs import check_outputs
from ..pair import SIDES, Pair, Progress
from ..pairing import Match, Pairing, Tensor, lies_within, uncovered
from ..results.findings import DtypeLeak, Side
from ..results.report import Report
from ..samples import calls
from ..samples.sampling import Planned, Sample
from ..sides.arrays import class_of
from ..sides.subject import Array, Call, Run, SideWeight
from ..sides.tables import Tables
from ..verdict.probes import Kind, Moved, Probe
from ..verdict.runner import Noise, OutputArrays
from .format import FLASH, ORACLE, Dump, DumpError, key_of, of_side
from .trials import RecordedTrials


def compare_dumps(
    torch_dump: str | Path,
    flax_dump: str | Path,
    *,
    rules: object = None,
    command: str = "",
    progress: Progress | None = None,
) -> Report:
    """Judge two dumps as `compare` judges two modules.

    The first divergence comes from the submodule outputs of both free runs, which show differences of the forward
    pass only.

    Args:
        torch_dump: folder of the torch dump.
        flax_dump: folder of the Flax dump.
        rules: pairing of the parameters, if the Flax dump was not made like the torch dump.
        command: the command to run again, for the report.
        progress: callback with the current stage, the work done and the total.

    Raises:
        DumpError: (a ValueError) a folder is not a complete dump.
        ValueError: the two cannot be compared.
    """
    started = time.perf_counter()
    with np.errstate(all="ignore"):
        replay = Replay(of_side(torch_dump, "torch"), of_side(flax_dump, "flax"), rules)
        replay.pair.progress = progress or replay.pair.progress
        report = replay.report()
    seconds = time.perf_counter() - started
    return dataclasses.replace(report, command=command, seconds=seconds, peak_memory=peak_memory())


class Replay:
    """Looks up what two dumps hold, where `compare` runs two subjects.

    Args:
        first: the torch dump.
        second: the Flax dump.
        rules: see `compare_dumps`.

    Raises:
        ValueError: the two cannot be compared.
    """

    live = False

    def __init__(self, first: Dump, second: Dump, rules: object):
        ours, theirs = first.manifest, second.manifest
        self.dumps: dict[Side, Dump] = {"first": first, "second": second}
        self.alone = not theirs.like
        if theirs.like and theirs.like != first.digest:
            raise ValueError(f"{second.path} was dumped like another torch dump than {first.path}")
        if (ours.dtypes, ours.modes) != (theirs.dtypes, theirs.modes):
            raise ValueError("the dumps differ in precisions or modes; make both with the same --dtype and --mode")
        self.pair = Pair(
            first=first,
            second=second,
            arguments={"first": first.arguments, "second": second.arguments},
            same_inputs=calls.alike(first.arguments, second.arguments),
            fixed=frozenset(),
            vary=frozenset(),
            own_weights={"first": first.weights(), "second": second.weights()},
            dtype=ours.dtype,
            outputs=ours.outputs,
            pairing=Pairing(()),
            transfer=theirs.transfer,
            lacks={side: one.manifest.lacks for side, one in self.dumps.items() if one.manifest.lacks},
            notes=list(dict.fromkeys([*ours.notes, *theirs.notes])),
        )
        check_outputs(ours.outputs, theirs.outputs, self.pair.shown)
        if self.alone and self.pair.same_inputs != list(range(len(first.arguments.leaves))):
            raise ValueError(f"the dumps hold different inputs; {self._advice}")
        self._match(rules)

    @property
    def _advice(self) -> str:
        return f"dump the Flax side with --like {self.dumps['first'].path}"

    def report(self) -> Report:
        """Return the report on all samples that both dumps hold."""
        made = self.dumps["first"].manifest
        report = judged(self, made.seeds, made.first_seed, tuple(made.modes), tuple(made.dtypes)).report
        report = dataclasses.replace(report, environment=self._environment())
        if self.alone and any(one.kind == "weight" and one.verdict != "equal" for one in report.tensors):
            return dataclasses.replace(report, message=f"the dumps hold different weights; {self._advice}")
        if report.verdict == "different" and not self.pair.lacks:
            tree, divergence = self._located()
            report = dataclasses.replace(report, tree=tree, first_divergence=divergence)
        if report.verdict in ("different", "precision") and report.first_divergence is None:
            note = "where the two first part could not be told from dumps; compare both sides in one process for that"
            report = dataclasses.replace(report, notes=[*report.notes, note])
        return report

    # ---- what the judge asks for

    def sample(self, planned: Planned) -> Sample | None:
        """Return a sample that both dumps hold, or None; its results are looked up, so it has no weights.

        If the Flax dump was not made with `like`, samples of the sides' own weights replace those of drawn ones.
        """
        recorded = planned._replace(kind=planned.kind.replace("own", "held")) if self.alone else planned
        if any(recorded not in dump for dump in self.dumps.values()):
            return None
        return Sample({}, {side: dump.inputs(recorded) for side, dump in self.dumps.items()}, recorded)

    def run(self, side: Side, sample: Sample, dtype: str, mode: str = "eager", seed: int = 0) -> Run:
        """Look up the results of one side in a precision."""
        del seed
        self._check_same(sample.planned, dtype)
        cast = None if dtype == self.pair.dtype else dtype
        which = ORACLE if cast == "float64" and mode == "eager" else mode
        return self.dumps[side].run(sample.planned, dtype, which)

    def exact(self, side: Side, sample: Sample, dtype: str, mode: str = "eager", seed: int = 0) -> Run:
        """Look up the float64 results of one side; with softmax instead of fused attention, if recorded."""
        del seed
        dump = self.dumps[side]
        if mode == FLASH and self._stored_probes(side, sample, dtype).get(FLASH):
            return dataclasses.replace(dump.run(sample.planned, dtype, FLASH), moved=1)
        return dump.run(sample.planned, dtype, ORACLE)

    def probe(self, kind: Kind, side: Side, sample: Sample, dtype: str, seed: int) -> Probe:
        """Look up the effect of other roundings on one side."""
        del seed
        stored = self._stored_probes(side, sample, dtype).get(kind, {})
        moves = {}
        for name, keys in self._keys(side).items():
            value = next((stored[key] for key in keys if key in stored), None)
            if value is not None:
                moves[name] = Moved(*value)
        return moves

    def _stored_probes(self, side: Side, sample: Sample, dtype: str) -> Mapping[str, Mapping[str, tuple[float, float]]]:
        manifest = self.dumps[side].manifest
        return manifest.probes.get(dtype, {}).get(str(manifest.samples.index(sample.planned)), {})

    def tables(self, side: Side, sample: Sample, dtype: str) -> Tables | None:
        """Look up the tables of one side."""
        del sample
        return self.dumps[side].manifest.tables.get(dtype)

    def dtype_leaks(self, dtype: str) -> list[DtypeLeak]:
        """Return nothing: dumps hold no dtypes of calls."""
        del dtype
        return []

    def same_literals(self, sample: Sample, dtype: str) -> bool:
        """Return False: dumps hold no literals."""
        del sample, dtype
        return False

    def noise(self, dtype: str, modes: tuple[str, ...]) -> Noise:
        """Look up the noise of each side."""
        del modes
        noise = Noise()
        for side in SIDES:
            made = self.dumps[side].manifest
            noise.differences |= made.noise.get(dtype, {})
            stored = [made.floors.get(dtype, {})]
            if side == "first" and len(self.pair.lacks) == len(SIDES):
                stored.append(made.perturbed.get(dtype, {}))
                noise.notes.append("neither side has float64: judged by how far moves of one ulp move the results")
            for name, keys in self._keys(side).items():
                units = [one[key] for one in stored for key in keys if key in one]
                noise.floors[name] = max([noise.floors.get(name, 0.0), *units])
        return noise

    def unstable(self) -> str:
        """Return a dump's description of nondeterminism, the first side's before the second's; "" without one."""
        return self.dumps["first"].manifest.unstable or self.dumps["second"].manifest.unstable

    def changed(self, side: Side, matches: Sequence[Match], by: float) -> list[Array]:
        """Return nothing: a dump runs nothing."""
        del side, matches, by
        return []

    def reaches(self, side: Side, before: OutputArrays, matches: Sequence[Match], by: float) -> bool:
        """Look up whether parameters reach the output; those that are not listed have a gradient, so they do."""
        del before
        reach = self.dumps[side].manifest.reach
        reached = [reach.get(key_of(one.first if side == "first" else one.second), (True, True)) for one in matches]
        return any(used if math.isnan(by) else moves for used, moves in reached)

    # ---- names

    def _keys(self, side: Side) -> dict[str, list[str]]:
        """Return name of a tensor -> the names under which a dump may store its measures."""
        pair, others = self.pair, self.pair.second_names()
        sources = {
            f"grad {match.first.name}": f"grad {(match.first if side == 'first' else match.second).source}"
            for match in pair.pairing.matches
        }
        outputs = ["output"] if len(pair.outputs) == 1 else [f"output{place}" for place in pair.structure]
        return {name: [name, sources.get(name, name), others.get(name, name)] for name in [*outputs, *others]}

    def _check_same(self, planned: Planned, dtype: str) -> None:
        """Make sure that both dumps were made of the same numbers, where neither was given the other's."""
        if not self.alone:
            return
        first, second = self.dumps["first"], self.dumps["second"]
        pairs = zip(first.inputs(planned).leaves, second.inputs(planned).leaves, strict=True)
        cotangents = zip(first.cotangents(planned, dtype), second.cotangents(planned, dtype), strict=True)
        if not all(_same(one, two) for one, two in [*pairs, *cotangents]):
            raise ValueError(f"the dumps were made of different random numbers (seeds, NumPy versions); {self._advice}")

    # ---- pairing

    def _match(self, rules: object) -> None:
        """Pair the weights as the Flax dump was made, else by rules, or by names and the weights that both hold."""
        if self.alone:
            trials = RecordedTrials(self.pair, self.dumps, self._holds_the_same)
            matching.complete(self.pair, (None, None), rules, trials=trials)
            return
        self.pair.pairing = self._stored_pairing()
        self.pair.own_weights["first"] = self.dumps["first"].weights()
        if rules is not None:
            self._check_rules(rules)

    def _check_rules(self, rules: Any) -> None:
        """See that the pairing in the Flax dump is one of these rules."""
        ours, theirs = (dump.parameters() | dump.state() for dump in self.dumps.values())
        by_rules, stored = pairings.partial(rules, ours, theirs), self.pair.pairing
        ids = {
            name: np.arange(math.prod(one.shape)).reshape(one.shape) + (i << 40)
            for i, (name, one) in enumerate(ours.items())
        }
        wanted, made = Pairing(by_rules.matches).to_second(ids), stored.to_second(ids)
        is_same = all(name in made and _same(made[name], array) for name, array in wanted.items())
        if not is_same or {row[:2] for row in by_rules.dropped} - {row[:2] for row in stored.dropped}:
            raise ValueError(f"{self.dumps['second'].path} was made with another pairing than these rules say")

    def _holds_the_same(self, candidate: Pairing) -> float:
        made, of_second = candidate.to_second(self.pair.own_weights["first"]), self.pair.own_weights["second"]
        return 0.0 if all(_same(array, of_second[name]) for name, array in made.items()) else math.inf

    def _stored_pairing(self) -> Pairing:
        """Return the pairing in the Flax dump, checked to be one of these parameters."""
        made = self.dumps["second"].manifest
        self.dumps["first"].carry({match.first.source for match in made.pairing})
        parameters = {side: dump.parameters() for side, dump in self.dumps.items()}
        path = self.dumps["second"].path
        matches = []
        tensors: dict[Side, list[Tensor]] = {"first": [], "second": []}
        for match in made.pairing:
            for side in SIDES:
                tensor = match.tensor(side)
                if tensor.source not in parameters[side]:
                    raise DumpError(f"{path} pairs {tensor.source}, which {self.pair.shown[side]} does not have")
                parameter = parameters[side][tensor.source]
                tensors[side].append(dataclasses.replace(tensor, parameter=parameter))
            matches.append(dataclasses.replace(match, first=tensors["first"][-1], second=tensors["second"][-1]))
        for side in SIDES:
            dropped = {name for where, name, _ in made.dropped if where == side}
            self._check_paired(
                side, tensors[side], {name: parameters[side][name] for name in parameters[side].keys() - dropped}
            )
        return Pairing(tuple(matches), tuple(made.dropped))

    def _check_paired(self, side: Side, tensors: Sequence[Tensor], parameters: Mapping[str, SideWeight]) -> None:
        """Check that the tensors of a stored pairing make up every parameter, each element once.

        Whole numbers of a function's tree may be left over: they are state.
        """
        path, label = self.dumps["second"].path, self.pair.labels[side]
        for tensor in tensors:
            size = math.prod(tensor.parameter.shape)
            if tensor.cut is None and tensor.shape != tensor.parameter.shape:
                raise DumpError(f"{path} pairs {tensor.source} of {label} in another shape")
            if tensor.cut is not None and not lies_within(tensor, size):
                raise DumpError(f"{path} pairs {tensor.name} of {label}, which lies outside {tensor.source}")
        is_tree = self.dumps[side].kind.endswith("function")
        needed = {name for name, one in parameters.items() if not is_tree or class_of(one.dtype) == "float"}
        lost = sorted(needed - {tensor.source for tensor in tensors}) or uncovered(tensors)
        twice = [name for name in parameters if sum(one.source == name and one.cut is None for one in tensors) > 1]
        if lost or twice:
            raise DumpError(f"{path} does not pair {(lost or twice)[0]} of {label} once")

    # ---- where they part, and where they ran

    def _located(self) -> Any:
        """Return the module tree and the first divergence in the forward pass, from the calls that two dumps hold."""
        first, second = self.dumps["first"], self.dumps["second"]
        tree = divergence = None
        for sample in reversed(first.recorded()):
            if sample in second.recorded():
                calls_of = {side: _all_calls(dump, sample) for side, dump in self.dumps.items()}
                location = find_in_calls(sides_of(self.pair), calls_of)
                tree, divergence = location.tree, location.divergence
                if divergence is not None:
                    break
        return tree, divergence

    def _environment(self) -> dict[str, str]:
        ours, theirs = (self.dumps[side].manifest.environment for side in SIDES)
        environment: dict[str, str] = {}
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name in ours and name in theirs and ours[name] != theirs[name]:
                environment |= {f"{name} (torch side)": ours[name], f"{name} (Flax side)": theirs[name]}
            else:
                environment[name] = ours.get(name, theirs.get(name, ""))
        return environment


def _same(first: Array, second: Array) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes()


def _all_calls(dump: Dump, sample: Planned) -> list[Call]:
    run = dump.run(sample, dump.manifest.dtypes[0], ORACLE)
    return [Call("", 0, -1, dump.inputs(sample), run.outputs, []), *dump.calls(sample)]
