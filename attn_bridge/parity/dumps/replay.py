"""Judges two dumps as `compare` judges two modules; neither framework is needed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ...weights import Rule, Rules
from ..compare import pairing as pairings
from ..compare import samples as numbers
from ..compare.driver import peak_memory
from ..compare.judgement import SLOW, Judgement
from ..compare.localisation import find_in_calls
from ..compare.localisation.sides import Side as SideName
from ..compare.localisation.sides import sides_of
from ..compare.outputs import check_outputs
from ..compare.pair import Comparison, Progress
from ..compare.pairing import Match, Pairing, Tensor
from ..compare.report import Divergence, ModuleNode, Report, Side, TensorVerdict
from ..compare.samples import Sample
from ..compare.subject import Array, Arrays, Call, Run
from .format import FIRST, ORACLE, Dump, DumpError, Id, key_of, of_side
from .recording import PARTS


def compare_dumps(
    torch_dump: str | Path,
    flax_dump: str | Path,
    *,
    rules: Rules | Iterable[Rule] | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> Report:
    """Judge two dumps as `compare` judges two modules.

    Where they part is told by the outputs of submodules as both sides ran freely, which shows what differs in the
    forward pass only.

    Args:
        torch_dump: folder of the torch dump.
        flax_dump: folder of the Flax dump.
        rules: which parameter is which, where the Flax dump is not like the torch dump.
        command: the command that runs it again, for the report.
        progress: called with what is done, how much of it, and how much there is.

    Raises:
        DumpError: (a ValueError) a folder is not a whole dump.
        ValueError: the two can't be compared.
    """
    started = time.perf_counter()
    with np.errstate(all="ignore"):
        replay = _Replay(of_side(torch_dump, "torch"), of_side(flax_dump, "flax"), rules)
        replay.progress = progress or replay.progress
        report = replay.report()
    seconds = time.perf_counter() - started
    return dataclasses.replace(report, command=command, seconds=seconds, peak_memory=peak_memory())


class _Replay(Comparison):
    """Two dumps in the place of two modules."""

    can_run = False

    torch: Dump
    flax: Dump

    def __init__(self, torch: Dump, flax: Dump, rules: Rules | Iterable[Rule] | None):
        ours, theirs = torch.manifest, flax.manifest
        self.progress = lambda what, done, total: None
        self.torch, self.flax = torch, flax
        self.modules = (None, None)
        self.alone = not theirs.like
        if theirs.like and theirs.like != torch.digest:
            raise ValueError(f"{flax.path} was dumped like another torch dump than {torch.path}")
        if (ours.dtypes, ours.modes) != (theirs.dtypes, theirs.modes):
            raise ValueError("the dumps differ in precisions or modes; make both with the same --dtype and --mode")
        self.transfer = theirs.transfer
        self.notes = list(dict.fromkeys([*ours.notes, *theirs.notes]))
        self.lacks = {side: one.lacks for side, one in (("torch", ours), ("flax", theirs)) if one.lacks}  # type: ignore[misc]
        self.held, self.held_flax = torch.weights(), flax.weights()
        self.dtype = ours.dtype
        self.arguments, self.flax_arguments = torch.arguments, flax.arguments
        self.same_inputs = numbers.alike(self.arguments, self.flax_arguments)
        check_outputs(ours.outputs, theirs.outputs)
        self.outputs = ours.outputs
        self.structure = [place for place, _, _ in self.outputs]
        self.large = self.work() > SLOW
        self.before: dict[Side, list[Array]] = {}
        if self.alone and self.same_inputs != list(range(len(self.arguments.leaves))):
            raise ValueError(f"the dumps hold different inputs; {self._advice}")
        self.pairing = self._pair(rules)
        self.judged = ours.dtypes[0]
        self.drawn: set[int] = set()

    @property
    def _advice(self) -> str:
        return f"dump the Flax side with --like {self.torch.path}"

    def _pair(self, rules: Rules | Iterable[Rule] | None) -> Pairing:
        """Pair the parameters as the Flax dump was made, else by rules, or by names and the weights that both hold."""
        ours, theirs = self.torch.parameters(), self.flax.parameters()
        found = None if rules is None else pairings.from_rules(rules, ours, theirs)
        if self.alone:

            def probe(candidate: Pairing) -> float:
                made = candidate.to_flax(self.held)
                return 0.0 if all(_same(made[name], array) for name, array in self.held_flax.items()) else math.inf

            return found or pairings.propose(ours, theirs, probe)
        stored = self._stored_pairing()
        if found is not None:
            ids = {
                name: np.arange(math.prod(one.shape)).reshape(one.shape) + (i << 40)
                for i, (name, one) in enumerate(ours.items())
            }
            one, two = found.to_flax(ids), stored.to_flax(ids)
            if any(not _same(one[name], two[name]) for name in two):
                raise ValueError(f"{self.flax.path} was made with another pairing than these rules say")
        return found or stored

    def _stored_pairing(self) -> Pairing:
        """Return the pairing in the Flax dump, checked to be one of these parameters."""
        sides = {"torch": self.torch.parameters(), "flax": self.flax.parameters()}
        matches = []
        held: dict[str, list[Tensor]] = {"torch": [], "flax": []}
        for match in self.flax.manifest.pairing:
            for side, tensor in (("torch", match.torch), ("flax", match.flax)):
                if tensor.source not in sides[side]:
                    raise DumpError(f"{self.flax.path} pairs {tensor.source}, which {side} does not have")
                held[side].append(dataclasses.replace(tensor, parameter=sides[side][tensor.source]))
            matches.append(dataclasses.replace(match, torch=held["torch"][-1], flax=held["flax"][-1]))
        for side, parameters in sides.items():
            for name, parameter in parameters.items():
                found = sorted((one for one in held[side] if one.source == name), key=lambda one: one.part or (0, 1))
                axis = 0 if side == "torch" else -1
                parts = [one.part for one in found]
                if parts not in ([None], [(i, PARTS) for i in range(PARTS)]):
                    raise DumpError(f"{self.flax.path} does not pair {name} of {side} once")
                shape = list(parameter.shape)
                if len(parts) > 1 and shape:
                    shape[axis] //= PARTS
                if any(one.shape != tuple(shape) for one in found):
                    raise DumpError(f"{self.flax.path} pairs {name} of {side} in another shape")
        return Pairing(tuple(matches))

    def report(self) -> Report:
        """Return the report on all samples that both dumps hold."""
        made = self.torch.manifest
        report = self.judge(made.seeds, made.first_seed, tuple(made.modes), tuple(made.dtypes), False)
        if self.alone and any(one.kind == "weight" and one.verdict != "equal" for one in report.tensors):
            message = f"the dumps hold different weights; {self._advice}"
            return dataclasses.replace(report, message=message)
        if report.verdict == "different" and not self.lacks:
            tree, divergence = _locate(self, self.torch, self.flax)
            report = dataclasses.replace(report, tree=tree, first_divergence=divergence)
        if report.verdict in ("different", "precision") and report.first_divergence is None:
            note = "where the two first part could not be told from dumps; compare both sides in one process for that"
            report = dataclasses.replace(report, notes=[*report.notes, note])
        return report

    # ---- what the judge asks for

    def judgement(self, dtype: str, modes: tuple[str, ...]) -> Judgement:
        """Return what judges the samples in one precision."""
        return _Replayed(self, dtype, modes)

    def named_as(self, one: Id) -> Id:
        """Return the sample to take where the judge asks for one: with held weights, if both hold no other."""
        return (one[0].replace("own", "held"), *one[1:]) if self.alone else one

    def sample(self, kind: str, group: int, copy: int, seed: int) -> Sample:
        """Return what tells a sample apart; its results are looked up, so that it needs no weights."""
        plain = kind.removesuffix(" stress")
        one = (kind, group, copy, seed)
        return Sample(
            {}, self.torch.inputs(one), self.flax.inputs(one), plain, group, (seed, group, copy), plain != kind
        )

    def run(
        self,
        side: Side,
        sample: Sample,
        cotangents: list[Array] | None,
        dtype: str | None,
        mode: str = "eager",
        seed: int = 0,
    ) -> Run:
        """Look up the results of one side."""
        del cotangents, seed
        seed, group, copy = sample.seed
        one = (f"{sample.kind} stress" if sample.stress else sample.kind, group, copy, seed)
        found = self.torch if side == "torch" else self.flax
        return found.run(one, self.judged, ORACLE if dtype == "float64" and mode == "eager" else mode)

    def check_same(self, one: Id, dtype: str) -> None:
        """Make sure that both dumps were made of the same numbers, where neither was given the other's."""
        pairs = zip(self.torch.inputs(one).leaves, self.flax.inputs(one).leaves, strict=True)
        given = zip(self.torch.cotangents(one, dtype), self.flax.cotangents(one, dtype), strict=True)
        if self.alone and not all(_same(first, second) for first, second in [*pairs, *given]):
            raise ValueError(f"the dumps were made of different random numbers (seeds, NumPy versions); {self._advice}")

    def _instability(self, sides: Iterable[Side] = ()) -> str:
        del sides
        return self.torch.manifest.unstable or self.flax.manifest.unstable

    def changed(self, side: Side, weights: Arrays, matches: list[Match], by: float) -> list[Array]:
        del side, weights, matches, by
        return []

    def reaches(
        self, side: Side, before: Mapping[Side, list[Array]], weights: Arrays, matches: list[Match], by: float
    ) -> bool:
        """Look up whether parameters reach the output; those that are not listed have a gradient, so they do."""
        del before, weights
        reach = (self.torch if side == "torch" else self.flax).manifest.reach
        found = [reach.get(key_of(one.torch if side == "torch" else one.flax), (True, True)) for one in matches]
        return any(used if math.isnan(by) else moves for used, moves in found)

    def _environment(self) -> dict[str, str]:
        ours, theirs = self.torch.manifest.environment, self.flax.manifest.environment
        found: dict[str, str] = {}
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name in ours and name in theirs and ours[name] != theirs[name]:
                found |= {f"{name} (torch side)": ours[name], f"{name} (Flax side)": theirs[name]}
            else:
                found[name] = ours.get(name, theirs.get(name, ""))
        return found


class _Replayed(Judgement):
    """Judges the samples that both dumps hold."""

    comparison: _Replay

    def run(self, seeds: int, first_seed: int) -> list[TensorVerdict]:
        """Judge, and count what was there."""
        self.comparison.drawn = set()
        verdicts = super().run(seeds, first_seed)
        self.seeds = max(len(self.comparison.drawn), 1)
        return verdicts

    def take(self, kind: str, group: int, copy: int, seed: int) -> None:
        """Measure a sample if both dumps have it."""
        comparison = self.comparison
        one = comparison.named_as((kind, group, copy, seed))
        if one not in comparison.torch or one not in comparison.flax:
            return
        comparison.judged = self.dtype
        comparison.check_same(one, self.dtype)
        comparison.drawn |= set() if "stress" in kind else {seed} - {-1}
        super().take(*one)

    def _measure_noise(self) -> None:
        comparison = self.comparison
        flax_names = comparison.flax_names()
        matches = {f"grad {match.torch.name}": match for match in comparison.pairing.matches}
        ours, theirs = (one.manifest for one in (comparison.torch, comparison.flax))
        self.noise = ours.noise.get(self.dtype, {}) | theirs.noise.get(self.dtype, {})
        found = [ours.floors.get(self.dtype, {})]
        if len(comparison.lacks) == 2:
            found.append(ours.perturbed.get(self.dtype, {}))
            comparison.notes.append("neither side has float64: judged by how far moves of one ulp move the results")
        of_flax = theirs.floors.get(self.dtype, {})
        for name in comparison.named("torch", comparison.run("torch", comparison.sample(*FIRST), None, self.cast)):
            match = matches.get(name)
            source, flax_source = (f"grad {match.torch.source}", f"grad {match.flax.source}") if match else (name, name)
            floors = [one.get(name, one.get(source, 0.0)) for one in found]
            theirs_too = (of_flax[key] for key in (name, flax_source, flax_names.get(name, name)) if key in of_flax)
            self.floors[name] = max(*floors, next(theirs_too, 0.0))

    def _look_again(self, verdicts: list[TensorVerdict], seeds: int, first_seed: int) -> list[TensorVerdict]:
        """Judge precision again where the dumps hold fresh seeds for it."""
        made = self.comparison.torch.manifest.samples
        return super()._look_again(verdicts, seeds, first_seed) if any(one[1] >= 2000 for one in made) else verdicts


def _same(one: Array, two: Array) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype and one.tobytes() == two.tobytes()


# ---- where they part


def _all_calls(dump: Dump, one: Id) -> list[Call]:
    run = dump.run(one, dump.manifest.dtypes[0], ORACLE)
    return [Call("", 0, -1, dump.inputs(one), run.outputs, []), *dump.calls(one)]


def _locate(comparison: Comparison, torch: Dump, flax: Dump) -> tuple[ModuleNode | None, Divergence | None]:
    """Return the module tree and the first divergence in the forward pass, from the calls that two dumps hold."""
    tree, divergence = None, None
    for one in reversed(torch.recorded()):
        if one in flax.recorded():
            calls: dict[SideName, list[Call]] = {"first": _all_calls(torch, one), "second": _all_calls(flax, one)}
            found = find_in_calls(sides_of(comparison), calls)
            tree, divergence = found.tree, found.divergence
            if divergence is not None:
                break
    return tree, divergence
